import errno
import gzip
import json
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.export.perfetto import COMPUTE_THREAD, HOST, chrome_trace, write_trace
from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from tests.moebench.sim.sim_machines import ProgramBuilder, all_to_all, hardware, topology
from tests.moebench.sim.sim_strategies import programs


def document(built, where=None):
    where = where or topology(1, 4)
    return chrome_trace(built, replay(built, where, nominal(where.parameters())), "case")


def overlapped():
    builder = ProgramBuilder(0, 4)
    start = builder.start(all_to_all(range(4), 9 * 10**6))
    builder.pointwise(6 * 10**8)
    builder.wait(start)
    builder.pointwise(6 * 10**8)
    return builder.program()


@given(programs(), st.sampled_from(["gpu", "cpu"]))
@settings(max_examples=50)
def test_events_are_what_the_format_asks_for(built, kind):
    """Known phases and keys, times that are no less than 0, threads and processes that have names."""
    found = document(built, topology(1, 4, hw=hardware(kind)))
    json.dumps(found, allow_nan=False)
    named = {(e["pid"], e["tid"]) for e in found["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in found["traceEvents"]:
        assert event["ph"] in "MXstf"
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] == "M" or (event["pid"], event["tid"]) in named
        assert event["ph"] != "X" or event["dur"] > 0


@given(programs(), st.sampled_from(["gpu", "cpu"]))
@settings(max_examples=50)
def test_slices_of_a_thread_follow_each_other(built, kind):
    """A stream does one thing at a time, its waiting included."""
    found = document(built, topology(1, 4, hw=hardware(kind)))
    threads = defaultdict(list)
    for event in found["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        slices.sort()
        assert all(after[0] >= before[1] - 1e-6 for before, after in pairwise(slices))


@given(programs())
@settings(max_examples=50)
def test_arrows_begin_and_end_on_slices_in_order(built):
    """Each flow has one start and one end, its times don't fall, and a slice lies under each of its points."""
    events = document(built)["traceEvents"]
    slices = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    for points in flows.values():
        assert [p["ph"] for p in points] in (["s", "f"], ["s", "t", "f"])
        assert [p["ts"] for p in points] == sorted(p["ts"] for p in points)
        for point in points:
            here = (point["pid"], point["tid"])
            assert any(s[:2] == here and s[2] <= point["ts"] <= s[3] for s in slices)


def test_exposed_communication_is_a_slice():
    """3 ms on the link, 1 ms of it under work: the compute stream shows 2 ms of waiting."""
    found = document([overlapped()])
    waits = [e for e in found["traceEvents"] if e.get("cat") == "exposed"]
    assert [e["name"] for e in waits] == ["waiting for moebench::all_to_all_start"]
    assert waits[0]["tid"] == COMPUTE_THREAD
    assert waits[0]["dur"] == pytest.approx(2000, rel=0.02)
    names = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"host", "compute", "communication (world)"}
    assert found["otherData"]["step_ms"] == pytest.approx(4, rel=0.02)


def test_ranks_are_processes_and_collectives_join_them():
    """Two distinct ranks: two processes, and an arrow from one's exchange to the other's."""
    builders = [ProgramBuilder(0, 2, (0,)), ProgramBuilder(1, 2, (1,))]
    for builder in builders:
        builder.start(all_to_all(range(2), 10**6))
    found = document([b.program() for b in builders], topology(1, 2))["traceEvents"]
    assert {e["args"]["name"] for e in found if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    meeting = [e for e in found if e.get("cat") == "meeting"]
    assert [(e["ph"], e["pid"]) for e in meeting] == [("s", 0), ("f", 1)]
    assert all(e["tid"] not in (HOST, COMPUTE_THREAD) for e in meeting)


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """Where the last step fails nothing stays, not even a part."""
    def refuse(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("moebench.results.store.os.replace", refuse)
    with pytest.raises(OSError, match="No space"):
        write_trace(document([overlapped()]), tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_files_are_json_compressed_where_asked(tmp_path):
    """Both forms hold the same document."""
    found = document([overlapped()])
    write_trace(found, tmp_path / "t.json")
    write_trace(found, tmp_path / "t.json.gz")
    assert json.loads((tmp_path / "t.json").read_text()) == found
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes())) == found
