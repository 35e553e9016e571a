"""The figures of a paper as data: what each one shows, and which results and reported numbers fill it.

A figure is a grid of places. Every list of its experiment that holds more than one value is an axis of it, a series or
a panel; `only` narrows the lists.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moebench.workloads.kernel import DIMENSIONS
from moebench.workloads.part import SIZES as PART_SIZES

SPEEDUP, REDUCTION, METRIC, REGIONS = "speedup", "reduction", "metric", "regions"
# A baseline's time over the own; the share of a baseline's that the own is less; a metric itself; a step by region.
VALUES = (SPEEDUP, REDUCTION, METRIC, REGIONS)
AGAINST = (SPEEDUP, REDUCTION)  # values that need a baseline
# Metric -> what it is called, its unit in a figure, and how much of the unit of rows that is.
QUANTITIES: Mapping[str, tuple[str, str, float]] = {
    "step_time": ("step time", "ms", 1e-3),
    "kernel_time": ("time of one call", "us", 1e-6),
    "collective_time": ("time of one exchange", "us", 1e-6),
    "part_time": ("time of one call", "ms", 1e-3),
    "exposed_communication": ("exposed communication", "ms", 1e-3),
    "optimisation_time": ("time of the passes", "min", 60.0),
    "prediction_error": ("error of the prediction", "%", 0.01),
    "alltoall_share_of_step": ("all-to-alls of a step", "%", 0.01),
    "alltoall_over_expert_time": ("all-to-alls over experts", "", 1.0),
    "best_partition_count": ("most parts of a range", "", 1.0),
    "peak_memory": ("peak memory", "GiB", 2.0**30),
    "iteration_time": ("time of a step", "s", 1.0),
    "throughput": ("tokens a second", "ktokens/s", 1e3),
    "mfu": ("utilisation", "%", 0.01),
    "exposed_comm": ("exposed communication", "s", 1.0),
    "attention_and_gemm": ("products and attention", "s", 1.0),
    "other": ("everything else", "s", 1.0),
    "memory_activations": ("activations", "GB", 1e9),
    "memory_model_states": ("parameters, gradients, optimiser", "GB", 1e9),
    "memory_other": ("other memory", "GB", 1e9),
    "memory_total": ("memory in all", "GB", 1e9),
}
BARS, LINES = "bars", "lines"
MARKS = (BARS, LINES)
COLUMN, PAGE = "column", "page"
WIDTHS = (COLUMN, PAGE)  # of a paper in two columns
SYSTEM, BEST_OTHER = "system", "best-other"
AXES = ("x", "series", "panel")
CLUSTER = "cluster"
NUMBERS = ("batch_size", "size", "payload", *DIMENSIONS, *PART_SIZES)  # lists whose values are in order
MOST_SERIES = 8  # more colours and marks nobody tells apart


@dataclass(frozen=True)
class PaperFigure:
    """One figure or table of a paper.

    Attributes:
        name: of its files. number: as the paper counts it; empty where that is not known.
        published: what the paper published of it, a sentence.
        not_drawn: why there is nothing to draw; a figure that has it has none of what follows.
        value: one of `VALUES`, of `experiment`; metric: of which quantity, the experiment's own where none is named.
        baseline: a system, or of a speedup `best-other`.
        x, series, panel: names of lists of the experiment. only: name of a list -> what is kept of it, as text.
        reported: ids of the reported numbers that stand in it.
        mark: `bars` or `lines`. width: `column` or `page`.
    """

    name: str
    title: str
    number: str = ""
    published: str = ""
    not_drawn: str = ""
    experiment: str = ""
    value: str = ""
    metric: str = ""
    baseline: str = ""
    x: str = ""
    series: str = ""
    panel: str = ""
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reported: tuple[str, ...] = ()
    mark: str = ""
    width: str = COLUMN

    @property
    def axes(self) -> tuple[str, ...]:
        """The lists that vary in it: on the x axis, by series, by panel."""
        return tuple(name for name in (self.x, self.series, self.panel) if name)

    @property
    def has_bars(self) -> bool:
        """Whether values stand as bars: asked for, or because what is on the x axis has no order."""
        return self.mark == BARS or (not self.mark and self.x not in NUMBERS)
