"""One of two ranks of test_tensor_parallel_two_equals_one_process: `tensor_parallel_child.py RANK FOLDER`."""

import sys
from pathlib import Path

import torch
from test_provider import CU_SEQLENS, TOKENS, config_of, model_of, native_gradients

import provider


def main(rank: int, folder: Path) -> None:
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    weights = torch.load(folder / "weights.pt", weights_only=True)
    model = model_of(config_of(), weights)
    exported = dict(provider.export_native(model))
    logits = model.head(model(TOKENS, CU_SEQLENS))
    # d mean(logsumexp) / d logits is the softmax over the whole vocabulary, of which this rank holds half.
    parts = [torch.empty_like(logits) for _ in range(2)]
    torch.distributed.all_gather(parts, logits.detach().contiguous())
    probabilities = torch.cat(parts, -1).softmax(-1).chunk(2, -1)[rank]
    logits.backward(probabilities / len(TOKENS))
    torch.save(
        {
            "logits": logits.detach(),
            "round_trip": all(torch.equal(exported[name], weights[name]) for name in weights),
            "gradients": native_gradients(model),
        },
        folder / f"rank{rank}.pt",
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
