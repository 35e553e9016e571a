"""The replay of moves between storage, host and device, beside computing and communicating."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.transfer import STREAM_OF
from moebench.sim.replay import replay
from moebench.sim.uncertainty import draw, nominal
from moebench.workloads.errors import InputError
from tests.moebench.sim.sim_machines import GPU, ProgramBuilder, hardware, topology, uncertain

RATES = {
    "storage__read__bandwidth": 8e9,
    "storage__write__bandwidth": 4e9,
    "storage__latency": 100e-6,
    "copy__bandwidth": 20e9,
    "copy__latency": 10e-6,
    "host__memory__bandwidth": 100e9,
}
ISSUE, SYNC, FIXED = GPU["host.issue.operator"], GPU["host.sync"], GPU["gpu.kernel.fixed"]
STATE = 40_000_000  # bytes: 5.1 ms to read, 10.1 ms to write, 2.01 ms to copy
READ_S, WRITE_S, COPY_S = STATE / 8e9 + 1e-4, STATE / 4e9 + 1e-4, STATE / 20e9 + 1e-5


def machine(nodes=1, gpus=1, **changes):
    """With storage and a link to the host."""
    return topology(nodes, gpus, **{**RATES, **changes})


def move(builder, kind, after=(), moved=STATE):
    """One transfer."""
    return builder.add(f"host::{kind}", kind, stream=STREAM_OF[kind], bytes_read=moved, waits_on=tuple(after))


def wait(builder, *indices):
    """The compute stream waits."""
    return builder.add("host::wait", "wait", waits_on=indices)


def host_wait(builder, *indices):
    """The host waits."""
    return builder.add("host::event", "host-read", waits_on=indices)


def time_of(builder, where=None, **rest):
    """Replayed once."""
    where = where or machine()
    return replay((builder.program(),), where, nominal(where.parameters()), **rest)


def test_a_state_goes_from_storage_to_the_device_and_the_device_waits():
    """Read, then copied; the wait is a stall, not communication."""
    builder = ProgramBuilder()
    read = move(builder, "storage-read")
    copy = move(builder, "to-device", [read])
    wait(builder, copy)
    builder.pointwise(600_000)
    found = time_of(builder)
    work_s = 1e-6 + FIXED
    assert found.step_time_s[0] == pytest.approx(ISSUE + READ_S + COPY_S + work_s)
    assert found.exposed_transfer_s[0] == pytest.approx(READ_S + COPY_S - ISSUE)  # from when the copy was issued
    assert found.exposed_communication_s[0] == 0
    assert found.busy_s["storage"][0] == pytest.approx(READ_S)
    assert found.busy_s["host-to-device"][0] == pytest.approx(COPY_S)


def test_work_hides_a_transfer():
    """Beside ten milliseconds of computing seven of loading cost nothing."""
    times = {}
    for loads in (False, True):
        builder = ProgramBuilder()
        copy = move(builder, "to-device", [move(builder, "storage-read")]) if loads else None
        builder.pointwise(6_000_000_000)
        if copy is not None:
            wait(builder, copy)
        builder.pointwise(600_000)
        times[loads] = time_of(builder)
    assert times[True].exposed_transfer_s[0] == 0
    assert times[True].step_time_s[0] == pytest.approx(times[False].step_time_s[0] + 2 * ISSUE)


def test_storage_and_host_link_run_at_once_and_each_alone_in_order():
    """Three states: the second read runs beside the first copy; reads are the bottleneck."""
    builder = ProgramBuilder()
    copies = [move(builder, "to-device", [move(builder, "storage-read")]) for _ in range(3)]
    wait(builder, *copies)
    found = time_of(builder)
    assert found.step_time_s[0] == pytest.approx(ISSUE + 3 * READ_S + COPY_S)


def test_a_copy_waits_until_its_place_is_free():
    """The mark is an operator of the compute stream: the copy starts when that is over, and not before."""
    builder = ProgramBuilder()
    used = builder.pointwise(6_000_000_000)
    builder.pointwise(6_000_000_000)
    copy = move(builder, "to-device", [used])
    free = move(builder, "to-host")
    found = time_of(builder)
    line = found.timelines[0]
    assert line.start_s[copy] == pytest.approx(line.end_s[used])
    assert line.end_s[copy] == pytest.approx(line.end_s[used] + COPY_S)
    assert line.start_s[free] == pytest.approx(4 * ISSUE)


def test_the_host_waits_for_a_transfer_and_the_device_for_the_host():
    """An update on the host: what is issued after it is late, on the host's account."""
    builder = ProgramBuilder()
    host_wait(builder, move(builder, "host-update", moved=10**9))
    builder.pointwise(600_000)
    found = time_of(builder)
    assert found.step_time_s[0] == pytest.approx(ISSUE + 0.01 + SYNC + ISSUE + 1e-6 + FIXED)
    assert found.host_bound_s[0] == pytest.approx(ISSUE + 0.01 + SYNC + ISSUE)
    assert found.exposed_transfer_s[0] == 0


def test_a_step_ends_with_its_last_transfer():
    """A write-back that nobody waits for."""
    builder = ProgramBuilder()
    builder.pointwise(600_000)
    move(builder, "storage-write")
    assert time_of(builder).step_time_s[0] == pytest.approx(2 * ISSUE + WRITE_S)


def test_the_gpus_of_a_node_share_its_storage_and_not_their_links():
    """Four ranks that read at once take four times as long, on each of two nodes; their copies do not."""
    builder = ProgramBuilder(world=8)
    move(builder, "to-device", [move(builder, "storage-read")])
    found = time_of(builder, machine(2, 4))
    assert found.step_time_s[0] == pytest.approx(ISSUE + 4 * STATE / 8e9 + 1e-4 + COPY_S)


def test_a_cpu_moves_in_threads():
    """The host runs the operators; transfers run beside them."""
    builder = ProgramBuilder()
    copy = move(builder, "storage-read")
    builder.pointwise(6_000_000_000)
    wait(builder, copy)
    found = time_of(builder, machine(hw=hardware("cpu")))
    assert found.exposed_transfer_s[0] == 0
    assert found.step_time_s[0] == pytest.approx(0.01 + FIXED + 3 * ISSUE)


def test_a_machine_without_storage_says_what_is_missing():
    """By name."""
    builder = ProgramBuilder()
    move(builder, "storage-read")
    with pytest.raises(InputError, match=r"parameter storage\.read\.bandwidth is missing"):
        time_of(builder, topology(1, 1))


@st.composite
def programs(draw):
    """Work, transfers after each other and after work, waits of device and host."""
    builder, moves, work = ProgramBuilder(), [], []
    for _ in range(draw(st.integers(0, 25))):
        what = draw(st.sampled_from(["work", "move", "move", "wait", "host"]))
        if what == "work":
            work.append(builder.pointwise(draw(st.integers(1, 4)) * 600_000_000))
        elif what == "move":
            after = draw(st.lists(st.sampled_from(moves + work), max_size=2)) if moves + work else []
            kind = draw(st.sampled_from(sorted(STREAM_OF)))
            moves.append(move(builder, kind, after, draw(st.integers(1, 4)) * 10_000_000))
        elif moves:
            (wait if what == "wait" else host_wait)(builder, draw(st.sampled_from(moves)))
    return builder.program()


def expected_s(program, where):
    """End of the step, operator by operator, as the definition says."""
    values = {name: parameter.value for name, parameter in where.parameters().items()}
    rates = {
        "storage-read": (values["storage.read.bandwidth"], values["storage.latency"]),
        "storage-write": (values["storage.write.bandwidth"], values["storage.latency"]),
        "to-device": (values["copy.bandwidth"], values["copy.latency"]),
        "to-host": (values["copy.bandwidth"], values["copy.latency"]),
        "host-update": (values["host.memory.bandwidth"], 0.0),
    }
    host = device = 0.0
    free, ends = dict.fromkeys(STREAM_OF.values(), 0.0), {}
    for op in program.ops:
        waited = [ends[i] for i in op.waits_on]
        if op.kind == "host-read":
            host = max([host, *waited]) + SYNC
            continue
        host += ISSUE
        if op.kind == "wait":
            device = max([device, *waited])
        elif op.kind == "pointwise":
            device = max(device, host) + op.bytes / values["gpu.memory.bandwidth"] + FIXED
            ends[op.index] = device
        else:
            rate, latency = rates[op.kind]
            start = max([host, free[op.stream], *waited])
            ends[op.index] = free[op.stream] = start + op.bytes / rate + latency
    return max([host, device, *ends.values()])


@given(programs())
@settings(max_examples=40)
def test_any_program_takes_what_the_definition_says(program):
    """And every moment of the step belongs to one part."""
    where = machine()
    found = replay((program,), where, nominal(where.parameters()))
    assert found.step_time_s[0] == pytest.approx(expected_s(program, where), rel=1e-9, abs=1e-15)
    parts = sum(found.region_time_s.values(), np.zeros(1)) + found.host_bound_s
    assert parts == pytest.approx(found.step_time_s, rel=1e-9, abs=1e-15)
    for resource, busy in found.busy_s.items():
        assert busy[0] <= found.step_time_s[0] * (1 + 1e-9) + 1e-15, resource


@given(programs())
@settings(max_examples=15)
def test_draws_replay_as_each_alone(program):
    """Two equal ranks too."""
    where = machine(storage__read__bandwidth=uncertain(8e9, 1e9, 20e9), copy__bandwidth=uncertain(20e9, 5e9, 25e9))
    values = draw(where.parameters(), 4, 0)
    both = [replace(program, world=2, stands_for=(rank,), rank=rank) for rank in range(2)]
    together = replay(both, where, values)
    for i in range(5):
        alone = replay((program,), where, {name: v[i : i + 1] for name, v in values.items()})
        assert together.step_time_s[i] == alone.step_time_s[0]
