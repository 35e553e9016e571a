"""`moebench export`: each format, and what is refused."""

import csv
import gzip
import json
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest

from moebench.cases.plan import Filters
from moebench.run import begin, execute, prepare
from moebench.workloads.load import load_suite
from tests.moebench.fake_engine import Watch

NEEDED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "t": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """One case of the smoke suite, really traced and replayed."""
    filters = Filters(gates=("switch",), batch_sizes=(1,), systems=("reference",), topologies=("2x2",))
    job = begin(prepare(load_suite("smoke"), filters, "sim"), tmp_path_factory.mktemp("traced") / "run")
    execute(job, Watch(), 1, lambda cases: [SimpleNamespace(status="passed", reason="")] * len(cases))
    return job


def test_perfetto_opens_a_case(moebench, traced, tmp_path):
    """The trace event format: the keys of each phase, a named track for each rank and stream, slices that nest."""
    file = tmp_path / "case.json.gz"
    case = traced.cases[0].name
    said = moebench("export", traced.folder.path, "--as", "perfetto", "--case", case, "-o", file)
    assert (said.status, said.out) == (0, f"{file}\n")
    document = json.loads(gzip.decompress(file.read_bytes()))
    assert document["otherData"]["case"] == case
    events, tracks = document["traceEvents"], defaultdict(list)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"host", "compute"} < set(named.values())
    for event in events:
        assert NEEDED[event["ph"]] <= set(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(tracks) <= set(named)
    for slices in tracks.values():
        assert all(after[0] >= before[1] - 1e-6 for before, after in pairwise(sorted(slices)))
    bare = moebench("export", traced.folder.path, "--as", "perfetto", "--case", case)
    assert json.loads(bare.out) == document


def test_tables_go_to_the_terminal_or_into_a_file(moebench, traced, tmp_path):
    """The same text."""
    shown = moebench("export", traced.folder.path, "--as", "csv", "--experiment", "tiny")
    file = tmp_path / "rows.csv"
    assert moebench("export", traced.folder.path, "--as", "csv", "-o", file).out == f"{file}\n"
    assert file.read_text() == shown.out
    (line,) = csv.DictReader(shown.out.splitlines())
    assert float(line["peak_memory (B)"]) > 0
    assert float(line["step_time low (s)"]) < float(line["step_time (s)"])
    markdown = moebench("export", traced.folder.path, "--as", "markdown", "--metric", "nic_bytes").out
    assert "| case | nic bytes, KiB | note |" in markdown


def test_bad_input_is_one_line(moebench, traced, tmp_path):
    """A format, a case, an option that means nothing; a run without such rows, or none at all."""
    run, file = traced.folder.path, tmp_path / "out"
    assert "'xml' is not one of" in moebench.refused("export", run, "--as", "xml")
    assert "name it with --case" in moebench.refused("export", run, "--as", "perfetto")
    near = moebench.refused("export", run, "--as", "perfetto", "--case", "tiny/swich/b1/refrence", "-o", file)
    assert traced.cases[0].name in near
    assert "--case means nothing for csv" in moebench.refused("export", run, "--as", "csv", "--case", "tiny")
    assert "--metric means nothing" in moebench.refused("export", run, "--as", "nccl-tests", "--metric", "flops")
    assert "no rows of exchanges" in moebench.refused("export", run, "--as", "nccl-tests", "-o", file)
    assert "unknown experiment 'tinny'" in moebench.refused("export", run, "--as", "csv", "--experiment", "tinny")
    assert "unknown metric" in moebench.refused("export", run, "--as", "markdown", "--metric", "speed", "-o", file)
    assert "no run here" in moebench.refused("export", tmp_path, "--as", "csv")
    assert not file.exists()
