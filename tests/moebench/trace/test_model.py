"""Programs of whole models: what is recorded, how graphs are priced, what follows in rows."""

from dataclasses import replace

import pytest

from moebench.cases.case import Case
from moebench.rows.models import finish
from moebench.sim.engine import trace_key
from moebench.sim.replay import replay
from moebench.sim.rows import rows_of_replay
from moebench.sim.uncertainty import nominal
from moebench.trace.errors import OutOfMemory, Unsupported
from moebench.trace.model import programs_of, traced
from moebench.workloads.layer import GateSpec
from moebench.workloads.load import load_topology, with_overrides
from moebench.workloads.model import ModelWorkload, shape_of

SMALL = "gpt2-moe+layers=2+d_model=256+sequence=256+vocabulary=512"
P4DE, P3DN = load_topology("2x8-p4de"), load_topology("2x8-p3dn")


def case(system, dtype="fp32", gate="switch", batch_size=8):
    """A small model on 16 GPUs."""
    shape = shape_of(SMALL, GateSpec(gate, 1), batch_size, 16)
    return Case("own", "steps", system, ModelWorkload(SMALL, shape, dtype), P4DE.name, "2x8", "sim")


def rows_of(one):
    """The rows of a case on the nominal machine, by metric."""
    programs = programs_of(one, P4DE)
    done = replay(programs, P4DE, nominal(P4DE.parameters()))
    found = finish(one, P4DE, rows_of_replay(one, P4DE, programs, done))
    return {row.metric: row for row in found if not row.detail}


def test_what_planning_expects_is_what_the_replay_finds():
    """A model that waits for its exchanges: shorter in parts, as predicted within a few percent; rows say so."""
    whole, planned = rows_of(case("raf")), rows_of(case("lancet"))
    assert planned["step_time"].value < whole["step_time"].value
    assert planned["prediction_error"].value < 0.1
    assert planned["best_partition_count"].value > 1
    assert planned["exposed_communication"].value < whole["exposed_communication"].value
    assert planned["optimisation_time"].value > 0
    assert "prediction_error" not in whole
    for found in (whole, planned):
        assert 0 < found["alltoall_share_of_step"].value < 1
        ratio = found["alltoall_over_expert_time"].value
        assert ratio > 1
        assert found["alltoall_time"].value == pytest.approx(
            found["alltoall_share_of_step"].value * found["step_time"].value
        )


def test_one_program_for_all_ranks_and_a_trace_for_each_machine():
    """Ranks are alike; what a system plans on V100 is not what it plans on A100."""
    one = case("lancet")
    program = traced(one, P4DE).program
    assert list(program.stands_for) == list(range(16))
    assert program.notes
    assert traced(case("raf"), P4DE).program.notes == ()
    assert trace_key(one, P4DE) != trace_key(one, P3DN)
    assert trace_key(one, P4DE) == trace_key(replace(one, experiment="other"), P4DE)


def test_tf32_is_a_precision_of_products():
    """Products say so, nothing else does; V100 has none."""
    ops = {dtype: traced(case("tutel+degree=1", dtype), P4DE).program.ops for dtype in ("fp32", "tf32")}
    assert {op.dtype for op in ops["tf32"] if op.products} == {"tf32"}
    assert [op.name for op in ops["tf32"]] == [op.name for op in ops["fp32"]]
    times = [replay(programs_of(case("raf", dtype), P4DE), P4DE, nominal(P4DE.parameters())) for dtype in ops]
    assert times[1].step_time_s[0] < times[0].step_time_s[0]


def test_what_a_system_cant_run_is_unsupported():
    """A gate that DeepSpeed lacks; it runs what it has."""
    with pytest.raises(Unsupported, match="no gate bpr"):
        programs_of(case("deepspeed", gate="bpr"), P4DE)
    assert programs_of(case("deepspeed"), P4DE)[0].ops


def test_a_plan_that_does_not_fit_is_out_of_memory():
    """As a step without a plan is: a result of the system, no failure of it."""
    small = with_overrides(P4DE, {"gpu.memory.capacity": "1.01GiB"})
    done = replay(programs_of(case("raf"), small), small, nominal(small.parameters()))
    assert not done.fits[0]
    with pytest.raises(OutOfMemory, match="no pass makes that less"):
        programs_of(case("lancet"), small)


def test_raf_is_lancet_without_its_passes():
    """To the operator, and to the nanosecond."""
    off = "lancet+parts=false+moves=false+sums=false+fuses=false"
    (whole,), (planned,) = (programs_of(case(name), P4DE) for name in ("raf", off))
    assert sorted((op.name, op.region, op.bytes) for op in whole.ops) == sorted(
        (op.name, op.region, op.bytes) for op in planned.ops
    )
    times = [replay([one], P4DE, nominal(P4DE.parameters())).step_time_s[0] for one in (whole, planned)]
    assert times[0] == pytest.approx(times[1], rel=1e-6)


@pytest.mark.parametrize(("system", "overlaps"), [("raf", True), ("tutel+degree=1", True), ("deepspeed", False)])
def test_where_sums_of_gradients_start(system, overlaps):
    """During the backward, or behind all of it; between them every shared parameter is summed once."""
    (program,) = programs_of(case(system), P4DE)
    sums = [op for op in program.ops if op.collective is not None and op.collective.algorithm == "all_reduce"]
    exchanges = [op for op in program.ops if op.collective is not None and op.collective.algorithm == "all_to_all"]
    assert (sums[0].index < exchanges[-1].index) == overlaps
    products = [op.index for op in program.ops if op.products]
    assert (sums[0].index > products[-1]) != overlaps
    shared = case(system).workload.shape.shared_parameters
    assert sum(op.collective.bytes_per_peer for op in sums) == 4 * shared
