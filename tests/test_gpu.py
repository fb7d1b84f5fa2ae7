"""The whole job on a GPU that trainer and engine share: the tests' small runs, where there is one."""

import json

import job
import pytest
import test_engines
import torch
from safetensors.torch import load_file

import provider

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    "extra",
    [
        ["--algorithm", "grpo"],
        ["--algorithm", "ppo", "--optimizer", "adam", "--recompute", "--offload-train", "--publication-transport", "shm"],
        ["--algorithm", "flow-dppo", "--precision", "bf16", "--publication-transport", "disk"],
        ["--algorithm", "dppo", "--precision", "fp16", "--no-cuda-graphs"],
    ],
    ids=lambda extra: extra[1],
)
def test_stop_and_resume_equals_uninterrupted(extra, tmp_path):
    arguments = [*job.SMALL, *extra, "--updates", "3", "--colocate", "--device", "cuda"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for run, more in ((whole, []), (broken, ["--stop-after", "2"])):
        code, output = job.run(*arguments, *more, "--output", str(run))
        assert code == 0, output
    code, output = job.run("--resume", "--output", str(broken))
    assert code == 0, output
    code, output = job.audit(whole, broken)
    assert code == 0, output
    record = json.loads((whole / "run.json").read_text())
    assert record["device"] == "cuda"
    bound = 1e-5 if "--precision" not in extra else 0.03
    assert all(row["max_logprob_error"] <= bound for row in job.rows(whole / "metrics.jsonl"))


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs: one for the trainer, two for engines")
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_two_engine_gpus_sample_what_one_samples_and_the_trainer_agrees(ranks, tmp_path):
    """Before anything is optimized, as log-probabilities of another batch or of two ranks differ in the last bits. In the
    second update the replay guard speaks for the new weights."""
    runs = {"1": [], "2": ["--rollout-tensor-parallel-size", ranks]}
    for gpus, more in runs.items():
        arguments = [*job.SMALL, *more, "--updates", "2", "--device", "cuda", "--rollout-gpus", gpus]
        code, output = job.run(*arguments, "--output", str(tmp_path / gpus))
        assert code == 0, output
        assert all(row["max_logprob_error"] <= 1e-5 for row in job.rows(tmp_path / gpus / "metrics.jsonl"))
    one, two = (job.rows(tmp_path / gpus / "rollouts" / "000000.jsonl") for gpus in runs)
    requests = [{"prompt_tokens": c["prompt_tokens"], "seed": c["trace"]["seed"], "temperature": 0.8} for c in one]
    weights = {k: v for file in (job.TINY / "model").glob("*.safetensors") for k, v in load_file(file).items()}
    config = provider.read_config(job.TINY / "model")
    print(test_engines.assert_the_same_policy_sampled(config, weights, requests, one, two))
