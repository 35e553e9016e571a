"""A kernel that got slower is caught: an added operator by its exact costs, an added wait by the clock."""

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from moebench.cases.plan import Filters
from moebench.environment import environment
from moebench.kernels.permute import permute
from moebench.local import engine, worker
from moebench.results.store import RunFolder, new_record
from moebench.run import Job, begin, execute, prepare
from moebench.workloads.load import load_suite
from tests.moebench.fake_engine import Watch, check_cases
from tests.moebench.local.test_engine import THIS
from tests.moebench.local.test_engine import case as local_case

KERNEL = "moebench.systems.hetumoe.permute"


def simulate(path):
    """One simulated case of a system whose layout transform is `permute`."""
    filters = Filters(systems=("hetumoe",), gates=("switch",), batch_sizes=(1,), topologies=("1x2",))
    execute(begin(prepare(load_suite("smoke"), filters), Path(path)), Watch(), jobs=1, check=check_cases)


def measure(path):
    """One measured case of it, in six processes."""
    cases = [local_case("hetumoe")]
    record = new_record(load_suite("smoke"), Filters(), "local", [THIS], environment(["moebench"], 0), len(cases))
    execute(Job(RunFolder.create(Path(path), record), cases, {THIS.name: THIS}), Watch(), check=check_cases)


@pytest.fixture
def one_process(monkeypatch):
    """Measuring processes become calls in this one, which a test can change; everything else is as it is."""

    def run_child(module, request, threads=None):
        messages = []
        worker.measure(request, lambda **message: messages.append(message))
        return messages

    monkeypatch.setattr(engine, "run_child", run_child)
    # This process holds a hundred times the objects of one that only measures: collecting them takes most of the time.
    monkeypatch.setattr(worker, "gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))
    monkeypatch.setattr(worker, "quiet_interpreter", nullcontext)
    monkeypatch.setattr("moebench.run.ENGINES", {"local": "tests.moebench.compare.six_processes"})


def test_an_added_operator_fails_by_one_launch(moebench, in_folder, monkeypatch):
    """One product more in the layout transform: launches, bytes and simulated time are slower, exit 1."""
    simulate("before")
    monkeypatch.setattr(KERNEL, lambda *arguments: permute(*arguments) * 1.0)
    simulate("after")
    said = moebench("compare", "before", "after")
    assert said.status == 1
    slower = {line.split()[2] for line in said.out.splitlines() if line.startswith("+ slower")}
    assert {"launches", "device_bytes", "step_time"} <= slower
    assert moebench("compare", "before", "before").status == 0


def test_an_added_wait_fails_by_the_clock(moebench, in_folder, one_process, monkeypatch):
    """Fifty milliseconds more in the layout transform of a step of a few: no count changes, the time does, exit 1."""
    measure("before")

    def waiting(*arguments):
        time.sleep(0.05)
        return permute(*arguments)

    monkeypatch.setattr(KERNEL, waiting)
    for number in range(3):  # beside other tests even such a change may need a second look
        after = f"after{number}"
        measure(after)
        said = moebench("compare", "before", after)
        if said.status:
            break
    assert said.status == 1, said.out
    slower = {line.split()[2] for line in said.out.splitlines() if line.startswith("+ slower")}
    assert slower == {"step_time"}
    assert moebench("accept", "before", "--baseline", "main").status == 0
    assert moebench("check", after, "--baseline", "main").status == 1


