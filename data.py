"""Prompts: reading them, the cursor over them, and the tokenizer that goes both ways.

A data file is JSONL in UTF-8: one object a line, with string "prompt" and string "label"; other fields are ignored. The
whole file is checked before anything starts, and the first bad row ends with one `file:line: …` message:

    math.jsonl:17: "label" is missing; each row needs string "prompt" and "label"

A byte order mark and CRLF line ends are accepted, empty lines only at the end. Refused, because they are signs of a
damaged file and few tools downstream carry them: lone surrogates and NUL in a prompt or label, a field named twice.
"""

import dataclasses
import json
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

ENCODE_BATCH = 1024  # prompts handed to the tokenizer at once; fast tokenizers spread a batch over cores


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row. `tokens` are the prompt's ids, without added special tokens; at least one."""

    prompt: str
    label: str
    tokens: tuple[int, ...]


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


class _RowError(ValueError):
    pass


def _object(pairs: list[tuple[str, object]]) -> dict:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RowError(f"the field {json.dumps(twice)[:60]} stands twice in one object")
    return row


def _no_constant(name: str) -> None:
    raise _RowError(f"not JSON: {name} is no JSON value")


def _parse_row(line: str) -> tuple[str, str]:
    """(prompt, label) of one line. Raises _RowError."""
    try:
        row = json.loads(line, object_pairs_hook=_object, parse_constant=_no_constant)
    except _RowError:
        raise
    except json.JSONDecodeError as error:
        raise _RowError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise _RowError("not usable JSON: nested too deeply") from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise _RowError(f"not usable JSON: {str(error).split(';')[0]}") from None
    if not isinstance(row, dict):
        raise _RowError(f'a {_kind(row)}, not an object; each row needs string "prompt" and "label"')
    for field in ("prompt", "label"):
        if field not in row:
            raise _RowError(f'"{field}" is missing; each row needs string "prompt" and "label"')
        if not isinstance(row[field], str):
            raise _RowError(f'"{field}" is a {_kind(row[field])}; it must be a string')
        if "\0" in row[field]:
            raise _RowError(f'"{field}" holds a NUL character')
        try:
            row[field].encode()
        except UnicodeEncodeError as error:
            raise _RowError(f'"{field}" holds a lone surrogate at character {error.start}') from None
    return row["prompt"], row["label"]


def _kind(value: object) -> str:
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null value")


def _lines(path: Path) -> Iterable[tuple[int, bytes]]:
    """(number from 1, content) of each line, without the byte order mark and the line end."""
    if path.is_dir():
        raise ValueError(f"{path}: a directory; a JSONL file is needed")
    try:
        with open_plain(path) as file:
            for number, line in enumerate(file, 1):
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def open_plain(path: Path | str):
    """Open a plain file to read its bytes. ValueError for anything else: a pipe may keep us waiting, a device never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path}: not a plain file")
    return open(path, "rb")


def _encode(tokenizer, texts: list[str]) -> list[list[int]]:
    # verbose=False: a prompt above the model's length is our error below, not the tokenizer's warning.
    return tokenizer(texts, add_special_tokens=False, padding=False, truncation=False, verbose=False)["input_ids"]


def read_prompts(path: Path | str, tokenizer, max_prompt_len: int, vocab_size: int | None = None) -> list[Prompt]:
    """All rows of a JSONL file, in file order, with their tokens; at least one.

    tokenizer: what `load_tokenizer` returns. max_prompt_len: the most tokens a prompt may have. vocab_size: the model's.
    ValueError, one line with file and line: a file that is missing, unreadable or without rows; bytes that are not
    UTF-8; a line that is empty, no JSON or no object; a prompt or label that is missing, no string, or holds a lone
    surrogate or NUL; a prompt that encodes to no tokens or to one that the model has not, cannot be encoded, or is longer
    than max_prompt_len.
    """
    path = Path(path)
    rows: list[tuple[int, str, str]] = []
    empty = 0  # number of the first of the empty lines just read
    for number, line in _lines(path):
        if not line.strip():
            empty = empty or number
            continue
        if empty:
            raise ValueError(f"{path}:{empty}: an empty line between rows")
        try:
            rows.append((number, *_parse_row(line.decode("utf-8"))))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line)") from None
        except _RowError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not rows:
        raise ValueError(f"{path}: no rows")
    prompts = []
    for start in range(0, len(rows), ENCODE_BATCH):
        batch_rows = rows[start : start + ENCODE_BATCH]
        for (number, prompt, label), tokens in zip(batch_rows, _encode_rows(path, tokenizer, batch_rows), strict=True):
            if not tokens:
                raise ValueError(f'{path}:{number}: "prompt" encodes to no tokens')
            if len(tokens) > max_prompt_len:
                raise ValueError(
                    f'{path}:{number}: "prompt" is {len(tokens)} tokens long; at most {max_prompt_len} are allowed'
                )
            if vocab_size is not None and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                raise ValueError(
                    f'{path}:{number}: "prompt" holds token {max(tokens)}; the model has tokens 0 to {vocab_size - 1}'
                )
            prompts.append(Prompt(prompt, label, tuple(tokens)))
    return prompts


def _encode_rows(path: Path, tokenizer, rows: list[tuple[int, str, str]]) -> list[list[int]]:
    try:
        return _encode(tokenizer, [prompt for _, prompt, _ in rows])
    except Exception:  # `tokenizers` raises plain Exception, for the whole batch: find the row
        encoded = []
        for number, prompt, _ in rows:
            try:
                encoded += _encode(tokenizer, [prompt])
            except Exception as error:
                reason = " ".join(str(error).split())[:200]
                raise ValueError(f'{path}:{number}: the tokenizer cannot encode "prompt": {reason}') from None
        return encoded


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


# ---------------------------------------------------------------------------------------------------------------------
# The cursor: the number of prompts consumed since the run began. It is all a resume needs to know about the data.
# ---------------------------------------------------------------------------------------------------------------------


def batch(prompts: Sequence[Prompt], cursor: int, n: int) -> tuple[list[tuple[int, Prompt]], int]:
    """The next n prompts in file order, beginning again at the end, and the cursor after them.

    cursor: prompts consumed so far, in total; the next is row `cursor % len(prompts)`. Each prompt comes with its row
    index, from 0. No row is repeated before all were used. ValueError: no prompts, cursor below 0, n below 1.
    """
    if not prompts or cursor < 0 or n < 1:
        raise ValueError(f"a batch of {n} from {len(prompts)} prompts at cursor {cursor}")
    indices = [i % len(prompts) for i in range(cursor, cursor + n)]
    return [(i, prompts[i]) for i in indices], cursor + n


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
