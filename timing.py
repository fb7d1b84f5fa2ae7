"""How many seconds an update will take, worked out before it starts: `python run.py --dry-run …` prints it.

A model of *this* program on H200s, phase by phase as `seconds` in metrics.jsonl has them: each phase is a sum of parts, and a
part is an amount of work (FLOP, bytes, tokens) over a rate. Rates are in `Hardware`, each with where it comes from: eleven were
measured on one H200 before the project, two are set from one phase each of one of its runs, and two from its float32 products
alone. docs/scaling.md holds the rest of what was measured against them (`python benchmarks/predict.py`). Rates between GPUs are
nominal or assumed: several GPUs were never measured, so for them this is prediction.

What it leaves out: the start (a minute or two) and the first update, which captures graphs; kernels that are not matrix products
(they are in the measured rate of a forward pass); grading; the loader's and Ray's time for a call; what happens when the KV cache
overflows; garbage collection, page faults, slow nodes and anything that varies from one run to the next.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import random
from collections.abc import Mapping

import plan

BLOCK = 16  # tokens of a block of vLLM's KV cache: the prefix cache holds whole ones
FEW_ROWS = 64  # as in matmul.py, which imports torch: completions that a decode step of split products may have


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Rates of one GPU with its 16 CPU cores, of what joins GPUs, and of the driver's process. FLOP/s, bytes/s, seconds.

    "Notes" are measurements on one H200 from before the project, which docs/scaling.md repeats.

    `matmul`: notes, 145 TFLOP of a forward and a backward pass with recompute (16 × 176 tokens, official shape) in 3.02, 0.70 and
    0.37 s; fp16 as bf16. `attention`: the share of it that attention reaches, assumed. `memory`: notes, reading weights.
    `decode`: the share of that which a decode step reaches: the bytes of one of 16 sequences over 23 and 8 ms (notes); tf32 as
    fp32, fp16 as bf16. With split products: over 11 ms, which is 23 ms with cuBLAS's 16-row products taken out and those of
    matmul.py put in (19.9 and 7.9 ms, results/products.json). `parts`: what sums in parts add to a forward pass, from the
    forward and both gradients there (2.122 s in place of 2.068).
    `digest`: BLAKE3 of a tensor on the GPU, from the middle of the 0.77 to 1.14 s in which six runs published 16.7 GB, hashed
    twice (results/official, results/budget.json; the notes have 24 GB/s, of another loop). `snapshot`: trainer.copy_to_host,
    which fills fresh host memory, from the 1.95 s of GRPO's first measured checkpoint. `pinned`, `disk`, `load`: notes, moving
    weights; the lower where they give a range. `load` is of pageable memory, before files went through a pinned piece.
    `nvlink`, `network`: a GPU's, one way; nominal (450 GB/s; 400 Gb/s a GPU, eight network cards a node). `ring`: the share that
    NCCL's ring reaches of them; `hop`: a step of a ring. Both assumed.
    `share_node`, `share_all`: a shared file system, one node's and all nodes' together. Assumed.
    `driver_*`, `rank_*`: seconds a response token on one core, results/driver.json.
    """

    gpus_per_node: int = 8
    gib: float = 139.0
    matmul: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"fp32": 48e12, "tf32": 208e12, "bf16": 393e12, "fp16": 393e12}
    )
    attention: float = 1.0
    memory: float = 4.1e12
    decode: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"fp32": 0.30, "split": 0.626, "tf32": 0.30, "bf16": 0.43, "fp16": 0.43}
    )
    parts: float = 0.079
    digest: float = 35e9
    snapshot: float = 11.4e9
    pinned: float = 55e9
    disk: float = 2.5e9
    load: float = 4e9
    nvlink: float = 450e9
    network: float = 50e9
    ring: float = 0.8
    hop: float = 10e-6
    share_node: float = 5e9
    share_all: float = 50e9
    driver_receive: float = 180e-9  # unpickles what engines answer
    driver_decode: float = 330e-9  # text for the reward
    driver_send: float = 60e-9  # pickles the batch, once for all trainer processes (cluster.each)
    driver_write: float = 1.6e-6  # rollouts/*.jsonl
    rank_receive: float = 270e-9  # every trainer process unpickles the whole batch and makes tensors of it


H200 = Hardware()


# --- amounts ---------------------------------------------------------------------------------------------------------


def layer_weights(config) -> int:
    """Numbers in the matrices of all physical layers."""
    heads, groups = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return config.num_hidden_layers * config.hidden_size * (2 * heads + 2 * groups + 3 * config.intermediate_size)


def token_flops(config) -> int:
    """FLOP of one token's way through the matrices of all layers and loops; without attention and LM head."""
    return 2 * config.num_loops * layer_weights(config)


def attention_flops(config, area: float) -> float:
    """FLOP of causal attention in all layer visits; `area`: sum over sequences of length². Half of it lies under the mask."""
    return 2 * config.num_attention_heads * config.head_dim * config.num_loops * config.num_hidden_layers * area


def head_flops(config, rows: int) -> int:
    return 2 * config.hidden_size * config.vocab_size * rows


def padded_area(lengths: list[int]) -> int:
    """The area that `provider.Packing` makes of one pack: a batch is as long as its longest, and the shortest in it half that."""
    area, longest = 0, 0
    for length in sorted(lengths, reverse=True):
        if 2 * length < longest or not longest:
            longest = length
        area += longest**2
    return area


def step_bytes(config, element: int, sequences: float, length: float, ranks: int = 1) -> float:
    """Bytes that each of an engine's ranks reads in one decode step: the layers once a loop, the LM head, keys and values."""
    weights = config.num_loops * layer_weights(config) + config.hidden_size * config.vocab_size
    return element * weights / ranks + sequences * length * kv_bytes(config, element) / min(ranks, config.num_key_value_heads)


def kv_bytes(config, element: int) -> int:
    """Of one token: a key and a value in each layer visit."""
    return 2 * config.num_loops * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * element


def spread(count: int, longest: int, mean: float) -> list[int]:
    """Lengths of `count` completions, descending: the first is `longest`, and they thin out as (1 − x)^k with the mean given as a
    share of it. 1 is all alike; 0.5 is even from nothing to the longest."""
    if mean >= 1:
        return [longest] * count
    return [longest, *(max(1, round(longest * (1 - (i + 0.5) / count) ** (1 / mean - 1))) for i in range(1, count))]


def loads(sizes: list[int], ranks: int) -> list[list[int]]:
    """As `layout.divide`, without torch and for many ranks: the sizes that each rank gets, in the order of the samples."""
    heap, parts = [(0, rank) for rank in range(ranks)], [[] for _ in range(ranks)]
    for sample in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        load, rank = heap[0]
        parts[rank].append(sample)
        heapq.heapreplace(heap, (load + sizes[sample], rank))
    return [[sizes[sample] for sample in sorted(part)] for part in parts]


# --- talk between GPUs -----------------------------------------------------------------------------------------------


def ring(hw: Hardware, size: float, ranks: int, stride: int = 1, both: bool = True) -> float:
    """Seconds of a ring all-reduce of `size` bytes on each of `ranks` GPUs (both=False: of half of it, a reduce-scatter or an
    all-gather). stride: GPUs between neighbours, as data-parallel ranks are T apart. Across nodes, the members that lie on a node
    share its eight network cards with the rings of the others, so each has `network` for itself."""
    if ranks == 1:
        return 0.0
    on_node = max(1, hw.gpus_per_node // stride)
    rate = hw.nvlink if ranks <= on_node else min(hw.nvlink, hw.network * on_node)
    steps = (2 if both else 1) * (ranks - 1)
    return steps / ranks * size / (rate * hw.ring) + steps * hw.hop


# --- phases ----------------------------------------------------------------------------------------------------------


def seconds(r, config, mean: float = 1.0, hw: Hardware = H200) -> dict[str, dict[str, float]]:
    """{phase: {part: seconds}} of one update of run.Recipe `r` on GPUs of `hw`; `total` sums the phases that every update has.

    Completions: the longest takes all of r.max_response_len, and the mean is the share `mean` of it; prompts are of
    r.max_prompt_len. Phases: publish, rollout, grade, train, record (rollouts/), and, in updates that save, checkpoint (the loop
    waits) and writer (in the background). A part that a run has not is 0.
    """
    count = r.rollout_batch_size * r.n_samples_per_prompt
    responses = spread(count, r.max_response_len, mean)
    tokens = sum(responses)
    found = {
        "publish": publish(r, config, hw),
        "rollout": rollout(r, config, mean, hw) | {"to the driver": tokens * hw.driver_receive},
        "grade": {"text": tokens * hw.driver_decode},
        "train": train(r, config, responses, hw),
        "record": {"rollouts to disk": tokens * hw.driver_write},
    }
    found["total"] = {phase: sum(parts.values()) for phase, parts in found.items()}
    return found | checkpoint(r, config, hw)


def publish(r, config, hw: Hardware) -> dict[str, float]:
    """Digest, bytes to where the engines read them, and in every engine the load and its own digest, one after the other."""
    size, t, ranks = element_bytes(r) * plan.weights(config), r.tensor_model_parallel_size, r.rollout_tensor_parallel_size
    parts = {
        "trainer's digest": size / t / hw.digest + ring(hw, size, t, both=False),
        "engines' digest": size / ranks / hw.digest + ring(hw, size, ranks, both=False),
    }
    if r.offload_train:
        parts["actor for critic"] = exchange(r, config, hw)
    how = transport(r)
    if how == "ipc":
        return parts | {"engines read": 2 * size / hw.memory}
    if how == "shm":  # pinned at both ends; without tensor parallelism the digest's pass is the copy
        return parts | {"to the host": size / t / hw.pinned if t > 1 else 0.0, "engines read": size / hw.pinned}
    nodes = math.ceil(r.rollout_gpus / hw.gpus_per_node) if r.ray_address else 1
    write = size / t / hw.disk
    read = size / hw.load  # every rank of every engine reads the whole, a node once from the file system
    if r.ray_address:
        write, read = max(write, size / hw.share_node), read + max(size / hw.share_node, size * nodes / hw.share_all)
    return parts | {"to the host": size / t / hw.snapshot, "to a file": write, "engines read": read}


def exchange(r, config, hw: Hardware) -> float:
    """With --offload-train: one network goes to pinned host memory and the other comes back, with the optimizer's state."""
    return plan.checkpoint_bytes(r, config) / r.tensor_model_parallel_size / hw.pinned


def transport(r) -> str:
    """What run.py's `place` makes of auto on GPUs."""
    if r.publication_transport != "auto":
        return r.publication_transport
    return "ipc" if r.colocate and r.tensor_model_parallel_size == 1 else "disk" if r.ray_address else "shm"


def rollout(r, config, mean: float, hw: Hardware) -> dict[str, float]:
    """Of the engine with most prompts, one of whose completions is the longest there may be: the others wait for it."""
    element, ranks, kind = element_bytes(r), r.rollout_tensor_parallel_size, arithmetic(r)
    prompts, p = math.ceil(r.rollout_batch_size / (r.rollout_gpus // ranks)), r.max_prompt_len
    lengths = spread(prompts * r.n_samples_per_prompt, r.max_response_len, mean)
    again = p - (p - 1) // BLOCK * BLOCK  # of a prompt that another sample has filled in: the end of it
    fill = prompts * (p + (r.n_samples_per_prompt - 1) * again)
    flops = fill * token_flops(config) + attention_flops(config, prompts * p**2) + head_flops(config, len(lengths))
    visits = config.num_loops * config.num_hidden_layers

    def sums(rows):
        return 2 * visits * ring(hw, rows * config.hidden_size * element, ranks)

    def step(alive: float, length: float) -> float:
        """Seconds of a decode step: the memory's or the arithmetic's, whichever is longer, and the ranks' sums."""
        each = alive * (token_flops(config) + head_flops(config, 1)) + 2 * attention_flops(config, alive * length)
        share = hw.decode["split" if plan.split_matmul(r) and alive <= FEW_ROWS else kind]
        moved = step_bytes(config, element, alive, length, ranks) / (hw.memory * share)
        return max(moved, each / ranks / hw.matmul[kind]) + sums(alive)

    slots = min(r.max_num_seqs, len(lengths))
    waiting = (len(lengths) - slots) * sum(lengths) / len(lengths)  # tokens of those that wait for a place
    full = waiting / slots * step(slots, p + mean * r.max_response_len / 2)
    running, crowd, alone, begun = spread(slots, r.max_response_len, mean), 0.0, 0.0, 1  # the prefill gives the first token
    for alive, length in zip(range(slots, 0, -1), reversed(running), strict=True):
        took = max(0, length - begun) * step(alive, p + (begun + length) / 2)
        crowd, alone = (crowd + took, alone) if 2 * alive > slots else (crowd, alone + took)
        begun = max(begun, length)
    prefill = flops / ranks / hw.matmul[kind] + sums(fill)
    return {"prefill": prefill, "decode": full + crowd, "decode, engine half empty": alone}


def train(r, config, responses: list[int], hw: Hardware) -> dict[str, float]:
    """Of the data-parallel rank with most work. Forward 1, backward 2 (attention 2.5), with recompute the layers once more; a
    critic is scored first; flow-dppo scores half and steps twice. Split products make a forward pass longer, and recompute all
    of a layer but its last product."""
    kind, t, element = arithmetic(r), r.tensor_model_parallel_size, element_bytes(r)
    data, p = r.train_gpus // t, r.max_prompt_len
    critic, flow, split = r.algorithm != "grpo", r.algorithm == "flow-dppo", plan.split_matmul(r) and t == 1
    down = config.num_hidden_layers * config.hidden_size * config.intermediate_size / layer_weights(config)
    again = (1 - down if split else 1.0) if r.recompute else 0.0
    # Passes over the layers' matrices (of which forward), over attention, over the LM head.
    matrices, forward, attention, head = 3 + again, 1 + again, 3.5 + float(r.recompute), 3.0
    if critic:
        matrices, forward, attention = 2 * matrices + 1, 2 * forward + 1, 2 * attention + 1
    if flow:
        matrices, forward, attention, head = matrices + 0.5, forward + 0.5, attention + 0.5, head + 0.5
    parts = hw.parts if split else 0.0
    shares = divided(tuple(responses), p, data, r.micro_batch_tokens)
    work = []
    for fed, rows, area in shares:
        flops = (matrices + parts * forward) * fed * token_flops(config) + (head + parts * (head - 2)) * head_flops(config, rows)
        flops += attention * attention_flops(config, area) / hw.attention
        work.append((flops / t / hw.matmul[kind], fed))
    slowest, fed = max(work)
    average = sum(spent for spent, _ in work) / data
    # Two sums of the hidden states a layer visit and pass; backward has as many as forward.
    sums = 2 * config.num_loops * config.num_hidden_layers * (matrices - (2 if critic else 1))
    packed = math.ceil(fed / r.micro_batch_tokens) or 1
    talk = sums * packed * ring(hw, fed / packed * config.hidden_size * element, t)
    networks, steps = [plan.weights(config), *([plan.weights(config, True)] if critic else [])], 2 if flow else 1
    gradients = optimizer = 0.0
    # trainer.LOGIT_ELEMENTS rows × vocabulary at a time, each with its own backward pass to the head's whole gradient.
    chunks = math.ceil(max(rows for _, rows, _ in shares) * (config.vocab_size // t) / 2**25)
    head_adds = max(0, chunks - 1) * (8 + element) * config.vocab_size * config.hidden_size / t / hw.memory
    for n in networks:
        share = n / t
        if r.distributed_optimizer:
            gradients += ring(hw, 4 * share, data, t, both=False) + ring(hw, element * share, data, t, both=False)
        else:
            gradients += ring(hw, 4 * share, data, t)
        optimizer += share * optimizer_bytes(r, data) / hw.memory
    return {
        "forward and backward": average,
        "waiting for the slowest rank": max(0.0, slowest - average),
        "LM head's gradient into its buffer": head_adds,
        "tensor-parallel sums": talk,
        "gradient sums": steps * gradients,
        "optimizer": steps * optimizer,
        "actor for critic": 3 * exchange(r, config, hw) if r.offload_train else 0.0,
        "to the trainers": sum(responses) * hw.driver_send,
        "trainers unpickle": sum(responses) * hw.rank_receive,
    }


@functools.lru_cache(maxsize=256)
def divided(responses: tuple[int, ...], prompt: int, data: int, budget: int) -> list[tuple[int, int, int]]:
    """(tokens fed, response tokens, padded area of attention) of each data-parallel rank; kept for searches over layouts."""
    sizes = [prompt + n for n in responses]
    random.Random(0).shuffle(sizes)  # long and short ones come in any order, which is what pads a pack
    parts = loads(sizes, data)
    return [(sum(m) - len(m), sum(m) - prompt * len(m), sum(map(padded_area, packs(m, budget)))) for m in parts]


def packs(sizes: list[int], budget: int) -> list[list[int]]:
    """As trainer.make_packs fills them; a completion is fed without its last token."""
    groups: list[list[int]] = [[]]
    used = 0
    for size in sizes:
        if groups[-1] and used + size > budget:
            groups.append([])
            used = 0
        groups[-1].append(size - 1)
        used += size
    return groups


def optimizer_bytes(r, data: int) -> float:
    """Bytes that a step moves for each weight: the gradient zeroed (4), added into its FP32 buffer (8 and what it is stored in),
    measured (4), scaled (8); then the step reads and writes the FP32 weight (8), reads its gradient (4), reads and writes Adam's
    moments (16), checks what it wrote (4, moments 8), and in half precision casts and checks the weights (2 × 2)."""
    element, adam = element_bytes(r), r.optimizer == "adam"
    step = 8 + 4 + 4 + (24 if adam else 0) + (0 if r.precision == "fp32" else 4)
    return 4 + 8 + element + 4 + 8 + step / (data if r.distributed_optimizer else 1)


def checkpoint(r, config, hw: Hardware) -> dict[str, dict[str, float]]:
    """{"checkpoint": what the loop waits for, "writer": what goes on beside the next updates}. trainer.snapshot, write_state."""
    size, t, data = plan.checkpoint_bytes(r, config), r.tensor_model_parallel_size, r.train_gpus // r.tensor_model_parallel_size
    digest = size / t / hw.digest  # every data-parallel rank hashes its own copy
    nodes = math.ceil(r.train_gpus / hw.gpus_per_node)
    rate = min(nodes * hw.share_node, hw.share_all) if r.ray_address else hw.disk
    write, read = 2 * size / rate, size / min(hw.digest, hw.share_node if r.ray_address else hw.digest)  # a sync doubles a write
    if r.train_gpus == 1 and r.offload_train:  # host memory holds the network that is away: written while the loop waits
        parts = {"digest": digest, "actor for critic": 4 * exchange(r, config, hw), "write": write}
        return {"checkpoint": parts, "writer": {"hash of the files": read}}
    if r.train_gpus == 1:
        waits = {"digest": digest, "copy": size / hw.snapshot}
        return {"checkpoint": waits, "writer": {"write": write, "hash of the files": read}}
    moments = size - element_bytes(r) * plan.weights(config)
    gather = 2 * ring(hw, moments / t, data, t) if r.distributed_optimizer else 0.0  # once for digests, once to write
    parts = {"digest": digest + ring(hw, size, t, both=False), "gather": gather, "copy": size / r.train_gpus / hw.snapshot}
    return {"checkpoint": parts | {"write": write}, "writer": {"hash of the files": read}}


def save_interval(found: Mapping) -> int:
    """The fewest updates between checkpoints at which the writer is done before the next one must wait for it."""
    return math.ceil(sum(found["writer"].values()) / sum(found["total"].values()))


def largest(found: Mapping) -> tuple[str, float]:
    """(phase and part, its share of the update) of the part that takes longest."""
    total = sum(found["total"].values())
    phase, part = max(((p, q) for p in found["total"] for q in found[p]), key=lambda pq: found[pq[0]][pq[1]])
    return f"{phase}: {part}", found[phase][part] / total


def arithmetic(r) -> str:
    return "tf32" if r.precision == "fp32" and r.matmul_precision == "high" else r.precision


def element_bytes(r) -> int:
    return 4 if r.precision == "fp32" else 2
