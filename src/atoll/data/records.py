"""Records of one text each: JSON lines and parquet, read one at a time; and bytes to text, with what had to be replaced counted."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.config import UserError

RECORDS = (".jsonl", ".parquet")


@dataclass
class Repairs:
    """What reading had to replace."""

    undecodable: int = 0  # bytes (or lone surrogates) that are not UTF-8, each run shown as U+FFFD


def decode(raw: bytes, repairs: Repairs) -> str:
    """`raw` as UTF-8. Undecodable bytes become U+FFFD and are counted in `repairs`."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        repairs.undecodable += len(raw) - len(raw.decode("utf-8", "ignore").encode("utf-8"))
        return raw.decode("utf-8", "replace")


def clean(text: str, repairs: Repairs) -> str:
    """`text` without lone surrogates, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        repairs.undecodable += whole.count("\ufffd") - text.count("\ufffd")
        return whole


def read_records(path: Path, text_field: str, repairs: Repairs) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of every record; a null text is an empty one. Raises `UserError` naming the record that is wrong."""
    rows = _jsonl(path, text_field, repairs) if path.suffix == ".jsonl" else _parquet(path, text_field)
    for number, value in rows:
        if value is None:
            yield number, ""
        elif isinstance(value, bytes):
            yield number, decode(value, repairs)
        elif isinstance(value, str):
            yield number, clean(value, repairs)
        else:
            kind = type(value).__name__
            raise UserError(f"data.text_field = {text_field!r}: record {number} of {path.name!r} holds a {kind} there; text is expected")


def _missing(text_field: str, there: Iterable[str], where: str) -> UserError:
    there = list(there)
    near = difflib.get_close_matches(text_field, there, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, there)) or 'none'}"
    return UserError(f"data.text_field = {text_field!r}: {where} has no such field; {hint}")


def _jsonl(path: Path, text_field: str, repairs: Repairs) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"line {number} of {path.name!r}"
            try:
                record = json.loads(decode(line, repairs))
            except (ValueError, RecursionError) as error:
                raise UserError(f"data.source = {str(path)!r}: {where} is not JSON ({error}); repair or remove it") from error
            if not isinstance(record, dict):
                raise UserError(f"data.source = {str(path)!r}: {where} is not a JSON object; {{{text_field!r}: ...}} is expected")
            if text_field not in record:
                raise _missing(text_field, record, where)
            yield number, record[text_field]


def _parquet(path: Path, text_field: str) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"data.source = {str(path)!r}: reading parquet needs pyarrow; pip install 'atoll[data]'") from error
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"data.source = {str(path)!r}: not a parquet file, or a damaged one; write it again") from error
    with file:
        names = file.schema_arrow.names
        if text_field not in names:
            raise _missing(text_field, names, repr(path.name))
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield number, value
