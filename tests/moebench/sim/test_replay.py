import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.program import Collective
from moebench.sim.meetings import StuckReplay
from moebench.sim.replay import replay
from moebench.sim.uncertainty import draw, nominal
from tests.moebench.sim.sim_machines import ProgramBuilder, all_to_all, hardware, topology, uncertain
from tests.moebench.sim.sim_reference import longest_path_s
from tests.moebench.sim.sim_strategies import programs

MIB = 2**20
shapes = st.sampled_from([(1, 4), (2, 2), (4, 1)])
kinds = st.sampled_from(["gpu", "cpu"])


def nominally(built, where):
    return replay(built, where, nominal(where.parameters()))


def uncertain_topology(nodes, gpus, kind):
    hw = hardware(
        kind,
        gpu__memory__bandwidth=uncertain(600e9, 100e9, 700e9),
        host__issue__operator=uncertain(6e-6, 1e-6, 50e-6),
        gpu__product__fixed=uncertain(5e-6, 0.0, 9e-6),
    )
    return topology(
        nodes, gpus, hw=hw, nic__bandwidth=uncertain(12e9, 2e9, 50e9), link__bandwidth=uncertain(9e9, 2e9, 200e9)
    )


@given(programs(), shapes, kinds)
def test_the_step_is_the_longest_path_and_no_longer_than_everything_in_a_row(built, shape, kind):
    """Exactly the longest chain of waits; at most the serial sum over all ranks' operators with host issue."""
    where = topology(*shape, hw=hardware(kind))
    found = nominally(built, where)
    critical, serial = longest_path_s(built, where, nominal(where.parameters()))
    assert found.step_time_s[0] == pytest.approx(critical, rel=1e-9, abs=1e-15)
    assert found.step_time_s[0] <= serial * (1 + 1e-9) + 1e-15


@given(programs(), shapes, kinds)
def test_the_step_is_no_shorter_than_any_resource_is_busy(built, shape, kind):
    """Host, streams and tiers do one thing at a time."""
    found = replay(built, uncertain_topology(*shape, kind), draw(uncertain_topology(*shape, kind).parameters(), 20, 0))
    for resource, busy in found.busy_s.items():
        assert (busy <= found.step_time_s * (1 + 1e-9) + 1e-15).all(), resource
        assert (found.busy_share[resource] <= 1 + 1e-9).all()


@given(programs(), shapes, kinds)
def test_every_moment_of_the_step_belongs_to_one_part(built, shape, kind):
    """Operators by region, exposed communication and host-bound time add up to the step in every draw."""
    where = uncertain_topology(*shape, kind)
    found = replay(built, where, draw(where.parameters(), 20, 0))
    regions = sum(found.region_time_s.values(), np.zeros(21))
    assert regions + found.host_bound_s == pytest.approx(found.step_time_s, rel=1e-9, abs=1e-15)
    parts = sum(found.compute_time_s.values(), np.zeros(21)) + found.exposed_communication_s
    assert parts == pytest.approx(regions, rel=1e-9, abs=1e-15)
    assert {region for region, _ in found.exposed_time_s} <= {"exchange", "grad-sync"}


@given(programs(), shapes, kinds)
@settings(max_examples=40)
def test_draws_replay_as_each_alone(built, shape, kind):
    """Vectorised over draws equals one draw at a time, and index 0 equals a replay without uncertainty."""
    where = uncertain_topology(*shape, kind)
    values = draw(where.parameters(), 5, 0)
    together = replay(built, where, values)
    for i in range(6):
        alone = replay(built, where, {name: v[i : i + 1] for name, v in values.items()})
        assert together.step_time_s[i] == alone.step_time_s[0]
        assert together.host_bound_s[i] == pytest.approx(alone.host_bound_s[0], rel=1e-12, abs=1e-15)
    assert together.step_time_s[0] == nominally(built, where).step_time_s[0]


@given(programs(distinct=1), shapes)
def test_equal_ranks_replay_as_one(built, shape):
    """A symmetric program traced once, or once for each of two halves, takes the same time and sends the same bytes."""
    where = topology(*shape)
    one = built[0]
    halves = [_standing(one, 0, range(0, 4, 2)), _standing(one, 1, range(1, 4, 2))]
    whole, split = nominally(built, where), nominally(halves, where)
    assert split.step_time_s[0] == whole.step_time_s[0]
    for tier in ("link", "nic"):
        assert split.link_use[tier].total_bytes == pytest.approx(whole.link_use[tier].total_bytes)


def _standing(program, rank, ranks):
    from dataclasses import replace

    return replace(program, rank=rank, stands_for=ranks)


@given(programs(), shapes, kinds)
def test_timelines_agree_with_the_parts(built, shape, kind):
    """Operators of a stream don't overlap, and the reference rank's gaps and work add up to the step."""
    where = topology(*shape, hw=hardware(kind))
    found = nominally(built, where)
    for program, line in zip(built, found.timelines):
        assert (line.end_s >= line.start_s).all()
        assert (np.diff(line.host_start_s) >= -1e-15).all()
        on_compute = [i for i, op in enumerate(program.ops) if op.stream == "compute"]
        assert (line.start_s[on_compute][1:] >= line.end_s[on_compute][:-1] - 1e-15).all()
    line, ops = found.timelines[found.reference], built[found.reference].ops
    work = sum(line.end_s[i] - line.start_s[i] for i, op in enumerate(ops) if op.stream == "compute")
    total = work + line.exposed_s.sum() + line.idle_s.sum()
    assert total == pytest.approx(found.step_time_s[0], rel=1e-9, abs=1e-15)


def test_a_gpu_runs_behind_its_host():
    """Large operators hide the issue of those that follow: only the first issue shows."""
    builder = ProgramBuilder()
    for _ in range(10):
        builder.pointwise(6 * 10**8)
    found = nominally([builder.program()], topology(1, 1))
    assert found.step_time_s[0] == pytest.approx(10 * (1e-3 + 3e-6) + 6e-6)
    assert found.host_bound_s[0] == pytest.approx(6e-6)


def test_small_operators_are_bound_by_the_host():
    """A kernel can't start before it is issued."""
    builder = ProgramBuilder()
    for _ in range(10):
        builder.pointwise(8)
    found = nominally([builder.program()], topology(1, 1))
    assert found.step_time_s[0] == pytest.approx(10 * 6e-6 + 3e-6, rel=1e-4)


def test_a_cpu_runs_what_it_issues():
    """On a CPU issue and execution alternate on one thread."""
    builder = ProgramBuilder()
    for _ in range(10):
        builder.pointwise(6 * 10**8)
    found = nominally([builder.program()], topology(1, 1, hw=hardware("cpu")))
    assert found.step_time_s[0] == pytest.approx(10 * (1e-3 + 3e-6 + 6e-6))
    assert found.host_bound_s[0] == pytest.approx(10 * 6e-6)


def test_a_host_read_drains_the_queue():
    """What follows a read is issued after everything before it has run, plus the cost of the read."""
    builder = ProgramBuilder()
    builder.pointwise(6 * 10**8)
    builder.read()
    builder.pointwise(8)
    found = nominally([builder.program()], topology(1, 1))
    assert found.step_time_s[0] == pytest.approx(6e-6 + 1e-3 + 3e-6 + 15e-6 + 6e-6 + 3e-6, rel=1e-6)


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_work_between_launch_and_wait_hides_the_exchange(kind):
    """Only what the work doesn't cover is exposed."""

    def exposed(work):
        builder = ProgramBuilder(0, 8)
        start = builder.start(all_to_all(range(8), 9 * 10**6))  # 7 ms on the link
        builder.pointwise(work)
        builder.wait(start)
        builder.pointwise(8)
        found = nominally([builder.program()], topology(1, 8, hw=hardware(kind)))
        return found.exposed_communication_s[0], found.step_time_s[0]

    alone, _ = exposed(0)
    partly, step = exposed(600_000_000 * 3)
    fully, _ = exposed(600_000_000 * 9)
    assert alone == pytest.approx(7e-3, rel=0.02)
    assert partly == pytest.approx(4e-3, rel=0.02)
    assert step == pytest.approx(7e-3, rel=0.02)
    assert fully == 0


def test_a_collective_waits_for_its_last_rank():
    """A rank with more work holds up the others, and its own time is what the step shows."""
    builders = [ProgramBuilder(0, 2, range(1)), ProgramBuilder(1, 2, range(1, 2))]
    builders[1].pointwise(6 * 10**9)
    for builder in builders:
        builder.wait(builder.start(all_to_all(range(2), 9 * 10**6)))
        builder.pointwise(8)
    found = nominally([b.program() for b in builders], topology(1, 2))
    early, late = found.timelines
    assert late.start_s[1] == early.start_s[0] == pytest.approx(10e-3, rel=0.01)
    assert early.exposed_s.sum() == pytest.approx(11e-3, rel=0.01)
    assert late.exposed_s.sum() == pytest.approx(1e-3, rel=0.05)


def test_the_parts_are_those_of_the_rank_that_ends_last():
    """Which rank that is may differ between draws."""
    builders = [ProgramBuilder(0, 2, range(1)), ProgramBuilder(1, 2, range(1, 2))]
    builders[0].product(4096, 4096, 4096, region="experts")
    builders[1].pointwise(6 * 10**9, region="gate")
    where = topology(1, 2)
    values = {name: np.array([v[0], v[0]]) for name, v in nominal(where.parameters()).items()}
    values["gpu.memory.bandwidth"] = np.array([600e9, 6000e9])
    found = replay([b.program() for b in builders], where, values)
    assert found.region_time_s["gate", "forward"][1] == 0
    assert found.region_time_s["experts", "forward"][1] > 0
    assert found.region_time_s.keys() == {("experts", "forward"), ("gate", "forward")}


def test_uneven_exchanges_take_each_ranks_bytes():
    """Rank 1 receives everything: 3 x 9 MB over its link."""
    builders = [ProgramBuilder(r, 4, range(r, r + 1)) for r in range(4)]
    for builder in builders:
        send = (0, 9 * 10**6, 0, 0)
        builder.start(all_to_all(range(4), send=send, receive=send))
    found = nominally([b.program() for b in builders], topology(1, 4))
    assert found.busy_s["link"][0] == pytest.approx(3e-3 + 10e-6)
    assert found.link_use["link"].total_bytes == 27 * 10**6


def test_padded_and_uneven_ranks_meet():
    """An exchange may be even on some ranks and uneven on others."""
    builders = [ProgramBuilder(r, 2, range(r, r + 1)) for r in range(2)]
    builders[0].start(all_to_all(range(2), 9 * 10**6))
    builders[1].start(all_to_all(range(2), send=(18 * 10**6, 0)))
    found = nominally([b.program() for b in builders], topology(1, 2))
    assert found.busy_s["link"][0] == pytest.approx(2e-3 + 10e-6)


def test_groups_on_different_tiers_overlap_and_on_one_tier_queue():
    """Two groups have their own streams; the NIC carries one after the other, a link and a NIC work side by side."""

    def step(first, second):
        builder = ProgramBuilder(0, 16)
        builder.start(first)
        builder.start(second)
        return nominally([builder.program()], topology(2, 8)).step_time_s[0]

    node = all_to_all(range(8), 90 * 10**6, group="node")  # 70 ms on the link
    rail = all_to_all(range(0, 16, 8), 122 * 10**6, group="rail")  # 8 groups share the NIC: 80 ms
    other = all_to_all(range(0, 16, 8), 122 * 10**6, group="other")
    beside = all_to_all(range(8), 90 * 10**6, group="another of the same ranks")
    assert step(node, rail) == pytest.approx(80e-3, rel=0.01)
    assert step(node, beside) == pytest.approx(140e-3, rel=0.01)
    assert step(rail, other) == pytest.approx(160e-3, rel=0.01)


def test_leaders_have_the_nic_to_themselves():
    """A group that only one rank a node joins shares its NIC with nobody."""
    leader, other = ProgramBuilder(0, 16, (0, 8)), ProgramBuilder(1, 16, [r for r in range(16) if r % 8])
    leader.start(all_to_all(range(0, 16, 8), 122 * 10**6, group="leaders"))
    found = nominally([leader.program(), other.program()], topology(2, 8))
    assert found.step_time_s[0] == pytest.approx(10e-3, rel=0.01)


def test_programs_of_other_nodes_meet_in_their_own_groups():
    """Node groups with unequal work don't wait for each other."""
    builders = [ProgramBuilder(0, 4, range(2)), ProgramBuilder(2, 4, range(2, 4))]
    builders[1].pointwise(6 * 10**9)
    for builder, ranks in zip(builders, (range(2), range(2, 4))):
        builder.wait(builder.start(all_to_all(ranks, 9 * 10**6, group="node")))
    found = nominally([b.program() for b in builders], topology(2, 2))
    assert found.timelines[0].end_s.max() == pytest.approx(1e-3, rel=0.1)
    assert found.timelines[1].end_s.max() == pytest.approx(11e-3, rel=0.1)


def test_a_collective_that_a_rank_never_launches_is_an_error():
    """The error says who waits for whom."""
    builders = [ProgramBuilder(0, 2, range(1)), ProgramBuilder(1, 2, range(1, 2))]
    builders[0].wait(builders[0].start(all_to_all(range(2), 8)))
    with pytest.raises(StuckReplay, match=r"number 0 on group 'world' \(operator 0 of rank 0\) waits for rank 1"):
        nominally([b.program() for b in builders], topology(1, 2))


def test_different_collectives_at_one_meeting_are_an_error():
    """Ranks must launch the same collectives in the same order."""
    builders = [ProgramBuilder(0, 2, range(1)), ProgramBuilder(1, 2, range(1, 2))]
    builders[0].start(all_to_all(range(2), 8))
    builders[1].start(Collective("all_reduce", "world", range(2), 8))
    with pytest.raises(StuckReplay, match="all_to_all on some ranks and all_reduce on rank 1"):
        nominally([b.program() for b in builders], topology(1, 2))


def test_ranks_without_a_program_are_an_error():
    """Somebody must stand for every rank of a group."""
    builders = [ProgramBuilder(0, 4, range(1)), ProgramBuilder(1, 4, range(1, 2))]
    for builder in builders:
        builder.start(all_to_all(range(4), 8))
    with pytest.raises(StuckReplay, match="rank 2, for which no program stands"):
        nominally([b.program() for b in builders], topology(1, 4))


def test_memory_fits_by_draw():
    """Peak bytes against capacity less what is reserved, in each draw."""
    hw = hardware(gpu__memory__capacity=24e9, gpu__memory__reserved=uncertain(1e9, 0.5e9, 2e9))
    where = topology(1, 1, hw=hw)
    builder = ProgramBuilder()
    builder.pointwise(8)
    found = replay([builder.program(peak_bytes=23 * 10**9)], where, draw(where.parameters(), 100, 0))
    assert found.peak_bytes == 23 * 10**9
    assert found.fits[0]
    assert found.fits[1:].sum() == 50


def test_an_empty_program_takes_no_time():
    """An empty rank is valid."""
    found = nominally([ProgramBuilder().program()], topology(1, 1))
    assert found.step_time_s.tolist() == [0.0]
    assert found.busy_share["host"].tolist() == [0.0]


def test_bad_programs_are_refused():
    """No program, or operators that don't count from 0."""
    with pytest.raises(ValueError, match="no program"):
        nominally([], topology(1, 1))
    builder = ProgramBuilder()
    builder.view()
    builder.ops = builder.ops * 2
    with pytest.raises(ValueError, match="count from 0"):
        nominally([builder.program()], topology(1, 1))


@pytest.mark.parametrize("algorithm", ["all_to_all", "all_reduce", "all_gather", "reduce_scatter"])
def test_a_symmetric_step_looks_at_no_rank_one_by_one(algorithm):
    """A step of eight billion ranks replays: closed forms, so that 1,440 ranks cost no more than 8."""
    nodes = 10**9
    builder = ProgramBuilder(0, 8 * nodes)
    builder.wait(builder.start(Collective(algorithm, "world", range(8 * nodes), MIB)))
    builder.wait(builder.start(Collective(algorithm, "rail", range(0, 8 * nodes, 8), MIB)))
    found = nominally([builder.program()], topology(nodes, 8))
    assert found.step_time_s[0] > 0
    assert found.link_use["nic"].total_bytes > 0
