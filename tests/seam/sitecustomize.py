"""Faults for the crash tests, in place only where a test puts this folder on PYTHONPATH (Ray's workers inherit it).

SEAM="module:name:when:nth:do ..." acts at the nth call, in one process, of `module.name` (a function, Class.method, or
a generator): `before` it, `after` it, `during` it (0.05 s after it began), or before its nth `item`. What it does:

    kill         SIGKILL to the run's driver (SEAM_DRIVER, see job.py) and then to this process
    die          SIGKILL to this process alone
    interrupt    SIGINT to the driver's process group, as a terminal's Ctrl-C
    terminate    SIGTERM to the driver's process group, as `timeout` and SLURM send it
    stall=S      this process waits there for S seconds
    full=BYTES   from here on no file that this process writes may grow beyond BYTES
    clock=S      from here on this process's wall clock (time.time, time.time_ns) is S seconds away from the true one
    memory       MemoryError

The product has no code for this.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import resource
import signal
import sys
import threading
import time


def _act(what: str) -> None:
    what, _, number = what.partition("=")
    driver = int(os.environ.get("SEAM_DRIVER", os.getpid()))
    if what in ("kill", "die"):
        for pid in (driver, os.getpid()) if what == "kill" else (os.getpid(),):
            os.kill(pid, signal.SIGKILL)
    elif what == "interrupt":
        os.killpg(driver, signal.SIGINT)
    elif what == "terminate":
        os.killpg(driver, signal.SIGTERM)
    elif what == "stall":
        time.sleep(float(number))
    elif what == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(number), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    elif what == "clock":
        _shift(float(number))
    elif what == "memory":
        raise MemoryError
    else:
        raise ValueError(what)


def _shift(seconds: float, true=time.time, true_ns=time.time_ns) -> None:
    time.time = lambda: true() + seconds
    time.time_ns = lambda: true_ns() + int(seconds * 1e9)


def _patch(module, name: str, when: str, nth: int, what: str) -> None:
    owner = module
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    inner, calls = getattr(owner, last), [0]

    def reached() -> bool:
        calls[0] += 1
        return calls[0] == nth

    @functools.wraps(inner)
    def items(*args, **kwargs):
        for item in inner(*args, **kwargs):
            if reached():
                _act(what)
            yield item

    @functools.wraps(inner)  # Ray looks at an actor's signatures
    def call(*args, **kwargs):
        hit = reached()
        if hit and when == "before":
            _act(what)
        if hit and when == "during":
            threading.Thread(target=lambda: (time.sleep(0.05), _act(what)), daemon=True).start()
        result = inner(*args, **kwargs)
        if hit and when == "after":
            _act(what)
        return result

    setattr(owner, last, items if when == "item" else call)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the named modules as usual and patches each once it has run."""

    def __init__(self, points: list[list[str]]):
        self.points = points

    def find_spec(self, fullname, path, target=None):
        here = [point[1:] for point in self.points if point[0] == fullname]
        if not here:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        loader = spec.loader
        run = loader.exec_module

        def exec_module(module):
            run(module)
            for name, when, nth, what in here:
                _patch(module, name, when, int(nth), what)

        loader.exec_module = exec_module
        return spec


if points := os.environ.get("SEAM", "").split():
    sys.meta_path.insert(0, _Finder([point.split(":") for point in points]))
