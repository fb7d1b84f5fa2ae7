"""Grading in a bounded process: Math-Verify on the last \\boxed{}, or a reward function of the user's own.

What a model writes is hostile text. 5^(5^(5^(5^5))) keeps sympy busy for good, holding the interpreter so that no
Python signal handler and no thread gets a turn; Math-Verify's own time-out is such a handler. So answers are judged in
a worker process: this very file, started with the running interpreter, which imports neither torch nor this project.
The parent waits for each verdict until the time limit, then kills exactly that process and starts another; the answer
scores 0, is counted, and costs its own time only. Messages are JSON with a length before them: text of any kind,
lone surrogates and control characters included, goes through, and nothing is ever unpickled or evaluated.

The limits a worker lives under:

* time: `time_limit_s` of wall clock per answer, kept by the parent (SIGKILL to the worker's own process group);
* memory: address space beyond what the worker holds once its imports are done (RLIMIT_AS, kept by the kernel);
* the parent's life: an idle worker ends when its pipe closes; a busy one whose parent is gone is ended by an alarm and
  by RLIMIT_CPU shortly after the time limit, both with the kernel's default action. (PR_SET_PDEATHSIG would be sent
  when the *thread* that started the worker ends, which is wrong in a pool.)
"""

import dataclasses
import importlib
import importlib.machinery
import importlib.util
import json
import math
import numbers
import os
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

LIMITS = ("time", "memory", "crash", "length")  # what `Grade.limit` can say
MAX_ANSWER_CHARS = 2000  # of a \boxed{} content; the longest answer in MATH and DeepMath is below 600
START_LIMIT_S = 60.0  # for the worker's imports; Math-Verify takes 0.5 s from a warm disk cache
REPLY_LIMIT_BYTES = 1 << 16
_LENGTH = struct.Struct(">Q")


@dataclasses.dataclass(frozen=True)
class Grade:
    """Reward of one completion; `limit` is None or the entry of LIMITS that cut it short (the reward is then 0)."""

    reward: float
    limit: str | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Answers, as text. Runs in the parent, in time linear in the text.
# ---------------------------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")


def last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{…} in `text`, braces balanced (\\{ and \\} do not count); None without one.

    A last \\boxed{ that never closes, as in a truncated completion, is no answer: earlier ones are not taken instead.
    """
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    opening = re.compile(r"\\boxed\s*\{").match(text, start)
    if not opening:
        return None
    depth = 1
    for token in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening.end()):
        if token[0] in "{}":
            depth += 1 if token[0] == "{" else -1
            if depth == 0:
                return text[opening.end() : token.start()]
    return None


def _normalised(answer: str) -> str:
    """Without surrounding white space, and without one pair of dollar signs around it."""
    answer = answer.strip()
    if len(answer) > 1 and answer[0] == answer[-1] == "$":
        answer = answer[1:-1].strip()
    return answer


def _verdict_without_sympy(answer: str, label: str) -> float | None:
    """1.0 for equal text, 0.0 or 1.0 for two plain integers, 0.0 for an empty answer; None where mathematics decides.

    This is what lets the completions of an update grade in well under a millisecond each.
    """
    if not answer:
        return 0.0
    if answer == label:
        return 1.0
    ours, theirs = _INTEGER.fullmatch(answer), _INTEGER.fullmatch(label)
    if ours and theirs:
        negative = [m[1] == "-" and m[2] != "0" for m in (ours, theirs)]
        return float(ours[2] == theirs[2] and negative[0] == negative[1])
    return None


# ---------------------------------------------------------------------------------------------------------------------
# A reward function of the user's own
# ---------------------------------------------------------------------------------------------------------------------


def _module_path(module: str, search: list[str]) -> Path:
    """File of an importable module, found without importing it or its parent packages."""
    found = None
    for i, _ in enumerate(parts := module.split(".")):
        found = importlib.machinery.PathFinder.find_spec(".".join(parts[: i + 1]), search)
        if found is None:
            break
        search = list(found.submodule_search_locations or [])
    if found is None or not found.has_location or not found.origin:
        raise ValueError(f"--reward: there is no module {module!r} with a source file on the Python path")
    return Path(found.origin)


def _split_spec(spec: str) -> tuple[str, str]:
    place, colon, function = spec.rpartition(":")
    if not (colon and place and function.isidentifier()):
        raise ValueError(f"--reward {spec!r}: expected 'module:function' or 'file.py:function'")
    return place, function


def _search_path() -> list[str]:
    """Where modules are looked for: this process's path, then the directory the command was started in."""
    return [entry or os.getcwd() for entry in sys.path] + [os.getcwd()]


def _source_path(spec: str) -> Path:
    place, _ = _split_spec(spec)
    if place.endswith(".py") or os.sep in place:
        try:
            path = Path(place).expanduser().resolve()
            found = path.is_file()
        except (RuntimeError, OSError, ValueError):  # no such user, a loop of links, too long a name, a NUL
            found = False
        if not found:
            raise ValueError(f"--reward {_printable(spec)!r}: there is no file")
        return path
    return _module_path(place, _search_path())


def reward_source(spec: str | None) -> tuple[str | None, str | None]:
    """(path, BLAKE3 hex of the content) of the file that defines a custom reward; (None, None) for the default.

    What the file imports in turn is not covered. ValueError: a spec of the wrong form, or no such module or file.
    """
    if spec is None:
        return None, None
    import blake3

    path = _source_path(spec)
    try:
        return str(path), blake3.blake3(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"--reward {spec!r}: cannot read {path}: {error.strerror}") from None


# ---------------------------------------------------------------------------------------------------------------------
# The parent's side
# ---------------------------------------------------------------------------------------------------------------------


class _WorkerDied(Exception):
    pass


class _TimeUp(Exception):
    pass


class _Worker:
    """One worker process and its two pipes. Every wait has a deadline; `kill` leaves no zombie."""

    def __init__(self, hello: dict, show_errors: bool):
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve())],  # -P: this directory shadows no one's modules
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if show_errors else subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the parent's business; the group is the worker's own, and killed whole
            # Sympy's order of operations follows set order: one hash seed, so that a resumed run grades alike.
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        self.write_fd, self.read_fd = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.write_fd, False)
        os.set_blocking(self.read_fd, False)
        try:
            self.ready = self.ask(hello, START_LIMIT_S)
        except BaseException:
            self.kill()
            raise

    def ask(self, message: dict, limit_s: float) -> dict:
        """Sends one message, returns its reply. Raises _TimeUp or _WorkerDied; the worker must then be killed."""
        deadline = time.monotonic() + limit_s
        body = json.dumps(message).encode("ascii")
        self._send(_LENGTH.pack(len(body)) + body, deadline)
        (size,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
        if size > REPLY_LIMIT_BYTES:
            raise _WorkerDied
        try:
            reply = json.loads(self._receive(size, deadline))
        except ValueError:
            raise _WorkerDied from None
        if not isinstance(reply, dict):
            raise _WorkerDied
        return reply

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        poller = select.poll()  # not select(): it fails above descriptor 1023
        poller.register(fd, event)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _TimeUp

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self.write_fd, select.POLLOUT, deadline)
            try:
                view = view[os.write(self.write_fd, view) :]
            except BlockingIOError:
                continue
            except OSError:
                raise _WorkerDied from None

    def _receive(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            self._wait(self.read_fd, select.POLLIN, deadline)
            try:
                part = os.read(self.read_fd, size - len(data))
            except BlockingIOError:
                continue
            if not part:
                raise _WorkerDied
            data += part
        return data

    def kill(self) -> None:
        # Safe although the worker may be dead: until it is waited for, its id belongs to no other process.
        if self.process.returncode is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self.process.kill()
            self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Grader:
    """Grades completions in one bounded worker process; a context manager.

    spec: None for Math-Verify, else 'module:function' or 'file.py:function', called as
        function(prompt: str, response: str, label: str) -> float. Modules are found on the Python path and in the
        current directory.
    time_limit_s: seconds of wall clock for one answer.
    memory_limit_mb: MiB of address space one answer may need beyond what the worker holds after its imports.

    The default compares the content of the response's last \\boxed{} with the label (the plain answer, or a text whose
    last \\boxed{} holds it): 1.0 where Math-Verify calls them equal, else 0.0. Without a box, or with an empty one, the
    reward is 0. Equal text gives 1.0, and two plain integers are compared, without asking Math-Verify. A box of more
    than MAX_ANSWER_CHARS characters scores 0 (limit "length").

    ValueError: at construction for a spec that cannot be loaded; from `grade` for a custom function that raises or
    returns no finite number. `limits` counts the answers each limit cut short. The default's worker starts at the
    first answer that needs it, a custom reward's at construction. Not for several threads at once.
    """

    def __init__(self, spec: str | None = None, time_limit_s: float = 3.0, memory_limit_mb: int = 1024):
        if not (math.isfinite(time_limit_s) and time_limit_s > 0):
            raise ValueError(f"the grader's time limit must be a positive number of seconds, got {time_limit_s}")
        if memory_limit_mb < 1:
            raise ValueError(f"the grader's memory limit must be at least 1 MiB, got {memory_limit_mb}")
        self.spec, self.time_limit_s = spec, float(time_limit_s)
        self.limits: Counter[str] = Counter()
        self._worker: _Worker | None = None
        self._closed = False
        self._hello = {"time_limit_s": self.time_limit_s, "memory_limit_mb": int(memory_limit_mb), "spec": None}
        if spec is not None:
            path, place = _source_path(spec), _split_spec(spec)[0]
            is_file = place.endswith(".py") or os.sep in place
            self._hello |= {
                "spec": spec,
                "file": str(path) if is_file else None,
                "module": None if is_file else place,
                "function": _split_spec(spec)[1],
                "path": _search_path(),
            }
            self._started()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_worker", None) is not None:
            self.close()

    def close(self) -> None:
        """Ends the worker. The grader cannot be used again."""
        self._closed = True
        self._discard()

    def grade(self, samples: list[tuple[str, str, str]]) -> list[Grade]:
        """Grades of (prompt, response, label) triples, in order. A batch repeats an (answer, label) pair often: the
        default judges each pair once. See the class for errors."""
        if self._closed:
            raise RuntimeError("this grader was closed")
        if self.spec is not None:
            return [self._custom(i, *sample) for i, sample in enumerate(samples)]
        judged: dict[tuple[str, str], Grade] = {}
        return [self._boxed(response, label, judged) for _, response, label in samples]

    def _boxed(self, response: str, label: str, judged: dict[tuple[str, str], Grade]) -> Grade:
        answer = last_boxed(response)
        if answer is None:
            return Grade(0.0)
        label_box = last_boxed(label)
        answer, label = _normalised(answer), _normalised(label if label_box is None else label_box)
        verdict = _verdict_without_sympy(answer, label)
        if verdict is not None:
            return Grade(verdict)
        if len(answer) > MAX_ANSWER_CHARS:
            return self._limited("length")
        if (answer, label) not in judged:
            grade, _ = self._ask({"answer": answer, "label": label})
            judged[answer, label] = grade
        elif judged[answer, label].limit:
            self.limits[judged[answer, label].limit] += 1
        return judged[answer, label]

    def _custom(self, index: int, prompt: str, response: str, label: str) -> Grade:
        grade, problem = self._ask({"prompt": prompt, "response": response, "label": label})
        if problem:
            raise ValueError(f"--reward {self.spec!r}, sample {index}: {problem}")
        return grade

    def _limited(self, limit: str) -> Grade:
        self.limits[limit] += 1
        return Grade(0.0, limit)

    def _ask(self, message: dict) -> tuple[Grade, str | None]:
        try:
            try:
                reply = self._started().ask(message, self.time_limit_s)
            except _WorkerDied:
                # It may have died while idle (the kernel short of memory, say): the answer gets one fresh worker.
                self._discard()
                reply = self._started().ask(message, self.time_limit_s)
        except _TimeUp:
            self._discard()
            return self._limited("time"), None
        except _WorkerDied:
            self._discard()
            return self._limited("crash"), None
        except BaseException:
            self._discard()  # a reply may be under way: never let it answer the next question
            raise
        if reply.get("limit") == "memory":
            self._discard()
            return self._limited("memory"), None
        if reply.get("retire"):
            self._discard()
        if "problem" in reply:
            return Grade(0.0), str(reply["problem"])
        return Grade(float(reply["reward"])), None

    def _started(self) -> _Worker:
        if self._worker is None:
            try:
                worker = _Worker(self._hello, show_errors=self.spec is not None)
            except _TimeUp:
                raise ValueError(f"{self._name()} was not loaded within {START_LIMIT_S:.0f} s") from None
            except _WorkerDied:
                raise ValueError(f"{self._name()}: the worker process died while loading it") from None
            self._worker = worker
            if "problem" in worker.ready:
                self._discard()
                raise ValueError(f"{self._name()}: {worker.ready['problem']}")
        return self._worker

    def _name(self) -> str:
        return "Math-Verify" if self.spec is None else f"--reward {self.spec!r}"

    def _discard(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


# ---------------------------------------------------------------------------------------------------------------------
# The worker's side: `python reward.py`, spoken to over its standard input and output
# ---------------------------------------------------------------------------------------------------------------------


class _OutOfMemory(BaseException):
    """A MemoryError on its way past Math-Verify, which swallows every Exception and calls the answer wrong."""


def _read_message(fd: int, parent: int) -> dict:
    def exactly(size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            # The pipe may be held open by a fork of the parent: look for the parent itself as well.
            while not select.select([fd], [], [], 5.0)[0]:
                if os.getppid() != parent:
                    os._exit(0)
            part = os.read(fd, min(size - len(data), 1 << 20))
            if not part:
                os._exit(0)
            data += part
        return bytes(data)

    (size,) = _LENGTH.unpack(exactly(_LENGTH.size))
    return json.loads(exactly(size))


def _write_message(fd: int, message: dict) -> None:
    body = json.dumps(message, allow_nan=False).encode("ascii")
    data = memoryview(_LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _printable(text)


def _printable(text: str, limit: int = 300) -> str:
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "…"


def _math_verify():
    """→ judge(message) -> reply, on Math-Verify with its time-outs off: they rely on a signal handler of Python's,
    which sympy's big integers never let run. The parent's kill is what bounds it."""
    import logging

    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify
    from math_verify import parser as internals

    # Math-Verify 0.9 parses under `except Exception: pass`, so that running out of memory looks like a wrong answer.
    def telling(function):
        def call(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except MemoryError:
                raise _OutOfMemory from None

        return call

    for name in ("parse_latex_cached", "parse_expr_cached"):
        setattr(internals, name, telling(getattr(internals, name)))

    def judge(message: dict) -> dict:
        try:
            gold, answer = (
                parse("\\boxed{" + message[key] + "}", parsing_timeout=None, raise_on_error=True)
                for key in ("label", "answer")
            )
            return {"reward": float(verify(gold, answer, timeout_seconds=None, raise_on_error=True))}
        except MemoryError:
            raise
        except Exception:  # whatever sympy or the grammar stumble over, the answer was not seen to be right
            return {"reward": 0.0}

    judge({"label": "1/2", "answer": "0.5"})  # builds the regular expressions and the grammar
    return judge


def _custom_function(hello: dict):
    """→ judge(message) -> reply, on the user's function. Raises ValueError where it cannot be loaded."""
    sys.path[:] = list(dict.fromkeys(hello["path"]))
    try:
        if hello["file"]:
            sys.path.insert(0, str(Path(hello["file"]).parent))
            spec = importlib.util.spec_from_file_location("custom_reward", hello["file"])
            module = importlib.util.module_from_spec(spec)
            sys.modules["custom_reward"] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(hello["module"])
    except BaseException as error:
        raise ValueError(f"importing it failed: {_one_line(error)}") from None
    function = getattr(module, hello["function"], None)
    if not callable(function):
        raise ValueError(f"{hello['file'] or hello['module']} has no function {hello['function']!r}")

    def judge(message: dict) -> dict:
        try:
            value = function(message["prompt"], message["response"], message["label"])
        except MemoryError:
            raise
        except BaseException as error:  # SystemExit too
            return {"problem": f"{hello['function']} raised {_one_line(error)}"}
        try:
            number = float(value) if isinstance(value, numbers.Real) else math.nan
        except (OverflowError, ValueError, TypeError):
            number = math.nan
        if not math.isfinite(number):
            shown = _printable(repr(value), 80)
            return {"problem": f"{hello['function']} returned {shown} ({type(value).__name__}), not a finite number"}
        return {"reward": number}

    return judge


def _address_space() -> int:
    """Bytes of address space this process holds; 0 where the system does not tell (then memory is not bounded)."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _bound(limit: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _arm(time_limit_s: float) -> None:
    """Should the parent be gone, the kernel ends this worker soon after the limit, whatever holds the interpreter."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, time_limit_s + 2)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = math.ceil(used.ru_utime + used.ru_stime + (time_limit_s + 2) * (os.cpu_count() or 1))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu if hard == resource.RLIM_INFINITY else min(cpu, hard), hard))


def _serve() -> None:
    parent = os.getppid()
    # The two pipes move away from descriptors 0 and 1, so that a print in a reward function cannot speak for us.
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hello = _read_message(requests, parent)
    try:
        judge = _math_verify() if hello["spec"] is None else _custom_function(hello)
    except Exception as error:
        _write_message(replies, {"problem": str(error) if isinstance(error, ValueError) else _one_line(error)})
        return
    allowance, held = hello["memory_limit_mb"] << 20, _address_space()
    if held:
        _bound(held + allowance)
    _write_message(replies, {"ready": True})
    while True:
        message = _read_message(requests, parent)
        _arm(hello["time_limit_s"])
        try:
            reply = judge(message)
        except (MemoryError, _OutOfMemory):
            reply = {"limit": "memory"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        del message
        # What earlier answers left behind (sympy's caches) must not be charged to a later one.
        _write_message(replies, reply | {"retire": _address_space() - held > allowance // 2})


if __name__ == "__main__":
    if os.isatty(0):
        sys.exit("reward.py is the grader's worker process; it is started by Grader, not by hand")
    _serve()
