"""The whole job on a GPU that trainer and engine share: the tests' small runs, where there is one."""

import json

import job
import pytest
import torch

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
