"""The replay of reads that overlap: the host waits for the copies, the device for nobody."""

import pytest

from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from tests.moebench.sim.sim_machines import GPU, ProgramBuilder, topology

BEFORE, MEANWHILE = 60_000_000, 600_000_000  # bytes; 0.1 and 1 ms at 600 GB/s
SYNC, FIXED = GPU["host.sync"], GPU["gpu.kernel.fixed"]


def _step(blocking):
    builder = ProgramBuilder()
    builder.pointwise(BEFORE)
    if not blocking:
        copy = builder.add("host::copy_expert_counts", "copy", stream="device-to-host", bytes_read=64)
    builder.pointwise(MEANWHILE)
    if blocking:
        builder.read()
    else:
        builder.add("host::event", "host-read", waits_on=(copy,))
    builder.pointwise(BEFORE)
    where = topology(1, 1)
    return replay((builder.program(),), where, nominal(where.parameters()))


def test_the_device_works_on_while_the_host_waits_for_a_copy():
    """The read is over long before what was issued after the copy: no gap on the device."""
    found = _step(blocking=False)
    busy_s = (2 * BEFORE + MEANWHILE) / 600e9 + 3 * FIXED
    assert found.step_time_s[0] == pytest.approx(busy_s + GPU["host.issue.operator"], rel=1e-6)
    timeline = found.timelines[0]
    copied, read, last = timeline.end_s[1], timeline.host_end_s[3], timeline.start_s[4]
    assert timeline.end_s[0] < copied < read < timeline.end_s[2]
    assert read == pytest.approx(copied + SYNC)
    assert last == timeline.end_s[2]


def test_a_blocking_read_leaves_a_gap():
    """The host first waits for everything, and the device then for the host."""
    gap_s = _step(blocking=True).step_time_s[0] - _step(blocking=False).step_time_s[0]
    assert gap_s == pytest.approx(SYNC + GPU["host.issue.operator"], rel=1e-6)


def test_a_copy_is_not_exposed_communication():
    """It holds up the host alone."""
    assert _step(blocking=False).exposed_communication_s[0] == 0
