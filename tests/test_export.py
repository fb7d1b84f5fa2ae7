"""The exported folder: what it holds, that its digest is the publication's, and that nothing is left when it is refused."""

import json
import resource
import shutil
import subprocess
import sys
import warnings

import job
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import checkpoint
import data
import export
import provider

CONFIG = provider.read_config(job.TINY / "model")


made = []  # what `tiny_run` made


def tiny_run(factory):
    """(run of two GRPO updates with a held-out evaluation before and after, held-out file): one for the tests of all commands."""
    if made:
        return made[0]
    folder = factory.mktemp("tiny")
    held_out = folder / "heldout.jsonl"
    held_out.write_text("".join((job.TINY / "heldout.jsonl").read_text().splitlines(keepends=True)[:12]))
    args = ["--algorithm", "grpo", *job.SMALL, "--updates", "2", "--optimizer", "adam", "--eval-data", str(held_out)]
    code, output = job.run(*args, "--output", str(folder / "run"))
    assert code == 0, output
    made.append((folder / "run", held_out))
    return made[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_run(tmp_path_factory)[0]


def command(capsys, *args):
    """Exit code, stdout and stderr of export.py."""
    capsys.readouterr()
    code = export.exit_code("export.py", export.main, [str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


def content(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def digest_of(folder):
    return checkpoint.digest_of(dict(provider.read_checkpoint(folder, provider.read_config(folder))))


# --- a checkpoint as Megatron stores it, without Megatron ------------------------------------------------------------


def stored(native, prefix=""):
    """Native tensors under Megatron's names: q, k and v interleaved by query group, gate above up."""
    names = {"model.embed_tokens": "embedding", "model.norm": "final_norm", "lm_head": "output_layer"}
    found = {f"{names[n]}.weight": native[f"{n}.weight"] for n in names}
    d, groups = CONFIG.head_dim, CONFIG.num_key_value_heads
    for n in range(CONFIG.num_hidden_layers):
        t = {k.removeprefix(f"model.layers.{n}.").removesuffix(".weight"): v for k, v in native.items() if f"layers.{n}." in k}
        parts = [t[f"self_attn.{x}_proj"].unflatten(0, (groups, -1, d)).flatten(1, 2) for x in "qkv"]
        found |= {
            f"layers.{n}.self_attention.linear_qkv.weight": torch.cat(parts, 1).flatten(0, 1),
            f"layers.{n}.self_attention.linear_qkv.layer_norm_weight": t["input_layernorm"],
            f"layers.{n}.self_attention.linear_proj.weight": t["self_attn.o_proj"],
            f"layers.{n}.mlp.linear_fc1.layer_norm_weight": t["post_attention_layernorm"],
            f"layers.{n}.mlp.linear_fc1.weight": torch.cat([t["mlp.gate_proj"], t["mlp.up_proj"]]),
            f"layers.{n}.mlp.linear_fc2.weight": t["mlp.down_proj"],
        }
    return {prefix + key: value for key, value in found.items()}


def made_run(run, updates=(1,), precision="fp32", digest=None):
    """A run directory with a checkpoint after each of `updates`. Returns the FP32 weights of each."""
    dtype = getattr(torch, export.DTYPES[precision])
    folder = job.TINY / "model"
    contents = {"model": {p.name: data.file_digest(p) for p in folder.glob("*.json")}}
    checkpoint.create_run(run, {"recipe": {"model": str(folder), "precision": precision, "updates": 9}, "contents": contents})
    made = {}
    for n in range(max(updates)):
        checkpoint.append_rollouts(run, n, [{}])
        checkpoint.append_metrics(run, {"update": n})
    for n in updates:
        noise = torch.Generator().manual_seed(n)
        tensors = provider.read_checkpoint(folder, CONFIG)
        made[n] = {k: v.float() + 1e-3 * torch.randn(v.shape, generator=noise) for k, v in tensors}
        published = {k: v.to(dtype) for k, v in made[n].items()}
        state = stored(published) | (stored(made[n], export.MAIN) if precision != "fp32" else {})
        with warnings.catch_warnings(action="ignore"):  # "assuming the intent is to save in a single process"
            dcp.save(state, checkpoint_id=str(checkpoint.staging(run, n) / "actor"), no_dist=True)
        facts = {"policy_version": n + 1, "policy_digest": digest or checkpoint.digest_of(published), "cursor": 0, "tensors": {}}
        checkpoint.publish_checkpoint(run, n, facts, keep=9)
    return made


# --- what is written -------------------------------------------------------------------------------------------------


def test_the_exported_digest_is_the_last_publications_and_the_run_is_untouched(run, tmp_path, capsys):
    before = content(run)
    code, out, err = command(capsys, run, tmp_path / "out")
    assert code == 0, err
    commit = checkpoint.read_commits(run)[-1]
    assert commit["version"] == 3 and digest_of(tmp_path / "out") == commit["digest"]
    assert f"policy digest {commit['digest']}: as committed" in out
    assert content(run) == before
    assert not [p for p in tmp_path.iterdir() if p.name != "out"]


def test_the_folder_holds_native_names_config_and_tokenizer(run, tmp_path, capsys):
    assert command(capsys, run, tmp_path / "new" / "out")[0] == 0
    out, model = tmp_path / "new" / "out", job.TINY / "model"
    held = load_file(out / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in held.items()} == provider.tensor_shapes(CONFIG)
    assert json.loads((out / "config.json").read_text()) == json.loads((model / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    assert data.load_tokenizer(out)("1 + 1")["input_ids"] == data.load_tokenizer(model)("1 + 1")["input_ids"]
    assert len({p.stat().st_mode for p in out.iterdir()}) == 1, "a file that others may not read"


def test_bf16_is_the_rounded_policy_in_shards_of_the_asked_size(run, tmp_path, capsys):
    assert command(capsys, run, tmp_path / "fp32")[0] == 0
    code, out, err = command(capsys, run, tmp_path / "bf16", "--dtype", "bf16", "--shard-size-gb", "0.0003")
    assert code == 0, err
    full = dict(provider.read_checkpoint(tmp_path / "fp32", CONFIG))
    half = dict(provider.read_checkpoint(tmp_path / "bf16", CONFIG))
    assert all(torch.equal(half[name], full[name].bfloat16()) for name in full)
    shards = sorted((tmp_path / "bf16").glob("*.safetensors"))
    index = json.loads((tmp_path / "bf16" / provider.INDEX).read_text())
    assert len(shards) > 3 and set(index["weight_map"].values()) == {p.name for p in shards}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in half.values())
    assert all(sum(t.nbytes for t in load_file(p).values()) <= 300_000 for p in shards)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert f"written as BF16: digest {digest_of(tmp_path / 'bf16')}" in out


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_half_precision_run_gives_the_published_cast_or_its_fp32_main_parameters(precision, tmp_path, capsys):
    main = made_run(tmp_path / "run", precision=precision)[1]
    dtype = getattr(torch, export.DTYPES[precision])
    for asked, wanted in (("as-trained", dtype), ("fp32", torch.float32), ("bf16", torch.bfloat16)):
        code, _, err = command(capsys, tmp_path / "run", tmp_path / asked, "--dtype", asked)
        assert code == 0, err
        held = dict(provider.read_checkpoint(tmp_path / asked, CONFIG))
        assert all(held[name].dtype is wanted and torch.equal(held[name], t.to(wanted)) for name, t in main.items())


def test_an_older_checkpoint_can_be_asked_for_and_a_damaged_one_is_passed_over(tmp_path, capsys):
    made = made_run(tmp_path / "run", updates=(1, 2))
    assert command(capsys, tmp_path / "run", tmp_path / "one", "--updates", "1")[0] == 0
    assert torch.equal(load_file(tmp_path / "one" / "model.safetensors")["lm_head.weight"], made[1]["lm_head.weight"])
    shard = next((tmp_path / "run" / "checkpoints" / "000002" / "actor").glob("*.distcp"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    code, out, err = command(capsys, tmp_path / "run", tmp_path / "newest")
    assert code == 0 and "000002 is passed over" in err and "checkpoint 000001" in out
    assert digest_of(tmp_path / "newest") == digest_of(tmp_path / "one")
    code, _, err = command(capsys, tmp_path / "run", tmp_path / "two", "--updates", "2")
    assert code == 2 and "damaged" in err and not (tmp_path / "two").exists()


def test_config_json_keeps_its_other_keys_and_names_the_written_type(tmp_path):
    for name, keys in (("old", {"torch_dtype"}), ("new", {"dtype"}), ("both", {"torch_dtype", "dtype"}), ("none", set())):
        raw = {"auto_map": {"AutoModelForCausalLM": "modeling_nanbeige.Model"}, **dict.fromkeys(keys, "float32")}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
        export.write_config(tmp_path / name, tmp_path / name, "bf16")
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written == {**raw, **dict.fromkeys(keys or {"torch_dtype"}, "bfloat16")}


def test_the_models_own_code_and_licence_go_along_weights_and_model_card_do_not(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(job.TINY / "model", model)
    for name in ("modeling_nanbeige.py", "tokenizer.model", "LICENSE", "README.md", "pytorch_model.bin", ".hidden.json"):
        (model / name).write_text("x")
    (model / "vocab.json").symlink_to(model / "tokenizer.json")  # as in the Hugging Face cache
    out.mkdir()
    export.copy_files(model, out)
    there = {"modeling_nanbeige.py", "tokenizer.model", "LICENSE", "vocab.json", "tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in out.iterdir()} == there and not (out / "vocab.json").is_symlink()


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(answer, code, *words):
    got, out, err = answer
    assert got == code, err
    assert err.startswith("export.py: error: ") and err.count("\n") == 1 and all(w in err for w in words), err


def test_weights_that_are_not_the_checkpoints_policy_are_refused_and_leave_nothing(tmp_path, capsys):
    made_run(tmp_path / "run", digest="0" * 64)
    refused(command(capsys, tmp_path / "run", tmp_path / "out"), 3, "0" * 64)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_commit_record_with_another_digest_is_refused(tmp_path, capsys):
    made_run(tmp_path / "run")
    checkpoint.append_commit(tmp_path / "run", {"version": 2, "epoch": 0, "digest": "1" * 64})
    refused(command(capsys, tmp_path / "run", tmp_path / "out"), 3, "1" * 64, "version 2")


def test_an_existing_folder_is_refused_unless_it_is_empty(run, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        refused(command(capsys, run, tmp_path / name), 2, name, "not an empty directory")
    refused(command(capsys, run, run / "checkpoints" / "000002" / "hf"), 2, "within the run's checkpoints")
    assert (tmp_path / "full" / "a").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert command(capsys, run, tmp_path / "empty")[0] == 0


def test_a_model_folder_that_moved_is_named_and_another_one_is_refused(tmp_path, capsys):
    made_run(tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["recipe"]["model"] = str(tmp_path / "gone")
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    refused(command(capsys, tmp_path / "run", tmp_path / "out"), 2, "gone", "--model")
    moved = shutil.copytree(job.TINY / "model", tmp_path / "moved")
    (moved / "model.safetensors").unlink()  # the first weights are not needed
    assert command(capsys, tmp_path / "run", tmp_path / "out", "--model", moved)[0] == 0
    (moved / "tokenizer.json").write_text((moved / "tokenizer.json").read_text() + " ")
    refused(command(capsys, tmp_path / "run", tmp_path / "other", "--model", moved), 2, "tokenizer.json", "not the file")


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, capsys):
    made_run(tmp_path / "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        answer = command(capsys, tmp_path / "run", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    refused(answer, 1, "model.safetensors", "cannot be written")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_bad_input_is_one_line_with_exit_code_2(tmp_path, capsys):
    made_run(tmp_path / "run")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "run.json").write_text(json.dumps({"recipe": {"model": str(job.TINY / "model"), "precision": "fp32"}}))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.json").write_text(json.dumps({"recipe": ["fp32"]}))
    out = tmp_path / "out"
    refused(command(capsys, tmp_path / "no", out), 2, "not a run directory")
    refused(command(capsys, tmp_path / "bare", out), 2, "no checkpoint yet")
    refused(command(capsys, tmp_path / "odd", out), 2, "run.json", "precision")
    refused(command(capsys, tmp_path / "run", out, "--updates", "7"), 2, "no checkpoint after 7 updates", "1")
    refused(command(capsys, tmp_path / "run", out, "--shard-size-gb", "nan"), 2, "--shard-size-gb")
    refused(command(capsys, tmp_path / "run", tmp_path / "run" / "run.json" / "x"), 2, "run.json")
    done = subprocess.run(
        [sys.executable, "export.py", str(tmp_path / "no"), str(out)], cwd=job.ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("export.py: error: ")
    assert not out.exists()
