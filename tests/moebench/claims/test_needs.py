"""What a network would have to be for a claim to hold, and which claims can be right together."""

from dataclasses import replace

import numpy as np
import pytest

from moebench.claims.exchange_scope import conditions, exchanges_of
from moebench.claims.needs import PAYLOAD, Curves, needs, needs_words
from moebench.claims.together import holdings, pairs, spans
from tests.moebench.claims.exchanges import CLAIMS, evidence, hetu, payload_of

H3, H4, C1, C2 = (CLAIMS[f"hetu-{name}"] for name in ("h3", "h4", "c1", "c2"))
OWN_US = 5.0  # what a message costs on the default machine


def needed(claim, found):
    """The claim's needs under its default assumptions, by parameter."""
    choice, points = conditions(claim, exchanges_of(claim, hetu()))[0]
    return choice, needs(claim, points, Curves(found), found.topologies)


def by_payload(case, _=None):
    """2 at 256 KiB, and in proportion to the inverse of the payload."""
    return 2.0 * 2**18 / payload_of(case)


def test_the_least_change_of_each_parameter_is_found():
    """A speedup in proportion to the cost of a message: it must grow by what is missing, less the tolerance."""
    found = evidence(lambda *_: 0.166, by_message=lambda case, factors: 0.166 * factors)
    choice, parts = needed(H3, found)
    by_name = {need.parameter: need for need in parts}
    need = by_name["nic.message"]
    least = (1.66 - 0.15 * 0.66) / 0.166  # the tolerance is of the gain
    assert need.factor == pytest.approx(least, rel=0.01)
    assert need.nearest == pytest.approx(OWN_US * 1e-6 * least, rel=0.01)
    assert not need.is_known
    assert by_name[PAYLOAD].nearest is None
    assert by_name[PAYLOAD].reach == pytest.approx(0.166)
    words = needs_words(H3, choice, parts)
    assert words.startswith("at 16 MiB a GPU it would need nic.message of 47")
    assert "us in place of 5 us (taken to lie between 0.12 us and 31 us); no other parameter does it alone" in words


def test_a_payload_is_a_way_out_too():
    """Where the speedup falls with the payload, the one at which it is as claimed."""
    found = evidence(by_payload, by_message=lambda case, factors: np.full(41, by_payload(case)))
    _, parts = needed(H3, found)
    assert parts[0].parameter == PAYLOAD
    assert parts[0].nearest == pytest.approx(2 * 2**18 / (1.66 - 0.15 * 0.66), rel=0.01)
    assert needs_words(H3, *needed(H3, found)).startswith("at 16 MiB a GPU it would need a payload of 32")


def test_a_claim_that_holds_needs_nothing():
    """No sentence; every parameter is as it is."""
    found = evidence(lambda *_: 1.66, by_message=lambda case, factors: 1.66 * factors)
    choice, parts = needed(H3, found)
    assert needs_words(H3, choice, parts) == ""
    assert {need.parameter: need.is_as_it_is for need in parts} == {"nic.message": True, PAYLOAD: True}


def test_where_nothing_does_it_that_is_said():
    """The nearest that any value gives stays with the need."""
    found = evidence(lambda *_: 0.5, by_message=lambda case, factors: np.full(41, 0.5))
    choice, parts = needed(H3, found)
    assert needs_words(H3, choice, parts) == "at 16 MiB a GPU it would hold for no value of a single parameter"
    assert all(need.factor == np.inf and need.reach == pytest.approx(0.5) for need in parts)


def test_a_finding_needs_all_of_its_cases():
    """The value at which the last of them turns."""

    def slow(case, factors):
        return np.minimum(3.0, 4.0 * factors * 2**10 / payload_of(case))

    found = evidence(lambda case, _: min(3.0, 4.0 * 2**10 / payload_of(case)), by_message=slow)
    _, parts = needed(C1, found)
    [need] = parts  # several payloads: the payload itself is no way out
    assert need.nearest == pytest.approx(OWN_US * 1e-6 / 4, rel=0.01)
    assert need.reach == pytest.approx(1.0, rel=0.01)
    [(low, high)] = spans(need)
    assert (low, high) == (pytest.approx(need.values[0]), need.nearest)


def test_without_replays_nothing_is_needed():
    """A measured run has none."""
    found = evidence(lambda *_: 0.5)
    assert [need.parameter for need in needed(H3, found)[1]] == [PAYLOAD]
    assert needed(C1, found)[1] == []


def test_pairs_that_one_value_makes_right():
    """H3 and H4 at one payload, with the least change that does it."""

    def ratio(case, factors):
        return np.where(payload_of(case) == 2**20, (1.66 if case.size == "4x8" else 2.0) * factors / 4, 0.1)

    found = evidence(lambda case, _: float(ratio(case, 1.0)), by_message=ratio)
    listed = holdings([H3, H4], hetu(), found, found.topologies)
    [pair] = pairs(listed)
    assert pair.is_one_machine
    assert pair.payload == "1 MiB"
    assert pair.need.parameter == "nic.message"
    assert pair.need.factor == pytest.approx(4 * 0.94, rel=0.02)
    assert pair.need.is_known


def test_pairs_that_nothing_makes_right():
    """Faster by 1.66 and slower at once can't be."""
    found = evidence(lambda *_: 1.0, by_message=lambda case, factors: factors)
    pair = next(p for p in pairs(holdings([H3, C1], hetu(), found, found.topologies)))
    assert pair.is_one_machine
    assert pair.need is None


def test_pairs_about_other_machines_are_not_compared():
    """Other links, other numbers: whatever holds here says nothing of there."""
    found = evidence(lambda *_: 0.5, by_message=lambda case, factors: 0.5 * factors)
    listed = holdings([H3, C2, replace(H3, experiment="overall")], hetu(), found, found.topologies)
    assert {h.claim.id for h in listed} == {"hetu-h3", "hetu-c2"}
    [pair] = pairs(listed)
    assert not pair.is_one_machine
    assert pair.need is None
