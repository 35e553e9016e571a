"""One training step of a layer as Programs: the real module on meta tensors, traced once a distinct rank.

A padded layer reads nothing on the host and is the same on every rank: one Program. A layer that reads the routing is
traced again for every rank whose answers differ; where those are many, ranks that receive nearly equally many rows
share a program, and above a limit all do so. One that asks who leads a node, for leaders and others,
and one that asks in which run of ranks it is, for each run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch._dynamo  # meta kernels import it on their first call, for about a second: here forked workers share it
from torch import Tensor

from moebench.cases.case import Case
from moebench.cases.layers import layer_of
from moebench.kernels.collectives.group import described_group
from moebench.kernels.host import UnansweredRead, answering
from moebench.program import Program
from moebench.systems.interface import System, problem
from moebench.systems.registry import conventions_of, get
from moebench.systems.training import TrainingStep
from moebench.trace.answers import ROUNDS_RANKS, RoutingAnswers
from moebench.trace.errors import Unsupported
from moebench.trace.recorder import record_step
from moebench.workloads.conventions import Conventions
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.layer import LayerWorkload
from moebench.workloads.machine import Topology

__all__ = ["MOST_DISTINCT_PROGRAMS", "Unsupported", "programs_of", "trace_layer"]

MOST_DISTINCT_PROGRAMS = 64
# So many stand for any number of ranks whose received rows differ by less than the share below within each group. On
# 4x8 and 8x8 TITAN RTX nodes the steps of systems that exchange ragged rows then move by 0.2 % at most, and by 0.1 % on
# average, against a program a rank. Skewed routings are further apart, and are traced rank by rank.
ENOUGH_PROGRAMS = 16
NEARLY_EQUAL = 0.05
# Beside what a program reads, its place, if it asked: whether a rank leads its node, in which run of ranks it is.
LEADS, BLOCK = "leads", "block"
_LEARNING_RATE = 0.01


def programs_of(case: Case, topology: Topology) -> tuple[Program, ...]:
    """The programs of a case on all ranks of a topology.

    Raises:
        Unsupported: as `trace_layer`.
    """
    system, layer = get(case.system), layer_of(case)
    conventions = conventions_of(system, layer.gate, case.conventions)
    return trace_layer(system, layer, topology.ranks, conventions, topology.gpus_per_node)


def trace_layer(
    system: System, workload: LayerWorkload, ranks: int, conventions: Conventions, ranks_per_node: int | None = None
) -> tuple[Program, ...]:
    """The programs of all `ranks`: each says which ranks it stands for.

    Args:
        ranks_per_node: numbered node by node; only exchanges that know nodes ask for it.

    Raises:
        Unsupported: the workload has no meaning on so many ranks, the system can't run it, or it reads a value that
            nothing answers.
    """
    reason = problem(system, workload, conventions, ranks)
    if reason is not None:
        raise Unsupported(reason)
    tracer = _Tracer(system, workload, ranks, conventions, ranks_per_node)
    try:
        return tracer.programs()
    except UnansweredRead as error:
        raise Unsupported(str(error)) from error


@dataclass(frozen=True)
class _Traced:
    """A recorded rank, and the answers that its course depended on."""

    program: Program
    reads: dict[str, tuple[int, ...]]


class _Tracer:
    def __init__(
        self, system: System, workload: LayerWorkload, ranks: int, conventions: Conventions, ranks_per_node: int | None
    ) -> None:
        self._system, self._workload, self._ranks, self._conventions = system, workload, ranks, conventions
        self._ranks_per_node = ranks_per_node
        self._block_size = ranks
        self._answers = RoutingAnswers(workload, ranks, conventions, ranks_per_node)

    def programs(self) -> tuple[Program, ...]:
        first = self._trace(0)
        if not first.reads:
            return (replace(first.program, stands_for=range(self._ranks)),)
        distinct = {tuple(self._answer(rank, q) for q in first.reads) for rank in range(self._ranks)}
        places = [place for place in (LEADS, BLOCK) if place in first.reads]
        if len(distinct) > ENOUGH_PROGRAMS:
            groups = self._groups(places, ENOUGH_PROGRAMS)
            if all(self._are_nearly_equal(group) for group in groups):
                return self._grouped(len(distinct), groups)
        if len(distinct) > MOST_DISTINCT_PROGRAMS:
            return self._grouped(len(distinct), self._groups(places, MOST_DISTINCT_PROGRAMS))
        return self._distinct(first)

    def _distinct(self, first: _Traced) -> tuple[Program, ...]:
        """Ranks that would read what an earlier one read run the same program."""
        traced, stands_for = [first], [[0]]
        for rank in range(1, self._ranks):
            place = next((place for place, one in enumerate(traced) if self._reads_as(rank, one)), None)
            if place is None:
                traced.append(self._trace(rank))
                stands_for.append([])
            stands_for[len(traced) - 1 if place is None else place].append(rank)
        notes: tuple[str, ...] = ()
        if "rounds" in first.reads and self._ranks > ROUNDS_RANKS:
            notes = (f"the rounds of gate {self._workload.gate.name} are those of {ROUNDS_RANKS} of the ranks",)
        return tuple(
            replace(one.program, stands_for=_compact(ranks), notes=notes) for one, ranks in zip(traced, stands_for)
        )

    def _groups(self, places: Sequence[str], most: int) -> list[list[int]]:
        """At most `most` groups of ranks, unless there are more places, of nearly equal size by received rows.

        No group is of two places.
        """
        order = sorted(range(self._ranks), key=lambda rank: (self._answers.received_rows(rank), rank))
        kinds: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for rank in order:
            kinds.setdefault(tuple(self._answer(rank, place) for place in places), []).append(rank)
        groups = []
        for kind in kinds.values():
            count = min(len(kind), max(1, most * len(kind) // self._ranks))
            groups += [kind[start:end] for start, end in pairwise(n * len(kind) // count for n in range(count + 1))]
        return groups

    def _are_nearly_equal(self, group: Sequence[int]) -> bool:
        """Whether the ranks of a group, in ascending order of received rows, are."""
        return self._answers.received_rows(group[-1]) <= (1 + NEARLY_EQUAL) * self._answers.received_rows(group[0])

    def _grouped(self, distinct: int, groups: Sequence[Sequence[int]]) -> tuple[Program, ...]:
        """A program a group, that of its median rank."""
        note = (
            f"{distinct} distinct routings are grouped by received rows into {len(groups)} programs, "
            "each that of its group's median rank"
        )
        return tuple(
            replace(
                self._trace(group[len(group) // 2]).program, stands_for=_compact(sorted(group)), notes=(note,)
            )
            for group in groups
        )

    def _reads_as(self, rank: int, traced: _Traced) -> bool:
        return all(self._answer(rank, question) == answer for question, answer in traced.reads.items())

    def _answer(self, rank: int, question: str) -> tuple[int, ...]:
        if question == BLOCK:
            return (rank // self._block_size,)
        return (int(self._leads(rank)),) if question == LEADS else self._answers.answer(rank, question)

    def _leads(self, rank: int) -> bool:
        return self._ranks_per_node is not None and rank % self._ranks_per_node == 0

    def _trace(self, rank: int) -> _Traced:
        workload, group = self._workload, described_group(self._ranks, rank, ranks_per_node=self._ranks_per_node)
        device, dtype = torch.device("meta"), torch_dtype(workload.dtype)
        layer = self._system.build(workload, group, self._conventions, device, dtype)
        step = TrainingStep(layer, group, learning_rate=_LEARNING_RATE)
        x_TD = torch.empty(
            workload.tokens, workload.d_model, device=device, dtype=dtype, requires_grad=workload.input_gradient
        )
        upstream_TD = torch.empty(workload.tokens, workload.d_model, device=device, dtype=dtype)
        reads: dict[str, tuple[int, ...]] = {}

        def answer(quantity: str, values: Tensor) -> list[int]:
            question = self._answers.question(quantity, values.numel())
            reads[question] = self._answers.answer(rank, question)
            return list(reads[question])

        with answering(answer):
            recorder = record_step(step, (x_TD, upstream_TD), [*layer.parameters(), *layer.buffers()])
        if group.is_asked_for_leaders:
            reads[LEADS] = self._answer(rank, LEADS)
        if group.block_size is not None:
            self._block_size = group.block_size
            reads[BLOCK] = self._answer(rank, BLOCK)
        return _Traced(recorder.program(rank, self._ranks), reads)


def _compact(ranks: Sequence[int]) -> Sequence[int]:
    """A range where the ranks are evenly spaced."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    spaced = range(ranks[0], ranks[-1] + 1, step)
    return spaced if list(spaced) == list(ranks) else tuple(ranks)
