"""One sentence of why for each verdict, in words a reader of the paper knows."""

from collections.abc import Mapping, Sequence

from moebench.cases.gates import ENGINE as COUNT
from moebench.claims import verdict as v
from moebench.claims.deciding import WORTH_NAMING, Influence
from moebench.claims.query import Obtained
from moebench.claims.reported import EXACT, FRACTION, RATIO, SHARE, Claim
from moebench.claims.words import factor_words, level_words, outcome_words

TOLD_LEVELS = 3  # of an assumption with more levels, those at which most draws agree
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
    if claim.kind == FRACTION or claim.unit == SHARE:
        return f"{100 * value:.3g} %"
    shown = f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
    return shown if claim.kind == EXACT else f"{shown} {claim.unit}"


def quantities(claim: Claim, low: float | None, high: float | None) -> str:
    """`1.1x to 1.3x`, or nothing."""
    return "" if low is None or high is None else f"{quantity(claim, low)} to {quantity(claim, high)}"


def reported(claim: Claim) -> str:
    """The reported value with its relation: `up to 8.1x`."""
    return _RELATION[claim.relation] + quantity(claim, claim.value)


def why_judged(
    claim: Claim,
    nominal: float | str | None,
    agreement: v.Agreement,
    factors: Sequence[Influence],
    found: Obtained,
    fitted: str,
) -> str:
    """Obtained against reported, how many draws agree, and what decides."""
    ours = quantity(claim, nominal) if nominal is not None else "nothing to compare on the default machine"
    start = f"{ours} against {reported(claim)}{f' ({found.detail})' if found.detail else ''}"
    if fitted:
        return f"{start}; {fitted} was fitted to this claim's data"
    needs = f"; {found.needs}" if found.needs else ""
    draws = sum(len(c.values[c.sampled]) for c in found.conditions)
    one = "the nominal machine" if found.engine == "sim" else "the machine measured"
    over = one if draws == 1 else f"{draws:,} draws"
    if len(found.conditions) > 1:
        over += f" over {len(found.conditions)} assumptions"
    if agreement.word == v.DEPENDS:
        told = _largest(agreement.shares)
        outcomes = ", ".join(f"{outcome_words(word)} in {_percent(share)}" for word, share in told)
        return f"{start}; of {over}: {outcomes}{_decider(factors, agreement.focus, found)}{_short(found)}{needs}"
    if draws == 1 and found.engine == COUNT:
        return f"{start}: {outcome_words(agreement.top)}{_short(found)}{needs}"
    if draws == 1:
        return f"{start}: {outcome_words(agreement.top)} on {over}{_short(found)}{needs}"
    return f"{start}: {outcome_words(agreement.top)} in {_percent(agreement.share)} of {over}{_short(found)}{needs}"


def why_partial(found: Obtained) -> str:
    """A claim about cases that this run does not hold all of."""
    return (
        f"needs {found.points} cases under the default assumptions, this run has {found.points - found.lacking}; "
        f"the value is that of the cases it has{f' ({found.detail})' if found.detail else ''}"
    )


def _short(found: Obtained) -> str:
    """Which part of the planned assumptions was run, where it is not all."""
    if len(found.conditions) == found.planned:
        return ""
    return f" ({len(found.conditions)} of {found.planned} assumptions were run)"


def _decider(factors: Sequence[Influence], focus: str, found: Obtained) -> str:
    """What decides, where the draws are enough to tell it from chance."""
    worth = [f for f in factors if f.eta_squared >= WORTH_NAMING]
    named = [f for f in worth if f.is_significant]
    if not named:
        draws = max(len(c.values[c.sampled]) for c in found.conditions)
        return f"; {draws} draws are too few to tell what decides" if worth else "; no single parameter decides"
    first = named[0]
    is_long = len(first.contrast) > TOLD_LEVELS + 1
    levels = list(first.contrast.items())
    if is_long:
        levels.sort(key=lambda item: -item[1])
    parts = [f"{_percent(share)} with {level_words(first.name, level)}" for level, share in levels]
    if is_long:
        parts = [*parts[:TOLD_LEVELS], f"at most {_percent(levels[TOLD_LEVELS][1])} with the others"]
    then = f"; then {factor_words(named[1].name)} ({_percent(named[1].eta_squared)})" if len(named) > 1 else ""
    explains = f"explains {_percent(first.eta_squared)} of the variation between draws"
    ends = f"{outcome_words(focus)} in {', '.join(parts)}"
    return f"; {factor_words(first.name)} decides most ({explains}): {ends}{then}"


def _largest(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(word, share) for word, share in shares.items() if share >= v.WORTH_TELLING]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
