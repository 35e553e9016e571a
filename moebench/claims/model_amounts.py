"""What a training of a whole model reaches as claims name it: tokens a second, memory of a GPU, the gain over another.

Tokens a second are those of all ranks; a gain without a size is the mean over all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moebench.claims.query import drawn
from moebench.claims.reported import UNITS, Claim
from moebench.claims.scope import named, ranks_of
from moebench.claims.verdict import out_of_memory
from moebench.results.rows import Row
from moebench.workloads.layer import GateSpec
from moebench.workloads.model import shape_of
from moebench.workloads.models.shape import GPT2MoEShape

THROUGHPUT, MEMORY, GAIN = "throughput", "memory_per_gpu", "throughput_gain"
AMOUNTS = (THROUGHPUT, MEMORY, GAIN)
PEAK = "peak_memory"  # the metric of rows that memory is in
# Key of a scope -> size of a model. A `batch` is left open: whether it is of a GPU or of all is a reading.
_SIZES = {"experts": "experts", "hidden": "d_model", "layers": "layers", "heads": "heads", "vocab": "vocabulary"}
SCOPE_KEYS = (*_SIZES, "params", "batch")
_NEAR = 0.005  # parameters are printed with three digits or four


def is_meant(claim: Claim, shape: GPT2MoEShape) -> bool:
    """Whether a model has the sizes of a claim's scope."""
    if not all(named(claim, key, (getattr(shape, size),)) for key, size in _SIZES.items()):
        return False
    printed = float(claim.scope.get("params", "nan"))
    return "params" not in claim.scope or abs(shape.parameters() - printed) <= _NEAR * printed


def amounts(
    claim: Claim,
    points: Sequence[Any],
    tables: Mapping[str, Mapping[tuple[Any, str], Row]],
    best: Callable[[Any, str], Row | None],
) -> tuple[np.ndarray, np.ndarray, list[Row], list[Any]]:
    """The claim's quantity in its unit, points x draws (NaN: no number), who is out of memory where there is none, the
    rows behind it, the points that have any.

    Args:
        tables: rows by metric, of points and systems.
        best: the row of a step's time of a system, the fastest of its variants.
    """
    if claim.metric == MEMORY:
        table = tables.get(PEAK, {})
        have = [point for point in points if (point, claim.system) in table]
        rows = [[table[point, claim.system]] for point in have]
    else:
        names = (claim.system, claim.baseline) if claim.metric == GAIN else (claim.system,)
        found = {point: [best(point, name) for name in names] for point in points}
        have = [point for point in points if all(found[point])]
        rows = [[row for row in found[point] if row is not None] for point in have]
    used = [row for own in rows for row in own]
    draws = max((len(row.draws) for row in used), default=1) or 1
    each = [[drawn(row, draws) for row in own] for own in rows]
    values = np.array([_value(claim, point, own) for point, own in zip(have, each)]).reshape(len(have), draws)
    out: np.ndarray = np.isnan(each).reshape(len(have), 2 if claim.metric == GAIN else 1, draws)  # by side
    if claim.metric == GAIN and have:  # in general: over all sizes
        values, out = values.mean(axis=0, keepdims=True), np.any(out, axis=0)[None]
    return values / UNITS[claim.unit][1], out_of_memory(*out.swapaxes(0, 1)), used, have


def _value(claim: Claim, point: Any, each: Sequence[np.ndarray]) -> np.ndarray:
    if claim.metric == MEMORY:
        return each[0]
    if claim.metric == GAIN:
        return each[1] / each[0] - 1
    ranks = ranks_of(point.topology.partition("-")[0])
    return shape_of(point.model, GateSpec("switch"), point.batch_size, ranks).tokens * ranks / each[0]
