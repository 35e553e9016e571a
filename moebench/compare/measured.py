"""The verdicts on all measured quantities of two sides; apart, so that comparing exact values needs no scipy."""

from collections.abc import Mapping, Sequence

from moebench.compare.judge import RUNS_AS_UNITS, Judged, judge, levels_of, variance_of
from moebench.compare.rules import Threshold
from moebench.compare.side import Key, Side
from moebench.compare.spread import Prior, learn


def judged(base: Side, head: Side, thresholds: Mapping[Key, Threshold]) -> dict[Key, Judged]:
    """The verdict on each key of `thresholds`.

    Quantities of one engine, metric and regime learn from each other what processes differ by.
    """
    families: dict[tuple, list[Key]] = {}
    for key in thresholds:
        # A baseline of many runs knows what runs differ by, one of few only what processes do.
        pooled_runs = len(set(base.samples[key].runs)) >= RUNS_AS_UNITS
        families.setdefault((*key[1:], pooled_runs), []).append(key)
    found: dict[Key, Judged] = {}
    for keys in families.values():
        prior = _prior(base, head, keys)
        for key in keys:
            found[key] = judge(base.samples[key], head.samples[key], thresholds[key], prior)
    return found


def _prior(base: Side, head: Side, keys: Sequence[Key]) -> Prior:
    """What some quantities say together about what processes differ by."""
    pairs = [(base.samples[key], head.samples[key]) for key in keys]
    usable = [pair for pair in pairs if not any(side.problem or not side.processes for side in pair)]
    return learn([variance_of(levels_of(*pair)) for pair in usable])
