"""What share of the wire the baseline alone would have to get, against a formula."""

from dataclasses import replace

import numpy as np
import pytest

from moebench.cases.plan import Filters, plan
from moebench.claims.congestion import congestion
from moebench.claims.evidence import Evidence
from moebench.results.rows import row_of
from tests.moebench.claims.exchanges import CLAIMS, hetu, machine

H3, H4, C1 = (CLAIMS[f"hetu-{name}"] for name in ("h3", "h4", "c1"))
SHARES = np.geomspace(0.8 / 1024, 1, 40)


def found(claims, leader_s, payload=2**24, gpus=("titan-rtx",)):
    """Flat takes a second at a share of 0.8, and in proportion to its inverse; the leader what it takes by size."""
    machines, rows = {}, []
    topologies = tuple(f"{size}-{gpu}" for size in leader_s for gpu in gpus)
    for case in plan(hetu(), Filters(topologies=topologies, systems=("flat", "leader"))):
        if case.workload.payload_bytes == payload:
            machines[case.topology] = machine(case.topology)[0]
            time_s = 1.0 if case.system == "flat" else leader_s[case.size]
            detail = {"parameter": "fabric.share", "values": list(SHARES), "times_s": list(time_s * 0.8 / SHARES)}
            rows.append(row_of(case, "gpu", "collective_time", "s", time_s))
            rows.append(row_of(case, "gpu", "time_if", "s", None, detail=detail))
    evidence = Evidence(rows, machines)
    return congestion(claims, hetu(), evidence, evidence.topologies)


def test_the_baseline_alone_loses_rate():
    """The exchange keeps its time: 0.8 over what the baseline must take for 1.66 x, less the tolerance."""
    [part] = found([H3], {"4x8": 10.0})
    need = part.by_claim["hetu-h3"]
    assert need.parameter == "flat's own fabric.share"
    assert need.nearest == pytest.approx(0.8 / (10 * (1.66 - 0.099)), rel=0.01)
    assert not need.is_known
    assert part.at_once == need


def test_both_at_once_where_their_shares_meet():
    """On each kind of node by itself."""
    parts = found([H3, H4], {"4x8": 10.0, "8x8": 8.3}, gpus=("titan-rtx", "v100-sxm2"))
    assert [part.choice.gpu for part in parts] == ["titan-rtx", "v100-sxm2"]
    assert all(part.at_once.nearest == pytest.approx(0.8 / 15.61, rel=0.01) for part in parts)
    assert found([H3, H4], {"4x8": 10.0, "8x8": 1.0})[0].at_once is None


def test_only_numbers_with_rows_have_a_share():
    """No finding; nothing where no case ran; a kind of node on which one of the claims wasn't run is left out."""
    assert found([C1, replace(H3, experiment="overall")], {"4x8": 10.0}) == []
    assert found([H4], {"4x8": 10.0}) == []
    other = replace(H4, baseline="2d")
    assert [list(part.by_claim) for part in found([H3, other], {"4x8": 10.0, "8x8": 8.3})] == [["hetu-h3"]]
