"""How outcomes, assumptions and rules are called, the same in the terminal, the report and every sentence of why."""

import re
from collections.abc import Mapping, Sequence

from moebench.claims import verdict as v
from moebench.claims.reported import BEST_OTHER, Claim

# What each verdict means, as a legend says it.
DEFINITIONS: Mapping[str, str] = {
    v.REPRODUCED: f"within {100 * v.TOLERANCE:.0f} % of what was reported; a bound holds",
    v.DIRECTION_ONLY: "the same winner, by another factor",
    v.CONTRADICTED: "the other winner, an absolute number that is further off, or a bound that does not hold",
    v.CALIBRATED: "a parameter was fitted to the claim's own data, so that agreeing proves nothing",
    v.DEPENDS: f"fewer than {100 * v.AGREEMENT:.0f} % of the draws agree",
    v.NOT_RUN: "the run does not answer it",
}
_OUTCOMES = {
    v.BASELINE_OUT: "the baseline out of memory",
    v.SYSTEM_OUT: "the system out of memory",
}
_ASSUMPTIONS = {
    "gpu": "GPU",
    "experts": "number of experts",
    "input_gradient": "input gradient",
    "payload": "payload of a GPU",
    "rivals": "the choice of rivals",
}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_SHORT = {"mfu": "MFU", "gemm": "GEMM"}
_A_GPU = re.compile(r"(?:(\d+)\s*\*\s*)?world")


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def baseline_words(claim: Claim) -> str:
    """What a claim compares with; empty where with nothing."""
    return "the best other" if claim.baseline == BEST_OTHER else claim.baseline or ""


def claim_words(claim: Claim) -> str:
    """What is claimed, without the number: `max step speedup of A against B, gate switch, batch size 32`."""
    baseline = baseline_words(claim)
    metric = "" if claim.metric == "finding" else " ".join(_SHORT.get(w, w) for w in claim.metric.split("_"))
    words = " of ".join(filter(None, (metric, claim.system))) or claim.experiment
    scope = [
        value.replace(",", ", ") if key in ("scope", "gates") else f"{key.replace('_', ' ')} {value}"
        for key, value in claim.scope.items()
    ]
    return ", ".join([words + (f" against {baseline}" if baseline else ""), *scope])


def outcome_words(word: str) -> str:
    """The outcome of a draw inside a sentence; a verdict is always called by its own word."""
    return _OUTCOMES.get(word, word)


def factor_words(name: str) -> str:
    """A parameter by its name, an assumption in words."""
    return _ASSUMPTIONS.get(name, name)


def level_words(name: str, level: str) -> str:
    """A level of a factor after "with": `GPU titan-rtx`, `experts two a GPU`, `no input gradient`."""
    if name == "experts":
        return f"experts {experts_words(level)}"
    if name == "rivals":
        return level
    if name == "input_gradient":
        return "an input gradient" if level.lower() in ("yes", "true") else "no input gradient"
    return f"the {level} of its range" if level.endswith(" third") else f"{factor_words(name)} {level}"


def experts_words(rule: str) -> str:
    """A rule for the number of experts in words: `16`, `one a GPU`, `two a GPU`, `16 or one a GPU` (the larger)."""
    text = str(rule).strip()
    terms = text[4:-1].split(",") if text.startswith("max(") and text.endswith(")") else [text]
    return " or ".join(_term_words(term.strip()) for term in terms)


def _term_words(term: str) -> str:
    match = _A_GPU.fullmatch(term)
    if match is None:
        return term
    count = int(match[1] or 1)
    return f"{_NUMBERS[count] if count < len(_NUMBERS) else count} a GPU"
