"""Reading a TOML file so that every complaint about it can name file, line and key.

The standard parser gives no positions, so the line of a key is found again in the text, for errors only.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebench.workloads.errors import InputError

SCHEMA_VERSION = 1
Key = str | int

_HEADER = re.compile(r"\s*(\[\[?)(.+?)\]\]?\s*(?:#.*)?")
_PART = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_ASSIGNMENT = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")


@dataclass(frozen=True)
class TomlFile:
    """A parsed file with its text."""

    path: Path
    text: str
    data: dict[str, Any]

    def where(self, keys: Sequence[Key] = ()) -> str:
        """`file.toml, line 7: parameters."nic.bandwidth"` for the key path `keys`."""
        line = line_of(self.text, keys) if keys else None
        place = f"{self.path}, line {line}" if line else str(self.path)
        return f"{place}: {dotted(keys)}" if keys else place


def read_toml(path: Path) -> TomlFile:
    """Read and parse `path`; its schema_version must be the one this version knows.

    Raises:
        InputError: unreadable, not UTF-8, not TOML (with line and key), beyond a parser, another schema_version.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of some systems put a byte-order mark first
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(_explain_syntax(path, text, str(error))) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"cannot be read: {error}"
        raise InputError(f"{path}: {reason}") from None
    file = TomlFile(path, text, data)
    version = data.pop("schema_version", None)
    if version is None:
        raise InputError(f"{file.where()}: missing key schema_version; write schema_version = {SCHEMA_VERSION}")
    if isinstance(version, bool) or version != SCHEMA_VERSION:
        place = file.where(["schema_version"])
        raise InputError(f"{place}: {version!r} is unknown; this version reads {SCHEMA_VERSION}")
    return file


def dotted(keys: Sequence[Key]) -> str:
    """A key path as TOML writes it; a list index follows its key in brackets."""
    shown = ""
    for key in keys:
        if isinstance(key, int):
            shown += f"[{key}]"
            continue
        bare = re.fullmatch(r"[A-Za-z0-9_-]+", key)
        shown += ("." if shown else "") + (key if bare else f'"{key}"')
    return shown


def line_of(text: str, keys: Sequence[Key]) -> int | None:
    """Number of the line that sets `keys`, or the longest part of it that a line sets; None where no line does."""
    target = tuple(keys)
    table: tuple[Key, ...] = ()
    counts: dict[tuple[Key, ...], int] = {}
    best: tuple[int, int | None] = (0, None)
    for number, line in enumerate(text.splitlines(), start=1):
        header, assignment = _HEADER.fullmatch(line), _ASSIGNMENT.match(line)
        if header is not None and assignment is None:
            table = path = _table_path(header[2], header[1] == "[[", counts)
        elif assignment is not None:
            path = table + _split(assignment[1])
        else:
            continue
        if len(path) > best[0] and target[: len(path)] == path:
            best = (len(path), number)
    return best[1]


def _table_path(name: str, is_array: bool, counts: dict[tuple[Key, ...], int]) -> tuple[Key, ...]:
    """Key path of a table header, with the index of every array of tables on the way."""
    path: tuple[Key, ...] = ()
    parts = _split(name)
    for position, part in enumerate(parts):
        path += (part,)
        if is_array and position == len(parts) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path += (counts[path],)
    return path


def _split(key: str) -> tuple[Key, ...]:
    """The parts of a dotted key, quotes removed."""
    try:
        node = tomllib.loads(f"{key.strip()} = 0")
    except tomllib.TOMLDecodeError:
        return (key,)
    parts: list[Key] = []
    while isinstance(node, dict):
        [(part, node)] = node.items()
        parts.append(part)
    return tuple(parts)


def _explain_syntax(path: Path, text: str, message: str) -> str:
    """The parser's complaint with line and key."""
    match = re.search(r"\(at line (\d+), column (\d+)\)", message)
    lines = text.splitlines()
    number = int(match[1]) if match else len(lines)
    line = lines[number - 1] if 0 < number <= len(lines) else ""
    key = line.partition("=")[0].strip()
    reason = re.sub(r"\s*\(at .*\)", "", message)
    at = f", key {key}" if key else ""
    return f"{path}, line {number}{at}: malformed TOML: {reason}"
