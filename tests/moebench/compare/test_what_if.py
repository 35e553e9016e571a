"""Runs of a machine that --set changed: compared with the reason, and no part of a history."""

import shutil

import pytest

from tests.moebench.cli.support import Moebench

RUN = ("run", "--suite", "smoke", "--gate", "switch", "--batch-size", 1, "--topology", "2x2-titan-rtx")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run as described, and one with slow messages."""
    folder = tmp_path_factory.mktemp("what-if")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        from click.testing import CliRunner

        from moebench.cli import group

        for name, changed in (("plain", ()), ("slow", ("--set", "nic.message=300us"))):
            done = CliRunner().invoke(group, [str(word) for word in (*RUN, *changed, "--out", f"runs/{name}")])
            assert done.exit_code == 0, done.output
    return folder / "runs"


def test_the_reason_is_what_was_set(runs, capsys):
    """Re-based, because of --set; the side says so too."""
    said = Moebench(capsys)("compare", runs / "plain", runs / "slow")
    assert "what if nic.message=300us" in said.out
    assert "--set nothing became nic.message=300us" in said.out
    assert "the case itself changed" not in said.out


def test_a_baseline_knows_what_was_set(runs, capsys, monkeypatch, tmp_path):
    """Accepted from a what-if: the same one re-bases nothing, the machine as described names what is no longer set."""
    monkeypatch.chdir(tmp_path)
    ask = Moebench(capsys)
    assert ask("accept", runs / "slow", "--baseline", "slow").status == 0
    assert "re-based" not in ask("check", runs / "slow", "--baseline", "slow").out
    assert "--set nic.message=300us became nothing" in ask("check", runs / "plain", "--baseline", "slow").out


def test_a_narrowed_run_says_what_it_left_out(runs, capsys, tmp_path):
    """Fewer systems than the base: a note with how many cases, no verdict on them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(runs.parent)
        narrow = tmp_path / "narrow"
        assert Moebench(capsys)(*RUN, "--system", "hetumoe", "--out", narrow).status == 0
    said = Moebench(capsys)("compare", runs / "plain", narrow)
    assert said.status == 0
    assert "without 3 of base's 4 cases" in said.out + said.err


def test_a_history_has_none(runs, capsys, tmp_path):
    """One run alone has no change; a folder of what-ifs has no history, and an index of nothing is refused."""
    assert "300us" not in Moebench(capsys)("trend", runs).out
    shutil.copytree(runs / "slow", tmp_path / "only/slow")
    assert "no finished run" in Moebench(capsys)("trend", tmp_path / "only").err
    (tmp_path / "empty").mkdir()
    said = Moebench(capsys)("index", tmp_path / "empty")
    assert (said.status, "no run" in said.err) == (2, True)
    assert not (tmp_path / "empty/index.html").exists()
