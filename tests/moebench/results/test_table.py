"""Rows as a frame."""

import numpy as np

from moebench.cases.plan import Filters
from moebench.results.table import COLUMNS, table, table_of
from moebench.run import begin, prepare
from moebench.workloads.load import load_suite
from tests.moebench import fake_engine


def test_a_frame_has_one_row_a_value(tmp_path):
    """The frame of a folder equals the frame of its rows; draws are arrays, statuses and values as in the rows."""
    job = begin(prepare(load_suite("smoke"), Filters(gates=("switch",))), tmp_path / "run")
    with job.folder.writing() as append, fake_engine.behaving(memory_limit=2):
        for case in job.cases:
            append(fake_engine.rows_of(case, job.topologies[case.topology], job.suite))
    frame = table(job.folder)
    rows = job.folder.rows()
    assert list(frame.columns) == list(COLUMNS)
    assert len(frame) == len(rows) == 2 * len(job.cases)
    assert frame["case"].tolist() == [row.case for row in rows]
    assert (frame["status"] == "out-of-memory").any()
    for number, row in enumerate(rows):
        np.testing.assert_array_equal(frame["draws"][number], np.array(row.draws))
        assert (frame["value"][number] == row.value) or (row.value is None and np.isnan(frame["value"][number]))
    assert table_of(rows).drop(columns=["draws", "detail"]).equals(frame.drop(columns=["draws", "detail"]))
    assert set(table(job.folder, "launches")["metric"]) == {"launches"}


def test_an_empty_run_is_an_empty_frame(tmp_path):
    """No rows yet: the columns are there all the same."""
    job = begin(prepare(load_suite("smoke"), Filters()), tmp_path / "run")
    frame = table(job.folder)
    assert frame.empty
    assert list(frame.columns) == list(COLUMNS)
