"""What the measurements count and conclude: useful work, and what is read from a run."""

import importlib
import json

import job
import pytest

import provider
import trainer

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture
def budget(monkeypatch):
    monkeypatch.syspath_prepend(str(job.ROOT / "benchmarks"))
    return importlib.import_module("budget")


@pytest.mark.parametrize("recompute", [False, True])
def test_the_useful_work_of_training_is_what_its_matrix_products_do_without_those_done_again(budget, recompute):
    """Against torch's own counter. Attention is told apart: its kernels are not counted, or with the half that is masked."""
    from torch.utils.flop_counter import FlopCounterMode

    lengths = [(5, 3), (9, 12), (7, 1), (4, 6)]
    rows = [{"prompt_tokens": [3] * p, "response_tokens": [4] * r, "log_probs": [-3.0] * r, "reward": float(i % 2)}
            for i, (p, r) in enumerate(lengths)]  # fmt: skip
    settings = trainer.TrainerSettings(str(job.TINY / "model"), "grpo", max_logprob_error=1e9, recompute=recompute)
    network = trainer.Trainer(settings)
    c = network.config
    network.train(rows, 0)
    with FlopCounterMode(display=False) as counter:
        network.train(rows, 1)
    done = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
    fed, visits = [p + r - 1 for p, r in lengths], c.num_hidden_layers * c.num_loops
    pairs = sum(1 for n in fed for query in range(n) for key in range(n) if key <= query)
    attention = 3 * visits * pairs * c.num_attention_heads * 2 * 2 * c.head_dim
    useful = budget.model_flops(c, lengths) - attention
    head = 6 * c.hidden_size * c.vocab_size * sum(r for _, r in lengths)
    assert done - useful == (recompute and (useful - head) // 3)


def test_an_update_at_the_official_shape_is_109_tflop(budget):
    from examples import make_checkpoint

    official = provider.parse_config(make_checkpoint.OFFICIAL, "official")
    assert budget.model_flops(official, [(128, 48)] * 16) == pytest.approx(109e12, rel=1e-3)


def test_a_run_is_read_by_phase_and_says_from_which_interval_on_nothing_waits_for_the_disk(budget, tmp_path):
    run = tmp_path / "run"
    for folder in ("publications", "rollouts", "logs", "checkpoints/000005"):
        (run / folder).mkdir(parents=True)
    lines = lambda rows: "".join(json.dumps(row) + "\n" for row in rows)  # noqa: E731
    pauses = [0.0, 0.0, 0.5, 0.0, 3.0]
    phases = {"publish": 1.0, "rollout": 1.25, "grade": 0.125, "train": 2.0}
    rows = [{"seconds": {**phases, "checkpoint": pause, "total": 4.5 + pause}} for pause in pauses]
    (run / "metrics.jsonl").write_text(lines(rows))
    when, commits = 100.0, [{"version": 1, "time": 100.0}]
    for version, pause in enumerate(pauses, 2):
        when += 4.5 + pause
        commits.append({"version": version, "time": when})
    (run / "publications" / "commits.jsonl").write_text(lines(commits))
    for update in range(5):
        completions = [{"prompt_tokens": [1, 2], "response_tokens": [3] * (update + 1)}]
        (run / "rollouts" / f"{update:06d}.jsonl").write_text(lines(completions))
    log = "x\ncheckpoint 3: 12.00 s in the background\ncheckpoint 5: 11.00 s in the background\n"
    (run / "logs" / "trainer.log").write_text(log)
    (run / "run.json").write_text(json.dumps({"facts": {"trainer": [{"card": "NVIDIA H200"}]}}))
    (run / "checkpoints" / "000005" / "state.json").write_text("{}")

    found = budget.read_run(run)
    assert found["lengths"][4] == [(2, 5)] and found["writers"] == [[3, 12.0], [5, 11.0]]
    assert [row.get("everything else") for row in found["updates"]] == [0.25] * 4 + [None]
    config = provider.read_config(job.TINY / "model")
    seen = budget.summary(found, config, [1, 2], "plain")
    assert seen["phases"]["total"]["median"] == 4.5 and seen["phases"]["everything else"]["max"] == 0.25
    assert budget.summary(found, config, [1, 2], "recompute")["goals"]["train"] == 3.0
    assert seen["goals"]["train"] == 2.5 and seen["useful"]["nominal"] == 67e12
    per_second = budget.model_flops(config, [(2, 2)]) / 2, budget.model_flops(config, [(2, 3)]) / 2
    assert (seen["useful"]["rate"]["min"], seen["useful"]["rate"]["max"]) == per_second
    saving = budget.saving(found, [1, 2], 2)
    assert (saving["pause"], saving["waited"], saving["smallest_interval"]) == (0.5, 3.0, 3)  # 3 × 4.5 s, 12 s of the writer

    evidence = {"plain": seen, "baseline": {"phases": {**seen["phases"], "rollout": {"median": 10.0}}}}
    assert "share" not in budget.comparison(evidence)["plain"]  # theirs is not whole yet
    told = budget.comparison({**evidence, "publication": {"total": 18.0}})
    assert told["baseline"]["sum"] == 30.0 and told["plain"]["share"] == pytest.approx(4.25 / 30)


def test_the_page_of_results_is_what_the_evidence_gives(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(job.ROOT / "benchmarks"))
    results = importlib.import_module("results")
    monkeypatch.setattr(results, "PAGE", tmp_path / "RESULTS.md")
    results.main()
    assert (tmp_path / "RESULTS.md").read_text() == (job.ROOT / "RESULTS.md").read_text()
