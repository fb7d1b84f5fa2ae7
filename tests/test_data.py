"""Every bad data file ends in one `file:line: message`; good ones come in order, and the cursor never skips."""

import gzip
import json
import shutil
import warnings

import job
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import checkpoint
import data

ALPHABET = "0123456789+-=? abcdefghijklmnopqrstuvwxyz"
some = settings(max_examples=200, deadline=None, derandomize=True)


def make_tokenizer(unknown: str | None = "<unk>") -> PreTrainedTokenizerFast:
    """One token a character; white space alone encodes to nothing; begins texts with <s> unless told not to."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *ALPHABET])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.normalizer = normalizers.Strip()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, **({"unk_token": unknown} if unknown else {}))


TOKENIZER = make_tokenizer()
GOOD = b'{"prompt": "1+1=", "label": "2"}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def read(folder, content: bytes, max_prompt_len: int = 20, tokenizer=TOKENIZER, **how) -> list[data.Prompt]:
    (folder / "d.jsonl").write_bytes(content)
    return data.read_prompts(folder / "d.jsonl", tokenizer, max_prompt_len, None, data.Reading(**how))


def refusal(folder, content: bytes, **kwargs) -> str:
    with pytest.raises(ValueError) as caught:
        read(folder, content, **kwargs)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(str(folder / "d.jsonl"))
    return message.removeprefix(str(folder / "d.jsonl"))


def test_rows_come_in_file_order_with_tokens_and_without_added_special_tokens(folder):
    rows = [{"prompt": f"{i}+1=?", "label": str(i + 1), "extra": {"any": [None, 1.5]}} for i in range(2500)]
    got = read(folder, "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert [(p.prompt, p.label) for p in got] == [(r["prompt"], r["label"]) for r in rows]
    assert got[7].tokens == tuple(TOKENIZER.convert_tokens_to_ids(list("7+1=?")))


def test_byte_order_mark_crlf_trailing_empty_lines_and_no_final_newline_are_accepted(folder):
    row = {"prompt": "a", "label": "\u2028 é 😀"}
    line = json.dumps(row, ensure_ascii=False).encode()
    for content in (b"\xef\xbb\xbf" + line, line + b"\r\n" + line + b"\r\n", line + b"\n\n \r\n\n", line):
        assert read(folder, content)[0].label == row["label"]


BAD = [
    (b"", ": no rows"),
    (b"\n\n", ": no rows"),
    (GOOD + b"\n" + GOOD, ":2: an empty line between rows"),
    (GOOD + b"nonsense\n", ":2: not JSON: Expecting value at column 1"),
    (b'{"prompt": "a", "label": "b"', ":1: not JSON: Expecting ',' delimiter at column 29"),
    (GOOD.strip() + GOOD, ":1: not JSON: Extra data"),
    (b'["a", "b"]\n', ":1: a list, not an object"),
    (b"12\n", ":1: a number, not an object"),
    (b"null\n", ":1: a null value, not an object"),
    (b'{"label": "2"}', ':1: "prompt" is missing; each row needs string "prompt" and "label"'),
    (GOOD + b'{"prompt": "a"}', ':2: "label" is missing; each row needs string "prompt" and "label"'),
    (b'{"prompt": "a", "label": 2}', ':1: "label" is a number; it must be a string'),
    (b'{"prompt": "a", "label": true}', ':1: "label" is a boolean; it must be a string'),
    (b'{"prompt": null, "label": "2"}', ':1: "prompt" is a null value; it must be a string'),
    (b'{"prompt": ["a"], "label": "2"}', ':1: "prompt" is a list; it must be a string'),
    (b'{"prompt": "", "label": "2"}', ':1: "prompt" encodes to no tokens'),
    (GOOD + b'{"prompt": "   ", "label": "2"}', ':2: "prompt" encodes to no tokens'),
    (GOOD + b'{"prompt": "aaaaaaaaaaaaaaaaaaaaa", "label": "2"}', ':2: "prompt" is 21 tokens long; at most 20 are'),
    (GOOD + b'{"prompt": "\xff", "label": "2"}', ":2: not UTF-8 (byte 13 of the line)"),
    ('{"prompt": "a", "label": "b"}'.encode("utf-16"), ":1: not UTF-8 (byte 1 of the line)"),
    (b'{"prompt": "\\ud800", "label": "2"}', ':1: "prompt" holds a lone surrogate at character 0'),
    (b'{"prompt": "a", "label": "2\\udfff"}', ':1: "label" holds a lone surrogate at character 1'),
    (b'{"prompt": "a\\u0000", "label": "2"}', ':1: "prompt" holds a NUL character'),
    (b'{"prompt": "a\0", "label": "2"}', ":1: not JSON: Invalid control character at"),
    (b'{"prompt": "a", "prompt": "b", "label": "2"}', ':1: the field "prompt" stands twice in one object'),
    (b'{"prompt": "a", "label": "2", "x": NaN}', ":1: not JSON: NaN is no JSON value"),
    (b'{"prompt": "a", "label": "2", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ":1: not usable JSON: nested"),
    (b'{"prompt": "a", "label": "2", "x": ' + b"9" * 10_000 + b"}", ":1: not usable JSON: Exceeds the limit"),
    (b'{"prompt": "' + b"a" * 200_000 + b'", "label": "2"}', ':1: "prompt" is 200000 tokens long'),
]


@pytest.mark.parametrize("content, message", BAD, ids=[m.split(": ", 1)[1][:40] for _, m in BAD])
def test_a_bad_row_is_named_by_file_line_and_field(folder, content, message):
    assert refusal(folder, content).startswith(message)


def test_a_prompt_at_exactly_the_limit_is_accepted(folder):
    assert len(read(folder, GOOD, max_prompt_len=4)[0].tokens) == 4
    assert "at most 3" in refusal(folder, GOOD, max_prompt_len=3)


def test_missing_file_and_directory_are_named(tmp_path):
    for path, message in ((tmp_path / "no.jsonl", "cannot be read: No such file"), (tmp_path, "a directory")):
        with pytest.raises(ValueError, match=message) as caught:
            data.read_prompts(path, TOKENIZER, 10)
        assert str(path) in str(caught.value)


def test_a_prompt_that_the_tokenizer_cannot_encode_is_named_by_its_row(folder):
    broken = make_tokenizer(unknown=None)

    class Refusing:
        def __call__(self, texts, **kwargs):
            if any("é" in text for text in texts):
                raise Exception("WordLevel error:\n Missing [UNK] token")
            return broken(texts, **kwargs)

    content = GOOD * 3 + '{"prompt": "é", "label": "2"}\n'.encode()
    message = refusal(folder, content, tokenizer=Refusing())
    assert message == ':4: the tokenizer cannot encode "prompt": WordLevel error: Missing [UNK] token'


@some
@given(st.binary(max_size=80) | st.lists(st.sampled_from([c for c, _ in BAD[:26]] + [GOOD, b"\n"]), max_size=4))
def test_any_bytes_are_read_or_refused_in_one_line(folder, content):
    try:
        rows = read(folder, content if isinstance(content, bytes) else b"".join(content))
        assert rows and all(row.tokens for row in rows)
    except ValueError as error:
        assert str(error).startswith(str(folder / "d.jsonl")) and len(str(error).splitlines()) == 1


# --- the options -----------------------------------------------------------------------------------------------------


def test_other_fields_and_numbers_as_labels_are_taken_when_asked_for(folder):
    row = b'{"question": "1+1=", "answer": %s, "prompt": 3}\n'
    keys = {"input_key": "question", "label_key": "answer"}
    assert refusal(folder, GOOD, **keys) == ':1: "question" is missing; each row needs string "question" and "answer"'
    said = ':1: "answer" is a number; it must be a string (--label-as-string takes numbers)'
    long = "123456789012345678901"
    for number, text in ("2", "2"), ("-0.5", "-0.5"), ("42.0", "42"), ("1e3", "1000"), (long, long):
        assert refusal(folder, row % number.encode(), **keys) == said
        (prompt,) = read(folder, row % number.encode(), label_as_string=True, **keys)
        assert (prompt.prompt, prompt.label) == ("1+1=", text)
    for bad in (b"true", b"null", b"[2]", b"1e999"):
        assert refusal(folder, row % bad, label_as_string=True, **keys).startswith(":1: ")
    assert read(folder, row % b'"2"', label_as_string=True, **keys)[0].label == "2"


def test_source_is_kept_where_it_is_a_string(folder):
    rows = [{"prompt": "1", "label": "1", "source": source} for source in ("a", 3, None, "\u2028b")]
    got = read(folder, "\n".join(json.dumps(row) for row in rows).encode() + b"\n" + GOOD)
    assert [p.source for p in got] == ["a", None, None, "\u2028b", None]


def test_prompts_that_are_too_long_are_dropped_and_told_by_place_when_asked_for(folder):
    path = folder / "long.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1" * n, "label": "1"}) + "\n" for n in (3, 9, 4, 5)))
    dropped: list[str] = []
    assert [len(p.tokens) for p in data.read_prompts(path, TOKENIZER, 4, dropped=dropped)] == [3, 4]
    assert dropped == [f"{path}:2", f"{path}:4"]
    with pytest.raises(ValueError, match="all 4 prompts are longer than 2 tokens"):
        data.read_prompts(path, TOKENIZER, 2, dropped=[])


# --- other files -----------------------------------------------------------------------------------------------------

ROWS = [{"prompt": f"{i}+1=", "label": str(i + 1), "source": "sum", "other": {"n": [i]}} for i in range(600)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write_arrow(path, rows=ROWS, file=False):
    table = pyarrow.Table.from_pylist(rows)
    with (pyarrow.ipc.new_file if file else pyarrow.ipc.new_stream)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=500)


def write_parquet(path, rows=ROWS):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), str(path), row_group_size=400)


def save_to_disk(folder, rows=ROWS):
    """The layout of datasets 5.2.0: shards of Arrow streams, named by state.json; the file of another set beside them."""
    folder.mkdir()
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    write_arrow(folder / names[0], rows[:300])
    write_arrow(folder / names[1], rows[300:])
    write_arrow(folder / "cache-1.arrow", rows)
    state = {"_data_files": [{"filename": name} for name in names], "_format_columns": None, "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def made(folder, form):
    path = folder / "data"
    if form == "gzip":
        path.write_bytes(gzip.compress(JSONL[:9000]) + gzip.compress(JSONL[9000:]))  # two members, as `cat` makes them
    elif form == "parquet":
        write_parquet(path)
    elif form in ("arrow file", "arrow stream"):
        write_arrow(path, file=form == "arrow file")
    elif form == "saved":
        save_to_disk(path)
    else:
        (path / "data" / ".cache").mkdir(parents=True)
        (path / "README.md").write_text("# a card")
        (path / "data" / ".cache" / "x.jsonl").write_text("no data")
        if form == "hub parquet":
            write_parquet(path / "data" / "train-00000-of-00002.parquet", ROWS[:100])
            write_parquet(path / "data" / "train-00001-of-00002.parquet", ROWS[100:])
        else:
            (path / "data" / "train.jsonl.gz").write_bytes(gzip.compress(JSONL))
    return path


FORMS = ["gzip", "parquet", "arrow file", "arrow stream", "saved", "hub parquet", "hub gzip"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_rows_gives_the_same_prompts(form, tmp_path):
    expected = read(tmp_path, JSONL)
    assert data.read_prompts(made(tmp_path, form), TOKENIZER, 20) == expected and len(expected) == 600


def test_a_pattern_takes_the_files_of_one_split_in_the_order_of_their_names(tmp_path):
    folder = made(tmp_path, "hub parquet")
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", ROWS[:7])
    with pytest.raises(ValueError, match=r"several splits \(test, train\); name the files of one, as the pattern ") as error:
        data.read_prompts(folder, TOKENIZER, 20)
    assert str(error.value).endswith(f"'{folder}/data/*train*'")
    assert data.read_prompts(f"{folder}/data/*train*", TOKENIZER, 20) == read(tmp_path, JSONL)
    with pytest.raises(ValueError, match="no file matches"):
        data.read_prompts(f"{folder}/data/dev*", TOKENIZER, 20)


def test_folders_that_hold_more_than_one_data_set_are_refused_by_name(tmp_path):
    hub = made(tmp_path, "hub parquet")
    (hub / "data" / "train.jsonl").write_bytes(JSONL)
    splits = tmp_path / "splits"
    splits.mkdir()
    (splits / "dataset_dict.json").write_text('{"splits": ["train"]}')
    save_to_disk(splits / "train")
    both = tmp_path / "both"
    for part in ("main", "socratic"):
        (both / part).mkdir(parents=True)
        write_parquet(both / part / "train-00000.parquet")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "more.jsonl").write_bytes(JSONL)
    (mixed / "train.jsonl").write_bytes(JSONL)
    for path, words in (
        (hub, "holds .jsonl and .parquet files"),
        (splits, f"several splits; name one of: {splits / 'train'}"),
        (both, f"several folders; name one of: {both / 'main'}, {both / 'socratic'}"),
        (mixed, "(train and others)"),
    ):
        with pytest.raises(ValueError) as caught:
            data.read_prompts(path, TOKENIZER, 20)
        assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value)
    assert len(data.read_prompts(splits / "train", TOKENIZER, 20)) == 600


LISTED = '{"_data_files": [{"filename": %s}]}'
STATES = [
    "{", "[]", "{}", '{"_data_files": []}', "[" * 99_999, LISTED % '"../d.arrow"', LISTED % "3", LISTED % '"no.arrow"',
    '{"_data_files": [{"filename": "d.arrow"}], "_indices_files": [1]}',
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_a_damaged_state_json_is_one_line(state, tmp_path):
    write_arrow(tmp_path / "d.arrow")
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(ValueError) as caught:
        data.read_prompts(tmp_path, TOKENIZER, 20)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def test_damaged_gzip_parquet_and_arrow_are_one_line_that_names_the_file(tmp_path):
    path = tmp_path / "d"
    for form in FORMS[:4]:
        content = made(tmp_path, form).read_bytes()
        half = len(content) // 2
        for damaged in (content[:half], content[:-9], content[:40], content[:half] + b"x" * 99 + content[half + 99 :]):
            path.write_bytes(damaged)
            try:
                data.read_prompts(path, TOKENIZER, 20)
            except ValueError as error:
                assert str(error).startswith(f"{path}:") and "\n" not in str(error)
            else:  # without a checksum, some damage is other data, and the end of a stream is no more than a mark
                assert form != "gzip" and (form == "arrow stream" or len(damaged) == len(content))
    path.write_bytes(gzip.compress(JSONL)[:-9])
    with pytest.raises(ValueError, match="d: damaged gzip after line 600: it ends early"):
        data.read_prompts(path, TOKENIZER, 20)
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(ValueError, match="d: Parquet that cannot be read after row 0: "):
        data.read_prompts(path, TOKENIZER, 20)
    plain = {"compression": "none", "use_dictionary": False}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), str(path), write_page_checksum=True, **plain)
    path.write_bytes(path.read_bytes().replace(b"55+1=", b"56+1=", 1))
    with pytest.raises(ValueError, match="d: Parquet that cannot be read after row 0: .*checksum"):
        data.read_prompts(path, TOKENIZER, 20)


def test_an_arrow_stream_that_was_cut_between_two_batches_is_read_with_a_warning_and_one_that_goes_on_is_refused(tmp_path):
    path = tmp_path / "d"
    write_arrow(path)
    whole = path.read_bytes()
    with open(path, "rb") as file:
        stream = pyarrow.ipc.open_stream(file)
        stream.read_next_batch()
        first = file.tell()
    for end, rows in ((first, 500), (-8, 600)):
        path.write_bytes(whole[:end])
        with pytest.warns(UserWarning, match=f"d: an Arrow stream without its end mark, perhaps cut off after row {rows}"):
            assert len(data.read_prompts(path, TOKENIZER, 20)) == rows
    path.write_bytes(whole + whole)
    with pytest.raises(ValueError, match="d: more data follows the end of the Arrow stream, which is after row 600"):
        data.read_prompts(path, TOKENIZER, 20)
    path.write_bytes(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(data.read_prompts(path, TOKENIZER, 20)) == 600


def test_gzip_bombs_and_endless_lines_are_refused_before_they_are_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MOST_ROW_BYTES", 2**20)
    path = tmp_path / "d"
    path.write_bytes(gzip.compress(GOOD * 4_000_000))
    unpacked = 0
    with pytest.raises(ValueError, match="d: gzip that expands more than 200 times"), open(path, "rb") as file:
        for number, _ in data._lines(path, file, True):
            unpacked = number
    assert 30_000 < unpacked < 1_000_000
    for content in (gzip.compress(b"0" * 60_000_000), b"0" * 3_000_000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="d:1: a line of more than 1 MiB"):
            data.read_prompts(path, TOKENIZER, 20)


def test_bad_rows_and_columns_of_a_table_are_named(tmp_path):
    path = tmp_path / "d.parquet"
    message = [{"role": "user", "content": "1"}]
    binary = pyarrow.table({"prompt": pyarrow.array([b"1"]), "label": ["1"]})
    twice = pyarrow.Table.from_arrays([pyarrow.array(["1"])] * 3, names=["prompt", "prompt", "label"])
    for table, words in (
        ([{"prompt": "1", "label": "1"}] * 300 + [{"prompt": "1", "label": None}], ':301: "label" is a null value; it must be'),
        ([{"prompt": "1", "label": {"a": "1"}}], ':1: "label" is an object; it must be a string'),
        ([{"prompt": message, "label": "1"}], ':1: "prompt" is a list; it must be a string (--apply-chat-template takes'),
        ([{"prompt": "1", "label": 2}], ':1: "label" is a number; it must be a string (--label-as-string takes numbers)'),
        ([{"prompt": {"text": "1"}, "label": "1"}], ':1: "prompt" is an object; it must be a string'),
        ([{"question": "1", "answer": "1"}], ': there is no column "prompt"; there are: question, answer'),
        (binary, ':1: "prompt" is a binary value; it must be a string'),
        (twice, ': the column "prompt" stands twice'),
        ([{"prompt": "1", "label": "1"}][:0], ': there is no column "prompt"; there are: none'),
        (pyarrow.table({"prompt": pyarrow.array([], "string"), "label": pyarrow.array([], "string")}), ": no rows"),
    ):
        if isinstance(table, list):
            write_parquet(path, table)
        else:
            pyarrow.parquet.write_table(table, str(path))
        with pytest.raises(ValueError) as caught:
            data.read_prompts(path, TOKENIZER, 20)
        assert str(caught.value).startswith(f"{path}{words}"), caught.value


def test_without_pyarrow_tables_are_refused_with_the_command_that_helps(tmp_path, monkeypatch):
    path = made(tmp_path, "parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"data: Parquet needs pyarrow; pip install -e '.\[data\]' installs it"):
        data.read_prompts(path, TOKENIZER, 20)


@some
@given(st.binary(max_size=60), st.sampled_from([b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff", b"\x1f\x8b\x08\0"]))
def test_any_bytes_after_a_magic_number_are_refused_in_one_line(folder, content, magic):
    path = folder / "any"
    for damaged in (magic + content, magic + content + magic):
        path.write_bytes(damaged)
        with pytest.raises(ValueError) as caught:
            data.read_prompts(path, TOKENIZER, 20)
        assert str(caught.value).startswith(f"{path}:") and len(str(caught.value).splitlines()) == 1


# --- chat templates --------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role[0] }} {{ m.content }}={% endfor %}"
    "{% if add_generation_prompt %}a{% if enable_thinking is false %}-{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def chat():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def one(prompt) -> bytes:
    return json.dumps({"prompt": prompt, "label": "2"}).encode()


def test_messages_and_strings_are_rendered_and_encoded_without_added_special_tokens(folder, chat):
    talk = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1", "name": None}]
    how = {"tokenizer": chat, "apply_chat_template": True}
    (got,) = read(folder, one(talk), **how)
    assert got.prompt == "s add=u 1+1=a" and got.tokens == tuple(chat.convert_tokens_to_ids(list(got.prompt)))
    assert read(folder, one("1+1"), **how)[0].prompt == "u 1+1=a"
    assert read(folder, one("1+1"), chat_template_args='{"enable_thinking": false}', **how)[0].prompt == "u 1+1=a-"
    rows = [{"prompt": talk, "label": "2"}]
    write_parquet(folder / "chat.parquet", rows)
    assert data.read_prompts(folder / "chat.parquet", chat, 20, None, data.Reading(apply_chat_template=True)) == [got]


def test_messages_that_a_template_cannot_take_are_named_by_row_and_message(folder, chat):
    user, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
    for prompt, words in (
        ([], '"prompt" is an empty list'),
        (["1"], '"prompt" message 1 is a string; it must be an object'),
        ([user, {"role": "user"}], '"prompt" message 2 "content" is a null value; it must be a string'),
        ([{"role": 1, "content": "1"}], '"prompt" message 1 "role" is a number'),
        ([{"role": "user", "content": [{"type": "text", "text": "1"}]}], '"prompt" message 1 "content" is a list'),
        ([user | {"tool_calls": []}], '"prompt" message 1: "tool_calls" is not taken'),
        ([user, answer], '"prompt" ends with a message of the assistant, whose turn it is'),
        ([user | {"content": "\0"}], '"prompt" message 1 "content" holds a NUL character'),
        ([user | {"content": "\ud800"}], '"prompt" message 1 "content" holds a lone surrogate at character 0'),
        ([{"role": "tool", "content": "1"}], 'the chat template cannot take "prompt": no tools here'),
        (3, '"prompt" is a number; it must be a string or a list of messages'),
    ):
        assert refusal(folder, GOOD + one(prompt), tokenizer=chat, apply_chat_template=True).startswith(f":2: {words}")


def test_a_template_that_is_missing_or_broken_and_arguments_that_it_does_not_know_are_refused(folder, chat):
    def said(tokenizer, arguments="{}"):
        with pytest.raises(ValueError) as caught:
            read(folder, GOOD, tokenizer=tokenizer, apply_chat_template=True, chat_template_args=arguments)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert said(make_tokenizer()).startswith("--apply-chat-template: the model folder holds no chat template")
    assert said(chat, '{"enable_thinkin": false}') == '--chat-template-args: the chat template knows no "enable_thinkin"'
    assert said(chat, '{"tokenize": true}') == "--chat-template-args: tokenize is not free to set"
    assert said(chat, "[]") == "--chat-template-args must be a JSON object, not a list"
    assert said(chat, "{").startswith("--chat-template-args is not JSON: ")
    for template in ("{% if %}", "{{ messages.x.y }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", ""):
        broken = make_tokenizer()
        broken.chat_template = template
        assert "d.jsonl:1: " in said(broken) or "no chat template" in said(broken)


# --- the order -------------------------------------------------------------------------------------------------------


@some
@given(st.integers(1, 7), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 6), st.none() | st.integers(0, 9))
def test_batches_of_any_size_take_every_prompt_once_an_epoch_and_a_resumed_cursor_goes_on(count, sizes, stop, seed):
    prompts = [data.Prompt(str(i), "", (i,)) for i in range(count)]
    cursor, seen = 0, []
    for i, n in enumerate(sizes):
        if i == stop:
            cursor = json.loads(json.dumps(cursor))  # a resume knows the cursor and nothing else
            data.order.cache_clear()
        taken, cursor = data.batch(prompts, cursor, n, seed)
        seen += [prompt.tokens[0] for prompt in taken]
    assert cursor == sum(sizes) and seen == [p.tokens[0] for p in data.batch(prompts, 0, cursor, seed)[0]]
    for epoch in range(0, cursor - count + 1, count):
        assert sorted(seen[epoch : epoch + count]) == list(range(count))
    if seed is None:
        assert seen == [i % count for i in range(cursor)]


def test_the_order_is_another_for_each_epoch_and_seed_and_the_same_on_every_machine():
    assert len({tuple(data.order(50, seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25
    assert data.order(10, 42, 0) == [6, 1, 7, 0, 5, 4, 8, 3, 9, 2] and data.order(10, 42, 1) == [3, 7, 2, 4, 8, 5, 9, 0, 6, 1]
    first = [data.order(8, seed, 0)[0] for seed in range(4000)]
    assert all(400 < first.count(row) < 600 for row in range(8)), "a row that comes first too often"


def test_a_cap_takes_the_first_prompts_or_a_choice_by_seed_that_a_larger_cap_keeps():
    prompts = [data.Prompt(str(i), "", (i,)) for i in range(30)]
    assert data.capped(prompts, 0) == data.capped(prompts, 30, 1) == prompts and data.capped(prompts, 4) == prompts[:4]
    few, more = (data.capped(prompts, n, 7) for n in (5, 9))
    assert len(few) == 5 and set(few) < set(more) and more == sorted(more, key=lambda p: p.tokens)
    assert few != data.capped(prompts, 5, 8) and few != prompts[:5]


@pytest.mark.parametrize("count, cursor, n", [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_impossible_batches_are_refused(count, cursor, n):
    with pytest.raises(ValueError, match="a batch of"):
        data.batch([data.Prompt("a", "b", (1,))] * count, cursor, n)


# --- tokenizer and digest --------------------------------------------------------------------------------------------


def test_a_saved_tokenizer_loads_and_decodes_without_special_tokens(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = data.load_tokenizer(tmp_path)
    ids = [1, *TOKENIZER.convert_tokens_to_ids(["4", "2"]), 2, 0]
    assert data.decode(loaded, ids).replace(" ", "") == "42"
    assert data.decode(loaded, []) == ""
    assert read(tmp_path, GOOD, tokenizer=loaded) == read(tmp_path, GOOD)


def test_a_tokenizer_that_is_missing_damaged_or_needs_remote_code_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    remote = tmp_path / "remote"
    TOKENIZER.save_pretrained(remote)
    (remote / "tokenizer.json").unlink()
    marker = tmp_path / "ran"
    (remote / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass T: pass\n")
    config = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", None]}}
    (remote / "tokenizer_config.json").write_text(json.dumps(config))
    damaged = tmp_path / "damaged"
    TOKENIZER.save_pretrained(damaged)
    (damaged / "tokenizer.json").write_text('{"version": ')
    for path in (tmp_path / "none", tmp_path / "empty", remote, damaged):
        with pytest.raises(ValueError) as caught:
            data.load_tokenizer(path)
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert not marker.exists()


def test_file_digest_is_blake3_of_the_content(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert data.file_digest(tmp_path / "empty") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    with pytest.raises(ValueError, match="cannot be read"):
        data.file_digest(tmp_path / "none")


def test_the_digest_of_several_files_tells_content_and_order_wherever_they_lie(tmp_path):
    one = made(tmp_path, "hub parquet")
    digest = data.content(one)
    assert digest == data.content(f"{one}/data/*.parquet") != data.content(one / "data" / "train-00000-of-00002.parquet")
    one.rename(tmp_path / "moved")
    (tmp_path / "moved" / "README.md").write_text("another card")
    assert data.content(tmp_path / "moved") == digest
    first, second = sorted((tmp_path / "moved" / "data").glob("*.parquet"))
    first.rename(first.with_name("train-9.parquet"))
    assert data.content(tmp_path / "moved") != digest
    (tmp_path / "one.jsonl").write_bytes(GOOD)
    assert data.content(tmp_path / "one.jsonl") == data.file_digest(tmp_path / "one.jsonl")


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_shuffled_run_on_chat_messages_in_parquet_stopped_within_an_epoch_and_resumed_equals_uninterrupted(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(job.TINY / "model", model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %} {% endif %}"
    )
    rows = job.rows(job.TINY / "train.jsonl")[:11]
    write_parquet(
        tmp_path / "train.parquet",
        [{"q": [{"role": "user", "content": r["prompt"]}], "a": int(r["label"]), "source": r["source"]} for r in rows],
    )
    held_out = [{"q": r["prompt"], "a": int(r["label"])} for r in job.rows(job.TINY / "heldout.jsonl")[:4]]
    (tmp_path / "heldout.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in held_out).encode()))
    args = ["--algorithm", "grpo", *job.SMALL, "--model", str(model), "--data", str(tmp_path / "train.parquet")]
    args += ["--eval-data", str(tmp_path / "heldout.jsonl.gz"), "--shuffle", "--max-prompts", "10", "--epochs", "1.2"]
    args += ["--apply-chat-template", "--chat-template-args", '{"enable_thinking": false}']
    args += ["--input-key", "q", "--label-key", "a", "--label-as-string"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    code, output = job.run(*args, "--output", str(whole))
    assert code == 0 and "update 3/3" in output, output
    code, output = job.run(*args, "--output", str(run), "--stop-after", "2")
    assert code == 0, output
    code, output = job.run("--resume", "--output", str(run))
    assert code == 0 and "resuming after update 2 of 3" in output, output
    code, output = job.audit(whole, run)
    assert code == 0, output

    taken = [c["prompt"] for update in range(3) for c in checkpoint.read_rollouts(run, update) if c["sample"] % 4 == 0]
    chosen = [r["prompt"] + " " for r in rows if r["prompt"] + " " in taken]
    assert len(chosen) == 10 and taken[:10] == [chosen[i] for i in data.order(10, 42, 0)]
    assert taken[10:] == [chosen[i] for i in data.order(10, 42, 1)[:2]]
    code, output = job.run("--resume", "--output", str(run), "--max-prompts", "9")
    assert code == 2 and "max_prompts: the run has 10, asked 9" in output, output
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}{{ enable_thinking }}")
    code, output = job.run("--resume", "--output", str(run))
    assert code == 2 and "other content: model chat_template.jinja" in output, output
