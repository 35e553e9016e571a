"""How many experts a layer has on a number of ranks: the small rule language of suite files.

A rule is a number (`16`), `world`, a multiple (`2*world`), or `max(...)` of those.
"""

import re

from moebench.workloads.errors import InputError

MOST_EXPERTS = 65_536

_TERM = re.compile(r"(?:(\d{1,9})\s*\*\s*)?world|(\d{1,9})")
_MAXIMUM = re.compile(r"max\((.*)\)")
_ADVICE = "write a number, world, 2*world, or max(16, world)"


def experts_for(rule: str, world: int, where: str = "") -> int:
    """Experts E of a rule on `world` ranks.

    Raises:
        InputError: the rule is not in the language, or gives no expert or more than `MOST_EXPERTS`.
    """
    place = f"{where}: " if where else ""
    text = str(rule).strip()
    if world < 1:
        raise InputError(f"{place}world = {world}: at least one rank is needed")
    maximum = _MAXIMUM.fullmatch(text)
    terms = maximum[1].split(",") if maximum else [text]
    experts = max(_term(term.strip(), world, text, place) for term in terms)
    if experts < 1:
        raise InputError(f"{place}experts rule {text!r} gives no expert; {_ADVICE}")
    if experts > MOST_EXPERTS:
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        raise InputError(f"{place}experts rule {text!r} gives {experts} experts on {ranks}; at most {MOST_EXPERTS}")
    return experts


def _term(term: str, world: int, rule: str, place: str) -> int:
    """One number, `world`, or multiple of it."""
    match = _TERM.fullmatch(term)
    if match is None:
        raise InputError(f"{place}experts rule {rule!r} is not understood at {term!r}; {_ADVICE}")
    if match[2] is not None:
        return int(match[2])
    return int(match[1] or 1) * world
