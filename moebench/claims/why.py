"""One sentence of why for each verdict, in words a reader of the paper knows."""

from collections.abc import Mapping, Sequence

from moebench.claims import verdict as v
from moebench.claims.deciding import WORTH_NAMING, Influence
from moebench.claims.query import Obtained
from moebench.claims.reported import EXACT, FRACTION, RATIO, Claim

_RELATION = {
    "equal": "",
    "at-least": "at least ",
    "at-most": "at most ",
    "max-over": "up to ",
    "mean-over": "on average ",
    "finding": "",
}


def quantity(claim: Claim, value: float | str | None) -> str:
    """A value in the claim's unit: `8.1x`, `33 %`, `20 minutes`."""
    if value is None:
        return "no value"
    if isinstance(value, str):
        return value
    if claim.kind == RATIO:
        return f"{value:.3g}x" if value < 1000 else f"{value:.0f}x"
    if claim.kind == FRACTION:
        return f"{100 * value:.3g} %"
    return f"{value:.4g}" if claim.kind == EXACT else f"{value:.4g} {claim.unit}"


def reported(claim: Claim) -> str:
    """The reported value with its relation: `up to 8.1x`."""
    return _RELATION[claim.relation] + quantity(claim, claim.value)


def why_judged(
    claim: Claim,
    nominal: float | None,
    agreement: v.Agreement,
    factors: Sequence[Influence],
    found: Obtained,
    fitted: str,
) -> str:
    """Obtained against reported, how many draws agree, and what decides."""
    ours = quantity(claim, nominal) if nominal is not None else "nothing to compare on the default machine"
    start = f"{ours} against {reported(claim)}"
    if fitted:
        return f"{start}; {fitted} was fitted to this claim's data"
    draws = sum(len(c.values[c.sampled]) for c in found.conditions)
    over = "the nominal machine" if draws == 1 else f"{draws:,} draws"
    if len(found.conditions) > 1:
        over += f" over {len(found.conditions)} assumptions"
    if agreement.word == v.DEPENDS:
        outcomes = ", ".join(f"{_meaning(word)} in {_percent(share)}" for word, share in _largest(agreement.shares))
        return f"{start}; of {over}: {outcomes}{_decider(factors, agreement.focus)}{_short(found)}"
    if draws == 1:
        return f"{start}: {_meaning(agreement.top)} on {over}{_short(found)}"
    return f"{start}: {_meaning(agreement.top)} in {_percent(agreement.share)} of {over}{_short(found)}"


def why_partial(found: Obtained) -> str:
    """A claim about cases that this run does not hold all of."""
    return (
        f"needs {found.points} cases under the default assumptions, this run has {found.points - found.lacking}; "
        "the value is that of the cases it has"
    )


def _short(found: Obtained) -> str:
    """Which part of the planned assumptions was run, where it is not all."""
    if len(found.conditions) == found.planned:
        return ""
    return f" ({len(found.conditions)} of {found.planned} assumptions were run)"


def _decider(factors: Sequence[Influence], focus: str) -> str:
    if not factors or factors[0].eta_squared < WORTH_NAMING:
        return "; no single parameter decides"
    first, second = factors[0], factors[1] if len(factors) > 1 else None
    parts = [f"{_percent(share)} with {_level(first.name, level)}" for level, share in first.contrast.items()]
    then = f"; then {second.name} ({second.eta_squared:.2f})" if second and second.eta_squared >= WORTH_NAMING else ""
    return f"; {first.name} decides most (eta^2 {first.eta_squared:.2f}): {_meaning(focus)} in {', '.join(parts)}{then}"


def _level(name: str, level: str) -> str:
    return f"the {level} of its range" if level.endswith(" third") else f"{name} {level}"


def _largest(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(word, share) for word, share in shares.items() if share >= v.WORTH_TELLING]


def _meaning(word: str) -> str:
    return {
        v.REPRODUCED: "reproduced",
        v.DIRECTION_ONLY: "same winner but another size",
        v.CONTRADICTED: "contradicted",
        v.BASELINE_OUT: "the baseline out of memory",
        v.SYSTEM_OUT: "the system out of memory",
        v.BOTH_OUT: "both out of memory",
    }.get(word, word)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
