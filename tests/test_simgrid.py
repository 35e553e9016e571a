import pytest

from benchmarks.simgrid_check import AIM, compared, even, ours_s, problem


def test_the_even_exchange_meets_the_closed_form():
    """8x8 behind one NIC a node: what leaves a node over the NIC's rate, whoever simulates it."""
    assert ours_s(even(8, 8, 1 << 22), 8, 8) == pytest.approx(8 * 56 * (1 << 22) / 12.2e9)


@pytest.mark.slow
@pytest.mark.skipif(problem() is not None, reason=problem() or "")
def test_a_flow_simulation_agrees():
    """SimGrid's flows end when the network model says, with shared NICs and with uneven traffic."""
    for found in compared():
        assert abs(found.error) <= AIM, found
