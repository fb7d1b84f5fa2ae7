"""Everything durable: the run directory and its lock, rollouts, metrics, commit records, checkpoints, digests.

    RUN/run.json                   the recipe, versions and pins; written once, atomically
    RUN/metrics.jsonl              one object per update
    RUN/rollouts/000000.jsonl      one object per completion of update 0, in sample order
    RUN/checkpoints/000002/        the state after 2 updates; state.json holds digests of all files and tensors
    RUN/publications/              commits.jsonl (which version has which digest), epoch, the publication in flight
    RUN/.lock, RUN/.lock.workers   kernel locks, see `lock_run`

Order is what makes a kill at any instant harmless. A whole file is written beside its name under a name that starts
with a dot, fsynced, renamed, and the directory fsynced (`write_atomic`); a line is appended and fsynced, and a torn
last line is dropped by the next writer; a checkpoint directory appears by one rename, after the rollouts and metrics
that it stands on. Names that start with a dot are never read, and the next start removes them.

No absolute path is stored, so a run directory may be moved. Digests are BLAKE3 in hex. The byte order is little-endian,
as in safetensors and on every machine this runs on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    import torch

ORPHAN_WAIT_S = 30.0  # how long a resume waits for processes of a killed run
_THREADED_FROM = 1 << 20  # bytes; below this, starting threads costs more than hashing
_PIECE, _PIECES = 128 << 20, 4  # bytes of one pinned buffer, and how many `tensor_digests` uses; `copy_pinned` has one more
_pinned: dict[int, Any] = {}  # kept for the life of the process: pinning costs more than hashing
_CHUNK = 16 << 20  # bytes read at a time when a file is hashed
_NUMBERED = re.compile(r"[0-9]{6,}")
_HEX = re.compile(r"[0-9a-f]{64}")
_DTYPES = {  # torch name -> safetensors name
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip


class GuardError(RuntimeError):
    """A guard stopped the run (digest, replay bound, non-finite number): exit code 3."""


class RunLocked(ValueError):
    """Another process works on this run directory."""


# ---------------------------------------------------------------------------------------------------------------------
# Digests


def tensor_digest(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """(safetensors dtype name, shape, BLAKE3 hex of the little-endian contiguous bytes) of one tensor.

    A contiguous CPU tensor is hashed where it lies, any other through one contiguous host copy. TypeError for a dtype
    that safetensors has no name for here.
    """
    import torch

    name = stored_dtype(tensor.dtype)
    flat = tensor.detach().contiguous().to("cpu").reshape(-1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else b""
    threads = blake3.AUTO if flat.numel() * flat.element_size() > _THREADED_FROM else 1
    return name, tuple(tensor.shape), blake3(data, max_threads=threads).hexdigest()


def stored_dtype(dtype: torch.dtype) -> str:
    """safetensors' name of a type. TypeError where it has none here."""
    name = _DTYPES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise TypeError(f"no digest is defined for dtype {dtype}")
    return name


def dtype_of(stored: str) -> torch.dtype:
    """The type with that name in safetensors. KeyError for others."""
    import torch

    return getattr(torch, {name: ours for ours, name in _DTYPES.items()}[stored])


def tensor_digests(
    tensors: Iterable[tuple[str, torch.Tensor]], into: Mapping[str, torch.Tensor] | None = None
) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """`tensor_digest` of each (name, tensor). CUDA tensors stream through pinned memory: one piece is copied while the
    pieces before it are hashed by all cores, so 16.7 GB cost what the hashing costs, and no second copy is needed.

    `into`: name → pinned host tensor that a CUDA tensor is copied to instead, so that the copy stays; it is what is hashed."""
    import torch

    found, jobs = {}, []
    with ThreadPoolExecutor(1) as hashing:  # one thread: pieces of a tensor are hashed in their order
        for name, tensor in tensors:
            if not tensor.is_cuda:
                found[name] = tensor_digest(tensor)
                continue
            dtype = stored_dtype(tensor.dtype)
            hasher = blake3(max_threads=blake3.AUTO)
            places = _bytes(into[name]).split(_PIECE) if into else itertools.repeat(None)
            for piece, host in zip(_bytes(tensor.detach().contiguous()).split(_PIECE), places, strict=False):
                if host is None:
                    slot = len(jobs) % _PIECES
                    if len(jobs) >= _PIECES:
                        jobs[-_PIECES].result()  # the slot's last user has been hashed
                    host = _pinned_piece(slot)[: piece.numel()]
                host.copy_(piece, non_blocking=True)
                copied = torch.cuda.Event()
                copied.record()
                jobs.append(hashing.submit(_hash_piece, hasher, copied, host))
            found[name] = (dtype, tuple(tensor.shape), hasher)
        for job in jobs:
            job.result()
    return {n: (d, shape, h if isinstance(h, str) else h.hexdigest()) for n, (d, shape, h) in found.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view(-1).view(torch.uint8)


def copy_pinned(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy between a GPU and host memory, either way: at once where that is pinned (hostmemory.py), else through one pinned
    piece. Both are contiguous, of one type and shape."""
    if source.is_pinned() or target.is_pinned():
        target.copy_(source)
        return
    piece = _pinned_piece(_PIECES)
    for a, b in zip(*(_bytes(tensor).split(len(piece)) for tensor in (source, target)), strict=True):
        b.copy_(piece[: len(a)].copy_(a))


def _pinned_piece(slot: int) -> torch.Tensor:
    import torch

    if slot not in _pinned:
        _pinned[slot] = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
    return _pinned[slot]


def _hash_piece(hasher: Any, copied: Any, host: torch.Tensor) -> None:
    copied.synchronize()
    hasher.update(host.numpy())


def policy_digest(entries: Mapping[str, tuple[str, Iterable[int], str]]) -> str:
    """BLAKE3 hex over the lines ``name TAB DTYPE TAB d0,d1 TAB digest LF``, sorted by the UTF-8 bytes of the name.

    `entries` maps native names to `tensor_digest` results. DESIGN §5: content alone, no file, shard or layout.
    """
    total = blake3()
    for name in sorted(entries, key=lambda n: n.encode()):
        dtype, shape, digest = entries[name]
        total.update(f"{name}\t{dtype}\t{','.join(str(int(d)) for d in shape)}\t{digest}\n".encode())
    return total.hexdigest()


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The policy digest of full tensors under their native names."""
    return policy_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()})


def tree_digest(tree: Any) -> str:
    """BLAKE3 hex of nested dicts, lists and tuples of tensors, arrays, numbers, strings and bytes.

    For the state of a scheduler or a generator. The order of keys does not matter, and a tuple equals its list.
    """
    import torch

    def text(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {"map": sorted([repr(key), text(item)] for key, item in value.items())}
        if isinstance(value, list | tuple):
            return [text(item) for item in value]
        if hasattr(value, "__array__") and not torch.is_tensor(value) and getattr(value, "ndim", 0):
            value = torch.from_numpy(value.copy().view(f"u{value.itemsize}").astype("int64"))
        if torch.is_tensor(value):
            return ["tensor", *tensor_digest(value)]
        return repr(value.item() if hasattr(value, "item") else value)

    return blake3(_dumps(text(tree))).hexdigest()


def file_blake3(path: Path | str) -> str:
    """BLAKE3 hex of a file's content. Read, not mapped: a bad sector is then an OSError and not a dead process."""
    total = blake3(max_threads=blake3.AUTO)
    buffer = memoryview(bytearray(min(_CHUNK, max(os.path.getsize(path), 1))))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total.update(buffer[:count])
    return total.hexdigest()


def _file_digests(root: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: file_blake3(root / name), names), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Durable writes


def fsync_dir(path: Path | str) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path | str, data: bytes) -> None:
    """Writes a whole file so that a crash leaves the old content or the new, never a mixture; durable on return.

    OSError names the file when the disk is full or the file too large; nothing new is left behind then.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write_temporary(temporary, data)
        os.replace(temporary, path)
    except OSError as error:
        _remove_file(temporary)
        raise _named(error, path) from error
    except BaseException:
        _remove_file(temporary)
        raise
    fsync_dir(path.parent)


def _write_temporary(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Appends one JSON line, durable on return. A torn last line of a killed writer is cut off first."""
    data = _dumps(row) + b"\n"
    new = not path.exists()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            end = _whole_lines(fd)
            os.ftruncate(fd, end)
            os.lseek(fd, end, os.SEEK_SET)
            try:
                _write_all(fd, data)
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, end)
                raise
        finally:
            os.close(fd)
    except OSError as error:
        raise _named(error, path) from error
    if new:
        fsync_dir(path.parent)


def _whole_lines(fd: int) -> int:
    """Offset just behind the last line feed of an open file."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - 65536)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


@contextlib.contextmanager
def writing(path: Path, size: int) -> Iterator[None]:
    """Around a library that writes about `size` bytes at `path`, a file or a directory, and may not say why it failed.

    On a full disk torch's zip writer says "unexpected pos 704 vs 598", and safetensors raises no OSError. So: on an
    error, what it left at `path` is removed, and where `size` bytes cannot be reserved there either, the error becomes
    the OSError that names the path and says so. Other errors pass, but for torch's CheckpointException, which is no
    Exception (torch 2.13) and would end the process: it becomes a RuntimeError.
    """
    try:
        yield
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else _remove_file(path)
        try:
            _reserve(path.with_name(f".{path.name}.{os.getpid()}.tmp"), size)
        except OSError as cause:
            raise _named(cause, path) from error
        if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
            raise
        raise RuntimeError(f"{path}: cannot be written ({str(error).strip().splitlines()[-1]})") from error


def give_users_mode(path: Path) -> None:
    """The mode that the user's umask gives a new file: safetensors 0.8 makes its own readable by their owner alone."""
    mask = os.umask(0o077)  # it can only be read by setting it; a file made in between is closed too far, not too little
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _reserve(path: Path, size: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.posix_fallocate(fd, 0, max(1, size))
    finally:
        os.close(fd)
        _remove_file(path)


def _named(error: OSError, path: Path) -> OSError:
    """The same error with the file it concerns and, for a full disk, what to do."""
    hint = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = " (make room, then --resume the run)"
    return OSError(error.errno, f"cannot write: {os.strerror(error.errno or 0)}{hint}", str(path))


def _remove_file(path: Path) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _subdirectory(run: Path | str, name: str) -> Path:
    path = Path(run) / name
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        fsync_dir(run)
    return path


# ---------------------------------------------------------------------------------------------------------------------
# JSON. Written without NaN and in ASCII, so that what a model wrote can neither break a line nor a terminal


def _dumps(value: Any, indent: int | None = None, sort: bool = False) -> bytes:
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, allow_nan=False, indent=indent, sort_keys=sort, separators=separators).encode()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _loads(data: bytes, where: str) -> dict[str, Any]:
    """One JSON object, or a ValueError of one line that begins with `where`."""
    try:
        value = json.loads(data.decode(), parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError too
        raise ValueError(f"{where}: not valid JSON ({str(error).splitlines()[0][:120]})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a JSON object is needed, found {type(value).__name__}")
    return value


def _read(path: Path) -> bytes:
    """A file's bytes; ValueError when it is missing or no plain file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{path}: not a plain file")
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: missing") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def _read_lines(path: Path, torn: bool) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, one at a time: a long run's do not stand in memory together. `torn`: a last line without
    line feed is left out, otherwise it is an error."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{path}: not a plain file")
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if torn:
                        return
                    raise ValueError(f"{path}:{number}: the last line is torn")
                yield _loads(line[:-1], f"{path}:{number}")
    except FileNotFoundError:
        raise ValueError(f"{path}: missing") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def _is_int(value: Any, at_least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


# ---------------------------------------------------------------------------------------------------------------------
# The run directory and its lock


def create_run(run: Path | str, record: Mapping[str, Any]) -> None:
    """Makes a run directory and writes `record` as its run.json.

    ValueError when the directory holds a run already, RunLocked when another process is making one there. Other files
    in it (a log the user redirected there) are left alone.
    """
    run = Path(run)
    data = _dumps(record, indent=1) + b"\n"
    if run.exists() and not run.is_dir():
        raise ValueError(f"{run}: not a directory")
    try:
        run.mkdir(parents=True, exist_ok=True)
        fsync_dir(run.parent)
    except OSError as error:
        raise ValueError(f"{run}: cannot be made ({error.strerror})") from None
    fd = _open_lock(run / ".lock")
    try:
        if not _flock(fd, fcntl.LOCK_EX, run, 0.2):
            raise RunLocked(f"{run}: another process works on this run")
        if holds_run(run):
            raise ValueError(f"{run} already holds a run; go on with --resume, or choose another --output")
        write_atomic(run / "run.json", data)
    finally:
        os.close(fd)


def holds_run(run: Path | str) -> bool:
    """Whether a directory holds a run, or parts of one without its run.json. Changes nothing."""
    run = Path(run)
    if (run / "run.json").exists() or (run / "metrics.jsonl").exists():
        return True
    folders = [run / name for name in ("rollouts", "checkpoints", "publications") if (run / name).is_dir()]
    return any(not entry.name.startswith(".") for folder in folders for entry in folder.iterdir())


def read_run(run: Path | str) -> dict[str, Any]:
    """The object in run.json; ValueError when `run` is no run directory."""
    run = Path(run)
    if not (run / "run.json").exists():
        raise ValueError(f"{run}: not a run directory (no run.json)")
    return _loads(_read(run / "run.json"), str(run / "run.json"))


def compare_recipes(saved: Mapping[str, Any], asked: Mapping[str, Any], free: set[str]) -> list[tuple[str, Any, Any]]:
    """Settings in which a resume differs from its run: (name, saved value, asked value), by name, without `free` ones.

    Values are compared as JSON holds them (a tuple equals its list); a setting that one side lacks is None there.
    """

    def plain(value: Any) -> Any:
        return json.loads(json.dumps(value, default=str))

    found = []
    for name in sorted((set(saved) | set(asked)) - set(free)):
        old, new = plain(saved.get(name)), plain(asked.get(name))
        if old != new or isinstance(old, bool) != isinstance(new, bool):
            found.append((name, old, new))
    return found


def compare_contents(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The same for the inputs, which go by content: digests, or of a folder one fact for each of its files."""

    def flat(contents: Mapping[str, Any]) -> dict[str, Any]:
        folders = {name: value if isinstance(value, Mapping) else {"": value} for name, value in contents.items()}
        return {f"{name} {file}".rstrip(): value for name, files in folders.items() for file, value in files.items()}

    return compare_recipes(flat(saved), flat(asked), set())


class RunLock:
    """Kernel locks held until `release` or the death of this process (and of children it forked without exec)."""

    def __init__(self, fds: list[int], owner: str):
        self._fds = fds
        self.owner = owner  # hand this to the worker processes, for `hold_run`

    def release(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_run(run: Path | str, wait_s: float = 0.0) -> RunLock:
    """Takes a run for this process, the driver, and removes what a killed one left half written.

    Two flocks. RUN/.lock is exclusive: a second driver is refused at once (RunLocked). RUN/.lock.workers is shared by
    the processes that write for a driver (`hold_run`): it is taken exclusively here, which proves that no orphan of a
    killed driver lives, and then lowered to shared so that the new workers get in. A worker that comes to life only
    now, started by a driver that is dead, is refused by its owner token. Descriptors close on exec, locks end with
    their process, so nothing stale is ever found.

    wait_s: how long to wait for orphans (a resume gives ORPHAN_WAIT_S). A driver that is dying is waited for too; one
    that is alive refuses within about a second.
    """
    run = Path(run)
    if not run.is_dir():
        raise ValueError(f"{run}: not a run directory")
    deadline = time.monotonic() + wait_s
    fds = [_open_lock(run / ".lock")]
    try:
        _lock_driver(fds[0], run, deadline)
        owner = secrets.token_hex(8)
        os.ftruncate(fds[0], 0)
        os.pwrite(fds[0], _dumps({"pid": os.getpid(), "host": socket.gethostname(), "owner": owner}) + b"\n", 0)
        fds.append(_open_lock(run / ".lock.workers"))
        if not _flock(fds[1], fcntl.LOCK_EX, run, max(0.2, deadline - time.monotonic())):
            raise RunLocked(f"{run}: processes of an earlier run still write here; try again when they have ended")
        _flock(fds[1], fcntl.LOCK_SH, run, 0)
        remove_unfinished(run)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return RunLock(fds, owner)


def hold_run(run: Path | str, owner: str | None = None) -> RunLock:
    """Joins the run of the driver whose `RunLock.owner` is given; every process that writes into RUN calls this first.

    RunLocked when the run belongs to another driver by now. Without `owner` the driver is not checked.
    """
    run = Path(run)
    fd = _open_lock(run / ".lock.workers")
    try:
        if not _flock(fd, fcntl.LOCK_SH, run, 5.0):
            raise RunLocked(f"{run}: another process is taking this run over")
        # Order: the new driver writes its token before it asks for the workers' lock. So either the token read here is
        # the new one, or the new driver sees this lock and waits.
        if owner is not None and _lock_record(run).get("owner") != owner:
            raise RunLocked(f"{run}: another process has taken this run over")
    except BaseException:
        os.close(fd)
        raise
    _end_forks_with_parent()
    return RunLock([fd], owner or "")


def log_output(run: Path | str, name: str) -> None:
    """Sends what this process and the libraries in it print to RUN/logs/NAME.log, from now on."""
    folder = Path(run) / "logs"
    folder.mkdir(exist_ok=True)
    with open(folder / f"{name}.log", "ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def _end_forks_with_parent() -> None:
    """Has the kernel kill every later fork of this process when the thread that forked it ends.

    Megatron forks the writers of a checkpoint and feeds them through queues (0.16.1). When their parent is killed they
    wait for it forever, and the lock that they inherited would keep every resume out.
    """
    global _parent
    if _parent is None:
        libc, _parent = ctypes.CDLL(None), os.getpid()

        def before() -> None:
            global _parent
            _parent = os.getpid()

        def in_child() -> None:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != _parent:  # it was killed before the line above
                os._exit(1)

        os.register_at_fork(before=before, after_in_child=in_child)


_parent: int | None = None  # the process that forks, once `_end_forks_with_parent` has been called


def is_locked(run: Path | str) -> bool:
    """Whether a driver works on this run now. Changes nothing."""
    try:
        fd = os.open(Path(run) / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def remove_unfinished(run: Path | str) -> None:
    """Removes what killed writers left under names that start with a dot. Only the holder of the run's lock may."""
    run = Path(run)
    for folder in (run, run / "rollouts", run / "publications", run / "checkpoints"):
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            name = entry.name
            if name.startswith(".") and (name.endswith(".tmp") or folder.name == "checkpoints"):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else _remove_file(entry)


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ValueError(f"{path}: the run cannot be locked ({error.strerror})") from None


def _flock(fd: int, kind: int, run: Path, wait_s: float) -> bool:
    """Whether the lock was got within `wait_s`. Polls: a blocking flock knows no time limit."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        except OSError as error:
            raise ValueError(f"{run}: this file system cannot lock files ({error.strerror})") from None


def _lock_driver(fd: int, run: Path, deadline: float) -> None:
    patience = 1.0 if deadline > time.monotonic() else 0.2  # `is_locked` of an audit holds the lock for microseconds
    alive_since = time.monotonic()
    while not _flock(fd, fcntl.LOCK_EX, run, 0.1):
        now, record = time.monotonic(), _lock_record(run)
        alive = record.get("host") != socket.gethostname() or _alive(record.get("pid"))
        if not alive and now < deadline:
            alive_since = now
        elif now - alive_since >= patience:
            who = f" (process {record['pid']} on {record['host']})" if {"pid", "host"} <= set(record) else ""
            raise RunLocked(f"{run}: another process works on this run{who}")


def _lock_record(run: Path) -> dict[str, Any]:
    try:
        return _loads(_read(run / ".lock"), "")
    except ValueError:
        return {}


def _alive(pid: Any) -> bool:
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] not in "ZXx"
    except (OSError, ValueError, TypeError, IndexError):
        return False


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts and metrics


def rollouts_file(run: Path | str, update: int) -> Path:
    return Path(run) / "rollouts" / f"{update:06d}.jsonl"


def append_rollouts(run: Path | str, update: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the completions of one update, in sample order; durable on return.

    GuardError when a row holds a number that is not finite, naming the sample.
    """
    _subdirectory(run, "rollouts")
    lines = []
    for index, row in enumerate(rows):
        try:
            lines.append(_dumps(row) + b"\n")
        except ValueError:
            raise GuardError(f"update {update}, sample {index}: the completion holds a non-finite number") from None
    write_atomic(rollouts_file(run, update), b"".join(lines))


def read_rollouts(run: Path | str, update: int) -> list[dict[str, Any]]:
    """The completions of one update. ValueError names file and line."""
    return list(_read_lines(rollouts_file(run, update), torn=False))


def append_metrics(run: Path | str, row: Mapping[str, Any]) -> None:
    """Appends the metrics of one update; durable on return. A non-finite number is written as null (JSON has none)."""
    _append_line(Path(run) / "metrics.jsonl", _finite(row))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not (float("-inf") < value < float("inf")):
        return None
    return value


def read_metrics(run: Path | str, torn: bool = True) -> list[dict[str, Any]]:
    """The metrics rows; [] when there are none yet. `torn`: whether an unfinished last line is passed over."""
    path = Path(run) / "metrics.jsonl"
    return list(_read_lines(path, torn)) if path.exists() else []


def truncate_to(run: Path | str, updates: int) -> None:
    """Takes a run back to the moment after `updates` updates: later checkpoints, metrics and rollouts go.

    In this order, each step harmless alone: what is left when it is interrupted is truncated by the next resume.
    """
    for later in [n for n in list_checkpoints(run) if n > updates]:
        remove_checkpoint(run, later)
    _truncate_metrics(Path(run), updates)
    _truncate_rollouts(Path(run), updates)


def _truncate_metrics(run: Path, updates: int) -> None:
    path = run / "metrics.jsonl"
    if not path.exists():
        return
    old = _read(path)
    # By position, as `_check_records` counted them; what stands after them goes unread, whatever befell it.
    new = b"".join(line + b"\n" for line in old.split(b"\n")[:-1][:updates])
    if new != old:
        write_atomic(path, new)


def _truncate_rollouts(run: Path, updates: int) -> None:
    folder = run / "rollouts"
    if not folder.is_dir():
        return
    for path in sorted(folder.glob("*.jsonl"), reverse=True):
        if _NUMBERED.fullmatch(path.stem) and int(path.stem) >= updates:
            _remove_file(path)
    fsync_dir(folder)


def _check_records(run: Path, updates: int) -> None:
    """ValueError unless rollouts and metrics of updates 0..updates-1 are there, whole."""
    for update in range(updates):
        path = rollouts_file(run, update)
        try:
            with open(path, "rb") as file:
                whole = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) == b"\n"
        except OSError:
            raise ValueError(f"{path}: missing") from None
        if not whole:
            raise ValueError(f"{path}: empty or torn")
    path = run / "metrics.jsonl"
    rows = [row.get("update") for row in itertools.islice(_read_lines(path, torn=True), updates)] if path.exists() else []
    missing = next((i for i in range(updates) if i >= len(rows) or not _is_int(rows[i]) or rows[i] != i), None)
    if missing is not None:
        raise ValueError(f"{path}: update {missing} is missing or out of order")


# ---------------------------------------------------------------------------------------------------------------------
# Publications


def commits_file(run: Path | str) -> Path:
    return Path(run) / "publications" / "commits.jsonl"


def read_commits(run: Path | str) -> list[dict[str, Any]]:
    """The commit records, oldest first; [] when there are none. A torn last line was never committed: left out.

    ValueError names the line of a record without whole number `version` and `epoch` and a `digest`.
    """
    return list(_commits(run))


def _commits(run: Path | str) -> Iterator[dict[str, Any]]:
    path = commits_file(run)
    for line, record in enumerate(_read_lines(path, torn=True) if path.exists() else (), 1):
        _check_commit(record, f"{path}:{line}")
        yield record


def _check_commit(record: Mapping[str, Any], where: str) -> None:
    whole = _is_int(record.get("version"), 1) and _is_int(record.get("epoch"))
    if not whole or not _is_digest(record.get("digest")):
        raise ValueError(f'{where}: "version" (from 1), "epoch" (from 0) and "digest" (64 hex digits) are needed')


def append_commit(run: Path | str, record: Mapping[str, Any]) -> None:
    """Makes the commit of one published version durable: {version, digest, epoch, tensors, time}.

    GuardError when the version was committed before with another digest (in any epoch: a resume must reproduce it), or
    when versions within an epoch, or epochs, do not grow. The same version and digest again in one epoch is a no-op.
    """
    _subdirectory(run, "publications")
    _check_commit(record, "commit record")
    version, epoch, digest = record["version"], record["epoch"], record["digest"]
    last = None
    for old in _commits(run):
        if old["version"] == version and old["digest"] != digest:
            raise GuardError(
                f"version {version} was committed with digest {old['digest']} in epoch {old['epoch']}, now has {digest}"
            )
        if old["version"] == version and old["epoch"] == epoch:
            return
        last = old
    if last and epoch < last["epoch"]:
        raise GuardError(f"version {version}: epoch {epoch} is older than the last committed, {last['epoch']}")
    if last and epoch == last["epoch"] and version < last["version"]:
        raise GuardError(f"version {version} is older than the last committed, {last['version']}")
    _append_line(commits_file(run), record)


def drop_commits_above(run: Path | str, first_version: int) -> None:
    """Removes the commit records above the first version of a resume; durable on return."""
    path = commits_file(run)
    if not path.exists():
        return
    old = _read(path)
    new = b"".join(_dumps(record) + b"\n" for record in read_commits(run) if record["version"] <= first_version)
    if new != old:
        write_atomic(path, new)


def next_epoch(run: Path | str) -> int:
    """The number of a new engine epoch, from 0; durable before it is used, so no epoch is ever used twice."""
    path = _subdirectory(run, "publications") / "epoch"
    epoch = 0
    if path.exists():
        text = _read(path).strip()
        if not re.fullmatch(rb"[0-9]{1,18}", text):
            raise ValueError(f"{path}: a whole number is needed")
        epoch = int(text) + 1
    write_atomic(path, f"{epoch}\n".encode())
    return epoch


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def checkpoint_path(run: Path | str, updates: int) -> Path:
    return Path(run) / "checkpoints" / f"{updates:06d}"


def list_checkpoints(run: Path | str) -> list[int]:
    """Update counts of the visible checkpoints, rising. Visible does not mean intact: see `verify_checkpoint`."""
    folder = Path(run) / "checkpoints"
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(entry.name) for entry in entries if _NUMBERED.fullmatch(entry.name) and entry.is_dir())


def staging(run: Path | str, updates: int) -> Path:
    """A fresh empty directory to write the checkpoint after `updates` updates into; `publish_checkpoint` shows it."""
    path = _subdirectory(run, "checkpoints") / f".{updates:06d}.tmp"
    if path.exists():
        shutil.rmtree(path)
    path.mkdir()
    return path


def publish_checkpoint(run: Path | str, updates: int, state: Mapping[str, Any], keep: int) -> dict[str, Any]:
    """Makes what lies in the staging directory the checkpoint after `updates` updates, durable on return.

    state: `policy_version` (updates + 1), `policy_digest`, `cursor` and `tensors` {kind: {name: BLAKE3 of the full
    tensor}}, and any more JSON; `updates`, `files` and `self` (BLAKE3 of state.json's other keys) are added. Then all
    but the newest `keep` checkpoints are removed. Returns the state as written.

    ValueError when the state lacks a key, or the run lacks rollouts or metrics of these updates. OSError when the disk
    is full; the staging directory is removed then. When this checkpoint exists with the same state, it stays; with
    another state that is a GuardError.
    """
    run, source, target = Path(run), staging_dir(run, updates), checkpoint_path(run, updates)
    if not _is_int(keep, 1):
        raise ValueError("at least one checkpoint must be kept")
    if not source.is_dir():
        raise ValueError(f"{source}: missing; nothing was staged")
    _check_records(run, updates)
    try:
        names = [name for name in _files_below(source) if name != "state.json"]
        full = json.loads(_dumps({**state, "updates": updates, "files": _file_digests(source, names)}))
        full["self"] = _self_digest(full)
        _check_state(full, updates, "state")
        if target.exists():
            if (there := _verified(run, updates)) is not None:
                if any(there[key] != full[key] for key in ("policy_digest", "cursor", "tensors")):
                    raise GuardError(f"{target}: exists already and holds another state")
                shutil.rmtree(source)
                return there
            remove_checkpoint(run, updates)
        _sync_tree(source)
        write_atomic(source / "state.json", _encode_state(full))
        _show(source, target)
    except OSError as error:
        shutil.rmtree(source, ignore_errors=True)
        if error.filename is None:
            raise _named(error, target) from error
        raise
    prune_checkpoints(run, keep)
    return full


def staging_dir(run: Path | str, updates: int) -> Path:
    return Path(run) / "checkpoints" / f".{updates:06d}.tmp"


def _show(source: Path, target: Path) -> None:
    os.rename(source, target)
    fsync_dir(target.parent)


def sync_files(root: Path, names: Iterable[str]) -> None:
    """Makes the content of files in a directory durable."""
    for name in names:
        fd = os.open(root / name, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _sync_tree(root: Path) -> None:
    sync_files(root, _files_below(root))
    for folder, _, _ in os.walk(root, topdown=False):
        fsync_dir(folder)


def prune_checkpoints(run: Path | str, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints."""
    for updates in list_checkpoints(run)[:-keep]:
        remove_checkpoint(run, updates)


def remove_checkpoint(run: Path | str, updates: int) -> None:
    """Hides a checkpoint by one rename, then deletes it: it is never seen half deleted."""
    path = checkpoint_path(run, updates)
    hidden = path.with_name(f".{path.name}.old")
    if hidden.exists():
        shutil.rmtree(hidden)
    os.rename(path, hidden)
    fsync_dir(path.parent)
    shutil.rmtree(hidden)


def read_state(run: Path | str, updates: int) -> dict[str, Any]:
    """state.json of a checkpoint, proven unchanged to the byte; the files it names are not looked at.

    ValueError names what is wrong.
    """
    path = checkpoint_path(run, updates) / "state.json"
    data = _read(path)
    state = _loads(data, str(path))
    _check_state(state, updates, str(path))
    # `self` covers what the JSON says; the comparison covers bytes that say nothing, such as white space.
    if state["self"] != _self_digest(state) or data != _encode_state(state):
        raise ValueError(f"{path}: damaged (its own digest does not match)")
    return state


def verify_checkpoint(run: Path | str, updates: int) -> dict[str, Any]:
    """Proves a checkpoint whole and returns its state: every file present with its BLAKE3, none besides, state.json
    unchanged, rollouts and metrics of its updates there. ValueError names the first file that is not so."""
    root = checkpoint_path(run, updates)
    state = read_state(run, updates)
    _check_records(Path(run), updates)
    found = set(_files_below(root)) - {"state.json"}
    for name in sorted(found ^ set(state["files"])):
        raise ValueError(f"{root / name}: {'not part of the checkpoint' if name in found else 'missing'}")
    try:
        for name, digest in _file_digests(root, sorted(found)).items():
            if digest != state["files"][name]:
                raise ValueError(f"{root / name}: damaged (its BLAKE3 is not the one in state.json)")
    except OSError as error:
        raise ValueError(f"{error.filename or root}: cannot be read ({error.strerror})") from None
    return state


def _verified(run: Path, updates: int) -> dict[str, Any] | None:
    try:
        return verify_checkpoint(run, updates)
    except ValueError:
        return None


def newest_checkpoint(run: Path | str, say: Callable[[str], None]) -> tuple[int, dict[str, Any]] | None:
    """(updates, state) of the newest checkpoint that verifies; each damaged one above it is named through `say`.

    None when the run has no checkpoint. ValueError when it has some and none verifies: going back to update 0 would
    then delete what the user may still want to look at, so the user decides.
    """
    counts = list_checkpoints(run)
    reason = ""
    for updates in reversed(counts):
        try:
            return updates, verify_checkpoint(run, updates)
        except ValueError as error:
            reason = str(error)
            say(f"checkpoint {updates:06d} is passed over: {reason}")
    if counts:
        raise ValueError(
            f"{run}: no checkpoint verifies ({reason}); without checkpoints and metrics.jsonl a resume starts again from update 0"
        )
    return None


def _files_below(root: Path) -> list[str]:
    """Relative POSIX paths of all files below a directory, sorted. ValueError for links and special files."""
    found = []
    for folder, folders, names in os.walk(root):
        for name in (*names, *(f for f in folders if os.path.islink(os.path.join(folder, f)))):
            path = os.path.join(folder, name)
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise ValueError(f"{path}: not a plain file")
            found.append(Path(path).relative_to(root).as_posix())
    return sorted(found)


def _encode_state(state: Mapping[str, Any]) -> bytes:
    return _dumps(state, indent=1, sort=True) + b"\n"


def _self_digest(state: Mapping[str, Any]) -> str:
    return blake3(_dumps({key: value for key, value in state.items() if key != "self"}, sort=True)).hexdigest()


def _check_state(state: Mapping[str, Any], updates: int, where: str) -> None:
    """ValueError names the key of a state.json that is not as DESIGN §6 has it."""

    def digests(value: Any) -> bool:
        return isinstance(value, dict) and all(_is_digest(item) for item in value.values())

    files, tensors = state.get("files"), state.get("tensors")
    checks = {
        "updates": _is_int(state.get("updates")) and state["updates"] == updates,
        "policy_version": _is_int(state.get("policy_version")) and state["policy_version"] == updates + 1,
        "policy_digest": _is_digest(state.get("policy_digest")),
        "cursor": _is_int(state.get("cursor")),
        "files": digests(files) and all(_is_inside(name) for name in files),
        "tensors": isinstance(tensors, dict) and all(digests(kind) for kind in tensors.values()),
        "self": _is_digest(state.get("self")),
    }
    for key, good in checks.items():
        if not good:
            raise ValueError(f'{where}: "{key}" is missing or wrong')


def _is_inside(name: str) -> bool:
    """Whether a stored path is relative, normal, and stays inside its directory."""
    path = PurePosixPath(name)
    plain = name == path.as_posix() and not path.is_absolute() and ".." not in path.parts
    return plain and name not in (".", "state.json")
