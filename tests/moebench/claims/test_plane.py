"""Where claims hold over the speed inside a node and the cost of a message, against a formula."""

from dataclasses import replace

import numpy as np
import pytest

from moebench.cases.plan import Filters, plan
from moebench.claims.evidence import Evidence
from moebench.claims.plane import break_even, costs, planes, together
from moebench.claims.reported import RATIO
from moebench.results.rows import row_of
from moebench.rows.exchanges import DEARER, FASTER
from tests.moebench.claims.exchanges import CLAIMS, hetu, machine

H3, H4, C1, C2 = (CLAIMS[f"hetu-{name}"] for name in ("h3", "h4", "c1", "c2"))
OWN_S = 5e-6


def rows(sides, payload=2**24):
    """Of each topology the times `sides[topology][exchange](faster, cost over its own)`."""
    machines, found = {}, []
    for case in plan(hetu(), Filters(topologies=tuple(sides))):
        if case.workload.payload_bytes == payload and case.system in sides[case.topology]:
            machines[case.topology] = machine(case.topology)[0]
            times = sides[case.topology][case.system](FASTER[:, None], DEARER[None, :])
            detail = {"faster": list(FASTER), "message_s": list(DEARER * OWN_S), "times_s": list(np.ravel(times))}
            found.append(row_of(case, "gpu", "time_if_both", "s", None, detail=detail))
    return Evidence(found, machines)


def gain_of(scale):
    """Flat costs what messages cost; the leader's cost falls with the speed inside."""
    return {
        "flat": lambda faster, cost: scale * cost * faster**0,
        "leader": lambda faster, cost: 100 / faster * cost**0,
    }


def found(claims, sides):
    evidence = rows(sides)
    return planes(claims, hetu(), evidence, evidence.topologies)


def test_a_claim_holds_where_the_formula_says():
    """1.66 x within 15 % of the gain, at each speed; as fast as the baseline where both cost the same."""
    [plane] = found([H3], {"4x8-titan-rtx": gain_of(1.0)})
    assert (plane.claim.kind, plane.choice.payload, plane.nics) == (RATIO, "16 MiB", 1)
    low, high = costs(plane)
    leader = 100 / plane.faster
    assert low == pytest.approx(OWN_S * leader * (1.66 - 0.099), rel=0.01)
    assert high == pytest.approx(OWN_S * leader * (1.66 + 0.099), rel=0.01)
    assert break_even(plane) == pytest.approx(OWN_S * leader, rel=0.01)


def test_claims_that_need_the_same_are_right_together():
    """At the least speed first; a claim that needs other messages at every speed is never right with it."""
    near = {"4x8-titan-rtx": gain_of(1.0), "8x8-titan-rtx": gain_of(2.0 / 1.66)}
    speed, low, high = together(found([H3, H4], near))
    assert speed == 1
    assert low < 166 * OWN_S < high
    assert together(found([H3, H4], {**near, "8x8-titan-rtx": gain_of(4.0)})) is None


def test_where_nothing_is_right_there_is_no_number():
    """Neither a cost nor a point in common."""
    never = {name: lambda faster, cost: faster**0 * cost**0 for name in ("flat", "leader")}
    planes_of = found([H3], {"4x8-titan-rtx": never})
    assert all(np.isnan(ends).all() for ends in costs(planes_of[0]))
    assert together(planes_of) is None
    slow = {**never, "leader": lambda faster, cost: 2 * faster**0 * cost**0}
    assert np.isnan(break_even(found([H3], {"4x8-titan-rtx": slow})[0])).all()


def test_only_numbers_about_one_case_have_a_plane():
    """No finding, no claim about several topologies, of another experiment or without rows of both sides."""
    sides = {"4x8-titan-rtx": gain_of(1.0)}
    assert found([C1, C2, replace(H3, scope={}), replace(H3, experiment="overall"), H4], sides) == []
    assert found([H3], {"4x8-titan-rtx": {"flat": gain_of(1.0)["flat"]}}) == []
