"""Ranks that are processes of one computer: they take turns on its cores, and sending takes their time."""

import pytest

from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from tests.moebench.sim.sim_machines import ProgramBuilder, all_to_all, hardware, topology

MIB = 2**20
MESSAGE_S = 1e-3


def step_s(program, where):
    return float(replay([program], where, nominal(where.parameters())).step_time_s[0])


def computer(nodes, gpus, cores, **links):
    return topology(nodes, gpus, hw=hardware("cpu"), host__cores=cores, **links)


def compute_only(world):
    build = ProgramBuilder(world=world)
    build.product(256, 256, 256)
    build.pointwise(MIB)
    return build.program()


def beside(world, products):
    """An exchange with work between start and wait."""
    build = ProgramBuilder(world=world)
    start = build.start(all_to_all(range(world), MIB))
    for _ in range(products):
        build.product(1024, 1024, 1024)
    build.wait(start)
    return build.program()


@pytest.mark.parametrize(("ranks", "cores", "slower"), [(2, 2, 1), (2, 4, 1), (4, 2, 2), (16, 2, 8)])
def test_ranks_take_turns_on_cores(ranks, cores, slower):
    """Each is slower by ranks over cores, never faster than alone."""
    alone = step_s(compute_only(1), computer(1, 1, 64))
    assert step_s(compute_only(ranks), computer(1, ranks, cores)) == pytest.approx(slower * alone)


def test_work_beside_an_exchange_is_longer_by_what_sending_takes():
    """Where every core has a rank; a spare core would do the sending."""
    links = {"host__message": MESSAGE_S, "link__bandwidth": 1e15, "link__latency": 0.0}
    alone, both = (beside(2, products) for products in (0, 20))
    crowded, roomy = computer(1, 2, 2, **links), computer(1, 2, 4, **links)
    work_s = step_s(both, roomy)
    assert work_s > step_s(alone, roomy) > 0
    issue_s = 30e-6  # of the wait, which passes while the processor sends
    assert step_s(both, crowded) == pytest.approx(work_s + MESSAGE_S - issue_s)


def test_an_exchange_alone_is_charged_once():
    """Its processor time is part of it, not another wait."""
    links = {"host__message": MESSAGE_S, "link__latency": 0.0}
    crowded, roomy = (step_s(beside(2, 0), computer(1, 2, cores, **links)) for cores in (2, 4))
    assert crowded == pytest.approx(roomy)
