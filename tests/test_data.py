"""Every bad data file ends in one `file:line: message`; good ones come in order, and the cursor never skips."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

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


def read(folder, content: bytes, max_prompt_len: int = 20, tokenizer=TOKENIZER) -> list[data.Prompt]:
    (folder / "d.jsonl").write_bytes(content)
    return data.read_prompts(folder / "d.jsonl", tokenizer, max_prompt_len)


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


# --- the cursor ------------------------------------------------------------------------------------------------------


@some
@given(st.integers(1, 7), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 6))
def test_batches_of_any_size_take_every_prompt_in_turn_and_a_resumed_cursor_goes_on(count, sizes, stop):
    prompts = [data.Prompt(str(i), "", (i,)) for i in range(count)]
    cursor, seen = 0, []
    for i, n in enumerate(sizes):
        if i == stop:
            cursor = json.loads(json.dumps(cursor))  # a resume knows the cursor and nothing else
        taken, cursor = data.batch(prompts, cursor, n)
        assert all(prompts[index] is prompt for index, prompt in taken)
        seen += [index for index, _ in taken]
    assert cursor == sum(sizes)
    assert seen == [i % count for i in range(cursor)]


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
