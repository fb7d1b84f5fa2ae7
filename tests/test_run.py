"""The whole job through `run.py` in fresh processes: the loop, its record, bad input, and that the losses are the library's."""

import dataclasses
import fcntl
import gzip
import json
import os
import signal
import struct
import termios
import time

import job
import pytest

import checkpoint
import plan
import run as command


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    """Two GRPO updates with an evaluation before and after."""
    folder = tmp_path_factory.mktemp("grpo")
    held_out = folder / "heldout.jsonl"
    held_out.write_text("".join((job.TINY / "heldout.jsonl").read_text().splitlines(keepends=True)[:12]))
    args = ["--algorithm", "grpo", *job.SMALL, "--updates", "2", "--optimizer", "adam", "--eval-data", str(held_out)]
    code, output = job.run(*args, "--output", str(folder / "run"))
    assert code == 0, output
    return folder / "run", output, args


def test_two_updates_leave_the_record_that_the_design_names(grpo):
    run, output, _ = grpo
    metrics = job.rows(run / "metrics.jsonl")
    assert [m["update"] for m in metrics] == [0, 1]
    assert [m["policy_version"] for m in metrics] == [1, 2]
    for m in metrics:
        assert m["max_logprob_error"] <= 1e-5
        assert {"reward_mean", "loss", "grad_norm", "entropy", "kl_rollout", "clip_fraction"} <= set(m)
        seconds = m["seconds"]
        assert set(seconds) == {"publish", "rollout", "grade", "train", "checkpoint", "evaluate", "total"}
        assert sum(seconds.values()) - seconds["total"] <= seconds["total"]
    assert {"before", "after"} == set(metrics[0]["eval"]) | set(metrics[1]["eval"])
    for update in (0, 1):
        completions = job.rows(run / "rollouts" / f"{update:06d}.jsonl")
        assert [c["sample"] for c in completions] == list(range(16))
        assert [c["group"] for c in completions] == [i // 4 for i in range(16)]
        for c in completions:
            assert len(c["response_tokens"]) == len(c["log_probs"]) > 0
            assert c["trace"]["policy_version"] == update + 1 and c["trace"]["loops"] == 2
            assert c["finish_reason"] in ("stop", "length")
    commits = job.rows(run / "publications" / "commits.jsonl")
    assert [c["version"] for c in commits] == [1, 2, 3]
    assert len({c["digest"] for c in commits}) == 3, "an update that moved nothing"
    state = checkpoint.verify_checkpoint(run, 2)
    assert state["policy_digest"] == commits[-1]["digest"] and state["cursor"] == 8
    assert output.splitlines()[-1].startswith("held-out accuracy: ")
    assert (run / "reward.png").stat().st_size > 1000


def test_a_run_is_consistent_with_itself(grpo):
    code, output = job.audit(grpo[0])
    assert code == 0, output


def test_a_finished_run_says_so_and_an_existing_run_is_not_overwritten(grpo):
    run, _, args = grpo
    code, output = job.run("--resume", "--output", str(run))
    assert code == 0 and "finished" in output
    code, output = job.run(*args, "--output", str(run))
    assert code == 2 and "already holds a run" in output


def test_resume_refuses_changed_settings_and_names_both_values(grpo):
    run, _, args = grpo
    code, output = job.run(*args, "--output", str(run), "--resume", "--lr", "5e-4", "--updates", "9")
    assert code == 2 and "lr" in output and "0.001" in output and "0.0005" in output and "updates" in output


def test_neither_evaluation_nor_a_trace_changes_a_rollout_or_a_parameter(grpo, tmp_path):
    run, _, args = grpo
    bare = args[: args.index("--eval-data")]
    code, output = job.run(*bare, "--output", str(tmp_path / "bare"), "--profile", "2")
    assert code == 0, output
    for update in (0, 1):
        a, b = (job.rows(r / "rollouts" / f"{update:06d}.jsonl") for r in (run, tmp_path / "bare"))
        assert a == b
    assert checkpoint.read_state(run, 2)["tensors"] == checkpoint.read_state(tmp_path / "bare", 2)["tensors"]
    for name, operator in (("trainer-0", "aten::mm"), ("engine-0", "_C::fused_add_rms_norm")):
        with gzip.open(tmp_path / "bare" / "profile" / f"{name}.json.gz") as trace:
            assert operator in {event.get("name") for event in json.load(trace)["traceEvents"]}


FLIP = """
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "algorithms":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            inner = module.ppo_loss

            def ppo_loss(*args):
                loss, metrics = inner(*args)
                return -loss, metrics

            module.ppo_loss = ppo_loss

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def test_replacing_a_loss_of_algorithms_changes_the_run(grpo, tmp_path):
    """The trainer has no loss of its own: a child in which `algorithms.ppo_loss` is another function trains otherwise."""
    run, _, args = grpo
    seam = tmp_path / "seam"
    seam.mkdir()
    (seam / "sitecustomize.py").write_text(FLIP)  # Ray's workers inherit the path, and import it at their start
    bare = args[: args.index("--eval-data")]
    code, output = job.run(*bare, "--output", str(tmp_path / "run"), PYTHONPATH=f"{seam}{os.pathsep}{job.ROOT}")
    assert code == 0, output
    first, other = (job.rows(r / "metrics.jsonl")[0] for r in (run, tmp_path / "run"))
    assert first["grad_norm"] == pytest.approx(other["grad_norm"]) and first["grad_norm"] > 0
    assert checkpoint.read_state(run, 2)["policy_digest"] != checkpoint.read_state(tmp_path / "run", 2)["policy_digest"]


def test_ctrl_c_finishes_the_update_saves_and_says_how_to_resume(tmp_path):
    run = tmp_path / "run"
    process = job.start("--algorithm", "grpo", *job.SMALL, "--updates", "500", "--output", str(run))
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "--resume --output" in output
    done = len(job.rows(run / "metrics.jsonl"))
    assert checkpoint.newest_checkpoint(run, print)[0] == done
    assert job.audit(run)[0] == 0


BAD = {
    "no data": (["--data", "missing.jsonl"], "missing.jsonl"),
    "no model": (["--model", "missing"], "missing"),
    "one completion": (["--n-samples-per-prompt", "1"], "--n-samples-per-prompt"),
    "setting of another algorithm": (["--kl-budget", "0.1"], "--kl-budget"),
    "temperature": (["--temperature", "0"], "--temperature"),
    "stop beyond the end": (["--stop-after", "7"], "--stop-after"),
    "environment": (["--train-env-vars", "[1]"], "--train-env-vars"),
    "reward": (["--reward", "nothing.py:f"], "nothing.py"),
    "long prompt": (["--max-prompt-len", "3"], "train.jsonl:1"),
    "odd halves": (["--algorithm", "flow-dppo", "--rollout-batch-size", "3"], "even"),
    "unknown option": (["--learning-rate", "1"], "--learning-rate"),
    "not a number": (["--lr", "nan"], "--lr"),
    "no chat template": (["--apply-chat-template"], "--apply-chat-template: the model folder holds no chat template"),
    "arguments of no template": (["--chat-template-args", '{"a": 1}'], "--chat-template-args needs"),
    "no such field": (["--label-key", "answer"], 'train.jsonl:1: "answer" is missing'),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_exit_code_2_and_no_run_directory(case, tmp_path):
    extra, named = BAD[case]
    code, output = job.run(*job.SMALL, "--output", str(tmp_path / "run"), *extra, timeout=60)
    assert code == 2, output
    assert named in output.splitlines()[-1] and "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_a_config_file_gives_settings_and_the_command_line_wins(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('algorithm = "ppo"\nlr = 1\nmax-prompt-len = 32\n[train_env_vars]\nA = "b"\n')
    values, given = command.parse(["--config", str(file), "--lr", "0.5"])
    assert values == {"algorithm": "ppo", "lr": 0.5, "max_prompt_len": 32, "train_env_vars": '{"A": "b"}'}
    assert given == set(values)


def test_the_record_of_a_run_can_be_given_back_as_its_config(grpo):
    record = json.loads((grpo[0] / "run.json").read_text())
    values, given = command.parse(["--config", str(grpo[0] / "run.json"), "--output", "elsewhere"])
    again = command.resolve(values, given)
    assert dataclasses.asdict(again) == {**record["recipe"], "output": "elsewhere", "resume": False, "dry_run": False}


@pytest.mark.parametrize("columns, bar", [(150, True), (0, False)])
def test_progress_is_a_bar_in_a_terminal_and_lines_in_one_without_width(columns, bar, tmp_path, monkeypatch, capsys):
    small = ["--model", "m", "--data", "d", "--output", str(tmp_path)]
    recipe = command.resolve(*command.parse(small))
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        show = command.Progress(recipe, 0)
        seconds = {"train": 1.0, "total": 1.0}
        show.update({"update": 0, "reward_mean": 0.5, "loss": 0.0, "max_logprob_error": 0.0, "seconds": seconds})
        show.close()
        shown = os.read(screen, 4096).decode() if bar else ""
    os.close(screen)
    assert ("1/3" in shown and "reward 0.500" in shown) == bar
    assert ("update 1/3: reward 0.500" in capsys.readouterr().out) != bar


def test_epochs_give_the_updates_that_take_each_prompt_as_often_and_only_one_of_the_two_counts(tmp_path):
    small = ["--model", "m", "--data", "d", "--output", "o", "--rollout-batch-size", "8"]

    def updates(*words, prompts):
        return command.with_updates(command.resolve(*command.parse([*small, *words])), prompts).updates

    assert updates("--epochs", "2", prompts=4200) == 1050 and updates("--epochs", "1", prompts=9) == 2
    assert updates("--epochs", "0.8", prompts=30) == 3 and updates(prompts=30) == 3
    file = tmp_path / "recipe.toml"
    file.write_text("epochs = 2\n")
    assert updates("--config", str(file), prompts=8) == 2 and updates("--config", str(file), "--updates", "9", prompts=8) == 9
    file.write_text("epochs = 2\nupdates = 5\n")
    for words in (["--config", str(file)], ["--epochs", "1", "--updates", "4"]):
        with pytest.raises(ValueError, match="--epochs and --updates"):
            updates(*words, prompts=8)
    for words in (["--epochs", "0"], ["--epochs", "nan"], ["--epochs", "1e5"], ["--epochs", "1", "--stop-after", "3"]):
        with pytest.raises(ValueError, match="--epochs"):
            updates(*words, prompts=10**7 if "1e5" in words else 16)


@pytest.mark.parametrize("text", ["lr = 'x'", "updates = 1.5", "colocate = 1", "learning_rate = 1", "algorithm = 'a2c'", "= 1"])
def test_a_config_file_with_a_mistake_is_refused_by_name(text, tmp_path):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ValueError, match="bad.toml: "):
        command.parse(["--config", str(tmp_path / "bad.toml")])


def test_a_dry_run_prints_what_the_run_needs_and_makes_nothing(tmp_path):
    data = ["--max-prompt-len", "14", "--drop-long-prompts", "--max-prompts", "900", "--shuffle", "--epochs", "2"]
    code, output = job.run(*job.SMALL, *data, "--output", str(tmp_path / "run"), "--dry-run", timeout=60)
    assert code == 0 and "678,784 parameters" in output
    assert "900 prompts of 7 to 14 tokens; 2 times through in 450 updates" in output
    assert "prompts above 14 tokens are dropped, the first " in output
    assert not (tmp_path / "run").exists()


def test_the_readme_names_every_option():
    readme = (job.ROOT / "README.md").read_text()
    for field in dataclasses.fields(command.Recipe):
        assert f"| `--{field.name.replace('_', '-')}` |" in readme


def test_prompts_whose_completions_are_all_alike_are_counted_and_said_once(monkeypatch, tmp_path):
    import collections

    import watch

    grade = collections.namedtuple("grade", "reward limit")
    rewards = iter([1.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5])
    grader = collections.namedtuple("grader", "grade")(lambda rows: [grade(next(rewards), None) for _ in rows])
    inputs = collections.namedtuple("inputs", "tokenizer")(None)
    monkeypatch.setattr("data.decode", lambda tokenizer, tokens: "")

    def graded():
        rows = [{"group": i // 2, "prompt": "", "label": "", "response_tokens": []} for i in range(4)]
        return command.grade(grader, inputs, rows)["frac_reward_zero_std"]

    assert (graded(), graded()) == (0.5, 1.0)
    monkeypatch.setattr(watch, "open_watchers", lambda *_: (lambda row: None, lambda: None))
    r = command.resolve({"model": "m", "data": "d", "output": str(tmp_path)}, set())
    show, said = command.Progress(r, 0), []
    monkeypatch.setattr(show, "say", said.append)
    row = {"update": 2, "reward_mean": 1.0, "loss": 0.0, "max_logprob_error": 0.0, "seconds": {"total": 1.0}}
    for share in (0.5, 1.0, 1.0):
        show.update({**row, "frac_reward_zero_std": share})
    assert len(said) == 1 and said[0].startswith("update 3: the completions of each prompt all have the same reward")


EVERY = {
    "loss", "entropy", "grad_norm", "kl_rollout", "reward_mean", "reward_std", "response_tokens_mean", "truncated_fraction",
    "max_logprob_error", "mean_logprob_error", "grader_limits", "seconds",
}  # fmt: skip
CRITIC = {"value_loss", "explained_variance", "critic_grad_norm"}
OWN = {
    "grpo": {"clip_fraction"},
    "ppo": {"clip_fraction", *CRITIC},
    "dppo": {"clip_fraction", "correction_clip_fraction", *CRITIC},
    "flow-dppo": {"categorical_kl", "blocked_fraction", "loss_steps", "grad_norm_steps", *CRITIC},
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", OWN)
def test_each_algorithm_reports_its_own_metrics(algorithm, tmp_path):
    code, output = job.run("--algorithm", algorithm, *job.SMALL, "--updates", "1", "--output", str(tmp_path / "run"))
    assert code == 0, output
    (row,) = job.rows(tmp_path / "run" / "metrics.jsonl")
    assert EVERY | OWN[algorithm] <= set(row)
    known = (job.ROOT / "docs" / "algorithms.md").read_text()
    named = {name.removesuffix("_steps") for name in row} - {"update", "policy_version", "grader_limits", "seconds"}
    assert not {name for name in named if f"`{name}`" not in known}


@pytest.mark.slow
def test_engines_of_two_ranks_give_what_the_trainer_scores(tmp_path):
    """Two engines of two processes each, which share every layer."""
    ranks = ["--rollout-gpus", "4", "--rollout-tensor-parallel-size", "2", "--placement", "spread"]
    code, output = job.run(*job.SMALL, *ranks, "--updates", "2", "--output", str(tmp_path / "run"), timeout=500)
    assert code == 0 and "the trainer and 2 engines" in output, output
    assert all(row["max_logprob_error"] <= 1e-5 for row in job.rows(tmp_path / "run" / "metrics.jsonl"))
    assert job.audit(tmp_path / "run")[0] == 0
    engine = checkpoint.read_run(tmp_path / "run")["facts"]["engine"]
    assert (engine["engines"], engine["ranks"]) == (2, 2)


@pytest.mark.parametrize(
    "gpus,settings,line",
    [
        (0, {}, "auto: no GPU here, so the CPU"),
        (0, {"colocate": True}, "auto: no GPU here, so the CPU; --colocate is about GPUs and changes nothing"),
        (0, {"device": "cuda"}, "cuda: no GPU here; this run needs 2 and cannot start on this machine (--device cpu needs none)"),
        (1, {}, "auto: 1 GPU here, so cuda; this run needs 2 and cannot start on this machine (--colocate shares one)"),
        (1, {"colocate": True}, "auto: 1 GPU here, so cuda"),
        (1, {"device": "cpu"}, "cpu"),
        (8, {"train_gpus": 4, "rollout_gpus": 4}, "auto: 8 GPUs here, so cuda"),
        (0, {"ray_address": "HOST:1"}, "auto: GPUs where the cluster has some"),
    ],
)
def test_a_dry_run_says_what_the_device_will_be_and_what_is_lacking(gpus, settings, line, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert plan._device(command.Recipe(algorithm="grpo", model="m", data="d", output="o", **settings)) == line


def test_too_few_resources_is_an_error_within_seconds_that_says_what_is_needed(tmp_path):
    began = time.monotonic()
    code, output = job.run(*job.SMALL, "--output", str(tmp_path / "run"), "--device", "cuda", timeout=60)
    assert code == 2 and "GPU" in output and not (tmp_path / "run").exists()
    assert "the cluster has 0 GPU" not in output or output.rstrip().endswith("--device cpu runs without a GPU"), output
    assert time.monotonic() - began < 60
