"""Write a random-weight checkpoint in the official layout: safetensors shards, their index, config.json.

    python examples/make_checkpoint.py --shape official --seed 0 --out DIR
    python examples/make_checkpoint.py --shape my_shape.json --seed 0 --out DIR --dtype fp32 --shards 1

The official weights are not needed to measure speed, memory and exactness; this stands in for them. Each tensor is
drawn by itself from a seed made of `--seed` and its name (normal, standard deviation 0.02; norms are ones), so a seed
gives the same weights in any order and any number of shards, on one kind of device: CUDA draws other numbers than the
CPU. One tensor is held at a time. At the official shape (bf16, 8.3 GB) it took 15 s beside an H200.
"""

import argparse
import hashlib
import json
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import provider

OFFICIAL = {
    "architectures": ["NanbeigeForCausalLM"],
    "model_type": "nanbeige",
    "vocab_size": 166144,
    "hidden_size": 3072,
    "intermediate_size": 10752,
    "num_hidden_layers": 22,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 70000000.0,
    "num_loops": 2,
    "skip_loop_final_norm": False,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 262144,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "bos_token_id": 166100,
    "eos_token_id": 166101,
}
TINY = OFFICIAL | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What AutoTokenizer reads; a chat template is carried along.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def random_tensors(config, seed, dtype, device):
    """Native name and random tensor, one at a time, each from a generator of its own."""
    import torch

    for name, shape in provider.tensor_shapes(config).items():
        if len(shape) == 1:
            yield name, torch.ones(shape, dtype=dtype)
            continue
        digest = hashlib.sha256(f"{seed}\t{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        tensor = torch.empty(shape, dtype=torch.float32, device=device)
        yield name, tensor.normal_(0, 0.02, generator=generator).to(dtype)


def number_tokenizer(out: Path, config) -> None:
    """A tokenizer for random weights: token i is the word "ti", so that every completion decodes to a text of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "model_max_length": 1 << 30}
    if config.eos_token_id is not None:
        fields["eos_token"] = f"t{config.eos_token_id}"
    (out / "tokenizer_config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="official, tiny, or a JSON file of config.json fields")
    parser.add_argument("--seed", type=int, required=True, help="seed of all weights")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not hold a checkpoint")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="stored type (default bf16)")
    parser.add_argument("--shards", type=int, default=2, help="number of safetensors files (default 2)")
    parser.add_argument("--tokenizer", type=Path, help="directory whose tokenizer files are copied (default: numbered words)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the numbers are drawn")
    options = parser.parse_args()
    start = time.perf_counter()
    try:
        make(options)
    except (ValueError, OSError) as error:
        sys.exit(f"make_checkpoint.py: {error}")
    size = sum(file.stat().st_size for file in options.out.glob("*.safetensors"))
    print(f"{options.out}: {size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")


def make(options: argparse.Namespace) -> None:
    raw = {"official": OFFICIAL, "tiny": TINY}.get(options.shape)
    if raw is None:
        # Fields not given are those of the official shape.
        raw = OFFICIAL | json.loads(Path(options.shape).read_text(encoding="utf-8"))
    config = provider.parse_config(raw, options.shape)
    if (options.out / provider.CONFIG).exists():
        raise ValueError(f"{options.out} already holds a {provider.CONFIG}")
    copies = []
    if options.tokenizer:
        copies = [options.tokenizer / name for name in TOKENIZER_FILES if (options.tokenizer / name).is_file()]
        if not copies:
            raise ValueError(f"{options.tokenizer} holds no tokenizer files")

    import torch

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[options.dtype]
    raw = raw | {"torch_dtype": str(dtype).removeprefix("torch.")}
    provider.write_checkpoint(
        options.out, raw, random_tensors(config, options.seed, dtype, device), shards=options.shards
    )
    for file in copies:
        shutil.copy2(file, options.out / file.name)
    if not copies:
        number_tokenizer(options.out, config)


if __name__ == "__main__":
    main()
