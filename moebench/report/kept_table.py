"""Which share of the routes each system's gate keeps, beside what a step takes: where systems differ in it."""

import pandas as pd

from moebench.report.model_figures import POINT
from moebench.report.parts import Linked, Table, number


def kept_tables(own: pd.DataFrame) -> list[Table]:
    """One table, or none where all keep the same.

    Args:
        own: rows of the experiment in their order.
    """
    keys = [*POINT, "system"]
    rows = own.drop_duplicates([*keys, "metric"])
    kept, steps = (rows[rows["metric"] == metric].set_index(keys) for metric in ("kept_share", "step_time"))
    shares = kept.groupby(POINT, observed=True)["value"]
    if not (shares.max() > shares.min()).any():
        return []
    found = [
        [
            str(row["topology"]), str(int(row["batch_size"])), str(row["system"]), f"{100 * row['value']:.1f} %",
            Linked(number(1e3 * steps.loc[tuple(row[key] for key in keys), "value"]), row["case"]),
        ]
        for _, row in kept.reset_index().iterrows()
    ]  # fmt: skip
    columns = ["where", "sequences a GPU", "system", "routes kept", "step, ms"]
    numeric = frozenset((columns[1], *columns[3:]))
    return [Table(columns, found, "What gates keep of the routes that tokens ask for", numeric)]
