"""Programs survive the way through JSON exactly."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.cost import KINDS, Product
from moebench.kernels.region import REGIONS
from moebench.program import BACKWARD, COMMUNICATION, COMPUTE, FORWARD, OPTIMIZER, Collective, Op, Program
from moebench.systems.registry import get
from moebench.trace.layer import trace_layer
from moebench.trace.serialise import programs_from_json, programs_to_json
from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec, LayerWorkload

counts = st.integers(0, 2**60)
sizes = st.lists(counts, max_size=4).map(tuple)
ranks = st.builds(range, st.integers(0, 9), st.integers(0, 99), st.integers(1, 3)) | st.lists(
    st.integers(0, 99), max_size=4
).map(tuple)
collectives = st.builds(Collective, st.text(max_size=5), st.text(max_size=5), ranks, st.none() | counts, sizes, sizes)
ops = st.builds(
    Op,
    index=counts,
    name=st.text(max_size=8),
    kind=st.sampled_from(KINDS),
    stream=st.sampled_from([COMPUTE, COMMUNICATION]),
    region=st.sampled_from(REGIONS),
    phase=st.sampled_from([FORWARD, BACKWARD, OPTIMIZER]),
    shapes=st.lists(sizes, max_size=3).map(tuple),
    dtype=st.sampled_from(["fp32", "int64", ""]),
    flops=counts,
    bytes_read=counts,
    bytes_written=counts,
    products=st.lists(st.builds(Product, counts, counts, counts, counts), max_size=2).map(tuple),
    collective=st.none() | collectives,
    waits_on=sizes,
)
programs = st.builds(
    Program, st.lists(ops, max_size=5).map(tuple), counts, counts, ranks, counts, counts, st.just(("a note",))
)


@given(st.lists(programs, max_size=3).map(tuple))
def test_any_program_returns_as_it_went(given_programs):
    """Every field, with its type: a range of ranks stays a range."""
    returned = programs_from_json(programs_to_json(given_programs))
    assert returned == given_programs
    assert [type(program.stands_for) for program in returned] == [type(p.stands_for) for p in given_programs]


def test_a_traced_layer_is_compact():
    """About 60 characters an operator, whatever the number of ranks."""
    workload = LayerWorkload(GateSpec("gshard", 2), 8, 1024, 2048, 2048, 1440)
    traced = trace_layer(get("deepspeed"), workload, 1440, COMMON)
    text = programs_to_json(traced)
    assert programs_from_json(text) == traced
    assert len(text) < 100 * len(traced[0].ops)


@pytest.mark.parametrize("cut", [None, "words", "shapes", "programs"])
def test_a_damaged_text_is_refused(cut):
    """What is missing is one clear error, and no traceback."""
    traced = trace_layer(get("hetumoe"), LayerWorkload(GateSpec("switch"), 1, 8, 8, 8, 2), 2, COMMON)
    document = json.loads(programs_to_json(traced))
    document = {"schema_version": document["schema_version"]} if cut is None else document | {cut: document[cut][:-1]}
    if cut == "programs":
        document["programs"] = [{"ops": 3}]
    with pytest.raises(InputError, match="not a recorded program"):
        programs_from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", json.dumps({"schema_version": 99})])
def test_another_text_is_refused(text):
    """No program, or one of an unknown schema version: an error for the person at the terminal."""
    with pytest.raises(InputError, match="recorded program"):
        programs_from_json(text)
