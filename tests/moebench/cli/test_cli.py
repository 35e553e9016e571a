"""The verbs of the command line, and what is the same for all of them."""

import os
import subprocess
import sys

import click
import pytest

from moebench.cli import VERBS, group, main


def test_help_lists_every_verb(moebench):
    """`moebench --help` names all verbs with a line each."""
    said = moebench("--help")
    assert said.status == 0
    for verb in VERBS:
        assert f"\n  {verb} " in said.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_own_help(moebench, verb):
    """Each verb's file loads and explains itself."""
    said = moebench(verb, "--help")
    assert said.status == 0
    assert f"Usage: moebench {verb}" in said.out
    assert isinstance(group.get_command(click.Context(group), verb), click.Command)


def test_help_imports_nothing_heavy():
    """The list of verbs needs no torch, pandas, rich or pydantic: it must be instant."""
    code = (
        "import sys\n"
        "from moebench.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pandas', 'rich', 'pydantic', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "verbs = [m for m in sys.modules if m.startswith('moebench.cli.')]\n"
        "assert not heavy and not verbs, (heavy, verbs)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_verb_or_option_is_one_line(moebench):
    """What doesn't exist is refused like all bad input."""
    assert "No such command 'lauch'" in moebench.refused("lauch")
    assert "No such option '--nic-speed'" in moebench.refused("run", "--suite", "smoke", "--nic-speed", "1gbit")
    assert "'gpu' is not one of" in moebench.refused("run", "--suite", "smoke", "--engine", "gpu")


def test_version(moebench):
    """`--version` prints the version."""
    assert moebench("--version").out.startswith("moebench, version ")


def test_without_arguments_help_is_shown(moebench):
    """A bare `moebench` explains itself."""
    said = moebench()
    assert said.status == 2
    assert "Usage: moebench" in said.out + said.err


def test_it_runs_as_a_module():
    """`python -m moebench` is the same program."""
    done = subprocess.run([sys.executable, "-m", "moebench", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("moebench, version ")


@pytest.mark.parametrize("arguments", [("list", "topologies"), ("claims", "--json")])
def test_a_full_output_is_one_line(tmp_path, arguments):
    """Where standard output takes nothing more: exit 2 and one line, no traceback."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "moebench", *arguments], stdout=full, stderr=subprocess.PIPE, text=True,
            cwd=tmp_path, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "moebench: standard output: can't write: No space left on device\n"


def test_a_closed_pipe_ends_quietly(tmp_path):
    """The reader has gone: the status of SIGPIPE, and not a word."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "moebench", "list", "topologies"], stdout=writing, stderr=subprocess.PIPE, text=True,
        cwd=tmp_path, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_cut_off_file_is_not_taken_for_ctrl_c(monkeypatch):
    """An end of file inside the program is a fault of its own, with its traceback; click would call it an abort."""

    def cut_off(*arguments):
        raise EOFError("Ran out of input")

    monkeypatch.setattr(group, "invoke", cut_off)
    with pytest.raises(EOFError, match="Ran out of input"):
        main(["list"])
