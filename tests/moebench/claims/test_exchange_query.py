"""Claims about exchanges: what a claim leaves open is assumed, what it names is its scope."""

from dataclasses import replace

import numpy as np
import pytest

from moebench.cases.plan import Filters
from moebench.claims import verdict as v
from moebench.claims.evidence import Evidence, obtain
from moebench.claims.exchange_scope import conditions, exchanges_of, sides_of
from moebench.claims.reported import exchanges
from moebench.claims.scope import CantAnswer
from moebench.claims.scoreboard import score
from moebench.results.rows import CPU_BOUND
from moebench.workloads.exchange import EXCHANGES
from tests.moebench.claims.exchanges import CLAIMS, evidence, hetu, payload_of

H3, H4, C1, C2 = (CLAIMS[f"hetu-{name}"] for name in ("h3", "h4", "c1", "c2"))


def by_size(small, large, limit=2**20):
    """One speedup below a payload, another from it on."""
    return lambda case, _: small if payload_of(case) < limit else large


def test_names_of_papers_are_exchanges_that_are_built():
    """What `exchanges.csv` names stands in the table of exchanges."""
    assert set(exchanges().values()) <= set(EXCHANGES)
    assert sides_of(H3) == sides_of(C1) == ("leader", "flat")
    assert sides_of(C2) == ("2d", "flat")
    with pytest.raises(CantAnswer, match="needs 3d, not built yet"):
        sides_of(replace(H3, system="3d"))


def test_payload_and_machine_are_assumed_where_nothing_is_said():
    """H3: every node type with every payload, 16 MiB on the first being the default."""
    experiment = exchanges_of(H3, hetu())
    planned = conditions(H3, experiment)
    assert len(planned) == len(experiment.node_types) * len(experiment.payloads_bytes)
    choice, points = planned[0]
    assert choice.labels == {"gpu": "titan-rtx", "payload": "16 MiB"}
    assert [(p.topology, p.payload_bytes) for p in points] == [("4x8-titan-rtx", 2**24)]
    assert [choice.is_default for choice, _ in planned] == [True] + [False] * (len(planned) - 1)


def test_what_a_claim_names_is_its_scope():
    """C1: one condition over all payloads between the ends of its range, on the machine that it names."""
    [(choice, points)] = conditions(C1, exchanges_of(C1, hetu()))
    assert choice.labels == {}
    assert {p.topology for p in points} == {"8x4-rtx-2080-ti"}
    assert [p.payload_bytes for p in points] == [2**n for n in range(10, 27, 2)]


def test_a_bound_on_gpus_ranges_over_topologies():
    """C2: every size below 256 GPUs together, a condition a payload."""
    planned = conditions(C2, exchanges_of(C2, hetu()))
    assert [choice.labels for choice, _ in planned[:1]] == [{"payload": "16 MiB"}]
    assert {p.topology.partition("-")[0] for p in planned[0][1]} == {"2x8", "4x8", "8x8", "16x8"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"scope": {"nodes": "5"}}, "has no topology of the claim's scope"),
        ({"scope": {"bytes": "1..2"}}, "has no payload of the claim's scope"),
        ({"scope": {"dtype": "bf16"}}, "has no dtype of the claim's scope"),
        ({"scope": {"gate": "switch"}}, "no experiment here is organised by gate"),
        ({"metric": "step_speedup"}, "no query for the metric step_speedup yet"),
    ],
)
def test_what_it_can_t_answer_it_says(changes, error):
    """And what is missing."""
    with pytest.raises(CantAnswer, match=error):
        obtain(replace(H3, **changes), hetu(), evidence(lambda *_: 2.0))


def test_a_speedup_is_divided_draw_by_draw():
    """The same machine for both; a payload that decides is named, the least share told once."""
    result = score(H3, hetu(), evidence(by_size(1.7, 0.2)))
    assert result.verdict == v.DEPENDS
    assert result.obtained == pytest.approx(0.2)
    assert result.shares == pytest.approx({v.CONTRADICTED: 6 / 11, v.REPRODUCED: 5 / 11})
    assert result.decides[0]["name"] == "payload"
    assert result.decides[0]["status"] == "assumption"
    assert "payload of a GPU decides most" in result.why
    assert "reproduced in 100 % with payload of a GPU 1 KiB" in result.why
    assert "at most 100 % with the others" in result.why


def test_a_gain_is_a_speedup_less_one():
    """A model's size leaves the payload open; what would have to be otherwise is told of the gain too."""
    claim = replace(H3, metric="communication_gain", value=0.155, unit="fraction", scope=dict(H3.scope, params="80e9"))
    found = obtain(claim, hetu(), evidence(lambda *_: 1.155))
    assert np.allclose(found.conditions[0].values, 0.155)
    assert found.conditions[0].assumption.labels == {"gpu": "titan-rtx", "payload": "16 MiB"}
    assert score(claim, hetu(), evidence(lambda *_: 1.155)).verdict == v.REPRODUCED
    slow = evidence(lambda *_: 0.5, by_message=lambda case, factors: 0.5 * factors)
    told = score(claim, hetu(), slow)
    assert told.verdict == v.CONTRADICTED
    assert "nic.message of" in told.why


def test_all_payloads_alike_is_a_verdict():
    """Reproduced, or contradicted, whatever was assumed."""
    assert score(H3, hetu(), evidence(lambda *_: 1.66)).verdict == v.REPRODUCED
    assert score(H3, hetu(), evidence(lambda *_: 0.5)).verdict == v.CONTRADICTED


def test_a_finding_holds_where_it_holds_in_every_case():
    """Slower at all payloads and topologies of its scope; where not, the sentence says where it is and where not."""
    assert score(C1, hetu(), evidence(lambda *_: 0.9)).verdict == v.REPRODUCED
    result = score(C1, hetu(), evidence(by_size(2.0, 0.5)))
    assert (result.verdict, result.obtained, result.error) == (v.CONTRADICTED, "mixed", None)
    assert (result.low, result.high) == (None, None)
    assert "faster at 1 KiB to 256 KiB and slower at 1 MiB to 64 MiB" in result.why
    on_size = lambda case, _: 1.2 if case.size == "16x8" else 0.8  # noqa: E731
    assert "slower on 2x8 to 8x8 and faster on 16x8" in score(C2, hetu(), evidence(on_size)).why


def test_a_finding_is_judged_draw_by_draw():
    """A parameter that decides who is faster is named."""

    def speedup(case, parameters):
        cost = parameters["nic.message"]
        return np.where(cost > np.median(cost), 2.0, 0.5)

    result = score(C1, hetu(), evidence(speedup))
    assert result.verdict == v.DEPENDS
    assert result.shares == pytest.approx({v.REPRODUCED: 0.5, v.CONTRADICTED: 0.5})
    assert result.decides[0]["name"] == "nic.message"


def test_out_of_memory_is_no_speedup_and_no_word():
    """Of a number it is an outcome; of a finding the other cases decide."""
    result = score(H3, hetu(), evidence(lambda case, _: np.nan if payload_of(case) == 2**30 else 1.66))
    assert result.verdict == v.REPRODUCED
    assert result.shares[v.SYSTEM_OUT] == pytest.approx(1 / 11)
    whole = evidence(lambda case, _: np.nan if payload_of(case) == 2**26 else 0.5)
    assert score(C1, hetu(), whole).verdict == v.REPRODUCED
    assert score(C1, hetu(), evidence(lambda *_: np.nan)).verdict == v.NOT_RUN


def test_a_part_of_a_run_judges_what_it_has():
    """One topology answers H3 and not H4; one exchange answers neither."""
    part = evidence(lambda *_: 1.66, Filters(topologies=("4x8-titan-rtx",)))
    assert score(H3, hetu(), part).verdict == v.REPRODUCED
    assert "(11 of 44 assumptions were run)" in score(H3, hetu(), part).why
    assert score(H4, hetu(), part).why == "none of its cases under the default assumptions was run"
    alone = evidence(lambda *_: 1.66, Filters(systems=("leader",)))
    assert score(H3, hetu(), alone).verdict == v.NOT_RUN


def test_what_processors_slowed_down_judges_nothing():
    """A measured summary that is marked is left out."""
    whole = evidence(lambda *_: 1.66)
    bound = Evidence([replace(row, detail={"mark": CPU_BOUND}) for row in whole.rows], whole.topologies)
    assert score(H3, hetu(), whole).verdict == v.REPRODUCED
    assert score(H3, hetu(), bound).verdict == v.NOT_RUN


def test_a_failed_case_is_the_reason():
    """The default condition's own failure is told."""
    whole = evidence(lambda *_: 1.66)
    whole.rows = tuple(replace(row, value=None, draws=(), status="failed", reason="no luck") for row in whole.rows)
    assert "is failed: no luck" in score(H3, hetu(), whole).why
