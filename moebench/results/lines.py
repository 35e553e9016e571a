"""Rows as JSON lines: how a results file is written, read, and cut where it is incomplete.

The rows of a case are written in one piece and the last of them carries `"last": true`, so whatever follows the last
such line (a torn line, half a case) is known to be incomplete.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from moebench.results.rows import Row
from moebench.workloads.errors import InputError

SCHEMA_VERSION = 1

_ROW_FIELDS = frozenset(f.name for f in fields(Row))
_LAST = b'"last": true}'


def encode(rows: Sequence[Row]) -> bytes:
    """The rows of one case as lines; a draw without a value (NaN) becomes null."""
    lines = []
    for index, row in enumerate(rows):
        item = {"schema_version": SCHEMA_VERSION, **row.to_json()}
        if "draws" in item:
            item["draws"] = [None if math.isnan(v) else v for v in item["draws"]]
        if index == len(rows) - 1:
            item["last"] = True
        lines.append(json.dumps(item, allow_nan=False) + "\n")
    return "".join(lines).encode()


def whole_bytes(data: bytes) -> int:
    """Length of the part of a results file that ends with the last row of a case."""
    end = data.rfind(_LAST + b"\n")
    return 0 if end < 0 else end + len(_LAST) + 1


def objects(file: Path, metrics: Sequence[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and JSON object of each row of the whole cases; of the given metrics, or all.

    Raises:
        InputError: a line is no JSON object, or another version of moebench wrote it.
    """
    wanted = [f'"metric": "{metric}"'.encode() for metric in metrics]
    data = file.read_bytes() if file.exists() else b""
    for number, line in enumerate(data[: whole_bytes(data)].splitlines(), 1):
        if wanted and not any(text in line for text in wanted):
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise InputError(f"{file}, line {number}: not a JSON object: {error}") from None
        check_version(item.pop("schema_version", None) if isinstance(item, dict) else None, f"{file}, line {number}")
        item.pop("last", None)
        yield number, item


def decode(item: dict[str, Any], where: str) -> Row:
    """The row of a JSON object.

    Raises:
        InputError: a key is missing or unknown.
    """
    unknown = sorted(item.keys() - _ROW_FIELDS)
    if unknown:
        raise InputError(f"{where}: unknown key {unknown[0]!r}")
    if "draws" in item:
        item["draws"] = tuple(math.nan if v is None else v for v in item["draws"])
    try:
        return Row(**{"unit": "", **item})
    except TypeError as error:
        raise InputError(f"{where}: {error}") from None


def check_version(version: Any, where: object) -> None:
    """Refuse what another version of moebench wrote."""
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{where}: schema_version {version!r} is unknown; this moebench reads {SCHEMA_VERSION}"
            " (run it again, or use the moebench that wrote it)"
        )
