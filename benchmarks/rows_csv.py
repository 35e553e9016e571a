"""Frozen dataclasses as lines of a CSV file, and back."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

Line = TypeVar("Line")


def write_rows(rows: Sequence[Any], path: Path) -> None:
    """One line an object; numbers with nine digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(rows[0])], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.9g}" if isinstance(v, float) else v for k, v in asdict(row).items()})


def read_rows(kind: type[Line], path: Path) -> list[Line]:
    """The objects of a file that `write_rows` wrote."""
    with path.open(newline="") as file:
        return [kind(**{f.name: _parsed(f.type, line[f.name]) for f in fields(kind)}) for line in csv.DictReader(file)]


def _parsed(kind: Any, text: str) -> Any:
    return text == "True" if kind is bool else kind(text)
