"""What validation found: one line a case, how far predictions are off, which aims are met. Arithmetic only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

STEP, EXCHANGE, OVERLAP = "step", "exchange", "overlap"
MEDIAN_AIM, NINTH_AIM, FEWEST, PAIR_DIFFERENCE, PAIR_AIM = 0.10, 0.20, 20, 0.10, 0.90


@dataclass(frozen=True)
class Result:
    """One case, predicted and measured; seconds and bytes.

    Attributes:
        kind: `step` (a training step of a layer), `exchange` (flat and two-phase, alone), `overlap` (an exchange
            beside products).
        point: what two systems must share to be compared; system: or the kind of exchange.
        payload_bytes: that a rank hands to one exchange.
        exposed: mean time in which a rank waits for collectives; link and nic: bytes and messages of the rank that
            sends most, by the same rules from the trace and from the operators that the ranks executed; NaN for
            exchanges by themselves, whose ranks record nothing.
        wire_bytes: that left all nodes, by the NICs' counters, headers included; predicted from the parameters.
    """

    kind: str
    size: str
    nic_rate: str
    point: str
    system: str
    payload_bytes: int
    predicted_s: float
    predicted_low_s: float
    predicted_high_s: float
    measured_s: float
    measured_low_s: float
    measured_high_s: float
    predicted_exposed_s: float
    measured_exposed_s: float
    predicted_link_bytes: float
    measured_link_bytes: float
    predicted_nic_bytes: float
    measured_nic_bytes: float
    predicted_messages: float
    measured_messages: float
    predicted_wire_bytes: float
    measured_wire_bytes: float
    predicted_peak_bytes: float
    measured_peak_bytes: float
    cpu_share: float
    wire_share: float
    cpu_bound: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def counts_equal(self) -> bool:
        """Whether bytes and messages are the same to the last one."""
        mine = (self.predicted_link_bytes, self.predicted_nic_bytes, self.predicted_messages)
        return mine == (self.measured_link_bytes, self.measured_nic_bytes, self.measured_messages)


@dataclass(frozen=True)
class Judgement:
    """Errors over the judged cases (not bound by processors), and the pairs of systems among them.

    Attributes:
        median, ninth: of absolute errors: the middle one, and the one that nine in ten do not pass.
        pairs: that differ by more than `PAIR_DIFFERENCE`; named_right: of which the faster one was predicted.
        excluded: cases that processors and not the network held up.
    """

    cases: int
    median: float
    ninth: float
    within_ninth_aim: float
    pairs: int
    named_right: int
    excluded: int
    counts_equal: int
    counted: int


def judge(results: Sequence[Result]) -> Judgement:
    """Of all kinds but overlap, which is told apart."""
    told = [r for r in results if r.kind != OVERLAP]
    judged = [r for r in told if not r.cpu_bound]
    counted = [r for r in told if r.kind == STEP]
    errors = np.array([abs(r.error) for r in judged])
    pairs = list(differing_pairs(judged))
    return Judgement(
        cases=len(judged),
        median=float(median(errors)) if judged else float("nan"),
        ninth=float(np.quantile(errors, 0.9)) if judged else float("nan"),
        within_ninth_aim=float(np.mean(errors <= NINTH_AIM)) if judged else float("nan"),
        pairs=len(pairs),
        named_right=sum(is_named_right(a, b) for a, b in pairs),
        excluded=len(told) - len(judged),
        counts_equal=sum(r.counts_equal for r in counted),
        counted=len(counted),
    )


def differing_pairs(results: Iterable[Result]) -> Iterable[tuple[Result, Result]]:
    """Two systems at one point whose measured times differ by more than `PAIR_DIFFERENCE`."""
    by_point: dict[tuple[str, str, str], list[Result]] = {}
    for r in results:
        by_point.setdefault((r.kind, r.size, r.point), []).append(r)
    for group in by_point.values():
        for a, b in combinations(group, 2):
            fast, slow = sorted((a.measured_s, b.measured_s))
            if slow > (1 + PAIR_DIFFERENCE) * fast:
                yield a, b


def is_named_right(a: Result, b: Result) -> bool:
    """Whether the one that is measured faster is predicted faster."""
    return (a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s)
