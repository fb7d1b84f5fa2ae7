"""Which trainer rank holds what: process groups, the batch divided among ranks, parts put together again.

N processes are N/T data-parallel ranks of T tensor-parallel ones each: rank r is tensor-parallel rank r % T of
data-parallel rank r // T, so the T that talk in every layer are neighbours, on one node where T allows.

- Tensor-parallel ranks hold a share of every matrix and see the same tokens. They compute the same losses.
- Data-parallel ranks hold the same weights and see their own completions. What is of the whole batch (values, advantages,
  the guard's gaps, metrics) they exchange: one number a token, put into its place of a vector of zeros and summed. A sum
  with zeros is exact, so every rank then holds the same bits and decides alike.

A decision that ends the update is taken by all or none (`any`): a rank that raised alone would leave the others waiting.
With one process nothing here communicates.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

import checkpoint

TIMEOUT = datetime.timedelta(hours=1)  # the longest that one rank may work while another waits for it


def divide(sizes: list[int], samples: list[int], ranks: int) -> list[list[int]]:
    """`samples` for each of `ranks`, in rising order, balanced by `sizes[sample]` (tokens).

    Largest first, each to the rank with the least so far, ties to the lower sample and rank: deterministic, and no rank
    has more than 4/3 of the best possible (Graham 1969). With fewer samples than ranks some have none.
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for sample in sorted(samples, key=lambda i: (-sizes[i], i)):
        least = load.index(min(load))
        parts[least].append(sample)
        load[least] += sizes[sample]
    return [sorted(part) for part in parts]


def open_store(host: str, ranks: int) -> tuple[dist.TCPStore, str]:
    """The rendezvous of `ranks` processes, held by this one: (store, "host:port"), on a port that is free.

    `host` is an address of this machine, and the store listens on it alone: on loopback nothing outside can join.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.bind((host, 0))
    listening.listen(1024)
    port = listening.getsockname()[1]
    # The store takes the descriptor over, and closes it.
    store = dist.TCPStore(
        host, port, ranks, is_master=True, timeout=TIMEOUT, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, f"{host}:{port}"


def join_store(address: str, ranks: int) -> dist.TCPStore:
    """The store that rank 0 opened at "host:port"."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), ranks, is_master=False, timeout=TIMEOUT)


class Ranks:
    """This process among the trainer's; Megatron's parallel state must be initialised."""

    def __init__(self):
        from megatron.core import parallel_state

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.tp, self.tp_size = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        self.dp, self.dp_size = self.rank // self.tp_size, self.size // self.tp_size
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.dp_group = parallel_state.get_data_parallel_group()
        self.vocabulary = self.tp_group if self.tp_size > 1 else None  # what `algorithms` takes as `group`

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on some rank; every rank gets the same answer."""
        if self.size == 1:
            return bool(flag)
        seen = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return bool(seen.item())

    def gather(self, value: Any, group: Any = None) -> list[Any]:
        """`value` of every rank of the group (None: of all), on every one of them."""
        if (self.size if group is None else group.size()) == 1:
            return [value]
        values: list[Any] = [None] * (self.size if group is None else group.size())
        dist.all_gather_object(values, value, group=group)
        return values

    def first(self, do: Callable[[], Any]) -> Any:
        """What `do` returns on rank 0, which alone calls it; what it raises there, every rank raises."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = do()
            except Exception as error:
                answer[1] = error
        if self.size > 1:
            dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def together(self, do: Callable[[], None], group: Any = None) -> None:
        """`do` on every rank of the group (None: all); returns when all have done it, and raises on each of them what was
        raised on the lowest that failed."""
        failure = None
        try:
            do()
        except Exception as error:
            failure = error
        for error in self.gather(failure, group):
            if error is not None:
                raise error

    # -- completions --

    def whole(self, values: Mapping[int, torch.Tensor], lengths: Mapping[int, int], device: str) -> dict[int, torch.Tensor]:
        """{sample: [length]} of every sample in `lengths`, from the ranks' own; float32, in the order of `lengths`."""
        if self.dp_size == 1:
            return {i: values[i] for i in lengths}
        flat = torch.zeros(sum(lengths.values()), device=device)
        parts = dict(zip(lengths, flat.split(list(lengths.values())), strict=True))
        for sample in parts.keys() & values.keys():
            parts[sample].copy_(values[sample])
        add_exactly(flat, self.dp_group)
        return parts

    # -- full tensors, one at a time --

    def full(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """The tensor of which `local` is this rank's share, cut as Megatron's marks on `parameter` say. [full shape]."""
        if self.tp_size == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return local
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(self.tp_size)]
        dist.all_gather(parts, local.contiguous(), group=self.tp_group)
        if local.is_cuda:
            torch.cuda.current_stream().synchronize()  # whoever reads on another stream must see finished tensors
        stride, dim = parameter.partition_stride, parameter.partition_dim
        if stride > 1:  # gate and up: each rank's share is its part of the one, then its part of the other
            parts = [part for half in zip(*(part.chunk(stride, dim) for part in parts), strict=True) for part in half]
        return torch.cat(parts, dim)

    def unflattened(self, part: torch.Tensor | None, start: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of `like`'s shape, float32, of which each data-parallel rank holds the flat piece `part` from `start`."""
        flat = torch.zeros(like.numel(), device=like.device)
        if part is not None:
            flat[start : start + part.numel()].copy_(part.reshape(-1))
        add_exactly(flat, self.dp_group)
        if flat.is_cuda:
            torch.cuda.current_stream().synchronize()
        return flat.view(like.shape)

    def digests(
        self, tensors: Iterable[tuple[str, torch.Tensor]], into: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, tuple[str, tuple[int, ...], str]]:
        """`checkpoint.tensor_digests` of full tensors that every tensor-parallel rank sees; each hashes its share of them.
        `into`: only without tensor parallelism."""
        if self.tp_size == 1:
            return checkpoint.tensor_digests(tensors, into)
        order: list[str] = []

        def mine() -> Iterator[tuple[str, torch.Tensor]]:
            for number, (name, tensor) in enumerate(tensors):
                order.append(name)
                if number % self.tp_size == self.tp:
                    yield name, tensor

        found = checkpoint.tensor_digests(mine())
        everything = {name: entry for part in self.gather(found, self.tp_group) for name, entry in part.items()}
        return {name: everything[name] for name in order}


def add_exactly(flat: torch.Tensor, group: Any) -> None:
    """Sum float32 vectors that are zero wherever another rank's is not, in place and to the bit: as integers, since
    0.0 + -0.0 is 0.0."""
    if group.size() > 1 and flat.numel():
        dist.all_reduce(flat.view(torch.int32), group=group)
