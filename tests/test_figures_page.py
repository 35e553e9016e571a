"""The page on figures and exports: its commands exist, its example is a figure of a suite, its words are true."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from moebench.cli import group as commands
from moebench.workloads.figure import MARKS, VALUES, WIDTHS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/figures.md").read_text(encoding="utf-8")
LINES = sorted(
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S)
    for line in block.splitlines()
    if line.startswith("moebench ")
)


@pytest.mark.parametrize("line", LINES)
def test_every_command_parses(line):
    """The verb takes what follows it; `--as` and `list` take their words. Nothing is run."""
    verb, *words = shlex.split(line)[1:]
    command = commands.get_command(None, verb)
    with command.make_context(verb, words):
        pass


def test_there_are_commands():
    """The pattern finds them."""
    assert len(LINES) >= 10


def test_the_example_is_a_figure_of_the_suite():
    """Letter for letter."""
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.S)
    assert example in (ROOT / "workloads/suites/hetu.toml").read_text(encoding="utf-8")


def test_the_words_are_those_of_the_program():
    """Values, marks, widths and formats that the page names are the ones there are."""
    for word in (*VALUES, *MARKS, *WIDTHS):
        assert f"`{word}`" in PAGE
    said = CliRunner().invoke(commands, ["export", "--help"]).output
    (choices,) = re.findall(r"\[(nccl-tests[^\]]*)\]", said)
    assert all(f"`{name}`" in PAGE for name in choices.split("|"))
