"""Result rows of exchanges as frames: one row a case, and speedups over a baseline."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from moebench.workloads.exchange import size_words

MICRO = 1e6
METRICS = ("algorithmic_bandwidth", "nic_bytes", "nic_messages", "inside_bytes", "peak_memory")
KEYS = ["topology", "payload_bytes", "dtype", "engine"]
COUNTED = ("cpu-bound",)  # marks of summaries that nothing judges by


def calls(own: pd.DataFrame, topologies: Sequence[str] = ()) -> pd.DataFrame:
    """One row a case, small payloads first: its time, and other metrics as columns of their names.

    Args:
        own: rows of exchanges.
        topologies: their order; others follow.
    """
    summaries = own[own["sample"].isna()]
    found = summaries[summaries["metric"] == "collective_time"].copy()
    for metric in METRICS:
        part = summaries[summaries["metric"] == metric].drop_duplicates("case").set_index("case")["value"]
        found[metric] = found["case"].map(part)
    found["payload_bytes"] = found["payload_bytes"].astype(float)
    found["payload"] = [size_words(size) for size in found["payload_bytes"]]
    found["exchange"] = found["system"].astype(str)
    found["node_type"] = [str(t).partition("-")[2] for t in found["topology"]]
    found["time_us"], found["low_us"], found["high_us"] = (found[c] * MICRO for c in ("value", "low", "high"))
    marks = found["detail"].map(lambda detail: detail.get("mark", ""))
    found["note"] = np.where(marks.isin(COUNTED), marks, found["reason"].fillna(""))
    places = {name: place for place, name in enumerate(topologies)}
    found["place"] = [places.get(str(name), len(places)) for name in found["topology"]]
    return found.sort_values(["payload_bytes", "place"], kind="stable").drop(columns="place")


def speedups(found: pd.DataFrame, exchanges: Sequence[str], baseline: str) -> pd.DataFrame:
    """One row for each other exchange at each point at which it and the baseline stand.

    Columns besides those of its case: `value` (the baseline's time over its own, NaN where there is none), `low` and
    `high` over the draws, `is_fastest` of all exchanges there.
    """
    rows = []
    for _, here in found.groupby(KEYS, sort=False, observed=True):
        by_name = here.drop_duplicates("exchange").set_index("exchange")
        if baseline not in by_name.index:
            continue
        theirs, fastest = by_name.loc[baseline], by_name["value"].min()
        for name in (n for n in exchanges if n != baseline and n in by_name.index):
            ours = by_name.loc[name]
            low, high = _interval(ours["draws"], theirs["draws"])
            speedup = {"value": theirs["value"] / ours["value"], "low": low, "high": high}
            is_fastest = bool(ours["value"] == fastest) and fastest < theirs["value"]
            rows.append({**ours.to_dict(), "exchange": name, **speedup, "is_fastest": is_fastest})
    return pd.DataFrame(rows)


def _interval(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    if len(ours) < 3 or len(ours) != len(theirs):
        return np.nan, np.nan
    ratios = (theirs / ours)[1:]
    ratios = ratios[~np.isnan(ratios)]
    return tuple(np.percentile(ratios, (5, 95))) if ratios.size else (np.nan, np.nan)


def crossing(points: pd.DataFrame) -> float:
    """The payload above which an exchange is slower than the baseline for good; inf if never, 0 if always.

    Between payloads the speedup is a straight line in logarithms of both.

    Args:
        points: of one exchange on one topology, with a number.
    """
    ordered = points.dropna(subset="value").sort_values("payload_bytes")
    sizes, logs = np.log(ordered["payload_bytes"].to_numpy()), np.log(ordered["value"].to_numpy())
    faster = np.flatnonzero(logs > 0)
    if not faster.size:
        return 0.0
    last = int(faster[-1])
    if last == len(logs) - 1:
        return np.inf
    share = logs[last] / (logs[last] - logs[last + 1])
    return float(np.exp(sizes[last] + share * (sizes[last + 1] - sizes[last])))
