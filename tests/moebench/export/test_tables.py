"""Rows as a wide table: a line a case, units in the header; CSV and Markdown."""

import csv
from dataclasses import replace

import pytest

from moebench.cases.plan import Filters
from moebench.export.order import natural
from moebench.export.tables import csv_text, markdown_text, wide
from moebench.results.rows import row_of
from moebench.run import begin, execute, prepare
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite
from tests.moebench.fake_engine import Watch

SMALL = Filters(gates=("switch",), batch_sizes=(1,), systems=("deepspeed", "hetumoe"), topologies=("2x2",))


@pytest.fixture
def job(fake, tmp_path):
    """Two cases of the smoke suite."""
    job = begin(prepare(replace(load_suite("smoke"), samples=4), SMALL, "sim"), tmp_path / "run")
    execute(job, Watch())
    return job


def add(job, rows):
    with job.folder.writing() as append:
        append(rows)


def lines(text):
    return list(csv.DictReader(text.splitlines()))


def test_a_case_is_a_line_of_the_csv(job):
    """Keys, status, and each metric in SI units under a header that names the unit."""
    found = lines(csv_text(wide(job.folder)))
    rows = {row.case: row for row in job.folder.rows("step_time")}
    assert [line["case"] for line in found] == sorted(rows, key=natural)
    for line in found:
        assert float(line["step_time (s)"]) == rows[line["case"]].value
        assert line["launches"] == "10"
        assert (line["gate"], line["batch_size"], line["engine"], line["status"]) == ("switch", "1", "sim", "passed")
    assert not {"op", "shape", "payload_bytes (B)"} & set(found[0])  # columns of other kinds


def test_parts_and_samples_are_no_lines(job):
    """Rows of a region or a sample change nothing; a regime is a line of its own, with what belongs to none."""
    case = job.cases[0]
    other = replace(case, experiment="tiny", conventions="as-shipped")
    rows = [row_of(other, "titan-rtx", "step_time", "s", 2.0, sample=0, detail={"regime": "hot"})]
    for regime, value in (("hot", 1.0), ("cold", 3.0)):
        detail = {"regime": regime, "q1": value, "count": 7}
        rows.append(row_of(other, "titan-rtx", "step_time", "s", value, low=0.9 * value, high=2 * value, detail=detail))
    rows += [
        row_of(other, "titan-rtx", "region_time", "s", 0.5, detail={"region": "gate", "phase": "forward"}),
        row_of(other, "titan-rtx", "peak_memory", "B", 4096.0),
    ]
    add(job, rows)
    found = lines(csv_text(wide(job.folder)))
    assert len(found) == 4
    shipped = {line["regime"]: line for line in found if line["conventions"] == "as-shipped"}
    assert {regime: line["step_time (s)"] for regime, line in shipped.items()} == {"hot": "1", "cold": "3"}
    assert {line["step_time low (s)"] for line in shipped.values()} == {"0.9", "2.7"}
    assert {line["peak_memory (B)"] for line in shipped.values()} == {"4096"}
    assert "region_time (s)" not in found[0]


def test_markdown_fits_units_to_the_numbers(job):
    """What is the same in every row stands above; bytes in binary units, times with an interval."""
    other = replace(job.cases[0], conventions="as-shipped")
    time = row_of(other, "titan-rtx", "step_time", "s", 12.3, low=10.0, high=20.0)
    add(job, [time, row_of(other, "titan-rtx", "peak_memory", "B", 3.0 * 2**30)])
    text = markdown_text(wide(job.folder))
    above, _, heading, dashes, *rest = text.splitlines()
    assert above.startswith("In every row: hardware `titan-rtx`, engine `sim`, dtype `fp32`")
    assert "step time, s | interval, s" in heading
    assert "peak memory, GiB" in heading
    assert heading.count("|") == dashes.count("|")
    row = next(line for line in rest if "as-shipped" in line)
    assert "| 12.3 | 10 to 20 |  | 3 |" in row
    assert all(line.count("|") == heading.count("|") for line in rest[:3])


def test_a_reason_can_break_no_table(job):
    """Pipes, newlines, mentions and markup of a note are shown as text."""
    reason = "a | b\n<script>alert(1)</script> @someone `x`"
    other = replace(job.cases[0], conventions="as-shipped")
    add(job, [row_of(other, "titan-rtx", "step_time", "s", None, status="failed", reason=reason)])
    (row,) = (line for line in markdown_text(wide(job.folder)).splitlines() if "failed" in line)
    assert "<script>" not in row
    assert "@someone" not in row
    assert row.count("|") == markdown_text(wide(job.folder)).splitlines()[2].count("|")
    (line,) = (line for line in csv.DictReader(csv_text(wide(job.folder)).splitlines(keepends=True)) if line["reason"])
    assert line["reason"] == reason


def test_metrics_can_be_chosen(job):
    """In their order in the rows; one that isn't there is named with its neighbours."""
    table = wide(job.folder, metrics=("launches",))
    assert list(lines(csv_text(table))[0])[-1] == "launches"
    assert "step" not in csv_text(table).splitlines()[0].replace("steps", "")
    with pytest.raises(InputError, match=r"unknown metric 'lunches' \(did you mean launches\?\)"):
        wide(job.folder, metrics=("lunches",))


def test_names_are_in_the_order_of_their_numbers():
    """`b8` before `b32`, and `16x8` after `2x8`."""
    names = ["a/b32/2x8", "a/b8/16x8", "a/b8/2x8", "a"]
    assert sorted(names, key=natural) == ["a", "a/b8/2x8", "a/b8/16x8", "a/b32/2x8"]
