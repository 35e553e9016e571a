"""How outcomes, assumptions and rules are called, the same in the terminal, the report and every sentence of why."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from moebench.claims import verdict as v
from moebench.claims.reported import BEST_OTHER, Claim

# What each verdict means, as a legend says it.
DEFINITIONS: Mapping[str, str] = {
    v.REPRODUCED: f"within {100 * v.TOLERANCE:.0f} % of what was reported; a bound holds",
    v.DIRECTION_ONLY: "the same winner, by another factor",
    v.CONTRADICTED: "the other winner, an absolute number that is further off, or an upper bound that does not hold",
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
_SHORT = {"mfu": "MFU", "gemm": "GEMM", "gpu": "GPU"}
_UNSAID = ("model", "step")  # keys that their values say
_COUNTED = {
    "gpus": "GPUs", "gpus_per_node": "GPUs a node", "nodes": "nodes", "experts": "experts", "layers": "layers",
    "heads": "heads", "tokens": "tokens", "dp": "replicas", "attention_mb": "MB of attention",
}  # fmt: skip
_NAMED = {"hidden": "hidden size", "vocab": "vocabulary", "top_k": "top-k", "sar": "selective rematerialisation"}
_BILLIONS = re.compile(r"[\d.]+e9")
_DEVICES = re.compile(r"(\d+)x(.+)")  # 48xA100
_A_GPU = re.compile(r"(?:(\d+)\s*\*\s*)?world")


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def baseline_words(claim: Claim) -> str:
    """What a claim compares with; empty where with nothing."""
    return "the best other" if claim.baseline == BEST_OTHER else claim.baseline or ""


def claim_words(claim: Claim, known: Collection[str] = ()) -> str:
    """What is claimed, without the number: `max step speedup of A against B, gate switch, batch size 32`.

    Args:
        known: keys of its scope that are left out.
    """
    baseline = baseline_words(claim)
    metric = "" if claim.metric == "finding" else " ".join(_SHORT.get(w, w) for w in claim.metric.split("_"))
    words = " of ".join(filter(None, (metric, claim.system))) or claim.experiment
    scope = [_scope_words(key, value, claim.experiment) for key, value in claim.scope.items() if key not in known]
    return ", ".join([words + (f" against {baseline}" if baseline else ""), *scope])


def titles(claims: Sequence[Claim]) -> dict[str, str]:
    """The words of each claim of a suite by its id, without what all claims of an experiment have in common.

    Those that would then be called the same, or have no scope left, have their whole one.
    """
    short = {}
    for claim in claims:
        scopes = [other.scope for other in claims if other.experiment == claim.experiment and len(other.scope) > 1]
        common = [key for key, value in claim.scope.items() if all(scope.get(key) == value for scope in scopes)]
        says_something = len(scopes) > 1 and len(common) < len(claim.scope)
        short[claim.id] = claim_words(claim, common if says_something else ())
    times = Counter(short.values())
    return {claim.id: short[claim.id] if times[short[claim.id]] == 1 else claim_words(claim) for claim in claims}


def _scope_words(key: str, value: str, experiment: str) -> str:
    """One pair of a scope: `params=13.9e9` is `13.9 B parameters`, `gpus=16..64` `16 to 64 GPUs`."""
    if key in ("scope", "gates"):
        return f"{experiment} {value}" if value == "in general" else value.replace(",", ", ")
    if key in _UNSAID:
        return value
    if key == "params" and _BILLIONS.fullmatch(value):
        return f"{float(value) / 1e9:g} B parameters"
    if key in _COUNTED and (devices := _DEVICES.fullmatch(value)):
        return " ".join(devices.groups())
    value = _number_words(value)
    if key in _COUNTED:
        return f"{value} {_COUNTED[key].removesuffix('s') if value == '1' else _COUNTED[key]}"
    return f"{_NAMED.get(key, key.replace('_', ' '))} {value}"


def _number_words(text: str) -> str:
    """`50304` is `50,304`, `16..64` `16 to 64`, `<256` `below 256`."""
    if text.isdecimal():
        return f"{int(text):,}"
    return text.replace("..", " to ").replace("<", "below ").replace(",", ", ")


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
