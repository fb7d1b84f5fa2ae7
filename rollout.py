"""The rollout engine: vLLM in this process, the receiving end of a publication, completions with their traces.

The policy reaches the engine only through a publication; no token is generated under a policy that is not committed:

    pause -> start(version) -> receive(tensors) -> verify(version, digest) -> [the commit record is durable] -> commit(record)

`verify` hashes the parameters that the model *holds*, compares with what the sender stated, and drops the KV and prefix
caches; `commit` lets `generate` work again. Where several engines serve one run, all have verified before the one record
is written (`engines.py`: `prepare`, record, `commit`); an engine on its own writes it itself (`publish`, or `finish` for
the last three). Whatever goes wrong on the way is a GuardError, and from then on the engine refuses to generate until a
complete publication commits.

An engine may be several processes with a GPU each, its *ranks*: vLLM's "external_launcher". Each runs the same calls in the
same order and holds its shard of every tensor; collectives inside the forward pass, and inside `held_digests`, join them.

The weights are overwritten in place, on GPU and CPU alike: a CUDA graph keeps its addresses, the device holds no second
copy of the model, and a transfer that breaks off leaves a whole (if useless) model that the next one repairs. (vLLM's
`reload_weights` moves the layers to the meta device in between and keeps half-received ones for the next call.)

Every completion has its own seed (`completion_seed`), which depends on run seed, update and sample index alone.
Log-probabilities are those of the distribution that was sampled (float32 logits / temperature, full vocabulary).
This module imports vLLM only when an engine is made; it knows nothing of Ray.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

import checkpoint
import provider
from checkpoint import GuardError

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # --precision -> torch and vLLM
STORED = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}  # --precision -> safetensors

# Seconds without a decode step, a tensor or the end of the start, after which an engine hangs: it prints where, and ends.
# A step on CPU may be the prefill of 8,192 tokens, which for the 3B model is half an hour on two cores.
STALL_S = {"cuda": 600.0, "cpu": 3600.0}


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is made with; `run.py` fills it from the recipe."""

    precision: str = "fp32"  # fp32, bf16 or fp16; the trainer's
    matmul_precision: str = "highest"  # of float32 products: highest (float32's) or high (TF32); the trainer's
    split_matmul: bool = False  # float32 products as `matmul` takes them; CUDA, fp32 and highest only
    device: str = "cpu"  # cpu or cuda
    max_model_len: int = 176  # tokens, prompt and completion together
    max_num_seqs: int = 256  # completions decoded at once
    kv_cache_gib: float = 1.0  # GiB for all KV caches; 0: what gpu_memory_utilization leaves (CUDA only)
    gpu_memory_utilization: float = 0.9  # share of the card, only where kv_cache_gib is 0
    cuda_graphs: bool = False  # capture decode steps; CUDA only
    graph_seqs: int = 256  # completions up to which a step's graph is captured, of more it runs without
    seed: int = 42  # vLLM's own; completions have theirs
    temperature: float = 0.8  # of a request that names none
    model_revision: str | None = None
    engine_revision: str | None = None
    epoch: int = 0  # engine epoch of the run, a resume opens a new one
    number: int = 0  # of the engine in its run, from 0
    tensor_parallel: int = 1  # processes, with a GPU each, that hold one engine: its ranks
    rank: int = 0  # of this process in its engine
    rendezvous: str = ""  # host:port where the ranks of an engine meet; free on the host of rank 0


def completion_seed(run_seed: int, update: int, sample: int, purpose: str = "train") -> int:
    """A 63-bit seed for one completion: BLAKE3 of purpose ('train' or 'eval'), run seed, update and sample index.

    Independent of placement, batch order and of how many engines there are.
    """
    return int.from_bytes(blake3(f"{purpose}\t{run_seed}\t{update}\t{sample}".encode()).digest(8), "big") >> 1


def commit_record(version: int, digest: str, epoch: int, tensors: int) -> dict[str, Any]:
    """What commits.jsonl says of a version, dated now."""
    return {"version": version, "digest": digest, "epoch": epoch, "tensors": tensors, "time": time.time()}


def graph_sizes(most: int) -> list[int]:
    """Batch sizes whose decode step is captured, up to `most`; one in between is padded to the next, which costs little
    where reading the weights is the bound. vLLM's own list has four times as many, each of them time at the start."""
    steps = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, *range(192, most, 64)]
    return [size for size in steps if size < most] + [most]


def log_name(number: int, rank: int) -> str:
    """The file of an engine's process in RUN/logs, without .log."""
    return f"engine-{number}" if rank == 0 else f"engine-{number}-rank-{rank}"


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment of the process that holds an engine, to be set before vLLM is imported there.

    OMP_NUM_THREADS is not among it: the placement decides how many threads an engine has.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process: publication is a function call
        "VLLM_LOGGING_LEVEL": "ERROR",  # of the warnings, none is about a run: no chat template, no tcmalloc
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # not in the offline bundle, and its sampling is not seeded per request
        "HF_HUB_OFFLINE": "1",  # everything is read from the model directory
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM ranks the sampled token through torch.compile: 20 s on a new machine, for a rank that nobody reads.
        "TORCHDYNAMO_DISABLE": "1",
    }
    if settings.device == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(settings.kv_cache_gib)))  # whole GiB
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the trainer works on the same cores
        # oneDNN keeps a kernel for each matrix and each number of tokens it has met, up to 1,024 of 0.2 MiB: they gather for
        # thousands of updates. Sixteen completions that are decoded together use 96 of the tiny model's.
        environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "128"
    else:
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        # Triton's float32 dot is TF32 by default: error 1.5e-3 against float64, 1.1e-6 with this (measured on an H200).
        environment["TRITON_F32_DEFAULT"] = "ieee" if settings.matmul_precision == "highest" else "tf32"
        environment["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"  # sums of ranks in NCCL's order alone, whatever the batch
    if settings.tensor_parallel > 1:
        host, _, port = settings.rendezvous.rpartition(":")
        environment |= {"RANK": str(settings.rank), "WORLD_SIZE": str(settings.tensor_parallel)}
        environment |= {"MASTER_ADDR": host, "MASTER_PORT": port, "LOCAL_RANK": "0"}  # each sees its own GPU alone
    return environment


# --- revisions -------------------------------------------------------------------------------------------------------


def check_revisions(model_dir: str | Path, settings: EngineSettings) -> dict[str, str]:
    """{"model_revision", "engine_revision"} as a run records them: the installed revision where the installed thing can
    tell, otherwise "unverified", with the value that was asked for.

    ValueError when it can tell and says something else than was asked for. Imports neither torch nor vLLM.
    """
    return {
        "model_revision": _checked("--model-revision", settings.model_revision, _model_revision(Path(model_dir))),
        "engine_revision": _checked("--engine-revision", settings.engine_revision, _engine_revision()),
    }


@dataclass(frozen=True)
class _Installed:
    """What an installed thing tells of its revision."""

    revision: str | None = None  # what a run records; None: it cannot tell
    commit: str | None = None  # its commit, if known
    names: Mapping[str, str] = field(default_factory=dict)  # other names (branch, tag) and the revision each stands for
    all_names: bool = False  # no other name can mean it


def _checked(option: str, asked: str | None, it: _Installed) -> str:
    if it.revision is None:
        return f"unverified:{asked}" if asked else "unverified"
    if not asked or asked == it.revision:
        return it.revision
    if re.fullmatch("[0-9a-f]{7,40}", asked):
        checkable = it.commit is not None
        same = checkable and (it.commit.startswith(asked) or asked.startswith(it.commit))
    else:
        checkable = it.all_names or asked in it.names
        same = it.names.get(asked) == it.revision
    if checkable and not same:
        raise ValueError(f"{option} asks for {asked}, but {it.revision} is installed")
    return it.revision if same else f"unverified:{asked}"


def _model_revision(model_dir: Path) -> _Installed:
    """Which commit a model directory holds."""
    here = Path(os.path.abspath(model_dir))
    if here.parent.name == "snapshots":  # the layout of the Hugging Face cache: snapshots/<commit>, refs/<branch>
        refs = here.parent.parent / "refs"
        files = [ref for ref in (refs.rglob("*") if refs.is_dir() else ()) if ref.is_file()]
        names = {ref.relative_to(refs).as_posix(): ref.read_text(errors="replace").strip() for ref in files}
        return _Installed(here.name, here.name, names)
    try:  # `hf download --local-dir` notes the commit beside the files
        text = (here / ".cache/huggingface/download/config.json.metadata").read_text(errors="replace")
    except OSError:
        return _Installed()
    commit = text.split("\n")[0].strip()
    return _Installed(commit, commit) if re.fullmatch("[0-9a-f]{40}", commit) else _Installed()


def _engine_revision() -> _Installed:
    """The installed vLLM: its version (also without local part, or as a tag) and its commit, if the build noted it."""
    from importlib.metadata import PackageNotFoundError, distribution

    for package in ("vllm", "vllm-cpu"):
        try:
            found = distribution(package)
        except PackageNotFoundError:
            continue
        public = found.version.split("+")[0]
        try:
            text = Path(str(found.locate_file("vllm/_version.py"))).read_text()
        except OSError:
            text = ""
        commit = re.search(r"commit_id = 'g?([0-9a-f]{7,40})'", text)
        names = dict.fromkeys((public, f"v{public}"), found.version)
        return _Installed(found.version, commit and commit[1], names, all_names=True)
    return _Installed()


# --- the transport's receiving end -----------------------------------------------------------------------------------


def received(manifest: Mapping[str, Any], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor on `device`) one at a time from the transport of a manifest.

    'disk' and 'shm': `location` is one safetensors file. 'ipc': `location` is {"device": UUID of the sender's GPU,
    "handles": {name: what torch's `reduce_tensor` gives to rebuild it}} from a process of this host, whose tensors stay
    alive and unchanged until `publish` returns; they are read where they lie, and may be strided slices of any rank.

    A trainer of several processes sends from each its share: `parts` in place of `location`, a list of {"location": …,
    "slices": {name: [dimension, start]}}. Of those one tensor after the other is put together. GuardError: a part lies
    outside its tensor, or the parts of one leave a gap.
    """
    if "parts" in manifest:
        yield from _joined(manifest["parts"], manifest, device)
        return
    with _opened(manifest["location"], manifest, device) as (names, get):
        for name in names:
            tensor = get(name)
            yield name, tensor.reshape(manifest["tensors"][name][1]) if manifest["transport"] == "ipc" else tensor


def _joined(parts: list[Mapping[str, Any]], manifest: Mapping[str, Any], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    with contextlib.ExitStack() as stack:
        sources = [(stack.enter_context(_opened(p["location"], manifest, device))[1], p["slices"]) for p in parts]
        for name, (_, shape) in manifest["tensors"].items():
            full, filled = None, 0
            for get, slices in sources:
                if name not in slices:
                    continue
                (dim, start), piece = slices[name], get(name)
                if piece.dim() > len(shape):  # a live slice of a fused weight
                    piece = piece.flatten(0, 1)
                if full is None:
                    full = torch.empty(shape, dtype=piece.dtype, device=piece.device)
                room = list(shape[:dim]) + [piece.shape[dim]] + list(shape[dim + 1 :])
                if list(piece.shape) != room or not 0 <= start <= shape[dim] - piece.shape[dim]:
                    raise GuardError(f"a part of {name} has shape {list(piece.shape)}, which is none of {list(shape)} at {start}")
                full.narrow(dim, start, piece.shape[dim]).copy_(piece)
                filled += piece.numel()
            if full is None or filled != full.numel():
                raise GuardError(f"{name}: the senders gave {filled} of its {math.prod(shape)} numbers")
            yield name, full


@contextlib.contextmanager
def _opened(
    location: Any, manifest: Mapping[str, Any], device: str
) -> Iterator[tuple[Iterable[str], Callable[[str], torch.Tensor]]]:
    """What one sender left: the names, and what gives the tensor of a name, on `device`."""
    if manifest["transport"] == "ipc":
        shared = _by_handles(location)
        yield shared, shared.__getitem__
    elif manifest["transport"] == "shm" and device == "cuda":
        import hostmemory

        tensors = hostmemory.open_policy_file(location, gpu=True).tensors
        yield tensors, lambda name: _to_gpu(tensors[name])
    elif manifest["transport"] in ("disk", "shm"):
        from safetensors import safe_open

        with safe_open(location, framework="pt") as file:
            yield file.keys(), lambda name: _to_gpu(file.get_tensor(name)) if device == "cuda" else file.get_tensor(name)
    else:
        raise GuardError(f"unknown publication transport {manifest['transport']!r}")


def _to_gpu(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    there = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
    checkpoint.copy_pinned(tensor.contiguous(), there)
    return there


def _by_handles(location: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of another process of this host by their CUDA IPC handles."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if location["device"] not in visible:
        raise GuardError("the sender's GPU is not visible to the engine; use another --publication-transport")
    tensors = {}
    for name, handle in location["handles"].items():
        args = list(handle)
        args[6] = visible[location["device"]]  # `storage_device`: the sender's number, where this process may have another
        # All are open before the first is used, and stay so: tensors that share an allocation share one mapping of it.
        tensors[name] = rebuild_cuda_tensor(*args)
    return tensors


# --- the engine ------------------------------------------------------------------------------------------------------


@dataclass
class _Publication:
    """A publication in flight: its version, the tensors received so far, and its digest once that was verified."""

    version: int
    seen: set[str]
    verified: str | None = None


class RolloutEngine:
    """One vLLM engine in this process, without weights until the first publication commits.

    Args:
        model_dir: directory with config.json; its weights are not read.
        run_dir: the run that commit records go to; None keeps none (tests, benchmarks).
        settings: EngineSettings.

    ValueError: an unsupported config, or a revision other than the one asked for.
    """

    def __init__(self, model_dir: str, run_dir: str | None, settings: EngineSettings):
        began = time.perf_counter()
        self.settings, self.run_dir = settings, run_dir
        self.config = provider.read_config(model_dir)
        self.revisions = check_revisions(model_dir, settings)
        self.shapes = provider.tensor_shapes(self.config)
        os.environ.update(engine_environment(settings))
        import torch
        import vllm

        import vllm_nanbeige

        torch.set_float32_matmul_precision(settings.matmul_precision)
        vllm_nanbeige.register()
        self._check_servable()
        self.engine_version = vllm.__version__
        set_num_threads = torch.set_num_threads
        self._marked = -math.inf
        with self._watched():
            self.llm = vllm.LLM(**self._engine_options(model_dir))
        torch.set_num_threads = set_num_threads  # vLLM on CPU disables it for having bound threads; here it binds none
        self._model = self.llm.apply_model(lambda model: model)[0]
        self._mark_steps(self.llm.llm_engine)
        self._committed: dict | None = None
        self._publication: _Publication | None = None
        self._refusal: str | None = "no policy has been published"
        self.start_s = time.perf_counter() - began

    def _engine_options(self, model_dir: str) -> dict[str, Any]:
        s = self.settings
        options = {
            "model": str(model_dir),
            "skip_tokenizer_init": True,
            "load_format": "dummy",  # weights come by publication only
            "dtype": DTYPES[s.precision],
            "max_model_len": s.max_model_len,
            "max_num_seqs": s.max_num_seqs,
            "enable_prefix_caching": True,
            "block_size": 32 if s.device == "cpu" else 16,  # vLLM on CPU takes 128, which shares no short prefix
            "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled: temperature applied
            "generation_config": "vllm",  # not the checkpoint's sampling defaults
            "seed": s.seed,
            "disable_log_stats": True,
            "additional_config": {"split_matmul": s.split_matmul},  # read by vllm_nanbeige
            "enforce_eager": not (s.cuda_graphs and s.device == "cuda"),
        }
        if s.kv_cache_gib:
            options["kv_cache_memory_bytes"] = int(s.kv_cache_gib * 2**30)
        if s.tensor_parallel > 1:
            options |= {"tensor_parallel_size": s.tensor_parallel, "distributed_executor_backend": "external_launcher"}
            options["disable_custom_all_reduce"] = True  # it needs every rank's GPU visible to every rank
        if s.device == "cuda":
            # Of a prefill. vLLM's 16,384 are no faster, and it begins with two steps of that size: 9 s at the official shape.
            options["max_num_batched_tokens"] = max(4096, s.max_num_seqs)
            # With the KV cache sized by hand vLLM only checks this share against what the trainer has left free.
            options["gpu_memory_utilization"] = 0.01 if s.kv_cache_gib else s.gpu_memory_utilization
            options["attention_backend"] = "TRITON_ATTN"  # serves float32
            if s.cuda_graphs:
                # Whole decode steps are captured; nothing is compiled, so eager and captured run the same kernels.
                sizes = graph_sizes(min(s.graph_seqs, s.max_num_seqs))
                graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
                options["compilation_config"] = {"mode": 0, **graphs}
        return options

    def _check_servable(self) -> None:
        """ValueError for a head size that vLLM's CPU attention would only refuse at the first token."""
        if self.settings.device == "cpu":
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            sizes = CPUAttentionBackend.get_supported_head_sizes()
            if self.config.head_dim not in sizes:
                raise ValueError(f'config.json: "head_dim" is {self.config.head_dim}; vLLM on CPU serves {sizes}')

    def facts(self) -> dict[str, Any]:
        """What a run records of its engine: pid, versions, revisions, seconds it took to start."""
        return {"pid": os.getpid(), "vllm": self.engine_version, **self.revisions, "start_s": round(self.start_s, 2)}

    def hold(self, run: str, owner: str) -> None:
        """Hold the run's lock in this process until it dies, so that a resume waits for it (DESIGN §6). From here on
        what this process prints stands in RUN/logs."""
        self._lock = checkpoint.hold_run(run, owner)
        checkpoint.log_output(run, log_name(self.settings.number, self.settings.rank))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """What runs inside makes progress (`_mark`) within STALL_S, or this process prints its stacks and ends: a hung
        engine is a dead one, which the run replaces. The timer is a thread of C that asks for no lock of Python's."""
        self._mark()
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._marked = -math.inf

    def _mark_steps(self, inner: Any) -> None:
        step = inner.step

        def marked_step():
            self._mark()
            return step()

        inner.step = marked_step

    def _mark(self) -> None:
        now = time.monotonic()
        if now - self._marked > 1:  # the timer is a thread, made anew each time: not for every step
            self._marked = now
            faulthandler.dump_traceback_later(STALL_S[self.settings.device], exit=True, file=2)

    # -- publication (the receiving end, DESIGN §5) --

    @property
    def committed(self) -> dict[str, Any] | None:
        """{version, digest, epoch} of the last committed policy, also while the engine refuses to generate."""
        return dict(self._committed) if self._committed else None

    def publish(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Receive and commit one policy, as the only engine. Returns the commit record, with `seconds` for loading,
        digest and commit.

        `manifest`: {version, digest, transport, location, tensors {name: [dtype, shape]}}, made by the sender. A
        version that is committed and in use, with the same digest, is a no-op. GuardError: anything not as stated.
        """
        if self._holds(manifest["version"], manifest["digest"]):
            return {**self._committed, "tensors": len(self.shapes), "seconds": {}}
        load_s = self._load(manifest)
        record = self.finish(manifest["version"], manifest["digest"])
        return {**record, "seconds": {"load": load_s, **record["seconds"]}}

    def prepare(self, manifest: Mapping[str, Any]) -> dict[str, float]:
        """The first half of a publication to several engines: receive and verify. This engine then holds the policy of
        `manifest` and refuses to generate until `commit`; it goes on where that policy is the one it has committed.

        Returns seconds for loading and digest. GuardError: anything not as stated."""
        if self._holds(manifest["version"], manifest["digest"]):
            return {}
        load_s = self._load(manifest)
        return {"load": load_s, "digest": self.verify(manifest["version"], manifest["digest"])}

    def _holds(self, version: int, digest: str) -> bool:
        """Whether this engine generates under that policy."""
        mine = self._committed
        return mine is not None and self._refusal is None and (mine["version"], mine["digest"]) == (version, digest)

    def _load(self, manifest: Mapping[str, Any]) -> float:
        self.pause()
        self.start(manifest["version"])
        self._check_stated(manifest["tensors"])
        began = time.perf_counter()
        self.receive(received(manifest, self.settings.device))
        return time.perf_counter() - began

    def pause(self) -> None:
        """Refuse to generate until a publication commits."""
        self._refusal = "a publication is under way"

    def start(self, version: int) -> None:
        """Open the publication of `version`; one that was left unfinished is abandoned.

        GuardError when the version is older than the committed one (the same one may come again)."""
        self.pause()
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            self._fail(f"version {version!r} is not a whole number from 1")
        if self._committed and version < self._committed["version"]:
            self._fail(f"version {version} is out of order: version {self._committed['version']} is committed")
        self._publication = _Publication(version, set())

    def receive(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Overwrite the model's parameters, in place, with full native tensors; may be called several times.

        GuardError for a tensor that the model has not, that came before, of another shape or dtype; and when the
        transport itself fails."""
        if self._publication is None:
            self._fail("tensors arrived without a start")
        self._publication.verified = None
        try:
            with self._watched():
                self._model.load_weights(self._expected(tensors))
        except GuardError:
            raise
        except Exception as error:
            raise self._failure(f"the transfer broke off: {type(error).__name__}: {error}") from error

    def _expected(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted, seen = DTYPES[self.settings.precision], self._publication.seen
        for name, tensor in tensors:
            if name not in self.shapes:
                self._fail(f"{name} is no tensor of this model")
            if name in seen:
                self._fail(f"{name} came twice")
            if tuple(tensor.shape) != self.shapes[name]:
                self._fail(f"{name} has shape {list(tensor.shape)}, the model needs {list(self.shapes[name])}")
            if str(tensor.dtype) != f"torch.{wanted}":
                self._fail(f"{name} is {str(tensor.dtype)[6:]}, the engine runs {wanted}")
            self._mark()
            yield name, tensor
            seen.add(name)

    def _check_stated(self, stated: Mapping[str, Any]) -> None:
        """Refuse a manifest that cannot become this model before any byte moves."""
        wanted = STORED[self.settings.precision]
        for name, (dtype, shape) in stated.items():
            if name not in self.shapes:
                self._fail(f"{name} is no tensor of this model")
            if (dtype, tuple(shape)) != (wanted, self.shapes[name]):
                self._fail(f"{name} is stated as {dtype} {list(shape)}, not {wanted} {list(self.shapes[name])}")
        self._check_complete(stated)

    def _check_complete(self, names: Iterable[str]) -> None:
        if missing := sorted(self.shapes.keys() - set(names)):
            self._fail(f"{missing[0]} is missing" + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""))

    def finish(self, version: int, digest: str) -> dict[str, Any]:
        """`verify`, make the commit record durable, `commit`: the end of a publication to an engine on its own.

        Returns the commit record {version, digest, epoch, tensors, time, seconds}. GuardError as `verify`."""
        began = time.perf_counter()
        digest_s = self.verify(version, digest)
        record = commit_record(version, digest, self.settings.epoch, len(self.shapes))
        try:
            self._append_commit(record)
        except Exception as error:
            raise self._failure(f"version {version} could not be committed: {error}") from error
        self.commit(record)
        return {**record, "seconds": {"digest": digest_s, "commit": time.perf_counter() - began - digest_s}}

    def verify(self, version: int, digest: str) -> float:
        """Hold what the model holds against `digest` (hex, DESIGN §5) and reset the caches. The engine goes on refusing
        to generate: what it holds is not committed.

        Returns the seconds that the digest took. GuardError: another version than was started, a missing tensor,
        another digest, or (for a version committed before) another than then."""
        if self._publication is None:
            self._fail(f"finish of version {version} without a start")
        publication = self._publication
        if version != publication.version:
            self._fail(f"finish of version {version}, but version {publication.version} was started")
        self._check_complete(publication.seen)
        began = time.perf_counter()
        try:
            held = checkpoint.policy_digest(self.held_digests())
        except ValueError as error:
            raise self._failure(f"version {version}: {error}") from error
        if held != digest:
            self._fail(f"version {version}: the engine holds a policy with digest {held}, the sender states {digest}")
        again = self._committed is not None and version == self._committed["version"]
        if again and held != self._committed["digest"]:
            self._fail(f"version {version} is committed with digest {self._committed['digest']}, now it has {held}")
        hashed = time.perf_counter()
        try:
            self._model.finish_loading()
            self.reset_caches()
        except Exception as error:
            raise self._failure(f"version {version} could not be committed: {error}") from error
        publication.verified = held
        return hashed - began

    def commit(self, record: Mapping[str, Any]) -> None:
        """Generate from here on under the verified policy, whose commit record {version, digest, epoch, …} is durable.
        Once more is a no-op. GuardError where `record` is not what was verified."""
        version, digest = record["version"], record["digest"]
        if self._holds(version, digest):
            return
        publication = self._publication
        if publication is None or (publication.version, publication.verified) != (version, digest):
            self._fail(f"commit of version {version}, which this engine has not verified")
        self._committed = {key: record[key] for key in ("version", "digest", "epoch")}
        self._publication, self._refusal = None, None

    def refuse(self, reason: str) -> None:
        """Refuse to generate until a complete publication commits: another engine of the run refused this one."""
        self._failure(reason)

    def held_digests(self) -> dict[str, tuple[str, tuple[int, ...], str]]:
        """name -> (dtype, shape, BLAKE3) of the full tensors that the model holds now, on every rank the same."""
        with self._watched():
            mine = checkpoint.tensor_digests(self._held())
            return mine if self.settings.tensor_parallel == 1 else self._model.of_all_ranks(mine)

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._model.held_tensors():
            self._mark()
            yield name, tensor

    def _append_commit(self, record: Mapping[str, Any]) -> None:
        if self.run_dir is not None:
            checkpoint.append_commit(self.run_dir, record)

    def _failure(self, reason: str) -> GuardError:
        self._publication = None
        self._refusal = f"the last publication failed ({reason})"
        return GuardError(f"publication refused: {reason}")

    def _fail(self, reason: str) -> None:
        raise self._failure(reason)

    def reset_caches(self) -> None:
        """Forget every cached key and value. RuntimeError when vLLM still has work in flight."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    # -- completions --

    def generate(self, requests: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Completions of all requests, batched continuously, in the order of the requests.

        A request: `prompt_tokens` list[int], `seed` int, `max_tokens` int, `temperature` float (default: the
        settings'; 0 is greedy). A completion: `response_tokens` (with the end-of-text token that ended it), `log_probs`
        of each, of the distribution that was sampled, `finish_reason` 'stop' or 'length', and `trace` (DESIGN §6).
        GuardError when no policy is committed; ValueError for a request that cannot be served.
        """
        if self._refusal is not None:
            raise GuardError(f"the engine does not generate: {self._refusal}")
        from vllm import SamplingParams

        prompts, parameters = [], []
        for number, request in enumerate(requests):
            tokens, limit = list(request["prompt_tokens"]), request["max_tokens"]
            if not tokens or limit < 1:
                raise ValueError(f"request {number}: needs at least one prompt token and one token to generate")
            if len(tokens) + limit > self.settings.max_model_len:
                raise ValueError(
                    f"request {number}: {len(tokens)} prompt tokens and {limit} to generate are more than "
                    f"the {self.settings.max_model_len} that the engine was made for"
                )
            if not 0 <= min(tokens) <= max(tokens) < self.config.vocab_size:
                raise ValueError(f"request {number}: a prompt token is not in 0..{self.config.vocab_size - 1}")
            prompts.append({"prompt_token_ids": tokens})
            parameters.append(
                SamplingParams(
                    temperature=request.get("temperature", self.settings.temperature),
                    top_p=1.0,
                    top_k=0,
                    seed=request["seed"],
                    max_tokens=limit,
                    logprobs=0,
                    detokenize=False,
                    ignore_eos=True,  # ends on the config's token alone, listed below, and on no other default
                    stop_token_ids=[] if self.config.eos_token_id is None else [self.config.eos_token_id],
                )
            )
        with self._watched():
            outputs = self.llm.generate(prompts, parameters, use_tqdm=False) if prompts else []
        return [self._completion(p, out.outputs[0]) for p, out in zip(parameters, outputs, strict=True)]

    def _completion(self, parameters: Any, output: Any) -> dict[str, Any]:
        tokens = list(output.token_ids)
        if output.finish_reason not in ("stop", "length") or len(output.logprobs) != len(tokens):
            raise RuntimeError(f"vLLM ended a completion with {output.finish_reason!r}")
        return {
            "response_tokens": tokens,
            "log_probs": [step[token].logprob for token, step in zip(tokens, output.logprobs, strict=True)],
            "finish_reason": output.finish_reason,
            "trace": {
                "policy_version": self._committed["version"],
                "digest": self._committed["digest"],
                **self.revisions,
                "epoch": self._committed["epoch"],
                "seed": parameters.seed,
                "loops": self.config.num_loops,
                "temperature": parameters.temperature,
            },
        }

    def close(self) -> None:
        """Shut the engine down and free its memory, so that another can be made in this process."""
        import gc

        from vllm.distributed import cleanup_dist_env_and_memory

        self._model = None
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()
