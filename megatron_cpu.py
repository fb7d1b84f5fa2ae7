"""Megatron-core without CUDA: the one place that makes it run on a machine that has no GPU.

Why. megatron-core 0.16.1 takes a GPU for granted in places that have nothing to do with a GPU: its DDP allocates
buffers on `torch.cuda.current_device()`, its optimizer and `dist_checkpointing` make scalars with `device="cuda"`, and
the checkpoint writer calls `torch.cuda.synchronize()`. Without CUDA each of these raises. Inside `enable()`

- `torch.cuda.current_device()` answers "cpu", which every `device=` argument accepts,
- `torch.cuda.synchronize()` does nothing, as there is nothing to wait for,
- `device="cuda"` means "cpu", `tensor.cuda()` returns the tensor, and `tensor.type()` says "torch.cuda.FloatTensor" and
  the like, which the optimizer asks for before it takes half-precision parameters or clips (a `TorchFunctionMode`).

Megatron's CUDA random-number tracker is not imitated: it serves dropout and weight initialisation, and this model has
neither (weights come from a checkpoint).

Where CUDA is available `enable()` changes nothing.

    with megatron_cpu.enable():
        model = DistributedDataParallel(...)      # also: get_megatron_optimizer, optimizer.step, dist_checkpointing

The forward and backward pass need none of it, but with sequence parallelism `for_good()`. Keep them outside: the mode
costs a Python call per torch operation.
"""

import contextlib
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_saved: list = []
_inside: list = []


@contextlib.contextmanager
def enable() -> Iterator[None]:
    """Make Megatron's CUDA calls answer for the CPU while the context lasts. Nests. No effect where there is CUDA."""
    import torch

    if torch.cuda.is_available():
        yield
        return
    # The functions are the process's, the mode is the thread's: a checkpoint writer and an optimizer step may be inside
    # at once, so the last one out restores.
    _replace_functions()
    try:
        with _cuda_means_cpu():
            yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                torch.cuda.current_device, torch.cuda.synchronize = _saved
                _saved.clear()


def for_good() -> None:
    """The functions without the mode, until the process ends: sequence parallelism asks for the current device in every
    forward and backward pass (its gather buffers), and a mode would cost a Python call per torch operation there."""
    import torch

    if not torch.cuda.is_available():
        _replace_functions()


def _replace_functions() -> None:
    import torch

    with _lock:
        if not _saved:
            _saved[:] = [torch.cuda.current_device, torch.cuda.synchronize]
            torch.cuda.current_device = lambda: "cpu"
            torch.cuda.synchronize = lambda device=None: None
        _inside.append(None)


def _cuda_means_cpu():
    import torch
    from torch.overrides import TorchFunctionMode

    def is_cuda(device):
        return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"

    class CudaMeansCpu(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                return func(args[0]).replace("torch.", "torch.cuda.")
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if func is torch.Tensor.to:
                args = tuple("cpu" if is_cuda(a) else a for a in args)
            return func(*args, **kwargs)

    return CudaMeansCpu()
