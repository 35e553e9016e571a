"""docs/new-system.md: its Python is a system that is right, and its comparison prints what the page shows."""

import re
from pathlib import Path

import pytest

from moebench.cases.plan import Filters
from moebench.checks.correctness import Status, check_all, check_gates, trial
from moebench.cli.step_table import print_times
from moebench.new_system import write_package
from moebench.run import begin, execute, prepare
from moebench.systems.registry import get
from moebench.workloads.gates.registry import GATES, parse_label
from moebench.workloads.load import load_suite
from tests.moebench.cli.support import Moebench
from tests.moebench.fake_engine import Watch

PAGE = (Path(__file__).parent.parent / "docs/new-system.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"(-?\d+\.\d+)( %)?")
TOLERANCE = 0.03  # versions of torch take other operators here and there


def blocks(language):
    """The page's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


@pytest.fixture
def grouped(site, tmp_path):
    """The package that the page's reader has in the end, installed."""
    folder = write_package("grouped", tmp_path / "grouped")
    (folder / "moebench_grouped/system.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    site.install_written(folder)


@pytest.mark.slow
def test_the_system_is_right(grouped):
    """Under both conventions; other gates are refused with a reason."""
    assert get("grouped").title == "Grouped (sorted rows, no padding)"
    tried = [(label, name) for label in ("switch", "gshard", "topk-3") for name in ("common", "as-shipped")]
    found = check_all([trial("grouped", parse_label(label), "bf16", name) for label, name in tried])
    assert dict(zip(tried, found)) == dict.fromkeys(tried, Status("passed"))
    others = [label for label in GATES if label not in ("switch", "gshard", "topk")]
    assert {status.status for status in check_gates("grouped", others).values()} == {"unsupported"}


@pytest.mark.slow
def test_the_comparison_prints_what_the_page_shows(grouped, tmp_path, monkeypatch, capsys):
    """Same words, same winners, numbers within what another torch may change; and the reason by region."""
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("toml")
    Path("compare.toml").write_text(text)
    job = begin(prepare(load_suite("compare.toml"), Filters()), Path("compared"))
    execute(job, Watch(), jobs=1)
    table, regions = blocks("text")
    monkeypatch.setenv("COLUMNS", "110")
    capsys.readouterr()
    print_times(job.cases, job.folder.rows("step_time"), "compared")
    same(capsys.readouterr().out, table)
    (command,) = re.findall(r"`moebench (explain .*?)`", PAGE)
    said = Moebench(capsys)(*command.split())
    assert said.status == 0
    start = said.out.index("region  ")
    same(said.out[start:].partition("\n\n")[0], regions)


def same(printed, shown):
    """Equal but for the last digits."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    for (ours, percent), (theirs, _) in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        absolute = 100 * TOLERANCE if percent else 0.003
        assert float(ours) == pytest.approx(float(theirs), rel=TOLERANCE, abs=absolute), shown
