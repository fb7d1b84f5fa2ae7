"""Ray: started on loopback or joined, watched while the run goes on, and gone when it ends.

A Ray of the run's own listens on 127.0.0.1 alone, answers only to who holds its token, and keeps its files in a folder that no
one else can enter. Only what the run started is stopped. Whatever dies, the run ends within a minute, with one line.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import checkpoint


@contextlib.contextmanager
def started_ray(address: str | None, run: Path, processes: int, complain: Callable[[Exception | str, int], int]):
    """Ray, started for a run of `processes` actors, or joined at `address`. Yields what registers a call for its end; stops
    what it started. `complain(error, code)` shows an error as the run's last line and returns the exit code."""
    import ray

    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    closing, done, lost, failed, folder = threading.Event(), threading.Event(), [], [], None

    def at_end(call, *args):
        stack.callback(lambda: None if lost else call(*args))

    def leave():
        if not lost:
            ray.shutdown()
        elif folder:  # it would wait for the head
            for pid in children(os.getpid(), folder):
                os.kill(pid, signal.SIGKILL)

    with contextlib.ExitStack() as stack:
        stack.callback(done.set)
        terminate = signal.getsignal(signal.SIGTERM)
        leave_signals_alone()
        if address:
            check_address(address)
            stack.callback(leave)
            ray.init(address=address, **quiet)
        else:
            folder = stack.enter_context(ray_folder(run))
            stack.callback(leave)
            cpus = max(processes, os.cpu_count())  # they take turns on the cores that there are
            ray.init(
                "local", num_cpus=cpus, _node_ip_address="127.0.0.1", include_dashboard=False, _temp_dir=folder, **quiet
            )
            end_with_this_process([pid for raylet in children(os.getpid(), folder) for pid in children(raylet, "")])
        signal.signal(signal.SIGTERM, terminate)  # Ray's core, in C++, has put one in place that prints its stack
        here = next(n for n in ray.nodes() if n["NodeID"] == ray.get_runtime_context().get_node_id())
        if not address and here["NodeManagerAddress"] != "127.0.0.1":
            raise RuntimeError(f"Ray was to listen on 127.0.0.1 alone, and took {here['NodeManagerAddress']}")
        stack.callback(closing.set)
        watch_ray({
            "Ray's head (GCS)": parse_address(ray.get_runtime_context().gcs_address),
            "Ray's node process (raylet)": (here["NodeManagerAddress"], here["NodeManagerPort"]),
        }, lost, failed, closing, done, complain)  # fmt: skip
        try:
            yield at_end
        except Exception as error:
            if lost:  # whatever it became on its way: raised inside an extension it arrives as a SystemError
                raise ray_died(lost) from None
            failed.append(error)
            raise


def leave_signals_alone() -> None:
    """Keep Ray from what it does with signals: Ctrl-C in a terminal, `timeout` and SLURM signal a whole process group, and the
    run then finishes its update and saves. So Ray's processes start in groups of their own (the kernel ends them with this
    process all the same), and its handler, which ends the process at once, is not put in place. Ray has no settings for either
    (2.56 to 2.60)."""
    from ray._private import services, utils

    start = services.ConsolePopen
    services.ConsolePopen = lambda *args, **options: start(*args, process_group=0, **options)
    utils.set_sigterm_handler = lambda handler: None


def children(parent: int, argument: str) -> list[int]:
    """Processes that `parent` started, with `argument` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            started_by = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if started_by == parent and argument.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def end_with_this_process(pids: list[int]) -> None:
    """Have processes killed when this one is gone, in whatever way: a helper waits for the end of its standard input.

    For Ray's two agents, which the raylet starts. The kernel ends the other processes of Ray with the driver, and the agents
    then try for 60 s to tell Ray's head, which is gone too, that the raylet died (Ray 2.60). The helper holds them by file
    descriptor: should one have ended before, no other process that got its number is hit.
    """
    with contextlib.suppress(AttributeError, OSError):  # no pidfd on this system: the agents end in their own time
        held = [os.pidfd_open(pid) for pid in pids]
        code = (
            "import contextlib, signal, sys\nsys.stdin.read()\nfor fd in map(int, sys.argv[1:]):\n"
            "    with contextlib.suppress(OSError):\n        signal.pidfd_send_signal(fd, signal.SIGKILL)\n"
        )
        command = [sys.executable, "-S", "-E", "-c", code, *map(str, held)]
        helper = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=held, start_new_session=True)
        _helpers.append(helper)  # its pipe stays open as long as this process lives
        for fd in held:
            os.close(fd)


_helpers: list = []


def ray_environment(address: str | None) -> None:
    """Set, in this process and for those that Ray starts, what Ray reads from the environment, when it is imported."""
    defaults = {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # keeps Ray from hiding GPUs with a warning
        "RAY_worker_niceness": "0",  # Ray's own is 15, which starves a run beside any other work
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if not address:
        defaults |= {
            "RAY_AUTH_MODE": "token",  # any user of the machine reaches loopback: without a token they could run code as us
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_task_events_max_num_task_in_gcs": "1000",  # records of calls that its head keeps; 100,000 by default
            "RAY_ROTATION_MAX_BYTES": str(16 << 20),
            "RAY_ROTATION_BACKUP_COUNT": "1",
            # Rendezvous of torch, NCCL and vLLM: by default they take the interface that the host's name stands for.
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "NCCL_SOCKET_IFNAME": "lo",
            "VLLM_HOST_IP": "127.0.0.1",
        }
    if not address or on_loopback_alone(address):
        # Ray 2.60 turns 127.0.0.1 into the machine's own address, and then listens on every interface, or waits for minutes
        # for a cluster that listens on loopback, unless clusters are off. Off is the default on macOS, hence the name.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def ray_folder(run: Path):
    """A folder for Ray's sockets and logs that only this user can enter, removed at the end. What killed runs of this user left
    there is removed too. When a process died, Ray's logs are kept in RUN/logs/ray."""

    def locked(path: Path) -> int | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by the run until it dies
            if path.exists() and os.fstat(fd).st_uid == os.getuid():
                return fd
        os.close(fd)
        return None

    root = Path(os.environ.get("RAY_TMPDIR") or "/tmp")  # short: a socket's path has at most 107 bytes
    for old in root.glob(f"{RAY_FOLDER}*"):
        if fd := locked(old):
            shutil.rmtree(old, ignore_errors=True)
            os.close(fd)
    while not (fd := locked(mine := Path(tempfile.mkdtemp(prefix=RAY_FOLDER, dir=root)))):
        pass  # another run that started now took it for a dead one's
    try:
        yield str(mine / "r")
    except Exception as error:
        if run.is_dir() and (isinstance(error, ConnectionError) or type(error).__name__ == "ActorDiedError"):
            for logs in mine.glob("r/session_2*/logs"):
                with contextlib.suppress(OSError):  # the error that is on its way says more
                    shutil.copytree(logs, run / "logs" / "ray", ignore=_SECRETS, dirs_exist_ok=True)
        raise
    finally:
        shutil.rmtree(mine, ignore_errors=True)
        os.close(fd)


RAY_FOLDER = "nanbeige-ray-"
_SECRETS = shutil.ignore_patterns("runtime_env*")  # hold the values of --train-env-vars


def ray_died(lost: list) -> ConnectionError:
    return ConnectionError(f"{lost[0]}; --resume goes on with the run")


def watch_ray(addresses: dict, lost: list, failed: list, closing: threading.Event, done: threading.Event, complain) -> None:
    """End the run with one line when one of Ray's own processes, {name: (host, port)}, has been gone for ten seconds.

    Without its head, calls to actors go on, but the death of an actor is not reported any more: `ray.get` would wait for it
    until Ray ends this process after 60 s, with a text of its own. So a thread looks whether they answer, until `closing`.
    What it finds goes to `lost`, and is raised in the main thread. Where that has not led to `done` in 25 s, the process is
    ended; and so it is afterwards, since Ray's exit handler waits for the head, too. Where the run ends for another reason,
    which may have stood in `failed` by then, Ray has 30 s to shut down.
    """

    def interrupt(*_):
        if lost:
            raise ray_died(lost)

    def answers(address: tuple[str, int]) -> bool:
        try:
            socket.create_connection(address, timeout=5).close()
            return True
        except OSError:
            return False

    def watch():
        missed = dict.fromkeys(addresses, 0)
        while not lost:
            if closing.wait(2):
                if not done.wait(30):
                    said = failed[0] if failed else ConnectionError("Ray did not shut down within 30 s")
                    os._exit(complain(process_fault(said) or said, 1))
                return
            for name, address in addresses.items():
                missed[name] = 0 if answers(address) else missed[name] + 1
                if missed[name] == 5:
                    lost.append(f"{name} at {address[0]}:{address[1]} died: it no longer answers")
        sys.stdout.flush()
        sys.stdout = open(os.devnull, "w")  # Ray would print the raylet's log there; the error goes to stderr
        os.kill(os.getpid(), signal.SIGUSR1)
        if done.wait(25):
            time.sleep(3)  # the main thread says what it was
        else:
            complain(ray_died(lost), 1)
        os._exit(1)

    signal.signal(signal.SIGUSR1, interrupt)
    threading.Thread(target=watch, name="watch-ray", daemon=True).start()


def on_loopback_alone(address: str) -> bool:
    """Whether the cluster at host:port can be reached at 127.0.0.1, and not at this machine's address in its network."""
    host, port = parse_address(address) or ("", 0)
    if host not in ("127.0.0.1", "localhost"):
        return False
    with contextlib.suppress(OSError, OverflowError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel chooses the interface
        socket.create_connection((probe.getsockname()[0], port), timeout=5).close()
        return False
    return True


def parse_address(address: str) -> tuple[str, int] | None:
    """(host, port) of "host:port", without the brackets of an IPv6 address; None for any other form (auto, ray://…)."""
    host, colon, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if colon and port.isdecimal() and "/" not in host else None


def check_resources(bundles: list[dict], device: str, parts: str) -> None:
    """ValueError where a cluster cannot hold these bundles even when idle: what is needed, and what there is."""
    import ray

    has, nodes = ray.cluster_resources(), [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kinds = ("GPU", "CPU") if device == "cuda" else ("CPU",)
    wanted, there = {k: sum(b[k] for b in bundles) for k in kinds}, {k: has.get(k, 0) for k in kinds}
    if any(wanted[k] > there[k] for k in kinds):
        needs, found = (", ".join(f"{n:g} {k}" for k, n in listed.items()) for listed in (wanted, there))
        hint = "; --colocate shares one GPU" if wanted.get("GPU") == 2 and there["GPU"] == 1 else ""
        hint = "; --device cpu runs without a GPU" if device == "cuda" and not there["GPU"] else hint
        raise ValueError(f"placement needs {needs} ({parts}); the cluster has {found}{hint}")
    for kind in kinds:
        largest, by_node = max(b[kind] for b in bundles), sorted((node.get(kind, 0) for node in nodes), reverse=True)
        if largest > by_node[0]:
            raise ValueError(
                f"placement needs a node with {largest:g} {kind}; the cluster's nodes have {', '.join(f'{n:g}' for n in by_node)}"
            )


PLACE_S = 6.0  # how long a cluster may take to find room: with leaving Ray, the run then ends within ten seconds


class NoPlace(ValueError):
    """The cluster has no room for what the run asks of it, or no longer."""


def reserve(wanted: list[tuple[list[dict], str]], at_end: Callable) -> tuple[list, Callable[[], bool]]:
    """Reserve placement groups, [(bundles, strategy)], until the run's end. Returns them, and a check whether all have their
    place, for whoever waits for their actors to start. Both raise NoPlace when one has had none for PLACE_S.

    Ray creates an actor whose group lost its place, as with its node, once there is room again, and says nothing meanwhile.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    groups, since = [], None
    for bundles, strategy in wanted:
        groups.append(placement_group(bundles, strategy=strategy))
        at_end(remove_placement_group, groups[-1])  # ends the run's actors, also where the cluster is somebody else's

    def check() -> bool:
        nonlocal since
        lacking = [n for n, group in enumerate(groups) if placement_group_table(group).get("state") != "CREATED"]
        since = (since or time.monotonic()) if lacking else None
        if lacking and time.monotonic() - since > PLACE_S:
            bundles, _ = wanted[lacking[0]]
            has, free = ray.cluster_resources(), ray.available_resources()
            there = ", ".join(f"{has.get(k, 0):g} {k} ({free.get(k, 0):g} free)" for k in bundles[0])
            raise NoPlace(f"placement needs {bundles}; the cluster has {there}")
        return not lacking

    while not check():
        time.sleep(0.1)
    return groups, check


def answers(refs: list, check: Callable[[], bool]) -> list:
    """What `refs` become. Raises what one of them raises, or what `check`, asked every second, raises, whatever the others do."""
    import ray

    waiting = refs
    while waiting:
        done, waiting = ray.wait(waiting, timeout=1)
        ray.get(done)
        if not done:
            check()
    return ray.get(refs)


def each(actors: list, method: str, *args, patience: float | None = None, check: Callable[[], bool] | None = None):
    """Call a method of every actor at once and wait for all, `patience` seconds at most. Returns what the first one answers;
    raises what one of them raises at once, whether or not the others have answered. check: as `answers` has it."""
    import ray

    if len(actors) > 1:
        args = [ray.put(arg) for arg in args]  # pickled once, and one copy a node, not one an actor
    refs = [getattr(actor, method).remote(*args) for actor in actors]
    return (answers(refs, check) if check else ray.get(refs, timeout=patience))[0]


def check_address(address: str) -> None:
    """ValueError where no one listens at host:port: Ray would try for minutes. Other forms (auto, ray://…) are Ray's matter."""
    if where := parse_address(address):
        try:
            socket.create_connection(where, timeout=5).close()
        except (OSError, OverflowError, UnicodeError) as error:
            raise ValueError(f"--ray-address {address}: no one answers there ({error})") from None


def constructed(error) -> BaseException:
    """What a constructor of trainer or engine raised, of which Ray keeps only the traceback; else `error` itself.

    Ray 2.60 ends the text of such an ActorDiedError with the exception's own lines: `ValueError: …`.
    """
    last = str(error).strip().splitlines()[-1]
    kind, _, text = last.partition(": ")
    known = {"ValueError": ValueError, "checkpoint.GuardError": checkpoint.GuardError}
    return known[kind](text) if getattr(error, "actor_init_failed", False) and kind in known else error


def process_fault(error: Exception) -> str | None:
    """One line for a process of the run that died or ran out of memory, instead of Ray's page; None for any other error."""
    kind, text = type(error).__name__, str(error)
    if kind == "OutOfMemoryError" and type(error).__module__.startswith("ray."):
        used = text.partition("OOM kill reason")[0].strip()
        return f"a process of the run was ended by Ray's memory monitor: {used}; --resume goes on with the run"
    if isinstance(error, MemoryError) or "OutOfMemoryError" in kind:
        where = re.search(r"ray::(\w+)\.(\w+)\(", text)
        who = f"{PROCESSES.get(where[1], where[1])} ({where[2]})" if where else "driver"
        said = str(getattr(error, "cause", error)) or "MemoryError"
        return f"the {who} ran out of memory: {said}; --resume goes on with the run"
    if kind in ("ActorDiedError", "ActorUnavailableError") and (where := re.search(r"class_name: (\w+)", text)):
        who, pid = PROCESSES.get(where[1], where[1]), re.search(r"pid: (\d+)", text)
        why = "killed from outside, or it crashed; the kernel kills where memory is short"
        if "low on memory" in text or "memory monitor" in text:
            why = "Ray ended it because the machine was running out of memory"
        number = f" (process {pid[1]})" if pid else ""
        return f"the {who} died{number}: {why}; RUN/logs may say more; --resume goes on with the run"
    return None


PROCESSES = {"Trainer": "trainer", "RolloutEngine": "engine"}  # class of the actor → what messages and logs call it
