"""Every moebench command of the pages runs, in the order of its page."""

import shutil
from pathlib import Path

import pytest

from tests.docs_bench import ROOT, call, make_home, make_runs, shell_lines

PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if shell_lines(page)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs that the pages speak of."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_runs(folder)
    return folder


@pytest.fixture
def bench(runs, tmp_path, monkeypatch):
    """A copy of it to work in, and a home of one's own where this machine has been measured."""
    monkeypatch.setenv("HOME", str(make_home(tmp_path / "home")))
    for name in ("MOEBENCH_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = Path(shutil.copytree(runs, tmp_path / "work"))
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page, bench):
    """Each exits with 0; runs only as far as --dry-run goes, and calibrating as far as its options."""
    for line in shell_lines(page):
        result = call(line)
        assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"
