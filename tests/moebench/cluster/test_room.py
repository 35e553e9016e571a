"""Ranks that don't fit into memory are refused, by what the kernel and a container's limit say."""

import pytest

from moebench.cluster import engine, room
from moebench.workloads.errors import InputError
from tests.moebench.cluster.engine_functions import some_cases, this_machine

GIB = 1 << 30


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """Writes what a machine says of its memory; None: nothing."""
    monkeypatch.setattr(room, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(room, "_GROUP", tmp_path / "memory.max")

    def say(available, limit=None):
        for name, text in (("meminfo", available), ("memory.max", limit)):
            if text is not None:
                (tmp_path / name).write_text(text)

    return say


@pytest.mark.parametrize(
    ("available", "limit", "meant"),
    [
        ("MemTotal: 8388608 kB\nMemAvailable:    2097152 kB\n", "max\n", 2 * GIB),
        ("MemAvailable: 2097152 kB\n", f"{GIB}\n", GIB),
        ("MemAvailable: 2097152 kB\n", None, 2 * GIB),
        ("MemTotal: 8388608 kB\n", None, None),
        ("MemAvailable:\nnonsense\n", f"{GIB}\n", GIB),
        (None, None, None),
    ],
)
def test_the_smaller_of_what_is_said_counts(memory, available, limit, meant):
    """Where nobody says anything, nothing is refused."""
    memory(available, limit)
    assert room.available_bytes() == meant
    assert (room.room_problem(10**6) is None) == (meant is None)


def test_ranks_that_do_not_fit_are_refused(memory):
    """With how many do; before anything is written, also without an emulated network."""
    memory("MemAvailable: 65536 kB\n")
    assert room.room_problem(4) is None
    told = "5 ranks take about 0.078 GiB of memory .*, and 0.062 GiB are available: at most 4 ranks fit here"
    topology, cases = this_machine(5), some_cases(5)
    with pytest.raises(InputError, match=f"^topology {topology.name}: {told}$"):
        engine.check(cases, {topology.name: topology})
