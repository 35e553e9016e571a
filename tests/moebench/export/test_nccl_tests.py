"""Exchanges in the columns of nccl-tests."""

import re
from dataclasses import replace

import pytest

from moebench.cases.plan import Filters
from moebench.export.nccl_tests import _number, nccl_text
from moebench.run import begin, execute, prepare
from moebench.workloads.errors import InputError
from tests.moebench.fake_engine import Watch
from tests.moebench.suites import of_kind, small_overall


def run_of(suite, path, **filters):
    job = begin(prepare(replace(suite, samples=4), Filters(quick=True, **filters), "sim"), path)
    execute(job, Watch())
    return job.folder


@pytest.fixture
def folder(fake, tmp_path, monkeypatch):
    """Flat and leader exchanges on two nodes, on the fake engine."""
    monkeypatch.setattr("moebench.rows.exchanges.finish", lambda case, topology, rows: rows)
    exchanges = of_kind("hetu", "exchange")
    topologies = ("2x8-titan-rtx", "16x8-titan-rtx")
    return run_of(exchanges, tmp_path / "run", systems=("flat", "leader"), topologies=topologies)


def test_a_line_has_its_columns_and_its_bandwidths(folder):
    """algbw is the buffer over the time, busbw leaves out the own part; time is in us."""
    rows = {(r.system, r.topology, r.payload_bytes): r.value for r in folder.rows("collective_time")}
    blocks = nccl_text(folder).strip().split("\n\n")
    assert len(blocks) == 4
    heads = [re.match(r"# (\S+) all-to-all on (\S+), (\d+) ranks", block).groups() for block in blocks]
    places = (("2x8-titan-rtx", "16"), ("16x8-titan-rtx", "128"))
    assert heads == [(name, *place) for place in places for name in ("flat", "leader")]
    for block, (name, topology, ranks) in zip(blocks, heads):
        lines = [line.split() for line in block.splitlines() if not line.startswith("#")]
        assert len(lines) == 11
        assert [int(line[0]) for line in lines] == sorted(int(line[0]) for line in lines)
        n = int(ranks)
        for size, count, dtype, redop, root, time, algbw, busbw, wrong in lines:
            assert (dtype, redop, root, wrong) == ("float", "none", "-1", "N/A")
            assert int(count) * 4 * n == int(size)
            seconds = rows[name, topology, int(size)]
            assert float(time) == pytest.approx(seconds * 1e6, rel=5e-2, abs=0.01)
            assert float(algbw) == pytest.approx(int(size) / seconds / 1e9, rel=5e-2, abs=0.01)
            assert float(busbw) == pytest.approx(int(size) / seconds / 1e9 * (n - 1) / n, rel=5e-2, abs=0.01)


def test_lines_stand_under_their_titles(folder):
    """As wide as nccl-tests prints them, so that its readers find every column."""
    titles = next(line for line in nccl_text(folder).splitlines() if "algbw" in line)
    line = next(line for line in nccl_text(folder).splitlines() if not line.startswith("#"))
    ends = [match.end() for match in re.finditer(r"\S+", titles[2:])]
    assert [match.end() - 2 for match in re.finditer(r"\S+", line)] == ends
    assert re.fullmatch(r" *\d+ +\d+ +float +none +-1 +[\d.]+ +[\d.]+ +[\d.]+ +N/A", line)


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [(0.0, 7, "0.00"), (160.54, 7, "160.54"), (9999.5, 7, "9999.50"), (26355.2, 7, "26355.2"),
     (2635520.0, 7, "2635520"), (3.1e8, 7, "3.1e+08"), (38.19, 6, "38.19"), (1234.5, 6, "1234.5")],
)  # fmt: skip
def test_numbers_have_as_many_decimals_as_fit(value, width, text):
    """The width of the column decides."""
    assert _number(value, width) == text


def test_what_has_no_number_is_a_comment(fake, tmp_path, monkeypatch):
    """Out of memory: no line that could be taken for one."""
    from tests.moebench.fake_engine import behaving

    monkeypatch.setattr("moebench.rows.exchanges.finish", lambda case, topology, rows: rows)
    with behaving(hungry="flat"):
        folder = run_of(of_kind("hetu", "exchange"), tmp_path / "run", systems=("flat",), topologies=("2x8-titan-rtx",))
    text = nccl_text(folder)
    assert "# 67108864 B: out-of-memory: too large" in text
    assert len([line for line in text.splitlines() if not line.startswith("#")]) == 8


@pytest.mark.parametrize(("old", "new"), [('"fp32"', '"fp8"'), ('topology": "2x8-titan-rtx"', 'topology": "lost"')])
def test_rows_changed_by_hand_are_named(folder, old, new):
    """A dtype that no exchange has, a machine that the run doesn't know."""
    folder.results.write_text(folder.results.read_text().replace(old, new))
    with pytest.raises(InputError, match=r"results\.jsonl: hierarchical-alltoall/.*: no exchange of fp"):
        nccl_text(folder)


def test_a_reason_stays_on_its_line(folder):
    """Line breaks of an error can't look like rows."""
    failed = '"reason": "a\\n    64  1  float", "value": null, "low": '
    text = folder.results.read_text().replace('"value": ', failed)
    folder.results.write_text(text.replace('"status": "passed"', '"status": "failed"'))
    lines = [line for line in nccl_text(folder).splitlines() if line]
    assert sum("failed: a" in line for line in lines) == 44
    assert all(line.startswith("#") for line in lines)


def test_other_runs_are_refused(fake, tmp_path):
    """A run of layers has nothing to show in these columns."""
    folder = run_of(small_overall(), tmp_path / "run", gates=("switch",), batch_sizes=(8,))
    with pytest.raises(InputError, match="no rows of exchanges"):
        nccl_text(folder)
