"""Kill points for the crash tests, in place only where a test puts this folder on PYTHONPATH (Ray's workers inherit it).

KILL_AT="module:name:when:nth" sends SIGKILL to the run's driver and then to this process at the nth call of
`module.name` (a function, or Class.method): `before` it, `after` it, or `during` it (0.05 s after it began).
The product has no code for this.
"""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import threading
import time


def _kill() -> None:
    for pid in (int(os.environ["KILL_DRIVER"]) if "KILL_DRIVER" in os.environ else os.getpid(), os.getpid()):
        os.kill(pid, signal.SIGKILL)


def _patch(module, name: str, when: str, nth: int) -> None:
    owner = module
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    inner, calls = getattr(owner, last), [0]

    def wrapped(*args, **kwargs):
        calls[0] += 1
        hit = calls[0] == nth
        if hit and when == "before":
            _kill()
        if hit and when == "during":
            threading.Thread(target=lambda: (time.sleep(0.05), _kill()), daemon=True).start()
        result = inner(*args, **kwargs)
        if hit and when == "after":
            _kill()
        return result

    setattr(owner, last, wrapped)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the named module as usual and patches it once it has run."""

    def __init__(self, module: str, name: str, when: str, nth: int):
        self.module, self.rest = module, (name, when, nth)

    def find_spec(self, fullname, path, target=None):
        if fullname != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        loader = spec.loader
        run = loader.exec_module

        def exec_module(module):
            run(module)
            _patch(module, *self.rest)

        loader.exec_module = exec_module
        return spec


if at := os.environ.get("KILL_AT"):
    _module, _name, _when, _nth = at.split(":")
    sys.meta_path.insert(0, _Finder(_module, _name, _when, int(_nth)))
