"""Composed jobs: parts add up to the step, closed forms, memory, and what does not fit."""

import numpy as np
import pytest

from moebench.rows.jobs import simulated
from moebench.sim.job import composed, memory
from moebench.trace.job import BACKWARD, CLOSING, FORWARD, OPENING, traced
from moebench.workloads.load import with_overrides
from moebench.workloads.models.mfu import flops_per_token
from tests.moebench.jobs import MODEL, case_of, machine


def run(case, samples=8):
    """The composed step and the rows of a case."""
    topology, values = machine(case.topology, samples)
    layout = case.workload.layout(topology.ranks, topology.gpus_per_node)
    rows = {row.metric: row for row in simulated(case, topology, values) if not row.detail}
    return composed(traced(case, topology), layout, topology, values), rows


def test_one_stage_takes_its_micro_batches_and_what_stands_at_the_ends():
    """No pipeline: the sum of the parts, under every draw."""
    found, _ = run(case_of(stages=1, global_batch=16))
    (stage,) = found.stages
    one = {name: part.time_s for name, part in stage.parts.items()}
    wanted = one[OPENING] + 3 * (one[FORWARD] + one[BACKWARD]) + one[CLOSING]
    np.testing.assert_allclose(found.timeline.time_s, wanted)
    assert found.transfer_s.tolist() == [0.0] * 9
    assert float(found.split()["bubble_s"][0]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "more", [{}, {"chunks": 2}, {"stages": 1}, {"chunks": 2, "system": "megatron_modern+overlap=combined"}]
)
def test_parts_add_up_to_the_step(more):
    """Products, exposed communication and the rest, under every draw; nothing is negative."""
    found, rows = run(case_of(**more))
    for draw in range(9):
        parts = sum(rows[name].draws[draw] for name in ("attention_and_gemm", "exposed_comm", "other"))
        assert parts == pytest.approx(rows["iteration_time"].draws[draw], rel=1e-4)
    assert all(float(np.min(value)) >= -1e-12 for value in found.split().values())
    assert 0 <= rows["bubble"].value < 1
    assert rows["bubble_time"].value <= rows["other"].value


def test_what_products_decide_and_who_is_waited_for():
    """Products half as long again, on a host that takes no time: the step is longer by that; the head's excess."""
    case = case_of("megascale+overlap=none", stages=1)
    topology, values = machine(case.topology, 0)
    values = {name: 0.0 * value if name.startswith("host.") else value for name, value in values.items()}
    trace, layout = traced(case, topology), case.workload.layout(topology.ranks, topology.gpus_per_node)
    now, slower = (composed(trace, layout, topology, values, slower_products=times) for times in (1.0, 1.5))
    products_s, longer_s = now.split()["products_s"][0], slower.timeline.time_s[0] - now.timeline.time_s[0]
    assert slower.split()["products_s"][0] == pytest.approx(1.5 * products_s)
    assert 0.4 * products_s < longer_s <= 0.5 * products_s * (1 + 1e-9)
    piped, rows = run(case_of(stages=4, global_batch=16), samples=0)
    busy = [float(one[0]) for one in piped.timeline.busy_s]
    wanted = sum(max(busy) - one for one in busy) / 4 / rows["iteration_time"].value
    assert rows["bubble_uneven"].value == pytest.approx(wanted)
    assert 0 < rows["bubble_uneven"].value < rows["bubble"].value


def test_tokens_and_utilisation_follow_from_the_step():
    """As the paper counts them: 16 sequences of 128 positions, 32 GPUs of 989 TFLOP/s."""
    _, rows = run(case_of())
    assert rows["throughput"].value == pytest.approx(16 * 128 / rows["iteration_time"].value)
    wanted = rows["throughput"].value * flops_per_token(MODEL) / (32 * 989e12)
    assert rows["mfu"].value == pytest.approx(wanted)


def test_later_stages_keep_less():
    """1F1B: p - k micro-batches on stage k, each what one forward leaves."""
    found, rows = run(case_of(stages=4, global_batch=16))
    needs = memory(found)
    kept = [found.trace.stages[role].kept_bytes for role in found.trace.roles]
    assert [one.activations for one in needs] == [4 * kept[0], 3 * kept[1], 2 * kept[2], kept[3]]
    assert rows["memory_total"].value == max(one.total for one in needs)


def test_what_does_not_fit_says_which_stage_and_what():
    """No time, but the bytes; draws too."""
    rows = _full("1.02 GB")
    assert rows[0].status == "out-of-memory"
    assert rows[0].value is None
    assert "a rank of stage 0 needs 0.028 GB (parameters" in rows[0].reason
    assert "h800 has 0.02 GB beside what is reserved: 0.0083 GB too many" in rows[0].reason
    assert {row.metric for row in rows[1:]} >= {"memory_total", "memory_activations"}


def test_a_device_of_which_all_is_reserved_has_no_negative_room():
    """Its capacity, and what is reserved of it."""
    assert _full("0.5 GB")[0].reason.endswith("h800 has 0.5 GB, all of them reserved (1.0 GB): nothing fits")


def _full(capacity):
    """The rows of a job on devices of so much memory, of which 1 GB is reserved."""
    case = case_of()
    topology, _ = machine()
    small = with_overrides(topology, {"gpu.memory.capacity": capacity, "gpu.memory.reserved": "1 GB"})
    values = {name: np.array([parameter.value]) for name, parameter in small.parameters().items()}
    return simulated(case, small, values)


def test_a_slower_nic_delays_the_ends_of_a_step():
    """Sums and gathers over the replicas, transfers between the stages: a hundredth of the rate."""
    topology, values = machine(samples=0)
    slow = {**values, "nic.bandwidth": values["nic.bandwidth"] / 100}
    case = case_of()
    layout = case.workload.layout(topology.ranks, topology.gpus_per_node)
    fast, late = (composed(traced(case, topology), layout, topology, one) for one in (values, slow))
    assert late.transfer_s[0] > fast.transfer_s[0]
    assert late.timeline.time_s[0] > fast.timeline.time_s[0]
    assert late.split()["products_s"][0] == fast.split()["products_s"][0]
