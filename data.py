"""Prompts: reading them, the order in which they are taken, and the tokenizer that goes both ways.

Data is JSONL in UTF-8, plain or gzip: one object a line. Or Parquet. Or a folder: one that the Hugging Face library wrote with
`save_to_disk` (Arrow files), or a snapshot of a data set on the hub (Parquet or JSONL files). Or a quoted pattern, such as
'DIR/data/train-*.parquet'; several files are read in the order of their names. What a file is, its first bytes tell.

Each row has a string "prompt" and a string "label" (or other fields that the options name); "source" is kept where it is a
string; other fields are passed over. With a chat template, a prompt is a list of messages, or a string that becomes one message
of the user. All rows are checked before anything starts, and the first bad one ends with one `file:line: …` message (of Parquet
and Arrow, the row's number from 1):

    math.jsonl:17: "label" is missing; each row needs string "prompt" and "label"

A byte order mark and CRLF line ends are accepted, empty lines only at the end. Refused, because they are signs of a
damaged file and few tools downstream carry them: lone surrogates and NUL in a prompt or label, a field named twice.
"""

import dataclasses
import decimal
import functools
import glob
import gzip
import json
import math
import os
import re
import stat
import textwrap
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

ENCODE_BATCH = 1024  # prompts handed to the tokenizer at once; fast tokenizers spread a batch over cores
MOST_ROWS = 2**24  # a run keeps all rows in memory
MOST_ROW_BYTES = 2**26
PART = 256  # rows of a table turned into Python objects at once
# Text of training data shrinks 3 to 40 times. A bomb of valid rows, 1,000 times, would fill the memory before its end.
MOST_EXPANSION = 200


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row. `prompt` is the text that was encoded, a rendered chat template included; `tokens` are its ids, without added
    special tokens, at least one."""

    prompt: str
    label: str
    tokens: tuple[int, ...]
    source: str | None = None


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a row becomes a prompt: the options of these names."""

    input_key: str = "prompt"
    label_key: str = "label"
    label_as_string: bool = False  # a number as label is taken as text; else refused
    apply_chat_template: bool = False
    chat_template_args: str = "{}"  # JSON object


# ---------------------------------------------------------------------------------------------------------------------
# Files: which ones, and the rows in them
# ---------------------------------------------------------------------------------------------------------------------

KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".arrow")
# A file name says which split it holds, by the words that the hub knows.
_SPLIT = re.compile("(?<![a-z])(train|training|test|testing|validation|valid|val|dev|eval|evaluation)(?![a-z])")


def files(path: Path | str) -> list[Path]:
    """The files that `path` means, in reading order: a file, those of a folder, or those that a pattern matches.

    ValueError: a folder that holds no data, or more than one data set (splits, subfolders, formats): nothing is mixed unasked.
    """
    path = Path(path)
    if os.path.isdir(path):
        return _files_of_folder(path)
    if os.path.lexists(path) or not glob.has_magic(str(path)):
        return [path]
    found = [Path(name) for name in sorted(glob.glob(str(path))) if not os.path.isdir(name)]
    if not found:
        raise ValueError(f"{path}: no file matches")
    return found


def _files_of_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(str(p.parent) for p in sorted(folder.glob("*/state.json")))
        raise ValueError(f"{folder}: a data set of several splits; name one of: {splits or 'none is there'}")
    if (folder / "state.json").is_file():
        return _files_of_saved(folder)
    found = [p for depth in ("*", "*/*") for p in sorted(folder.glob(depth)) if p.name.endswith(KINDS)]
    found = [p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts) and p.is_file()]
    if not found:
        raise ValueError(f"{folder}: a directory without {', '.join(KINDS[:-1])} or {KINDS[-1]} files")
    if len(folders := sorted({str(p.parent) for p in found})) > 1:
        raise ValueError(f"{folder}: data lies in several folders; name one of: {', '.join(folders)}")
    if len(kinds := sorted({next(k for k in KINDS if p.name.endswith(k)) for p in found})) > 1:
        pattern = f"{found[0].parent}/*{kinds[0]}"
        raise ValueError(f"{folder}: holds {' and '.join(kinds)} files; name those of one, as the pattern '{pattern}'")
    splits = {split[1] if (split := _SPLIT.search(p.name.lower())) else "" for p in found}
    if len(splits) > 1:
        named = ", ".join(sorted(splits - {""})) + (" and others" if "" in splits else "")
        pattern = f"{found[0].parent}/*{max(splits)}*"
        raise ValueError(f"{folder}: holds several splits ({named}); name the files of one, as the pattern '{pattern}'")
    return found


def _files_of_saved(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `datasets.Dataset.save_to_disk` wrote, as its state.json lists them."""
    state_file = folder / "state.json"
    try:
        with open_plain(state_file) as file:
            state = json.loads(file.read(MOST_ROW_BYTES))
        names = [one["filename"] for one in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{state_file}: not the state.json that save_to_disk writes") from None
    if not names or not all(isinstance(name, str) and name not in ("", "..") and "/" not in name for name in names):
        raise ValueError(f'{state_file}: "_data_files" is no list of plain file names')
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ValueError(f"{state_file}: a selection of rows; flatten_indices() before save_to_disk makes a data set of it")
    return [folder / name for name in names]


def open_plain(path: Path | str):
    """Open a plain file to read its bytes. ValueError for anything else: a pipe may keep us waiting, a device never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path}: not a plain file")
    return open(path, "rb")


def content(path: Path | str) -> str:
    """Digest (hex) of what the data holds, wherever it lies: of a file `file_digest`; of several, BLAKE3 of theirs in order."""
    import blake3

    digests = [file_digest(file) for file in files(path)]
    return digests[0] if len(digests) == 1 else blake3.blake3("\n".join(digests).encode()).hexdigest()


def file_digest(path: Path | str) -> str:
    """BLAKE3 (hex) of a file's bytes. ValueError where it cannot be read."""
    import blake3

    try:
        with open_plain(path) as file:
            digest = blake3.blake3()
            while part := file.read(1 << 22):
                digest.update(part)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _records(path: Path, how: Reading) -> Iterator[tuple[int, dict]]:
    """(line or row from 1, fields) of each row of one file. ValueError names file and line."""
    try:
        with open_plain(path) as file:
            start = file.read(6)
            file.seek(0)
            if start.startswith(b"PAR1") or start == b"ARROW1" or start.startswith(b"\xff\xff\xff\xff"):
                yield from _arrow_records(path, file, start, how)
            else:
                yield from _json_records(path, file, start.startswith(b"\x1f\x8b"), how)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None


def _json_records(path: Path, file, is_gzip: bool, how: Reading) -> Iterator[tuple[int, dict]]:
    empty = 0  # number of the first of the empty lines just read
    for number, line in _lines(path, file, is_gzip):
        if not line.strip():
            empty = empty or number
            continue
        if empty:
            raise ValueError(f"{path}:{empty}: an empty line between rows")
        try:
            yield number, _json_object(line.decode("utf-8"), how)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line)") from None
        except _RowError as error:
            raise ValueError(f"{path}:{number}: {error}") from None


def _lines(path: Path, file, is_gzip: bool) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content) of each line, without the byte order mark and the line end."""
    text = gzip.GzipFile(fileobj=file) if is_gzip else file
    number = size = 0
    while True:
        try:
            line = text.readline(MOST_ROW_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            reason = "it ends early" if isinstance(error, EOFError) else str(error)
            raise ValueError(f"{path}: damaged gzip after line {number}: {reason}") from None
        if not line:
            return
        number, size = number + 1, size + len(line)
        if len(line) > MOST_ROW_BYTES:
            raise ValueError(f"{path}:{number}: a line of more than {MOST_ROW_BYTES >> 20} MiB")
        if is_gzip and size > max(MOST_ROW_BYTES, MOST_EXPANSION * file.tell()):
            raise ValueError(f"{path}: gzip that expands more than {MOST_EXPANSION} times; unpack it if that is meant")
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _arrow_records(path: Path, file, start: bytes, how: Reading) -> Iterator[tuple[int, dict]]:
    """Rows of a Parquet file, or of an Arrow IPC file or stream (save_to_disk); only the columns that are needed."""
    kind = "Parquet" if start.startswith(b"PAR1") else "Arrow"
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError(f"{path}: {kind} needs pyarrow; pip install -e '.[data]' installs it") from None
    number = 0

    def unreadable(error: Exception) -> ValueError:  # beside its own kinds pyarrow raises ValueError, OverflowError, KeyError, …
        reason = textwrap.shorten(str(error), 200, placeholder=" …") or type(error).__name__
        return ValueError(f"{path}: {kind} that cannot be read after row {number}: {reason}")

    try:
        if kind == "Parquet":
            table = parquet.ParquetFile(file, page_checksum_verification=True)  # of pages that have one
            names, rows = table.schema_arrow.names, table.metadata.num_rows
        else:
            table = arrow.ipc.open_file(file) if start == b"ARROW1" else arrow.ipc.open_stream(file)
            names, rows = table.schema.names, 0
    except Exception as error:
        raise unreadable(error) from None
    _check_columns(path, names, how)
    if rows > MOST_ROWS:
        raise ValueError(f"{path}: more than {MOST_ROWS:,} rows")
    columns = list(dict.fromkeys((how.input_key, how.label_key, *(["source"] if "source" in names else []))))
    if kind == "Parquet":
        batches = table.iter_batches(batch_size=PART, columns=columns, use_threads=False)
    else:
        batches = map(table.get_batch, range(table.num_record_batches)) if start == b"ARROW1" else iter(table)
    while True:
        try:
            before = file.tell()
            if (batch := next(batches, None)) is None:
                if start.startswith(b"\xff\xff\xff\xff"):
                    _check_end(path, file, before, number)
                return
            batch = batch.select(columns)
            parts = [batch.slice(first, PART) for first in range(0, batch.num_rows, PART)]
        except Exception as error:
            raise unreadable(error) from None
        for part in parts:
            try:
                found = part.to_pylist()
            except Exception as error:
                raise unreadable(error) from None
            for row in found:
                number += 1
                yield number, row


def _check_end(path: Path, file, last: int, number: int) -> None:
    """Of an Arrow stream that was read: `last` is where its last batch ended, `number` how many rows it gave.

    Cut between two batches it is a shorter stream, but for the mark of eight bytes at its end. The format lets a writer leave
    that out ("or by closing the stream"), though Arrow's own libraries write it: a warning. Of what follows the mark, as where
    two streams were laid end to end, no reader tells: ValueError.
    """
    if file.tell() - last < 8:
        warnings.warn(f"{path}: an Arrow stream without its end mark, perhaps cut off after row {number}", stacklevel=2)
    elif file.read(1):
        raise ValueError(f"{path}: more data follows the end of the Arrow stream, which is after row {number}")


def _check_columns(path: Path, names: Sequence[str], how: Reading) -> None:
    for key in (how.input_key, how.label_key):
        if key not in names:
            raise ValueError(f"{path}: there is no column {json.dumps(key)}; there are: {', '.join(names)[:200] or 'none'}")
    for key in (how.input_key, how.label_key, "source"):
        if names.count(key) > 1:
            raise ValueError(f"{path}: the column {json.dumps(key)} stands twice")


# ---------------------------------------------------------------------------------------------------------------------
# A row
# ---------------------------------------------------------------------------------------------------------------------


class _RowError(ValueError):
    pass


def unique_fields(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object from its fields. ValueError where one stands twice."""
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RowError(f"the field {json.dumps(twice)[:60]} stands twice in one object")
    return row


def _no_constant(name: str) -> None:
    raise _RowError(f"not JSON: {name} is no JSON value")


def _needs(how: Reading) -> str:
    prompt = f"{json.dumps(how.input_key)}"
    if how.apply_chat_template:
        return f"each row needs {prompt}, a string or a list of messages, and string {json.dumps(how.label_key)}"
    return f"each row needs string {prompt} and {json.dumps(how.label_key)}"


def _json_object(line: str, how: Reading) -> dict:
    """The object in one line. Raises _RowError."""
    try:
        row = json.loads(line, object_pairs_hook=unique_fields, parse_constant=_no_constant)
    except _RowError:
        raise
    except json.JSONDecodeError as error:
        raise _RowError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise _RowError("not usable JSON: nested too deeply") from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise _RowError(f"not usable JSON: {str(error).split(';')[0]}") from None
    if not isinstance(row, dict):
        raise _RowError(f"{_a(row)}, not an object; {_needs(how)}")
    return row


def _fields(row: dict, how: Reading) -> tuple[str | list[dict], str, str | None]:
    """(prompt or messages, label, source) of a row. Raises _RowError."""
    for field in (how.input_key, how.label_key):
        if field not in row:
            raise _RowError(f"{json.dumps(field)} is missing; {_needs(how)}")
    prompt, label = row[how.input_key], row[how.label_key]
    if not how.apply_chat_template:
        also = " (--apply-chat-template takes messages)" if isinstance(prompt, list) else ""
        prompt = _text(json.dumps(how.input_key), prompt, also)
    elif isinstance(prompt, list):
        prompt = _messages(json.dumps(how.input_key), prompt)
    else:
        prompt = [{"role": "user", "content": _text(json.dumps(how.input_key), prompt, " or a list of messages")}]
    also = ""
    if _kind(label) == "number":
        label, also = _number(label) if how.label_as_string else label, " (--label-as-string takes numbers)"
    source = row.get("source")
    return prompt, _text(json.dumps(how.label_key), label, also), source if isinstance(source, str) else None


def _text(name: str, value: object, also: str = "") -> str:
    if not isinstance(value, str):
        raise _RowError(f"{name} is {_a(value)}; it must be a string{also}")
    if "\0" in value:
        raise _RowError(f"{name} holds a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _RowError(f"{name} holds a lone surrogate at character {error.start}") from None
    return value


def _messages(name: str, value: list) -> list[dict]:
    """[{"role", "content"}, …] for a chat template. Fields that a table fills with nulls are passed over."""
    if not value:
        raise _RowError(f"{name} is an empty list; messages are needed")
    messages = []
    for i, message in enumerate(value, 1):
        where = f"{name} message {i}"
        if not isinstance(message, dict):
            raise _RowError(f'{where} is {_a(message)}; it must be an object of "role" and "content"')
        if other := sorted(str(key) for key, one in message.items() if key not in ("role", "content") and one is not None):
            raise _RowError(f'{where}: {json.dumps(other[0])[:60]} is not taken; a message has "role" and "content"')
        messages.append({key: _text(f'{where} "{key}"', message.get(key)) for key in ("role", "content")})
    if messages[-1]["role"] == "assistant":
        raise _RowError(f"{name} ends with a message of the assistant, whose turn it is")
    return messages


def _number(value: float | decimal.Decimal) -> str:
    """A number as text: as JSON writes it, and whole ones without a fraction (a table that lacks some holds 42 as 42.0)."""
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        raise _RowError("the label is not a finite number")
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else str(value)


def _a(value: object) -> str:
    kind = _kind(value)
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _kind(value: object) -> str:
    kinds = {
        **{dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null value", bytes: "binary value"},
        **dict.fromkeys((int, float, decimal.Decimal), "number"),
    }
    return kinds.get(type(value), f"{type(value).__name__} value")


# ---------------------------------------------------------------------------------------------------------------------
# Rows to prompts
# ---------------------------------------------------------------------------------------------------------------------

_Row = tuple[str, str | list[dict], str, str | None]  # where it stands, prompt or messages, label, source


def read_prompts(
    path: Path | str,
    tokenizer,
    max_prompt_len: int,
    vocab_size: int | None = None,
    how: Reading | None = None,
    dropped: list[str] | None = None,
) -> list[Prompt]:
    """All rows of the data, in file order, with their tokens; at least one.

    tokenizer: what `load_tokenizer` returns. max_prompt_len: the most tokens a prompt may have. vocab_size: the model's.
    dropped: where given, rows with a longer prompt are left out, and their places (`file:line`) put there.
    ValueError, one line with file and line: a file that is missing, unreadable, damaged or without rows; bytes that are not
    UTF-8; a line that is empty, no JSON or no object; a prompt or label that is missing, no string, or holds a lone
    surrogate or NUL; messages that are none, or that the chat template refuses; a prompt that encodes to no tokens or to one
    that the model has not, cannot be encoded, or is longer than max_prompt_len.
    """
    how = how or Reading()
    arguments = template_arguments(tokenizer, how) if how.apply_chat_template else None
    rows: list[_Row] = []
    for file in files(path):
        for number, row in _records(file, how):
            where = f"{file}:{number}"
            try:
                rows.append((where, *_fields(row, how)))
            except _RowError as error:
                raise ValueError(f"{where}: {error}") from None
            if len(rows) > MOST_ROWS:
                raise ValueError(f"{path}: more than {MOST_ROWS:,} rows")
    if not rows:
        raise ValueError(f"{path}: no rows")
    key, prompts = json.dumps(how.input_key), []
    for start in range(0, len(rows), ENCODE_BATCH):
        batch_rows = rows[start : start + ENCODE_BATCH]
        if arguments is not None:
            batch_rows = [_rendered(tokenizer, row, arguments, key) for row in batch_rows]
        for (where, prompt, label, source), tokens in zip(batch_rows, _encode_rows(tokenizer, batch_rows, key), strict=True):
            if not tokens:
                raise ValueError(f"{where}: {key} encodes to no tokens")
            if len(tokens) > max_prompt_len:
                if dropped is None:
                    raise ValueError(f"{where}: {key} is {len(tokens)} tokens long; at most {max_prompt_len} are allowed")
                dropped.append(where)
                continue
            if vocab_size is not None and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                raise ValueError(f"{where}: {key} holds token {max(tokens)}; the model has tokens 0 to {vocab_size - 1}")
            prompts.append(Prompt(prompt, label, tuple(tokens), source))
    if not prompts:
        raise ValueError(f"{path}: all {len(rows):,} prompts are longer than {max_prompt_len} tokens")
    return prompts


def _encode_rows(tokenizer, rows: list[_Row], key: str) -> list[list[int]]:
    try:
        return _encode(tokenizer, [row[1] for row in rows])
    except Exception:  # `tokenizers` raises plain Exception, for the whole batch: find the row
        encoded = []
        for where, prompt, *_ in rows:
            try:
                encoded += _encode(tokenizer, [prompt])
            except Exception as error:
                reason = textwrap.shorten(str(error), 200, placeholder=" …")
                raise ValueError(f"{where}: the tokenizer cannot encode {key}: {reason}") from None
        return encoded


def _encode(tokenizer, texts: list[str]) -> list[list[int]]:
    # verbose=False: a prompt above the model's length is our error, not the tokenizer's warning.
    return tokenizer(texts, add_special_tokens=False, padding=False, truncation=False, verbose=False)["input_ids"]


# --- chat templates ---

_OURS = {
    "chat_template", "conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict",
    "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs", "padding", "truncation", "max_length",
    "processor_kwargs",
}  # fmt: skip


def parse_template_arguments(text: str) -> dict:
    """The JSON object of --chat-template-args. ValueError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--chat-template-args is not JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--chat-template-args must be a JSON object, not {_a(found)}")
    if taken := sorted(_OURS & set(found)):
        raise ValueError(f"--chat-template-args: {taken[0]} is not free to set")
    return found


def template_arguments(tokenizer, how: Reading) -> dict:
    """The arguments for the model's template. ValueError: there is no template, or one that does not know an argument's name,
    which it would pass over in silence."""
    arguments = parse_template_arguments(how.chat_template_args)
    try:
        text = tokenizer.get_chat_template()
    except Exception as error:
        reason = textwrap.shorten(str(error), 200, placeholder=" …")
        raise ValueError(f"--apply-chat-template: the model folder holds no chat template to use: {reason}") from None
    for name in arguments:
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
            raise ValueError(f"--chat-template-args: the chat template knows no {json.dumps(name)}")
    return arguments


def _rendered(tokenizer, row: _Row, arguments: dict, key: str) -> _Row:
    """The row with the template's text, which ends where the assistant's turn begins. A template runs in Jinja's sandbox."""
    where, messages, label, source = row
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **arguments)
        return where, _text("the rendered template", text), label, source
    except Exception as error:  # a template may raise anything
        reason = textwrap.shorten(str(error), 200, placeholder=" …") or type(error).__name__
        raise ValueError(f"{where}: the chat template cannot take {key}: {reason}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Order. The cursor is the number of prompts taken since the run began. With the seed it is all that a resume needs to know: the
# order of an epoch is a function of seed and epoch alone, by BLAKE3, which no library update changes.
# ---------------------------------------------------------------------------------------------------------------------


def batch(prompts: Sequence[Prompt], cursor: int, n: int, seed: int | None = None) -> tuple[list[Prompt], int]:
    """The next n prompts and the cursor after them: in file order, or shuffled anew in each epoch where a seed is given.

    cursor: prompts taken so far, in total. Each epoch takes every prompt once. ValueError: no prompts, cursor below 0, n below 1.
    """
    if not prompts or cursor < 0 or n < 1:
        raise ValueError(f"a batch of {n} from {len(prompts)} prompts at cursor {cursor}")
    size = len(prompts)
    places = (divmod(i, size) for i in range(cursor, cursor + n))
    return [prompts[i if seed is None else order(size, seed, epoch)[i]] for epoch, i in places], cursor + n


@functools.lru_cache(maxsize=2)  # a batch may reach into the next epoch
def order(size: int, seed: int, epoch: int) -> list[int]:
    """The rows 0 to size - 1 in the order of an epoch: sorted by keys that BLAKE3 gives for seed and epoch."""
    return _by_digest("order", size, seed, epoch)


def capped(prompts: list[Prompt], most: int, seed: int | None = None) -> list[Prompt]:
    """At most `most` prompts (0: all), in file order: the first ones, or with a seed a choice that the seed decides.

    A larger `most` keeps what a smaller one chose.
    """
    if not most or len(prompts) <= most:
        return prompts
    chosen = range(most) if seed is None else sorted(_by_digest("cap", len(prompts), seed)[:most])
    return [prompts[i] for i in chosen]


def _by_digest(purpose: str, size: int, *parts: int) -> list[int]:
    """0 to size - 1, sorted by keys of 8 bytes each: one after the other, the extended output of BLAKE3 over the arguments."""
    import numpy
    from blake3 import blake3

    keys = blake3("\t".join([purpose, *map(str, parts)]).encode()).digest(8 * size)
    return numpy.frombuffer(keys, "<u8").argsort(kind="stable").tolist()


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer
# ---------------------------------------------------------------------------------------------------------------------


def load_tokenizer(model_dir: Path | str):
    """The tokenizer in a model directory, from its files alone: no remote code, no network.

    ValueError, one line: no such directory, or files that Transformers cannot load without the model's own code.
    """
    path = Path(model_dir)
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory; a model directory with tokenizer files is needed")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    # Transformers 5 reads config.json beside the tokenizer and warns that it does not know the model's type.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{path}: the tokenizer cannot be loaded: {reason}") from None
    finally:
        logging.set_verbosity(verbosity)


def decode(tokenizer, ids: Sequence[int]) -> str:
    """Text of token ids as a reward sees it: without special tokens, spaces as the model wrote them."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
