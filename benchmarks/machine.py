"""What every measurement here notes of where it was made; no names of hosts or paths. Standard library only."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version


def machine() -> dict:
    """{"cores", "cpu", "memory_gib", "python"}; `cores` are those that this process may use."""
    with open("/proc/cpuinfo") as file:
        cpu = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return {"cores": cores, "cpu": cpu, "memory_gib": round(memory, 1), "python": platform.python_version()}


def versions(*packages: str) -> dict:
    """{package: version} of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
