"""Result rows as a pandas frame: one row a value, one column a field of Row."""

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from moebench.results.rows import Row
from moebench.results.store import RunFolder

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = tuple(f.name for f in fields(Row))
_CATEGORIES = (
    "suite",
    "experiment",
    "system",
    "gate",
    "part",
    "op",
    "shape",
    "topology",
    "size",
    "hardware",
    "metric",
    "unit",
    "engine",
)
_INTEGERS = ("sample", "batch_size", "tokens", "experts", "top_k", "d_model", "d_ffn", "payload_bytes",
             "global_batch", "micro_batch", "stages", "chunks", "products", "attention_mb", "expert_mb", "sent_percent",
             "of_part", "vocabulary", "parameters", "steps", "layers", "accumulated", "turn_steps", "passes",
             "cache_sizes", "heads", "positions", "recomputed",
             "most_micro_batch")  # fmt: skip


def table(folder: RunFolder, *metrics: str, with_samples: bool = True) -> "pd.DataFrame":
    """The rows of a run's whole cases; of the given metrics, or all. `draws` holds arrays, NaN where out of memory."""
    return table_of(folder.rows(*metrics, with_samples=with_samples))


def table_of(rows: Iterable[Row]) -> "pd.DataFrame":
    """Rows in memory, as the same frame."""
    import pandas as pd

    texts: dict[str, str] = {}  # the same few come again in every row, and each row brings its own copies
    items = [vars(row) for row in rows]
    columns: dict[str, list[Any]] = {
        name: [texts.setdefault(value, value) if type(value) is str else value for value in (i[name] for i in items)]
        for name in COLUMNS
    }
    columns["draws"] = [np.array(draws) for draws in columns["draws"]]
    frame = pd.DataFrame(columns)
    for name in ("value", "low", "high"):
        frame[name] = frame[name].astype("float64")
    kinds = dict.fromkeys(_CATEGORIES, "category") | dict.fromkeys(_INTEGERS, "Int64")
    return frame.astype(kinds)
