"""What the rows of a run say about routing rules, as frames and numbers that the report draws and tells."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from moebench.cases.gates import ENGINE
from moebench.gates.study import EVALUATION, TRAINING
from moebench.report.text import printable
from moebench.results.store import RunFolder
from moebench.results.table import table
from moebench.workloads.suite import GateExperiment

METRICS = (
    "capacity",
    "imbalance",
    "dropped_share",
    "experts_per_token",
    "tokens_without_expert",
    "aux_loss",
    "rounds",
    "tokens_per_expert",
    "kept_per_expert",
    "loss",
    "consistency",
)
_KEYS = ("routing", "phase", "step", "expert", "term", "when")  # of a row's detail


@dataclass(frozen=True)
class GateRows:
    """Rows about rules, a column for each key of their detail; NaN where a row has none."""

    frame: pd.DataFrame

    @property
    def gates(self) -> list[str]:
        """Labels, in the order in which they were run."""
        return list(dict.fromkeys(self.frame["gate"].astype(str)))

    @property
    def has_training(self) -> bool:
        """Whether any rule was trained."""
        return bool(self.frame["step"].notna().any())

    def case(self, gate: str) -> str:
        """The name of the case that its rows have."""
        return str(self._own(gate)["case"].iloc[0])

    def value(self, gate: str, metric: str, routing: str, phase: str = TRAINING) -> float | None:
        """A number about given logits; losses of several terms added up. None where there is none."""
        own = self._own(gate, metric)
        own = own[(own["routing"] == routing) & (own["phase"] == phase)]
        return None if own.empty else float(own["value"].sum())

    def has_evaluation(self, gate: str) -> bool:
        """Whether the rule is another one in evaluation."""
        return bool((self._own(gate)["phase"] == EVALUATION).any())

    def bars(self, gate: str) -> pd.DataFrame:
        """Columns routing, expert, wanted, kept, evaluated (NaN where evaluation is no different)."""
        own = self._own(gate).dropna(subset=["expert", "routing"])
        wide = own.pivot_table(
            index=["routing", "expert"], columns=["metric", "phase"], values="value", observed=True, sort=False
        )
        nothing = pd.Series(np.nan, index=wide.index)
        found = pd.DataFrame(
            {
                "wanted": wide["tokens_per_expert", TRAINING],
                "kept": wide["kept_per_expert", TRAINING],
                "evaluated": wide.get(("kept_per_expert", EVALUATION), nothing),
            }
        )
        return found.reset_index()

    def moments(self, gate: str) -> pd.DataFrame:
        """Columns step, loss, imbalance, dropped, experts_per_token, and aux where there is a loss; a row a step."""
        own = self._own(gate).dropna(subset=["step"])
        own = own[own["expert"].isna()]
        names = {"dropped_share": "dropped", "aux_loss": "aux"}
        wide = own.pivot_table(
            index="step", columns=own["metric"].astype(str).replace(names), values="value", aggfunc="sum"
        )
        return wide.reset_index()

    def loads(self, gate: str) -> pd.DataFrame:
        """Columns step, expert, load: tokens of an expert over the even share, in the training."""
        own = self._own(gate, "tokens_per_expert").dropna(subset=["step"])
        own = own[["step", "expert", "value"]].astype(float)
        even = own.groupby("step")["value"].transform("mean")
        return own.assign(load=own["value"] / even.where(even > 0, 1.0))

    def consistency(self, gate: str) -> tuple[float, float] | None:
        """Before and after the training; None for rules without a router."""
        own = self._own(gate, "consistency").set_index("when")["value"]
        return (float(own["before"]), float(own["after"])) if len(own) == 2 else None

    def terms(self, gate: str) -> list[str]:
        """Names of the auxiliary losses."""
        return list(dict.fromkeys(self._own(gate, "aux_loss")["term"].dropna()))

    def term(self, gate: str, name: str, routing: str, phase: str) -> float | None:
        """One auxiliary loss on given logits."""
        own = self._own(gate, "aux_loss")
        own = own[(own["routing"] == routing) & (own["phase"] == phase) & (own["term"] == name)]
        return None if own.empty else float(own["value"].iloc[0])

    def _own(self, gate: str, metric: str | None = None) -> pd.DataFrame:
        own = self.frame[self.frame["gate"] == gate]
        return own if metric is None else own[own["metric"] == metric]


def gate_rows(folder: RunFolder, experiment: GateExperiment) -> GateRows:
    """The rows of one experiment that study rules."""
    frame = printable(table(folder, *METRICS))
    frame = frame[(frame["experiment"] == experiment.name) & (frame["engine"] == ENGINE)]
    columns = {key: [detail.get(key) for detail in frame["detail"]] for key in _KEYS}
    return GateRows(frame[["case", "gate", "metric", "value"]].assign(**columns))
