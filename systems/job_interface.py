"""What a system is that trains decoders in parallel: it says how ranks share the work, and builds what a stage runs.

A pipeline has p stages of the same number of layers; each is run by n neighbouring ranks together, and there are d
replicas of the whole. Ranks are numbered with those of a stage side by side, then the stages, then the replicas: rank
i of stage k in replica r is (r p + k) n + i. Schedules and transfers between stages are everybody's (pipeline.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.host import Answer
from moebench.workloads.job import JobLayout
from moebench.workloads.models.decoder import DecoderModel


@dataclass(frozen=True)
class Spread:
    """How a system spreads a job over its ranks.

    Attributes:
        ranks: n, that run a stage together.
        replicas: d, of the pipeline.
        sharing: ranks that share a micro-batch; n where all of a stage do.
        microbatches: m, of each pipeline in a step.
        is_combined: the forward of one micro-batch runs beside the backward of another, see `CombinedStage`.
    """

    ranks: int
    replicas: int
    sharing: int
    microbatches: int
    is_combined: bool = False

    def sequences(self, micro_batch: int) -> int:
        """That pass a stage at once: the micro-batches of all its ranks."""
        return micro_batch * self.ranks // self.sharing


@dataclass(frozen=True)
class Training:
    """How parameters are updated: Adam's numbers, and what the balance loss of a rank's tokens counts."""

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    balance: float = 0.01


ADAM = Training()


@dataclass(frozen=True)
class StagePlace:
    """Where a stage, or a chunk of one, is built.

    Attributes:
        group: the ranks that run it together; rail: this rank's equals in all replicas; job: those ranks in all
            replicas, replica by replica, for other divisions.
        layers: how many of the model's.
    """

    group: Group
    rail: Group
    job: Group
    layers: int
    is_first: bool = True
    is_last: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("meta"))
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Part:
    """What a rank holds of a weight: the `index`-th of `parts` equal parts along dimension `cut`; None: all of it."""

    tensor: Tensor
    cut: int | None = None
    index: int = 0
    parts: int = 1

    def of(self, whole: Tensor) -> Tensor:
        """The same part of another tensor."""
        return whole if self.cut is None else whole.chunk(self.parts, self.cut)[self.index]


class JobStage(Protocol):
    """What one rank of a stage runs. A step: m times forward and backward, then `update`.

    `parameters`, `gradients` and `states` are all the tensors that live between steps.
    """

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Of this rank."""

    @property
    def gradients(self) -> Sequence[Tensor]:
        """Sums of a step's micro-batches."""

    @property
    def states(self) -> Sequence[Tensor]:
        """What the optimiser has."""

    def rows(self, x_SB: Tensor) -> Tensor:
        """What this rank takes of whole sequences [S, B, ...]."""

    def empty_rows(self, sequence: int, batch: int) -> Tensor:
        """Rows of the kind that a stage but the first takes from the one before it; uninitialised."""

    def forward(self, x: Tensor, labels: Tensor | None = None, is_first: bool = False) -> tuple[Tensor, Tensor]:
        """One micro-batch.

        Args:
            x: ids on the first stage, else rows that need a gradient.
            labels: on the last stage, this rank's; the first result is then the mean loss of its rows.
            is_first: of the step: parameters that were updated are gathered on the way.

        Returns:
            Rows or the loss; the balance loss of this rank's tokens.
        """

    def backward(self, out: tuple[Tensor, Tensor], gradient: Tensor | None = None, is_last: bool = False) -> None:
        """The same micro-batch back; its gradients are added to the sums.

        Args:
            gradient: of the rows; None: of the loss, 1.
            is_last: of the step: sums that are complete start on their way to the other ranks.
        """

    def update(self) -> None:
        """Once a step: Adam on the gradients of the step's mean loss; the new parameters may still be elsewhere."""

    def gather(self) -> None:
        """Bring all parameters up to date, as the next step's first forward does on its way."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of whole weights: `tokens`, `norm`, `head`, and `0.query_DQ` of the first layer."""

    def parts(self) -> dict[str, Part]:
        """What this rank holds, by the same names."""


class CombinedStage(JobStage, Protocol):
    """One that can run the forward of a micro-batch and the backward of another as one."""

    def forward_beside_backward(
        self,
        x: Tensor,
        labels: Tensor | None,
        behind: Any,
        out: tuple[Tensor, Tensor],
        gradient: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`forward(x, labels)`, and beside it `behind.backward(out, gradient)`; of a step neither first nor last.

        Args:
            behind: this one, or another stage of the same kind on this rank.
        """


@runtime_checkable
class JobSystem(Protocol):
    """A way to train a decoder on many ranks.

    Attributes:
        rounding: relative error that a gradient may have from how it is summed: 0 in FP32, 2^-8 where it is rounded to
            BF16 once.
        dtypes: optional: what parameters and rows may be, where not everything goes.
        apart: optional: the name under which the same operators run with micro-batches one after the other, of a system
            that runs them beside each other.
    """

    name: str
    title: str
    source: str
    rounding: float

    def spread(self, layout: JobLayout) -> Spread | str:
        """How many ranks share what; or why the numbers do not go, naming keys and numbers."""

    def on_few(self, ranks: int, node_ranks: int) -> "JobSystem":
        """With a layer shared among no more ranks than there are, as a check has them; its name says how."""

    def settings(self, model: DecoderModel, node_ranks: int) -> Sequence[str]:
        """Names of this system with the options that a planner tries for a model on nodes of so many ranks."""

    def supports(self, model: DecoderModel, layout: JobLayout) -> str | None:
        """None, or why this system can't train the model so, naming keys and numbers."""

    def stage(
        self, model: DecoderModel, layout: JobLayout, place: StagePlace, training: Training = ADAM
    ) -> JobStage:
        """What this rank runs of one stage, or of one chunk of it; parameters uninitialised."""

    def reads(self, model: DecoderModel, layout: JobLayout, shares: Sequence[float], index: int) -> Answer:
        """What rank `index` of a stage reads on the host, where expert e gets `shares[e]` of every rank's routes."""


def name_of(stem: str, options: Any) -> str:
    """`stem+key=value`, with the options of a dataclass that are not what they are by default."""
    values = [(one, getattr(options, one.name)) for one in fields(options)]
    return "+".join([stem, *(f"{one.name}={value}" for one, value in values if value != one.default)])


def problem(system: JobSystem, model: DecoderModel, layout: JobLayout, dtype: str | None = None) -> str | None:
    """Why a system can't run a job: what no system could, then what the numbers of micro-batches do not allow.

    Args:
        dtype: of parameters and rows; None: any that the system takes.
    """
    from moebench.systems import pipeline

    reason = layout.problem(model)
    if reason is not None:
        return reason
    spread = system.spread(layout)
    if isinstance(spread, str):
        return spread
    reason = pipeline.problem(layout.stages, spread.microbatches, layout.chunks) or system.supports(model, layout)
    dtypes: Sequence[str] | None = getattr(system, "dtypes", None)
    if reason is None and dtype is not None and dtypes is not None and dtype not in dtypes:
        return f"{system.name} trains in {' or '.join(dtypes)} only, not in {dtype}"
    return reason
