"""Files of parts that are measured: where they go, and that a disk too small is refused before anything is written."""

import os
from pathlib import Path

import pandas as pd
import pytest

from moebench.cases.case import Case
from moebench.disk_room import check_room, keep_files_in
from moebench.report.tier_view import tables
from moebench.results.rows import row_of
from moebench.results.table import table_of
from moebench.rows.parts import TIER, finish
from moebench.systems.part_registry import disk_bytes
from moebench.systems.scratch import VARIABLE, scratch
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_topology
from moebench.workloads.part import workload_of

SIZES = {
    "tokens": 64, "d_model": 32, "d_ffn": 64, "experts": 8, "top_k": 2, "layers": 2, "accumulated": 1,
}  # fmt: skip
WHERE = load_topology("1x1-a100-80-nvme")


def case_of(system="2d", engine="local", **sizes):
    """A step with stored states."""
    workload = workload_of("stored-step", SIZES | sizes, routing="zipf-1")
    return Case("s", "e", system, workload, WHERE.name, "1x1", engine)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """No folder is asked for at first; whatever a test sets is undone."""
    monkeypatch.setenv(VARIABLE, "")


def test_the_folder_is_an_option(tmp_path):
    """Every process that starts from here on knows it; one that is none, or a file, is refused."""
    keep_files_in(None)
    assert os.environ[VARIABLE] == ""
    keep_files_in(tmp_path)
    assert scratch() == tmp_path
    (tmp_path / "file").write_text("")
    for wrong in ("none", "file"):
        with pytest.raises(InputError, match=f"--scratch .*{wrong}: no such folder"):
            keep_files_in(tmp_path / wrong)
    with pytest.raises(InputError, match="--scratch /proc: "):
        keep_files_in(Path("/proc"))


def test_files_of_all_systems_of_a_point_must_fit(tmp_path, monkeypatch):
    """They are measured in turn; what is simulated has none, nor has what isn't run."""
    keep_files_in(tmp_path)
    both, needed = [case_of("2d"), case_of("none")], 2 * disk_bytes(case_of().workload, 1)
    usage = {"free": needed}
    monkeypatch.setattr("moebench.disk_room.shutil.disk_usage", lambda path: type("Usage", (), usage))
    check_room(both, {WHERE.name: WHERE})
    usage["free"] = needed - 1
    with pytest.raises(InputError, match=rf"keeps files of {needed:,} bytes in {tmp_path}, where {needed - 1:,} are"):
        check_room(both, {WHERE.name: WHERE})
    check_room([case_of(engine="sim"), case_of(top_k=9)], {WHERE.name: WHERE})


def test_bytes_of_tiers_and_waits_are_rows_and_tables():
    """Of each tier as it is and by the paper; without a number none."""
    case = case_of(engine="sim")
    step = row_of(case, "a100-80", "part_time", "s", 2.5)
    busy = row_of(case, "a100-80", "busy_time", "s", 1.5, detail={"resource": "storage"})
    rows = finish(case, WHERE, [step, busy])
    tiers = {(row.detail["tier"], row.detail["by"]): row.value for row in rows if row.metric == TIER}
    assert len(tiers) == 6
    assert tiers["disk", "paper"] == 12 * 16 * 2 * 32 * 64
    assert tiers["disk", "storage"] == disk_bytes(case.workload, 1)
    none = row_of(case, "a100-80", "part_time", "s", None, status="failed")
    assert not [row for row in finish(case, WHERE, [none]) if row.metric == TIER]
    waits, held = tables(table_of(rows))
    (line,) = waits.rows
    assert dict(zip(waits.columns, line))["step"] == "2.50"
    assert dict(zip(waits.columns, line))["drives"] == "1.50"
    assert held.rows[0][0] == "as it stands"
    assert tables(pd.DataFrame({"metric": []})) == []
    measured = [row for row in rows if row.metric != "busy_time"]
    assert [table.columns for table in tables(table_of(measured))] == [held.columns]
