"""Megatron-core without CUDA: the one place that makes it run on a machine that has no GPU.

Why. megatron-core 0.16.1 takes a GPU for granted in places that have nothing to do with a GPU: its DDP buffers are
allocated on `torch.cuda.current_device()`, its optimizer and `dist_checkpointing` make scalars with `device="cuda"`, and
the checkpoint writer calls `torch.cuda.synchronize()`. Without CUDA each of these raises. Inside `enable()`

- `torch.cuda.current_device()` answers "cpu", which every `device=` argument accepts,
- `torch.cuda.synchronize()` does nothing, as there is nothing to wait for,
- `device="cuda"` means "cpu", and `tensor.cuda()` returns the tensor (a `TorchFunctionMode`).

Megatron's CUDA random-number tracker is not imitated: it serves dropout and weight initialisation, and this model has
neither (weights come from a checkpoint). Gradient clipping inside Megatron's optimizer asserts a CUDA tensor type, which
this does not cover: pass `clip_grad=0` and clip outside.

Where CUDA is available `enable()` changes nothing.

    with megatron_cpu.enable():
        model = DistributedDataParallel(...)      # also: get_megatron_optimizer, optimizer.step, dist_checkpointing

The forward and backward pass need none of it. Keep them outside: the mode costs a Python call per torch operation.
"""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def enable() -> Iterator[None]:
    """Make Megatron's CUDA calls answer for the CPU while the context lasts, in this thread. Nests. No effect with CUDA."""
    import torch

    if torch.cuda.is_available():
        yield
        return
    saved = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda device=None: None
    try:
        with _cuda_means_cpu():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = saved


def _cuda_means_cpu():
    import torch
    from torch.overrides import TorchFunctionMode

    class CudaMeansCpu(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if func is torch.Tensor.cuda:
                return args[0]
            device = kwargs.get("device")
            if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
                kwargs["device"] = "cpu"
            if func is torch.Tensor.to:
                args = tuple("cpu" if isinstance(a, (str, torch.device)) and torch.device(a).type == "cuda" else a for a in args)
            return func(*args, **kwargs)

    return CudaMeansCpu()
