"""Jobs taken apart: operators and waits add up to the step; the pipeline as a timeline."""

from dataclasses import replace
from itertools import pairwise

import pytest

from moebench.explain.case import OTHER_STAGES
from moebench.explain.job import NEW_PARAMETERS, PIPELINE, apart, timeline
from moebench.explain.words import words
from moebench.sim.recorded import RecordedCase
from moebench.trace.job import programs_of
from moebench.workloads.load import load_topology
from tests.moebench.jobs import case_of


def recorded(**more):
    """A case as a run folder gives it."""
    case, topology = case_of(**more), load_topology("4x8-h800")
    return RecordedCase(case, topology, programs_of(case, topology), 4, 0)


@pytest.mark.parametrize("more", [{"chunks": 2}, {"stages": 1}])
def test_operators_and_waits_add_up_to_the_step(more):
    """Of the stage that computes longest; calls are those of all micro-batches."""
    found = apart(recorded(**more))
    assert sum(part.time_s for part in found.operators) == pytest.approx(found.step_s, rel=1e-6)
    assert sum(part.time_s for part in found.regions) == pytest.approx(found.step_s, rel=1e-6)
    assert found.low_s <= found.high_s
    by_name = {part.name: part for part in found.operators if part.region == PIPELINE}
    assert set(by_name) <= {OTHER_STAGES, NEW_PARAMETERS}
    assert (OTHER_STAGES in by_name) == (more.get("stages") != 1)
    attention = next(part for part in found.operators if part.name == "moebench::attention")
    replicas = 4 // more.get("stages", 2)
    assert attention.calls == 16 // replicas * 4 // more.get("stages", 2)  # micro-batches x layers of a stage
    said = words(found)
    assert any("with products 1.5 times as long the step would take" in note for note in found.notes)
    assert any("computes for" in note for note in found.notes) == (more.get("stages") != 1)
    assert any("step" in sentence for sentence in said)
    assert any("waits for other stages" in sentence for sentence in said) == (OTHER_STAGES in by_name)


def test_the_timeline_has_every_micro_batch_of_every_stage():
    """A process a stage, forward and backward of each, and the end of the step."""
    one = recorded(stages=4)
    document = timeline(replace(one, samples=0))
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    for place in range(4):
        own = [event for event in slices if event["pid"] == place]
        assert sorted(event["name"] for event in own if event["cat"] == "forward") == sorted(f"F{m}" for m in range(16))
        assert sum(event["cat"] == "backward" for event in own) == 16
        assert sum(event["cat"] == "step end" for event in own) == 1
        ends = sorted((event["ts"], event["ts"] + event["dur"]) for event in own)
        assert all(after[0] >= before[1] - 1e-6 for before, after in pairwise(ends))
    last = max(event["ts"] + event["dur"] for event in slices)
    assert last == pytest.approx(1e3 * document["otherData"]["step_ms"])
