"""Rows as JSON lines: how a results file is written, read, checked, and cut where it is incomplete.

The rows of a case are written in one piece and the last of them carries `"last": true`, so whatever follows the last
such line (a torn line, half a case) is known to be incomplete. How the JSON is spaced means nothing.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from io import BytesIO
from pathlib import Path
from typing import Any

from moebench.results.rows import Row, problem
from moebench.workloads.errors import InputError

SCHEMA_VERSION = 1

_ROW_FIELDS = frozenset(f.name for f in fields(Row))


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


def read(file: Path) -> bytes:
    """The bytes of a results file, none where it isn't there yet.

    Raises:
        InputError: it can't be read.
    """
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None


def whole_bytes(data: bytes, file: Path) -> int:
    """Length of the part of a results file that ends with the last row of a case; the rest is one torn case.

    Raises:
        InputError: more than one torn case follows, so that something else than a dead process made the file.
    """
    end, torn = len(data), set()
    while end:
        begin = data.rfind(b"\n", 0, end - 1) + 1
        line = data[begin:end]
        item = _object(line)
        if item is not None and item.get("last") is True:
            return end
        is_torn_line = end == len(data) and not line.endswith(b"\n")
        if item is None and not is_torn_line and line.strip():
            raise InputError(f"{file}, line {_number(data, begin)}: not a JSON object, and no end of a stopped run")
        torn.add(str(item.get("case_hash")) if item else "")
        if len(torn - {""}) > 1:
            raise InputError(
                f'{file}, line {_number(data, begin)}: the rows of several cases are not complete (the last row of a '
                'case says "last": true); something other than moebench changed this file'
            )
        end = begin
    return 0


def _number(data: bytes, begin: int) -> int:
    return data.count(b"\n", 0, begin) + 1


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return item if isinstance(item, dict) else None


def objects(
    file: Path, metrics: Sequence[str] = (), with_samples: bool = True
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and JSON object of each row of the whole cases; of the given metrics, or all.

    A case that stands there twice counts once, the first time (see `repeated`).

    Args:
        with_samples: or only summaries and what has no samples.

    Raises:
        InputError: a line is no row, or another version of moebench wrote it.
    """
    ended: set[str] = set()
    for number, item, is_last in _items(file, _ending_or_of(metrics) if metrics else _ANYTHING):
        names = {item["case_hash"], item["case"]}
        if names & ended:
            continue
        if is_last:
            ended |= names
        if (not metrics or item["metric"] in metrics) and (with_samples or item.get("sample") is None):
            yield number, item


def places(file: Path) -> dict[str, tuple[int, int]]:
    """First and last line of the rows of each whole case, by its name; of one that stands there twice the first time.

    Raises:
        InputError: a line is no row, or another version of moebench wrote it.
    """
    found: dict[str, tuple[int, int]] = {}
    before = 0
    for number, item, is_last in _items(file, _ENDING):
        if is_last:
            found.setdefault(item["case"], (before + 1, number))
            before = number
    return found


def repeated(file: Path) -> tuple[int, str] | None:
    """Line number and name of the first case that stands in a file for the second time, or None."""
    ended: set[str] = set()
    for number, item, is_last in _items(file, _ENDING):
        names = {item["case_hash"], item["case"]}
        if is_last and names & ended:
            return number, item["case"]
        if is_last:
            ended |= names
    return None


_ENDING, _ANYTHING = re.compile(b'"last"'), re.compile(b"")


def _ending_or_of(metrics: Sequence[str]) -> re.Pattern[bytes]:
    """Finds lines of some metrics and those that may end a case. By the key first: a name takes a try at each byte."""
    names = b"|".join(re.escape(metric.encode()) for metric in metrics)
    return re.compile(rb'"metric"\s*:\s*"(?:' + names + rb')"|"last"')


def _items(file: Path, wanted: re.Pattern[bytes]) -> Iterator[tuple[int, dict[str, Any], bool]]:
    """Line number and object of each row, and whether it is its case's last; of lines in which `wanted` is found."""
    data = read(file)
    for number, line in enumerate(BytesIO(data[: whole_bytes(data, file)]), 1):  # one at a time: a file may be large
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        if not wanted.search(line):
            if not (line.startswith(b"{") and line.rstrip().endswith(b"}")):
                raise InputError(f"{where}: not a JSON object")
            if b'"metric"' in line:
                continue
        try:
            item = _DECODER.decode(line.removeprefix(_BYTE_ORDER_MARK).decode())
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not a JSON object: {error}") from None
        if not isinstance(item, dict):
            raise InputError(f"{where}: not a JSON object")
        check_version(item.pop("schema_version", None), where)
        is_last = item.pop("last", False) is True
        found = problem(item)
        if found:
            raise InputError(f"{where}: {found}")
        yield number, item, is_last


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which editors of some systems put first
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def decode(item: dict[str, Any]) -> Row:
    """The row of a JSON object that `objects` has yielded."""
    draws = tuple(math.nan if v is None else v for v in item.get("draws", ()))
    return Row(**{"unit": "", **item, "draws": draws})


def check_version(version: Any, where: object) -> None:
    """Refuse what another version of moebench wrote."""
    if isinstance(version, bool) or version != SCHEMA_VERSION:
        raise InputError(
            f"{where}: schema_version {version!r} is unknown; this moebench reads {SCHEMA_VERSION}"
            " (run it again, or use the moebench that wrote it)"
        )
