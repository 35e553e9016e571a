"""Paths on the command line."""

from pathlib import Path
from typing import Any

import click


class OutputFile(click.Path):
    """A file to write: it must have a name, and be no folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, once it names a file."""
        path: Any = super().convert(value, param, ctx)
        if not Path(path).name:
            self.fail(f"{str(value)!r} names no file", param, ctx)
        return path
