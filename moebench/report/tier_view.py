"""What a section about parts says of states on several tiers: what a step waits for on each way, bytes of each."""

import pandas as pd

from moebench.report.parts import Linked, Table, number, size
from moebench.rows.parts import TIER

WAYS = {
    "storage": "drives", "host-to-device": "to the GPU", "device-to-host": "back", "host-update": "memory",
}  # fmt: skip
TIERS = ("device", "host", "disk")


def tables(own: pd.DataFrame) -> list[Table]:
    """Of the cases whose states are on tiers; nothing where there are none."""
    found = own[own["metric"] == TIER]
    if found.empty:
        return []
    cases = list(dict.fromkeys(found["case"]))
    own = own[own["case"].isin(cases)]
    simulated = list(dict.fromkeys(own[own["metric"] == "busy_time"]["case"]))
    return [*([_waits(own, simulated)] if simulated else []), _bytes(found, cases)]


def _waits(own: pd.DataFrame, cases: list[str]) -> Table:
    """Seconds of cases that are simulated: measured ones have the time alone, which the figure shows."""
    values: dict[tuple[str, str], float] = {}
    for _, row in own.iterrows():
        detail = row["detail"]
        key = str(detail.get("resource", "")) if row["metric"] == "busy_time" else row["metric"]
        if not detail or row["metric"] == "busy_time":
            values[row["case"], key] = row["value"]
    systems = own.drop_duplicates("case").set_index("case")
    has = [way for way in WAYS if any((case, way) in values for case in cases)]
    columns = ["at", "system", "step", "waits: network", "waits: tiers", *(WAYS[way] for way in has)]
    names = ("part_time", "exposed_communication", "exposed_transfer", *has)
    rows = [
        [str(systems.loc[case, "shape"]), Linked(str(systems.loc[case, "system"]), case),
         *(number(values.get((case, name))) for name in names)]
        for case in cases
    ]  # fmt: skip
    caption = (
        "Seconds of a step: what the GPU waits for, and how long the drives, the host's links and its memory (sums of "
        "gradients, updates) work"
    )
    first = 0 if len({row[0] for row in rows}) > 1 else 1  # where all are of one point nobody needs it
    return Table(columns[first:], [row[first:] for row in rows], caption, frozenset(columns[2:]))


def _bytes(found: pd.DataFrame, cases: list[str]) -> Table:
    """Of all ranks together, beside the paper's inequalities."""
    values = {(row["case"], row["detail"]["tier"], row["detail"]["by"]): row["value"] for _, row in found.iterrows()}
    systems = found.drop_duplicates("case").set_index("case")["system"].astype(str)
    held: dict[tuple[str, ...], str] = {}
    for case in cases:
        each = [size(values[case, tier, by]) for tier in TIERS for by in ("storage", "paper")]
        key = (systems[case].partition("+")[2], *each)
        held.setdefault(key, case)
    columns = ["options", *(f"{tier}{of}" for tier in TIERS for of in ("", ", by the paper"))]
    rows = [[Linked(key[0] or "as it stands", case), *key[1:]] for key, case in held.items()]
    caption = (
        "Bytes of expert states on all ranks' tiers: slots, cache with waiting gradients and files (two versions) as "
        "they are here; by the paper 4 alpha S / L, 16 alpha S and 12 S, of S parameters in L layers and alpha in use"
    )
    return Table(columns, rows, caption, frozenset(columns[1:]))
