"""Held-out evaluation: the run's own numbers again, the estimator, the table, and that upstream vLLM serves an export."""

import itertools
import json
import os
import subprocess
import sys

import job
import pytest
from test_export import content, made_run, tiny_run

import checkpoint
import data
import evaluate
import export
import rollout

# One process for everything that needs vLLM: the export in vLLM's own loader, before anything of this project is imported
# but by vLLM's plugin; then the run, and the model that it began with.
CHILD = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
run, held_out, model, folder = sys.argv[1:]
llm = LLM(f"{folder}/out", dtype="float32", max_model_len=64, enforce_eager=True)
prompts = [json.loads(line)["prompt"] for line in open(held_out)]
tokens = llm.get_tokenizer()(prompts, add_special_tokens=False)["input_ids"]
answers = llm.generate([{"prompt_token_ids": t} for t in tokens], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
json.dump([list(answer.outputs[0].token_ids) for answer in answers], open(f"{folder}/vllm.json", "w"))
llm.llm_engine.engine_core.shutdown()
del llm
cleanup_dist_env_and_memory()

import evaluate, export
command = lambda *args: export.exit_code("evaluate.py", evaluate.main, list(args)) and sys.exit(1)
command("--run", run, "--json", f"{folder}/run.json", "--completions", f"{folder}/run.jsonl")
command("--model", model, "--data", held_out, "--max-response-len", "12", "--json", f"{folder}/model.json")
"""


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """(run, its files before, folder with what CHILD wrote, its output)."""
    run, held_out = tiny_run(tmp_path_factory)
    folder = tmp_path_factory.mktemp("evaluated")
    policy = export.find_policy(run, None, None, print)
    export.export(policy, folder / "out", "fp32", 1_000_000, print)
    before = content(run)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(run), str(held_out), str(job.TINY / "model"), str(folder)],
        cwd=job.ROOT, env=job.environment(OMP_NUM_THREADS="1", **rollout.engine_environment(rollout.EngineSettings())),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return run, before, folder, done.stdout


def test_a_finished_run_gives_its_own_held_out_accuracy_exactly(evaluated):
    run, _, folder, output = evaluated
    own = job.rows(run / "metrics.jsonl")[-1]["eval"]["after"]
    again = json.loads((folder / "run.json").read_text())
    assert {key: again[key] for key in own} == own
    assert 0 < own["accuracy"] < 1, "an accuracy that tells nothing"
    commit = checkpoint.read_commits(run)[-1]
    assert (again["policy_version"], again["policy_digest"]) == (commit["version"], commit["digest"])
    assert f"version 3 committed, digest {commit['digest']}" in output


def test_the_model_that_a_run_began_with_gives_its_accuracy_before(evaluated):
    run, _, folder, _ = evaluated
    own = job.rows(run / "metrics.jsonl")[0]["eval"]["before"]
    again = json.loads((folder / "model.json").read_text())
    assert {key: again[key] for key in own} == own
    assert again["policy_digest"] == checkpoint.read_commits(run)[0]["digest"]


def test_evaluation_writes_nothing_to_the_run(evaluated):
    run, before, _, _ = evaluated
    assert content(run) == before


def test_completions_carry_trace_source_and_reward(evaluated):
    _, _, folder, _ = evaluated
    result = json.loads((folder / "run.json").read_text())
    completions = job.rows(folder / "run.jsonl")
    assert len(completions) == 12 * 5 and {c["trace"]["digest"] for c in completions} == {result["policy_digest"]}
    greedy = [c["reward"] for c in completions if c["sample"] == "greedy"]
    assert result["greedy"] == sum(greedy) / 12
    by_source = {c["source"] for c in completions}
    assert set(result["sources"]) == by_source and len(by_source) > 1
    assert sum(part["rows"] for part in result["sources"].values()) == 12
    assert result["pass_at"]["1"] == pytest.approx(result["accuracy"]) and result["pass_at"]["4"] >= result["pass_at"]["2"]


def test_upstream_vllm_loads_the_export_and_answers_as_the_run_did(evaluated):
    _, _, folder, _ = evaluated
    found = json.loads((folder / "vllm.json").read_text())
    greedy = [c["response_tokens"] for c in job.rows(folder / "run.jsonl") if c["sample"] == "greedy"]
    assert found == greedy


# --- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_correct_sample(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        assert evaluate.pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    assert evaluate.pass_at_k(1000, 1, 500) == pytest.approx(0.5)
    for bad in ((4, 5, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError):
            evaluate.pass_at_k(*bad)


def row(*rewards, tokens=3, reason="stop"):
    return [{"reward": r, "response_tokens": [1] * tokens, "finish_reason": reason} for r in rewards]


def test_the_figures_are_means_over_rows_with_the_greedy_answer_apart():
    rows = [row(1.0, 0.0, 0.0, 1.0), row(0.0, 0.0, 0.0, 0.0, tokens=5, reason="length")]
    found = evaluate.figures(rows, 3, 1.0)
    assert (found["rows"], found["greedy"], found["tokens"], found["truncated"]) == (2, 0.5, 4.0, 0.5)
    assert found["accuracy"] == pytest.approx(1 / 6) and found["standard_error"] == pytest.approx(1 / 6)
    assert found["pass_at"] == pytest.approx({"1": 1 / 6, "2": 1 / 3, "3": 1 / 2})
    partial = [row(0.5, 0.7, 0.7)]
    assert evaluate.figures(partial, 2, 0.6)["pass_at"] == {"1": 0.5, "2": 1.0}
    assert evaluate.figures(partial, 2, 1.0)["pass_at"] == {"1": 0.0, "2": 0.0}
    assert evaluate.figures([row(1.0)], 0, 1.0)["greedy"] == 1.0


def test_the_table_has_one_line_a_source_and_no_raw_control_characters():
    found = evaluate.figures([row(1.0, 1.0)], 1, 1.0)
    text = evaluate.table({"all": found, "  \x1b[31m\u202e": found})
    assert len(text.split("\n")) == 3 and len({len(line) for line in text.split("\n")}) == 1
    assert all(" " <= c <= "~" or c in "±\n" for c in text)
    assert "pass@" not in evaluate.table({"all": evaluate.figures([row(1.0)], 0, 1.0)})


def test_rows_are_broken_down_by_source_and_many_sources_are_counted_together():
    rows = [row(1.0, 1.0), row(0.0, 0.0), row(1.0, 0.0)]
    found = evaluate.breakdown(rows, ["a", "b", None], 1, 1.0)
    assert found["rows"] == 3 and list(found["sources"]) == ["(none)", "a", "b"]
    assert found["sources"]["a"] == evaluate.figures(rows[:1], 1, 1.0)
    assert evaluate.breakdown(rows, [None] * 3, 1, 1.0)["sources"] == {}
    many = evaluate.breakdown(rows * 200, [str(i // 2) for i in range(600)], 1, 1.0)["sources"]
    assert len(many) == evaluate.MOST_SOURCES + 1 and many["(other)"]["rows"] == 600 - 2 * evaluate.MOST_SOURCES


def test_the_data_options_of_a_run_are_the_evaluations_unless_given(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    recipe = {"input_key": "question", "apply_chat_template": True, "chat_template_args": '{"a": 1}', "drop_long_prompts": True,
              "max_prompt_len": 9, "label_as_string": True}  # fmt: skip
    policy = type("Policy", (), {"recipe": recipe})
    asked = evaluate.parse(["--run", "RUN", "--data", str(file)])
    evaluate.settle(asked, policy, {})
    assert {name: getattr(asked, name) for name in recipe} == recipe and asked.label_key == "label"
    words = ["--no-apply-chat-template", "--chat-template-args", "{}", "--input-key", "q", "--no-drop-long-prompts"]
    asked = evaluate.parse(["--run", "RUN", "--data", str(file), *words])
    evaluate.settle(asked, policy, {})
    assert not asked.apply_chat_template and asked.input_key == "q" and asked.max_prompt_len is None
    for words, name in (
        (["--chat-template-args", '{"a": 1}'], "--chat-template-args needs --apply-chat-template"),
        (["--chat-template-args", "x"], "--chat-template-args is not JSON"),
        (["--max-prompts", "-1"], "--max-prompts"),
        (["--max-prompt-len", "0"], "--max-prompt-len"),
        (["--label-key", ""], "--label-key"),
    ):
        asked = evaluate.parse(["--model", "DIR", "--data", str(file), *words])
        with pytest.raises(ValueError, match=name):
            evaluate.settle(asked, None, {})


def test_what_libraries_print_is_kept_from_the_screen_and_shown_where_they_fail(capfd):
    def noise():  # past Python's streams, of which pytest has put its own in place
        os.write(1, b"out\n")
        os.write(2, b"C++\n")

    with evaluate.quiet():
        noise()
    with pytest.raises(ValueError), evaluate.quiet():
        noise()
        raise ValueError("bad input")
    print("after")
    assert capfd.readouterr() == ("after\n", "")
    with pytest.raises(RuntimeError), evaluate.quiet():
        noise()
        raise RuntimeError
    assert capfd.readouterr() == ("", "out\nC++\n")


def test_nothing_is_generated_before_the_commit_and_a_wrong_digest_stops(tmp_path):
    """The order in which the engine is asked, with an engine that holds another tensor than was sent."""
    asked = []

    class Engine:
        def pause(self):
            asked.append("pause")

        def start(self, version):
            asked.append(f"start {version}")

        def receive(self, tensors):
            asked.append(f"receive {len(list(tensors))}")

        def finish(self, version, digest):
            asked.append(f"finish {version} {digest}")

    made = made_run(tmp_path / "run")[1]
    policy = export.find_policy(tmp_path / "run", None, None, print)
    evaluate.publish(Engine(), 2, export.policy_tensors(policy, "fp32"))
    assert asked == ["pause", "start 2", f"receive {len(made)}", f"finish 2 {checkpoint.digest_of(made)}"]
    made_run(tmp_path / "other", digest="0" * 64)
    policy = export.find_policy(tmp_path / "other", None, None, print)
    with pytest.raises(checkpoint.GuardError, match="0000"):
        evaluate.publish(Engine(), 2, export.policy_tensors(policy, "fp32"))
    assert not asked[-1].startswith("finish")


def test_requests_are_those_of_the_runs_evaluation():
    prompt = type("Prompt", (), {"tokens": (5, 6)})
    found = evaluate.requests([prompt, prompt], 2, 0.7, 9, 42, 3)
    assert [r["temperature"] for r in found] == [0.7, 0.7, 0.0] * 2
    assert [r["seed"] for r in found] == [rollout.completion_seed(42, 3, i, purpose="eval") for i in range(6)]
    assert all(r["prompt_tokens"] == [5, 6] and r["max_tokens"] == 9 for r in found)


# --- bad input -------------------------------------------------------------------------------------------------------


def test_bad_input_is_one_line_with_exit_code_2(tmp_path, capsys, monkeypatch):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", *rollout.engine_environment(rollout.EngineSettings(device="cuda"))):
        monkeypatch.setenv(name, "1")  # so that what main sets is undone
    made_run(tmp_path / "run")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    model, run, held_out = str(job.TINY / "model"), str(tmp_path / "run"), str(job.TINY / "heldout.jsonl")
    cases = [
        ([], "--run RUN or --model DIR"),
        (["--model", model], "--data FILE is missing"),
        (["--run", run], "--data FILE is missing"),
        (["--model", str(tmp_path / "no"), "--data", held_out], "config.json"),
        (["--run", str(tmp_path / "no"), "--data", held_out], "not a run directory"),
        (["--run", run, "--data", held_out, "--updates", "9"], "no checkpoint after 9 updates"),
        (["--model", model, "--data", held_out, "--updates", "1"], "--updates"),
        (["--model", model, "--data", str(empty)], "no rows"),
        (["--model", model, "--data", held_out, "--samples", "-1"], "--samples"),
        (["--model", model, "--data", held_out, "--temperature", "0"], "--temperature"),
        (["--model", model, "--data", held_out, "--max-response-len", "2048"], "--max-response-len"),
        (["--model", model, "--data", held_out, "--reward", "nothing"], "--reward"),
        (["--model", model, "--data", held_out, "--json", str(tmp_path / "no" / "a.json")], "no such directory"),
    ]
    for args, words in cases:
        code = export.exit_code("evaluate.py", evaluate.main, args)
        err = capsys.readouterr().err
        assert code == 2 and err.startswith("evaluate.py: error: ") and err.count("\n") == 1 and words in err, (args, err)


def test_held_out_rows_that_changed_since_the_run_are_refused_unless_named(tmp_path):
    file = tmp_path / "heldout.jsonl"
    file.write_text("{}\n")
    policy = export.Policy(tmp_path, {"eval_data": str(file)}, 1, {}, tmp_path, None, "fp32", True)
    asked = evaluate.parse(["--run", "RUN"])
    with pytest.raises(ValueError, match="not the file that the run was evaluated on"):
        evaluate.settle(asked, policy, {"contents": {"eval_data": "0" * 64}})
    evaluate.settle(asked, policy, {"contents": {"eval_data": data.file_digest(file)}})
    assert asked.data == str(file) and asked.samples == 4
    named = evaluate.parse(["--run", "RUN", "--data", str(file), "--samples", "0"])
    evaluate.settle(named, policy, {"contents": {"eval_data": "0" * 64}})
    assert named.samples == 0


def test_a_reward_file_that_changed_since_the_run_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, response, label): return 1.0\n")
    from reward import reward_source

    spec = f"{file}:score"
    digest = reward_source(spec)[1]
    for recorded in (digest, f"{digest}:score"):
        evaluate.check_reward(spec, {"contents": {"reward": recorded}})
        with pytest.raises(ValueError, match="not the reward file"):
            evaluate.check_reward(spec, {"contents": {"reward": recorded.replace(digest, "0" * 64)}})
