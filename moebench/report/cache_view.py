"""What a section about parts says of caches of expert states: hit rates by size, and what the step before needed.

Every sentence is worked out from the rows.
"""

from collections.abc import Sequence
from functools import partial

import pandas as pd

from moebench.claims.words import listed
from moebench.report.part_figures import hits_figure
from moebench.report.parts import Figure, Linked, Table, figure, percent
from moebench.results.rows import BY_SIZE, CACHED, HIT_RATE, USED
from moebench.workloads.part import BOUND, STEP_BEFORE
from moebench.workloads.suite import PartExperiment

PART = "expert-cache"
POINT = ["routing", "turn_steps", "tokens", "passes", "experts", "top_k", "layers", "steps"]
PASSES = {1: "a forward", 3: "forward, backward and update"}
CAPTION = (
    "Share of the requests that find their state in the cache, by the share of all states that it holds; the first "
    "sixth of the steps, in which it fills, does not count. A panel a routing."
)


def curves(own: pd.DataFrame) -> pd.DataFrame:
    """A row a point, system and size of cache: column `cached`, and `at`, the point in words."""
    found = own[(own["part"] == PART) & (own["metric"] == BY_SIZE)]
    return found.assign(
        cached=[detail[CACHED] for detail in found["detail"]],
        at=[_routing(row) for _, row in found.iterrows()],
        system=found["system"].astype(str),
    )


def _routing(row: pd.Series) -> str:
    turn = f", others popular every {int(row['turn_steps'])} steps" if row["turn_steps"] else ""
    return f"{row['routing']}{turn}"


def answer(experiment: PartExperiment, own: pd.DataFrame) -> str:
    """Which policy has most hits how often, and how far they are from the most that there could be; and settings."""
    drawn = _plain(curves(own))
    if drawn.empty:
        return ""
    table = drawn.pivot_table(index=[*POINT, CACHED], columns="system", values="value", observed=True)
    policies = table[[name for name in experiment.systems if name in table and name != BOUND]]
    won = [f"{name} at {int((policies[name] >= policies.max(axis=1) - 1e-9).sum())}" for name in policies]
    of_what = "points, each of a routing, size of step, way to ask and size of cache"
    told = [f"Of {len(table)} {of_what}, the most hits of a policy has {listed(won)} (equal ones count for each)"]
    if BOUND in table:
        short = [f"{name} {(table[BOUND] - table[name]).mean():.2f}" for name in policies]
        told.append(f"below the most that any could have they are, on average, by {listed(short)}")
    return f"{'; '.join(told)}. {_of_settings(own)}".strip()


def _beside(experiment: PartExperiment, drawn: pd.DataFrame) -> str:
    """The experiment's first policy beside each other one."""
    first, *others = [name for name in experiment.systems if name in set(drawn["system"]) and name != BOUND] or [""]
    told = [words for name in others if (words := _against(drawn, first, name))]
    return f"{first} has {'; '.join(told)}." if told else ""


def figures(experiment: PartExperiment, own: pd.DataFrame) -> list[Figure]:
    """One for each size of step and way to ask, a panel a routing."""
    drawn, made = _plain(curves(own)), []
    names = [name for name in experiment.systems if name in set(drawn["system"])]
    before = _prefetch(own)
    for (tokens, passes), points in drawn.groupby(["tokens", "passes"], observed=True, sort=False):
        title = f"Hits of {int(tokens)} tokens a step, states asked for by {PASSES[int(passes)]}"
        key = f"hits-{experiment.name}-{int(tokens)}-{int(passes)}"
        finding = _beside(experiment, points)
        recall = before[(before["tokens"] == tokens) & (before["passes"] == passes)]
        lines = {_routing(row): float(row["value"]) for _, row in recall.iterrows()}
        caption = CAPTION + (" Dotted: share that the step before needed too." if lines else "")
        made.append(
            figure(key, title, finding, caption, partial(hits_figure, points, lines, names), _table(points, title))
        )  # fmt: skip
    return made


def tables(own: pd.DataFrame) -> list[Table]:
    """What prefetch has, and the settings of policies that have any."""
    found, before, rates = [], _prefetch(own), curves(own)
    if len(before):
        used = own[(own["part"] == PART) & (own["metric"] == USED)].set_index("case")["value"]
        rows = [
            [Linked(_routing(row), row["case"]), f"{int(row['tokens'])}", f"{used[row['case']]:.2f}",
             f"{row['value']:.2f}"]
            for _, row in before.drop_duplicates(["routing", "turn_steps", "tokens"]).iterrows()
        ]  # fmt: skip
        columns = ["routing", "tokens a step", "of a layer's experts, needed", "of these, needed in the step before"]
        caption = "Bringing for each layer what it needed in the step before"
        found.append(Table(columns, rows, caption, frozenset(columns[1:])))
    both = _with_settings(rates)
    if len(both):
        found.append(_table(both, "Settings of a policy beside the policy as it stands"))
    return found


def _with_settings(rates: pd.DataFrame) -> pd.DataFrame:
    """The policies that have settings, with them and without, at the points that try them."""
    settings = rates[rates["system"].str.contains("+", regex=False)]
    both = rates.merge(settings[[*POINT, CACHED]].drop_duplicates(), on=[*POINT, CACHED])
    return both[_stems(both).isin(_stems(settings))]


def _stems(rates: pd.DataFrame) -> pd.Series:
    return rates["system"].map(lambda name: name.partition("+")[0])


def _of_settings(own: pd.DataFrame) -> str:
    """Which setting has most hits over the points that try settings, and which fewest."""
    both = _with_settings(curves(own))
    if both.empty:
        return ""
    mean = both.groupby("system", observed=True)["value"].mean().sort_values()
    plain = [f"as it stands {mean[name]:.2f}" for name in mean.index if "+" not in name]
    ends = [f"most hits with {mean.index[-1]}, {mean.iloc[-1]:.2f}", f"fewest with {mean.index[0]}, {mean.iloc[0]:.2f}"]
    whose = listed(list(dict.fromkeys(_stems(both))))
    return f"Of the settings of {whose}, mean over the points that try them: {listed([*ends, *plain])}."


def _plain(rates: pd.DataFrame) -> pd.DataFrame:
    """Those of systems as they stand, at points where several are."""
    own = rates[~rates["system"].str.contains("+", regex=False)]
    count = own.groupby(POINT, observed=True)["system"].transform("nunique") if len(own) else 0
    return own[count > 1] if len(own) else own


def _prefetch(own: pd.DataFrame) -> pd.DataFrame:
    found = own[(own["part"] == PART) & (own["metric"] == HIT_RATE)]
    return found[(found["system"].astype(str) == STEP_BEFORE) & found["value"].notna()]


def _against(drawn: pd.DataFrame, first: str, name: str) -> str:
    """`more hits than lru at 21 of 35 points, 0.62 more at most (...) and 0.28 fewer at most (...)`."""
    keys = [*POINT, CACHED]
    pair = drawn[drawn["system"] == first].merge(drawn[drawn["system"] == name], on=keys, suffixes=("", "_other"))
    if pair.empty:
        return ""
    gain = pair["value"] - pair["value_other"]
    told = f"more hits than {name} at {int((gain > 1e-9).sum())} of {len(gain)} points"
    ends = []
    for place, sign in ((gain.idxmax(), 1), (gain.idxmin(), -1)):
        if sign * gain[place] >= 0.005:
            where = f"{pair['at'][place]}, {percent(float(pair[CACHED][place]))} of the states"
            ends.append(f"{sign * gain[place]:.2f} {'more' if sign > 0 else 'fewer'} at most ({where})")
    return f"{told}, {listed(ends)}" if ends else told


def _table(points: pd.DataFrame, caption: str) -> Table:
    shares = sorted(set(points[CACHED]))
    columns = ["routing", "tokens a step", "passes", "policy", *(percent(share) for share in shares)]
    rows: list[Sequence[str]] = []
    for _, own in points.groupby([*POINT, "system"], observed=True, sort=False):
        first, values = own.iloc[0], own.set_index(CACHED)["value"]
        rows.append(
            [first["at"], f"{int(first['tokens'])}", f"{int(first['passes'])}",
             Linked(first["system"], first["case"]),
             *(f"{values[share]:.3f}" if share in values.index else "" for share in shares)]
        )  # fmt: skip
    told = f"{caption}: hits by the share of all states that the cache holds"
    return Table(columns, rows, told, frozenset(columns[4:]))
