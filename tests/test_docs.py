"""What the pages say is so: the option table, quoted messages, formulas and defaults, names, and the recipes under examples/."""

import ast
import dataclasses
import doctest
import functools
import re
import resource
import subprocess
import sys
import tomllib

import job
import pytest

import data
import plan
import provider
import run as command
import trainer

README = (job.ROOT / "README.md").read_text(encoding="utf-8")
ALGORITHMS = job.ROOT / "docs" / "algorithms.md"
ANOTHER = (job.ROOT / "docs" / "another-model.md").read_text(encoding="utf-8")
RECIPES = sorted((job.ROOT / "examples" / "recipes").glob("*.toml"))
MODULES = tomllib.loads((job.ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["py-modules"]


# --- README ----------------------------------------------------------------------------------------------------------


def test_the_option_table_says_what_help_says():
    for field in dataclasses.fields(command.Recipe):
        shown = "on" if field.default is True else "" if field.default in (None, 0, "{}") else f"`{field.default}`"
        assert f"| `--{field.name.replace('_', '-')}` | {shown} | {field.metadata['help']} |" in README


@functools.cache
def templates() -> list[re.Pattern]:
    """Every text in the program that holds words, as a pattern with a group for each value that is put into it."""
    found = set()
    for name in MODULES:
        for node in ast.walk(ast.parse((job.ROOT / f"{name}.py").read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else None for p in parts]
            if sum(len(re.findall("[a-zA-Z]{3,}", text or "")) for text in texts) >= 2:
                found.add("".join("(.*?)" if text is None else re.escape(text) for text in texts))
    return [re.compile(pattern, re.DOTALL) for pattern in found]


def printable(message: str) -> bool:
    """Whether the program can print it: a text of its own, with values of a few words, or with other such texts, within."""

    def value(text: str) -> bool:
        few = len(text.split()) <= 5  # "No space left on device"
        return few or any(len(text[:at].split()) <= 5 and printable(text[at:]) for at in range(len(text)))

    return any((whole := pattern.fullmatch(message)) and all(map(value, whole.groups(""))) for pattern in templates())


QUOTED = re.findall(r"^\| `(.+?)` \| [^|]+ \| [^|]+ \|$", README.partition("## When something goes wrong")[2], re.MULTILINE)


@pytest.mark.parametrize("message", QUOTED, ids=range(len(QUOTED)))
def test_each_message_in_the_troubleshooting_table_is_one_that_the_program_prints(message):
    plain = re.sub(r"^\[Errno \d+\] (.*): '.*'$", r"\1", message)  # as Python shows an OSError
    plain = re.sub(r"\[[\d, ]+\]$", "[]", plain)
    assert printable(plain)
    words = re.findall("[a-z]{4,}", plain)
    for word in words[:: max(1, len(words) // 3)]:
        if plain.count(word) == 1 and not printable(changed := plain.replace(word, f"{word} and quite other words")):
            break
    else:
        raise AssertionError(f"any text would pass: {changed}")


def test_messages_are_quoted_at_all():
    assert len(QUOTED) >= 15 and not printable("the flux capacitor is not charged enough for this run")


def test_help_comes_within_0_3_seconds():
    """Of the processor: others may be at work beside it. torch, Ray or Transformers alone would take a second."""
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "run.py", "--help"], cwd=job.ROOT, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.3


@pytest.mark.parametrize(
    "line, expected",
    [
        ("run.py --algorithm ", set(command.ALGORITHMS)),
        ("run.py --max-pr", {"--max-prompts", "--max-prompt-len"}),
        ("evaluate.py --drop", {"--drop-long-prompts"}),
    ],
)
def test_the_shell_is_told_options_and_choices(line, expected, tmp_path):
    """As argcomplete's shell function asks: the line in the environment, the answers through a file."""
    script, answers = line.split()[0], tmp_path / "answers"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(answers)}
    environment = job.environment(**asked, _ARGCOMPLETE_IFS="\n")
    done = subprocess.run([sys.executable, script], cwd=job.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert {answer.strip() for answer in answers.read_text().split("\n")} == expected
    assert "PYTHON_ARGCOMPLETE_OK" in (job.ROOT / script).read_text()[:1024]


# --- docs/ -----------------------------------------------------------------------------------------------------------


def test_the_examples_of_the_algorithms_page_give_what_it_says():
    failed, attempted = doctest.testfile(str(ALGORITHMS), module_relative=False)
    assert failed == 0 and attempted >= 16


def test_the_defaults_of_the_algorithms_page_are_those_of_the_code():
    text = ALGORITHMS.read_text(encoding="utf-8")
    lines = [line for line in text.partition("## 7.")[2].splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    said = {row[0]: dict(zip(("ppo", "grpo", "dppo", "flow-dppo"), row[1:], strict=True)) for row in table[2:]}
    for algorithm in command.ALGORITHMS:
        words = ["--algorithm", algorithm, "--model", "m", "--data", "d", "--output", "o"]
        r = command.resolve(*command.parse(words))
        settings = trainer.TrainerSettings(model="m", algorithm=algorithm)
        assert said["completions a prompt"][algorithm] == str(r.n_samples_per_prompt)
        assert said["optimizer steps an update"][algorithm] == str(settings.steps)
        assert said["`--kl-budget`"][algorithm] == ("" if r.kl_budget is None else str(r.kl_budget))
        assert said["critic"][algorithm] == ("yes" if settings.has_critic else "no")
        if said["`--clip`"][algorithm]:
            assert said["`--clip`"][algorithm] == str(r.clip)
    assert (settings.gamma, settings.lam, settings.value_clip) == (1.0, 0.95, 0.2)
    assert (settings.correction_low, settings.correction_high) == (0.5, 2.0)
    for name, value in (("temperature", 0.8), ("clip-grad", 1.0)):
        assert f"`--{name}` {value}" in text and getattr(r, name.replace("-", "_")) == value
    assert (r.optimizer, r.lr) == ("sgd", 1e-5) and "`--optimizer sgd` at `--lr` 1e-5" in text


def test_the_tables_of_the_scaling_page_are_what_the_model_of_time_and_memory_says(monkeypatch):
    monkeypatch.syspath_prepend(job.ROOT / "benchmarks")
    import predict

    text = predict.DOC.read_text(encoding="utf-8")
    assert predict.filled(text) == text, "python benchmarks/predict.py --write"
    for source in predict.EVIDENCE:
        for row in source():
            off = abs(row.predicted / row.measured - 1)
            assert off > 0.25 if row.missed else off < (0.03 if row.calibrates else 0.25), row
        assert list(source()), source
    assert sum(bool(row.missed) for source in predict.EVIDENCE for row in source()) == 5, "the page tells of five"


def test_the_names_on_the_page_of_another_model_are_in_the_code():
    sources = {name: (job.ROOT / name).read_text() for name in ("provider.py", "vllm_nanbeige.py")}
    defined = {name: set(re.findall(r"^ *(?:def|class) (\w+)", text, re.MULTILINE)) for name, text in sources.items()}
    parts = dict(zip(sources, re.split(r"\n## ", ANOTHER)[2:4], strict=True))
    for name, part in parts.items():
        table = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
        named = {word for cell in table for word in re.findall(r"`(\w+)", cell)} - {"Attention"}
        assert len(named) >= 4 and named <= defined[name], named - defined[name]
    fields = set(re.findall(r"`(\w+)`", re.search(r"Of the config, code outside.*?\n\n", ANOTHER, re.DOTALL)[0]))
    assert fields < {field.name for field in dataclasses.fields(provider.NanbeigeConfig)}
    others = set(MODULES) - {"provider", "vllm_nanbeige", "megatron_cpu"}
    outside = "".join((job.ROOT / f"{name}.py").read_text() for name in others)
    read = set(re.findall(r"\b(?:config|c)\.(\w+)", outside)) & {f.name for f in dataclasses.fields(provider.NanbeigeConfig)}
    assert read == fields
    for path in re.findall(r"`((?:tests|benchmarks|examples)/[\w/.]+)`", ANOTHER):
        assert (job.ROOT / path).is_file(), path
    assert "native_tensors" in (job.ROOT / "export.py").read_text() and "_STORED" in (job.ROOT / "audit.py").read_text()


# --- examples/recipes ------------------------------------------------------------------------------------------------


def settled(path):
    """The recipe as `run.py --config` takes it; model and data are the command line's where the file has none."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    more = [word for name in ("model", "data") if name not in raw for word in (f"--{name}", name)]
    return command.resolve(*command.parse(["--config", str(path), *more, "--output", "RUN"]))


def test_there_is_a_recipe_for_each_algorithm_and_placement():
    names = {path.stem for path in RECIPES}
    assert {f"tiny-{a}" for a in command.ALGORITHMS} | {"h200-grpo", "h200-ppo", "two-gpus-grpo"} <= names


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_taken_and_says_what_is_computed_for_it(path):
    sys.path.insert(0, str(job.ROOT / "examples"))
    from make_checkpoint import OFFICIAL

    r, text = settled(path), path.read_text(encoding="utf-8")
    if path.stem.startswith("tiny-"):
        assert r.algorithm == path.stem.removeprefix("tiny-") and not r.colocate
    config = provider.read_config(r.model) if "model =" in text else provider.parse_config(OFFICIAL, "official")
    prompts = [data.Prompt("", "", (1,) * r.max_prompt_len)]
    for line in plan.describe(r, config, prompts, [], command.kv_cache_gib(r, config)):
        if line.split()[0] not in ("model", "data", "device"):
            assert f"#   {line}\n" in text, line
    assert f"--config examples/recipes/{path.name}" in text
    assert text.startswith("# ") and ("Measured" in text or "was not run" in text)


@pytest.mark.parametrize("algorithm", command.ALGORITHMS)
def test_a_tiny_recipe_passes_a_dry_run_and_is_the_setting_that_was_seen_to_learn(algorithm, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(job.ROOT)
    path = f"examples/recipes/tiny-{algorithm}.toml"
    assert command.main(["--config", path, "--output", str(tmp_path / "run"), "--dry-run"]) == 0
    assert "model, data, reward and settings are in order" in capsys.readouterr().out
    from benchmarks import learning

    words = ["--algorithm", algorithm, *learning.COMMON, *learning.SETTINGS[algorithm], "--output", "RUN"]
    seen, r = command.resolve(*command.parse(words)), settled(job.ROOT / path)
    differ = {f.name for f in dataclasses.fields(r) if getattr(r, f.name) != getattr(seen, f.name)}
    assert differ <= {"model", "data", "eval_data", "save_interval"}
