"""What a run says, as the queries of every kind of workload read it."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from weakref import WeakKeyDictionary

from moebench import kinds
from moebench.claims.query import Obtained, StepTimes
from moebench.claims.reported import Claim
from moebench.claims.scope import experiment_of
from moebench.results.rows import CPU_BOUND, SUBJECTS, SUPPORTED, Row
from moebench.results.store import RunFolder, State
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite

METRICS = (
    *(*SUBJECTS, "time_if", "time_if_both", "device_bytes", "link_bytes", "flops", "launches"),
    *("exposed_communication", "alltoall_over_expert_time", "alltoall_share_of_step"),
    *("throughput", "mfu", "exposed_comm", "attention_and_gemm", "other"),
    *("memory_activations", "memory_model_states", "memory_other", "memory_total", "peak_memory"),
    *("prediction_error", "optimisation_time", "best_partition_count"),
)

_READ: "WeakKeyDictionary[RunFolder, tuple[State, Evidence]]" = WeakKeyDictionary()


class Evidence:
    """The rows of a run that claims are judged by, and the machines they name.

    Summaries whose processors set the pace are left out.
    """

    def __init__(self, rows: Iterable[Row] = (), topologies: Mapping[str, Topology] | None = None) -> None:
        self.rows = tuple(row for row in rows if row.detail.get("mark") != CPU_BOUND)
        self.topologies = dict(topologies or {})

    @classmethod
    def of(cls, folder: RunFolder) -> "Evidence":
        """What a run folder holds; read once as long as its rows stay the same."""
        known, state = _READ.get(folder), folder.state
        if known is None or known[0] != state:
            known = _READ[folder] = state, cls(folder.rows(*METRICS, with_samples=False), folder.topologies)
        return known[1]

    @cached_property
    def steps(self) -> StepTimes:
        """Step times of layers."""
        return StepTimes(self.rows)

    @cached_property
    def kernels(self) -> tuple[Row, ...]:
        """Rows of kernels, samples left out."""
        return tuple(row for row in self.rows if row.op is not None and row.sample is None)

    @cached_property
    def exchanges(self) -> tuple[Row, ...]:
        """Rows of exchanges, samples left out."""
        return tuple(row for row in self.rows if row.payload_bytes is not None and row.sample is None)

    @cached_property
    def parts(self) -> tuple[Row, ...]:
        """Rows of parts, samples left out."""
        return tuple(row for row in self.rows if row.part is not None and row.sample is None)

    @cached_property
    def rules(self) -> tuple[Row, ...]:
        """Which systems keep which rules, a row each."""
        return tuple(row for row in self.rows if row.metric == SUPPORTED)


def obtain(claim: Claim, suite: Suite, evidence: Evidence) -> Obtained:
    """Our value of a claim, by the query of its experiment's kind.

    Raises:
        CantAnswer: and what it would need.
    """
    experiment = experiment_of(claim, suite)
    return kinds.of(experiment.kind, "obtain")(claim, suite, evidence)
