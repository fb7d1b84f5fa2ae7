"""Pinned host memory, which a GPU reads and writes at the speed of its link, and a policy there that two processes share.

Without pins a copy takes a fraction of the link (1.5 of 55 GB/s on an H200). Pinning costs more than the copy, so what is
pinned is kept. `checkpoint.copy_pinned` copies to and from such memory in one step, other memory goes through a piece of it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import weakref
from dataclasses import dataclass

import torch

import checkpoint


def pin(buffer: torch.Tensor) -> None:
    """Pin host memory where it lies, until `buffer` itself, not a view of it, goes: memory that is freed while it is
    registered would have every later copy from or to its addresses refused. RuntimeError where the driver refuses."""
    cudart, address = torch.cuda.cudart(), buffer.data_ptr()
    try:
        torch.cuda.check_error(cudart.cudaHostRegister(address, buffer.nbytes, 0))
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")  # CUDA reports the refusal once more, to the next kernel
        raise
    weakref.finalize(buffer, cudart.cudaHostUnregister, address).atexit = False


def pinned(size: int) -> torch.Tensor:
    """`size` bytes of pinned host memory, where torch's pinned allocator rounds up to a power of two.

    A fork does not inherit it. Linux copies pinned pages for a child at once, not when they change, and Megatron forks a
    child for each file of a checkpoint: of 29 GiB each, a host of 128 has no room for two."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    pin(buffer)
    return buffer


# --- a policy that two processes of one host share -------------------------------------------------------------------


@dataclass
class PolicyFile:
    """A safetensors file in memory. `path`: where any process of this user on this host opens it, as long as the process
    that made it lives. `tensors`: name → the tensor as it lies there; writing to it writes to the file. `pinned`: in this
    process, for its GPU."""

    path: str
    tensors: dict[str, torch.Tensor]
    pinned: bool


def make_policy_file(like: dict[str, torch.Tensor], gpu: bool) -> PolicyFile:
    """A file with room for tensors of these names, types and shapes (on any device, meta too), pinned if `gpu`.

    It has no name in any folder (memfd_create(2)): no limit of /dev/shm holds for it, and it is gone with the last process
    that holds it, however that ended. Its pages are made once, here: to fill new ones took most of a publication's time.
    OSError where there is no room for it."""
    header, size = {}, 0
    for name, tensor in like.items():
        dtype = checkpoint.stored_dtype(tensor.dtype)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [size, size + tensor.nbytes]}
        size += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    fd = os.memfd_create("nanbeige-policy")
    try:  # without room this fails; a page touched later would end the process
        os.posix_fallocate(fd, 0, 8 + len(text) + size)
    except OSError as error:
        os.close(fd)
        hint = f"no room in memory for a policy of {size / 1e9:.3g} GB; --publication-transport disk needs none"
        raise OSError(error.errno, f"{error.strerror} ({hint})") from None
    os.pwrite(fd, len(text).to_bytes(8, "little") + text, 0)
    return open_policy_file(f"/proc/{os.getpid()}/fd/{fd}", gpu)


def open_policy_file(path: str, gpu: bool) -> PolicyFile:
    """The file at `path`, pinned if `gpu` so that copies to a GPU go straight from where it lies.

    Mapping and pins are kept, so only the first look at a file pays for them. They belong to the file, which may be written
    again; what is in it is read anew."""
    whole = _mapping(*_identity(path), path, gpu)
    start = 8 + int.from_bytes(whole[:8].numpy().tobytes(), "little")
    tensors = {}
    for name, entry in json.loads(whole[8:start].numpy().tobytes()).items():
        if name != "__metadata__":
            data = whole[start:][slice(*entry["data_offsets"])]
            tensors[name] = data.view(checkpoint.dtype_of(entry["dtype"])).view(entry["shape"])
    return PolicyFile(path, tensors, whole.is_pinned())


def _identity(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size


@functools.cache
def _mapping(device: int, inode: int, size: int, path: str, gpu: bool) -> torch.Tensor:
    whole = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    if gpu:
        with contextlib.suppress(RuntimeError):  # unpinned it serves as well, at a copy's slower speed
            pin(whole)
    return whole
