"""Calls the command line in this process, as a person would."""

from dataclasses import dataclass

import pytest

from moebench.cli import main


@dataclass
class Said:
    """What a command printed, and its exit status."""

    out: str
    err: str
    status: int


class Moebench:
    """`moebench(*arguments)` runs the command line and returns what it said."""

    def __init__(self, capsys) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Said:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        captured = self._capsys.readouterr()
        return Said(captured.out, captured.err, stopped.value.code)

    def refused(self, *arguments: object) -> str:
        """Run what must be refused: one line on standard error, nothing on standard output, status 2."""
        said = self(*arguments)
        assert said.status == 2
        assert said.out == ""
        assert said.err.startswith("moebench: ")
        assert said.err.count("\n") == 1
        return said.err
