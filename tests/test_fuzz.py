"""Damaged and hostile inputs: whatever a file or an option holds, the outcome is success or one clear line.

Valid examples are mutated (bytes flipped, cut, repeated; JSON fields given other types and sizes), seeded, in this
process: no Ray, no vLLM. The number of inputs is printed at the end.
"""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import socket
import struct
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import job
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_checkpoint import ToyRun
from test_data import TOKENIZER
from test_provider import TINY

import checkpoint
import cluster
import provider
import reward
import run as command
from data import decode, file_digest, load_tokenizer, read_prompts

SEEN: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def count(request):
    yield
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        text = ", ".join(f"{name} {n}" for name, n in SEEN.items())
        plugins.get_plugin("terminalreporter").write_line(f"\n{sum(SEEN.values()):,} inputs: {text}")


@pytest.fixture(scope="module")
def folder():
    """In memory where there is such a place: hundreds of run directories are written and fsynced."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


def many(examples: int):
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


REFUSALS = (ValueError, checkpoint.GuardError, OSError)  # what `run.command` turns into a line and exit code 2 or 3


def outcome(kind: str, function, *arguments):
    """(result, None) or (None, message); any other exception, or a message of several lines, fails the test."""
    SEEN[kind] += 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*arguments), None
    except REFUSALS as error:
        assert not isinstance(error, UnicodeError), error  # a ValueError, and never a message for a user
        message = str(error)
        assert message and len(message.splitlines()) == 1, message
        return None, message


# --- mutations -------------------------------------------------------------------------------------------------------

HUGE = "1" + "0" * 400  # more than a float holds
VALUES = [
    "null", "true", "false", "0", "-1", "1", "2", "3", "0.5", "-0.0", "1e308", "1e999", "-1e999", "NaN", "Infinity", "-Infinity",
    "2147483648", "4294967296", "9223372036854775808", HUGE, "-" + HUGE, "9" * 5000, '""', '"x"', '"1"', '"\\u0000"',
    '"\\ud800"', '"a\\nb"', '"\\u202e\\u0007\\u001b[31m"', '"' + "a" * 5000 + '"', '"../x"', "[]", "{}", "[[]]", "[null]", "[1]",
    f"[{HUGE}]", "[NaN]", '{"a": 1}', '{"": null}', '{"a\\nb": 5}', "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000,
    "'", "",
]  # fmt: skip
PIECES = [b"", b"\0", b"\n", b"\r\n", b'"', b"{", b"}", b"]", b",", b"\\", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80",
          b"\x1b[2J", b"\xe2\x80\xae", b"9" * 5000, b"[" * 5000, b" " * 5000]  # fmt: skip
MARK = "\x01here\x01"


def _places(value, here=()):
    yield here
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(item, (*here, key))


@st.composite
def swapped(draw, original) -> bytes:
    """JSON with one to three fields replaced, removed, repeated or added."""
    value = json.loads(json.dumps(original))
    raw = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        path = draw(st.sampled_from(list(_places(value))))
        how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "twice"]))
        mark = f"{MARK}{len(raw)}{MARK}"
        new = draw(st.sampled_from(VALUES))
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        here = parent[path[-1]] if path else value
        if how == "twice" and path and isinstance(parent, dict):
            new = f"{new}, {json.dumps(path[-1])}: {new}"
        if how == "add" and isinstance(here, dict):
            here[draw(st.sampled_from(["x", "", "a\nb", "\u202e", "rope_theta", "emb_neighbor_num"]))] = mark
        elif how == "remove" and path:
            del parent[path[-1]]
        elif path:
            parent[path[-1]] = mark
        else:
            value = mark
        raw.append((json.dumps(mark), new))
    text = json.dumps(value)
    for mark, new in raw:
        text = text.replace(mark, new)
    return text.encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw, original: bytes, end: int | None = None) -> bytes:
    """Bytes with one to three flips, cuts, insertions or repetitions in the first `end`."""
    content = original
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        at = draw(st.integers(0, min(len(content), end or len(content))))
        size = draw(st.sampled_from([1, 1, 2, 8, 64]))
        how = draw(st.sampled_from(["flip", "flip", "cut", "insert", "remove", "repeat"]))
        if how == "flip" and at < len(content):
            content = content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
        elif how == "cut":
            content = content[:at]
        elif how == "insert":
            content = content[:at] + draw(st.sampled_from(PIECES)) + content[at:]
        elif how == "remove":
            content = content[:at] + content[at + size :]
        elif how == "repeat":
            content = content[: at + size] + content[at:]
    return content


def either(original) -> st.SearchStrategy[bytes]:
    return swapped(original) | damaged(json.dumps(original, indent=1).encode())


# --- the model's files -----------------------------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
CONFIG = provider.parse_config(TINY, "test")


@pytest.fixture(scope="module")
def model(folder):
    """A folder with a native checkpoint in two shards, and what its files hold."""
    generator = torch.Generator().manual_seed(0)
    shapes = provider.tensor_shapes(CONFIG).items()
    path = folder / "outer" / "model"
    provider.write_checkpoint(path, TINY, ((n, torch.randn(s, generator=generator)) for n, s in shapes), shards=2)
    for name in SHARDS:  # what an index that leaves the folder would find
        shutil.copy(path / name, path.parent / name)
    return path, {p.name: p.read_bytes() for p in path.iterdir()}


@contextlib.contextmanager
def holding(model, **contents: bytes):
    """The model's folder with other contents of some files, meanwhile."""
    path, originals = model
    try:
        for name, content in contents.items():
            (path / name).write_bytes(content)
        yield path
    finally:
        for name in contents:
            (path / name).write_bytes(originals[name])


@many(500)
@given(either(TINY | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "loop_loss_weights": [0.5]}))
def test_any_config_is_read_or_refused_in_one_line(model, content):
    with holding(model, **{"config.json": content}) as path:
        config, refusal = outcome("config.json", provider.read_config, path)
        if refusal:
            assert refusal.startswith(str(path / "config.json"))
        else:
            outcome("config.json accepted", provider.check_checkpoint, path, config)


def header_of(content: bytes) -> dict:
    return json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])


@many(500)
@given(st.data())
def test_any_safetensors_header_is_read_or_refused_in_one_line(model, data):
    """What is accepted reads back, with every byte of every tensor inside its file."""
    path, originals = model
    content = originals[SHARDS[0]]
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    if data.draw(st.booleans()):
        text = data.draw(swapped(header))
        size = data.draw(st.sampled_from([len(text)] * 6 + [0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1]))
        content = struct.pack("<Q", size) + text + content[8 + length :]
    else:
        content = data.draw(damaged(content, 8 + length))
    with holding(model, **{SHARDS[0]: content}):
        _, refusal = outcome("safetensors header", lambda: list(provider.read_checkpoint(path, CONFIG)))
        _, at_once = outcome("safetensors header alone", provider.check_checkpoint, path, CONFIG)
        assert not at_once or refusal == at_once
        assert not refusal or refusal.startswith(str(path))


ESCAPES = [
    f"../{SHARDS[0]}", f"./{SHARDS[0]}", f"/{SHARDS[0]}", f"a/../{SHARDS[0]}", f"..\\{SHARDS[0]}", f"C:{SHARDS[0]}",
    f"{SHARDS[0]}/", f".{SHARDS[0]}", f"{SHARDS[0]}\0", f"\0{SHARDS[0]}", "..", ".", "", "model.bin", "x" * 300 + ".safetensors",
    "\ud800.safetensors", "a\nb.safetensors", "~/x.safetensors", "file:///x.safetensors", SHARDS[0].upper(), SHARDS[0] + " ",
    SHARDS[1], "\u202e.safetensors",
]  # fmt: skip


@many(250)
@given(st.data())
def test_any_index_is_read_or_refused_and_never_leaves_the_folder(model, data):
    path, originals = model
    index = json.loads(originals[INDEX])
    if data.draw(st.booleans()):
        names = sorted(index["weight_map"])
        for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)) if data.draw(st.booleans()) else names:
            index["weight_map"][name] = data.draw(st.sampled_from(ESCAPES))
        content = json.dumps(index).encode()
    else:
        content = data.draw(either(index))
    with holding(model, **{INDEX: content}):
        places, refusal = outcome("index", provider._locate, path, CONFIG)
        assert refusal or {place.parent for place in places.values()} == {path}
        assert not refusal or refusal.startswith(str(path))


@many(150)
@given(st.data())
def test_a_weight_that_is_not_finite_is_refused_whatever_its_bytes_are(model, data):
    path, originals = model
    shard = data.draw(st.sampled_from(SHARDS))
    content = bytearray(originals[shard])
    start = 8 + struct.unpack("<Q", content[:8])[0]
    at = start + 4 * data.draw(st.integers(0, (len(content) - start) // 4 - 1))
    content[at : at + 4] = struct.pack("<I", data.draw(st.integers(0, 2**32 - 1) | st.integers(0x7F7FFFFF, 0x7F800001)))
    finite = abs(struct.unpack("<f", content[at : at + 4])[0]) < float("inf")
    with holding(model, **{shard: bytes(content)}):
        _, refusal = outcome("weights", lambda: sum(t.numel() for _, t in provider.read_checkpoint(path, CONFIG)))
        assert bool(refusal) != finite


def test_a_shape_of_a_million_numbers_is_refused_at_once(model):
    content = model[1][SHARDS[0]]
    name, header = "model.embed_tokens.weight", header_of(content)
    header[name]["shape"] = [2**62] * 1_000_000
    text = json.dumps(header).encode()
    with holding(model, **{SHARDS[0]: struct.pack("<Q", len(text)) + text}) as path:
        _, refusal = outcome("safetensors header", provider.check_checkpoint, path, CONFIG)
    assert name in refusal


# --- data ------------------------------------------------------------------------------------------------------------

ROWS = [{"prompt": "1 + 1 = ?", "label": "2", "source": {"n": [1, 2]}}, {"prompt": "zwölf", "label": "é\\boxed{12}"}]
LINE = [json.dumps(row, ensure_ascii=i == 0).encode() for i, row in enumerate(ROWS)]


@many(600)
@given(st.data())
def test_any_jsonl_is_read_or_refused_by_file_and_line(folder, data):
    ends = data.draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"\r", b"\n\n", b"\x0b", b"\xe2\x80\xa8"]))
    lines = [*LINE, data.draw(swapped(ROWS[0]) | damaged(LINE[1])), LINE[0]]
    content = ends.join(lines) + data.draw(st.sampled_from([b"", ends]))
    code = data.draw(st.sampled_from(["utf-8"] * 5 + ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "utf-7"]))
    if code != "utf-8":
        content = content.decode("utf-8", "replace").encode(code, "replace")
    read_or_refused(folder, content)


def read_or_refused(folder, content: bytes):
    (folder / "d.jsonl").write_bytes(content)
    prompts, refusal = outcome("JSONL", read_prompts, folder / "d.jsonl", TOKENIZER, 20)
    assert refusal or all(p.tokens and len(p.tokens) <= 20 for p in prompts)
    assert not refusal or refusal.startswith(f"{folder / 'd.jsonl'}:")
    return prompts, refusal


def test_rows_of_ten_megabytes_are_read_or_refused():
    with tempfile.TemporaryDirectory() as name:
        big = "1" * 10_000_000
        for row, expected in (
            ({"prompt": "1", "label": big}, None),
            ({"prompt": "1", "label": "1", "more": [big]}, None),
            ({"prompt": " " * 1_000_000, "label": big}, "encodes to no tokens"),
            ({"prompt": big[:100_000], "label": big}, "at most 20 are allowed"),
        ):
            _, refusal = read_or_refused(Path(name), json.dumps(row).encode() + b"\n")
            assert refusal is None if expected is None else expected in refusal
        for content in (b"[", b"9", b"\0", b'{"prompt":', b'"\\'):
            assert read_or_refused(Path(name), content * (10_000_000 // len(content)))[1]


def test_what_is_no_plain_file_is_refused_without_a_wait(folder):
    """A named pipe without a writer would block for ever, /dev/zero never ends."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    (folder / "loop").symlink_to(folder / "loop")
    for path in (pipe, Path("/dev/zero"), folder, folder / "loop", folder / ("x" * 300)):
        assert outcome("no plain file", read_prompts, path, TOKENIZER, 20)[1]
        assert outcome("no plain file", file_digest, path)[1]
        assert outcome("no plain file", provider._read_json, path, "it")[1]
        assert outcome("no plain file", provider._read_header, path)[1]
        assert outcome("no plain file", checkpoint._read, path)[1]


# --- the tokenizer ---------------------------------------------------------------------------------------------------


TOKENIZER_FILES = {p.name: p.read_bytes() for p in sorted((job.TINY / "model").glob("*.json"))}
VOCABULARY = 104


@many(150)
@given(st.data())
def test_any_tokenizer_files_load_and_encode_or_are_refused_in_one_line(folder, data):
    here = folder / "tokenizer"
    here.mkdir(exist_ok=True)
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"]))
    for one, content in TOKENIZER_FILES.items():
        (here / one).write_bytes(content)
    (here / name).write_bytes(data.draw(either(json.loads(TOKENIZER_FILES[name]))))
    (here / "d.jsonl").write_bytes(LINE[0] + b"\n")
    tokenizer, refusal = outcome("tokenizer", load_tokenizer, here)
    assert not refusal or refusal.startswith(str(here))
    if tokenizer is not None:
        prompts, refusal = outcome("tokenizer accepted", read_prompts, here / "d.jsonl", tokenizer, 30, VOCABULARY)
        assert refusal or all(0 <= t < VOCABULARY for p in prompts for t in p.tokens)
        assert isinstance(decode(tokenizer, range(VOCABULARY + 3)), str)


# --- the run directory -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(folder):
    """A run of three updates: its folder, recipe, inputs and files."""
    rows = folder / "train.jsonl"
    rows.write_text("".join((job.TINY / "train.jsonl").read_text().splitlines(keepends=True)[:8]))
    run = folder / "run"
    r = parse_and_resolve(["--model", str(job.TINY / "model"), "--data", str(rows), "--output", str(run), "--updates", "3"])
    inputs = command.check(r)
    at = command.Placed([None], [None], "cpu", "shm")
    checkpoint.create_run(run, command.record(r, inputs, at, 2, {"trainer": {"pid": 1}, "engine": {"vllm": "0"}}))
    ToyRun(run).go()
    names = [str(p.relative_to(run)) for p in run.rglob("*") if p.is_file() and not p.name.startswith(".")]
    return Finished(run, r, inputs, {name: (run / name).read_bytes() for name in names})


class Finished:  # no dataclass: a failing example would print all of it
    def __init__(self, path: Path, recipe: command.Recipe, inputs: command.Inputs, files: dict[str, bytes]):
        self.path, self.recipe, self.inputs, self.files = path, recipe, inputs, files


class Reached(BaseException):
    """All that can be checked was in order: trainer and engine would be started now."""


@pytest.fixture(scope="module")
def no_start(finished):
    def place(*_):
        raise Reached

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "place", place)
        patch.setattr(command, "check", lambda _: finished.inputs)
        patch.setattr(command, "Stop", lambda: None)
        yield


def run_command(kind: str, *options: str) -> tuple[int | None, str]:
    """(exit code or None when the start was reached, the last line) of `run.command`."""
    SEEN[kind] += 1
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = command.command(list(options))
        except Reached:
            return None, ""
        except SystemExit as end:  # argparse
            code = end.code
            assert code == 2, err.getvalue()
    text = err.getvalue()
    assert code in (0, 2, 3) and "Traceback" not in text, text
    if code:
        assert text.startswith("usage:") or len(text.splitlines()) == 1, text
        assert "run.py: error: " in text, text
    return code, (text or out.getvalue()).splitlines()[-1]


def state_again(content: bytes) -> bytes:
    """A state.json changed by someone who knows its format: with the digest and the layout that belong to it."""
    try:
        state = json.loads(content)
        return checkpoint._encode_state({**state, "self": checkpoint._self_digest(state)})
    except (ValueError, TypeError, RecursionError, AttributeError):
        return content


@many(500)
@given(st.data())
def test_a_resume_of_any_damaged_run_goes_on_or_says_what_is_wrong(finished, no_start, data):
    run, originals = finished.path, finished.files
    shutil.rmtree(run)
    for name, content in originals.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
    jsons = ["run.json", "run.json", "checkpoints/000003/state.json", "checkpoints/000002/state.json"]
    lines = ["publications/commits.jsonl", "publications/commits.jsonl", "metrics.jsonl", "rollouts/000002.jsonl"]
    name = data.draw(st.sampled_from([*jsons, *lines, "publications/epoch", "checkpoints/000003/actor/common.pt"]))
    how = data.draw(st.sampled_from(["bytes"] * 6 + ["fields"] * 6 + ["gone", "folder", "loop"]))
    original = originals[name]
    if how == "fields" and name in jsons:
        content = data.draw(swapped(json.loads(original)))
        content = state_again(content) if "state" in name else content
    elif how == "fields" and name in lines:
        rows = original.splitlines(keepends=True)
        at = data.draw(st.integers(0, len(rows) - 1))
        rows[at] = data.draw(swapped(json.loads(rows[at]))) + b"\n"
        content = b"".join(rows)
    else:
        content = data.draw(damaged(original))
    if how in ("gone", "folder", "loop"):
        (run / name).unlink()
        if how != "gone":
            (run / name).mkdir() if how == "folder" else (run / name).symlink_to(run / name)
    else:
        (run / name).write_bytes(content)
    before = (run / "run.json").read_bytes() if (run / "run.json").is_file() else None
    run_command("damaged run", "--resume", "--output", str(run))
    if before is not None:
        assert (run / "run.json").read_bytes() == before  # nothing is repaired behind the user's back


# --- settings --------------------------------------------------------------------------------------------------------

TOML = """# a recipe
algorithm = "ppo"
model = "m"
data = "d.jsonl"
output = "RUN"
updates = 3
lr = 1e-5
temperature = 0.8
max-prompt-len = 32
cuda_graphs = false
seed = 42
[train_env_vars]
A = "b"
"""
TOMLS = [
    "[" * 3000 + "]" * 3000, "{a = " * 2000 + "1" + "}" * 2000, "1979-05-27T07:32:00Z", "1979-05-27", "07:32:00", HUGE,
    "-" + HUGE, "9" * 5000, "0x" + "f" * 500, "nan", "inf", "-inf", "1e999", "true", '""', '"\\u0000"', '"\\ud800"', '"a\\nb"',
    "[1, 2]", "{}", "{a = 1979-05-27}", '{"a=b" = "c"}', '{"" = "c"}', '{"a" = "\\u0000"}', "{a = 1}", "1_000", "0.5", "-1",
    "4294967296", "'''\na'''", "",
]  # fmt: skip


def parse_and_resolve(options: list[str]) -> command.Recipe:
    return command.resolve(*command.parse(options))


@many(400)
@given(st.data())
def test_any_config_file_gives_a_recipe_or_one_line(folder, data):
    fields = [f.name for f in dataclasses.fields(command.Recipe)]
    if data.draw(st.booleans()):
        content = data.draw(damaged(TOML.encode()))
    else:
        key = data.draw(st.sampled_from([*fields, "x", '"a\\nb"', '""', "a.b", "max-prompt-len"]))
        rows = [row for row in TOML.splitlines() if not row.startswith((key, "[", "A ="))]
        content = "\n".join([*rows, f"{key} = {data.draw(st.sampled_from(TOMLS))}"]).encode()
    (folder / "c.toml").write_bytes(content)
    r, refusal = outcome("TOML", parse_and_resolve, ["--config", str(folder / "c.toml")])
    assert refusal or isinstance(r, command.Recipe)


NUMBERS = [
    "", "0", "-0", "1", "2", "-1", "0.5", "1e-320", "1e308", "-1e308", "1e999", "nan", "inf", "-inf", "0x10", "1_0", " 3 ", "٣",
    "2147483647", "2147483648", "4294967295", "4294967296", str(2**63), str(2**64), HUGE, "-" + HUGE, "9" * 5000, "1e-5",
    "1,5", "1\n2", "--", "-", "None", "\x1b[31m", "\udcff",
]  # fmt: skip
WORDS = [
    "", " ", "a\nb", "\udcff", "\x1b[31m", "x" * 5000, "/", ".", "..", "~nobody/x.py:f", "é 日本 \u202e", "a\0b", "none.py:f",
    "os:getcwd", "a..b:f", ".:f", ":f", "f:", "json.:f", "os.path.x:f", "{}", "[]", "null", '{"A": "b"}', '{"": "b"}',
    '{"A=B": "c"}', '{"A": "\\u0000"}', '{"A": "\\ud800"}', '{"A": 1}', '{"A": NaN}', "[" * 5000, '{"A":' * 3000, "9" * 5000,
    "true",
]  # fmt: skip


@many(700)
@given(st.data())
def test_any_values_of_any_options_give_a_recipe_or_one_line(finished, no_start, data):
    """What is accepted is a recipe that run.json can hold, and whose needs can be worked out."""
    run, r = finished.path, finished.recipe
    options = ["--model", r.model, "--data", r.data, "--output", str(run.parent / "new"), "--dry-run"]
    for field in data.draw(st.lists(st.sampled_from(dataclasses.fields(command.Recipe)), min_size=1, max_size=3)):
        if field.name == "resume":
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            options.append(flag + data.draw(st.sampled_from(["", "", "=1", "x"])))
        else:
            numeric = (field.metadata["kind"] or type(field.default)) in (int, float)
            values = NUMBERS if numeric else [*WORDS, *(field.metadata["choices"] or ())]
            options.append(f"{flag}={data.draw(st.sampled_from(values))}")
    code, last = run_command("options", *options)
    assert code in (0, 2)
    assert not (run.parent / "new").exists()
    if code == 0:
        made = parse_and_resolve(options)
        assert "\udcff" not in "".join(str(value) for value in dataclasses.asdict(made).values())
        saved = json.loads(json.dumps(dataclasses.asdict(made), allow_nan=False))
        assert command.Recipe(**saved) == made


@many(150)
@given(st.sampled_from(WORDS) | st.text(max_size=12).map(lambda s: s + ":f") | st.text("abc./:~\0 é", max_size=12))
def test_any_reward_is_found_or_refused_in_one_line(spec):
    outcome("reward", reward.reward_source, spec)


# What the above found, by name.
FOUND = {
    "--seed=4294967296": "--seed must be from 0 to 4294967295",
    "--temperature=0.005": "--temperature must be from 0.01 to 100",
    f"--stop-after={HUGE}": "--stop-after must be from 0 to 2147483647",
    "--updates=--": "--updates: -- is no value",
    "--rollout-batch-size=1000000000": "at most 1,048,576 completions",
    "--max-num-seqs=1000000000": "--max-num-seqs must be from 1 to 65536",
    "--kv-cache-gib=1e308": "--kv-cache-gib must be from 0 to 1000000",
    '--train-env-vars={"A=B": "c"}': "an environment cannot hold",
    "--train-env-vars=" + "[" * 5000: "--train-env-vars is not JSON",
    '--train-env-vars={"A": "1", "A": "2"}': '--train-env-vars is not JSON: the field "A" stands twice in one object',
    '--train-env-vars={"A": "' + "x" * 2**17 + '"}': 'the value of "A" is too long for an environment',
    "--model-revision=\udcff": "--model-revision holds a NUL or is not UTF-8",
}


@pytest.mark.parametrize("option", FOUND)
def test_a_value_that_no_run_survives_is_refused_before_the_start(finished, no_start, option):
    r = finished.recipe
    new = str(finished.path.parent / "new")
    code, last = run_command("options", "--model", r.model, "--data", r.data, "--output", new, option)
    assert code == 2 and FOUND[option] in last


def test_an_output_that_cannot_be_made_is_refused_before_the_start(finished, no_start):
    r = finished.recipe
    for output in (Path(r.data), Path(r.data) / "below", finished.path.parent / ("x" * 300)):
        code, _ = run_command("options", "--model", r.model, "--data", r.data, "--output", str(output))
        assert code == 2


def test_a_ray_address_where_no_one_listens_is_refused_in_seconds():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        _, refusal = outcome("address", cluster.check_address, f"127.0.0.1:{free.getsockname()[1]}")
    assert "no one answers there" in refusal


def test_what_a_constructor_raised_is_told_in_its_own_words():
    """Ray keeps a traceback of it: the last line is the exception's."""

    class Died(Exception):
        actor_init_failed = True

    told = cluster.constructed(Died('The actor died …\n  File "x.py", line 1\nValueError: model: tensor "a" holds NaN'))
    assert type(told) is ValueError and str(told) == 'model: tensor "a" holds NaN'
    told = cluster.constructed(Died("…\ncheckpoint.GuardError: no"))
    assert type(told) is checkpoint.GuardError
    unknown = Died("…\nKeyError: 3")
    assert cluster.constructed(unknown) is unknown


def test_a_token_that_the_model_has_not_is_refused_by_row(folder):
    (folder / "d.jsonl").write_bytes(LINE[0] + b"\n")
    with pytest.raises(ValueError, match=r'd.jsonl:1: "prompt" holds token \d+; the model has tokens 0 to 4'):
        read_prompts(folder / "d.jsonl", TOKENIZER, 20, 5)
