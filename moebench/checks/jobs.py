"""Correct before fast, for jobs: no number of a system before its step is that of one rank with the whole batch.

Tried on 4 real gloo ranks of two nodes: a small decoder in two stages, more micro-batches than stages, one stage after
the other on the same ranks; Adam with a large epsilon, whose update is in proportion to the gradient, so that a wrong
factor shows. The losses and all parameters after each of two steps are compared. A system that shares a layer among
more ranks is tried as it is on these; one that runs the forward of a micro-batch beside the backward of another is
tried so, in two chunks a stage. What came out is remembered with a hash of the code.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moebench.cases.case import Case
from moebench.checks.correctness import RANKS, RANKS_PER_NODE, Status, code_hash, on_ranks, remembered
from moebench.kernels.collectives.group import Group, subgroup
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.systems.job_interface import JobStage, JobSystem, Spread, StagePlace, Training, problem
from moebench.systems.job_reference import OneRank, random_model
from moebench.systems.job_registry import get
from moebench.workloads.job import JobLayout
from moebench.workloads.models.decoder import DecoderModel, DecoderShape

TIMEOUT_S, TIMEOUT_MORE_S = 150.0, 30.0  # of a trial, and for each other one beside it
TOLERANCE = 2e-4  # of the largest change of a weight, beside what its gradients' sums may lose
TARGET = f"{__name__}:run_rank"
TRAINING = Training(learning_rate=1.0, eps=1.0, weight_decay=0.01, balance=0.0)
STAGES, STEPS = 2, 2
CANDIDATES = 128  # sequences, of which the clearest are a batch
MODEL = DecoderModel("small", "Small", 2 * STAGES, DecoderShape(32, 8, 4, 4, 16, 8, 2, shared_ffn=16), 40, sequence=16)
LAYOUT = JobLayout(RANKS * STAGES, RANKS_PER_NODE, STAGES, global_batch=RANKS)  # see `layout_of` for the batch


def check(cases: Sequence[Case]) -> Iterator[Status]:
    """Whether the system of each case trains the model, in their order; one start for all not remembered."""
    yield from remembered(cases, _key, lambda left: _tried([case.system for case in left]))


def _tried(systems: Sequence[str]) -> list[Status]:
    refusals = [_refusal(get(name).on_few(RANKS, RANKS_PER_NODE)) for name in systems]
    able = [name for name, refusal in zip(systems, refusals) if refusal is None]
    seen = iter(on_ranks(TARGET, able, TIMEOUT_S, TIMEOUT_MORE_S))
    return [next(seen) if refusal is None else Status("unsupported", refusal) for refusal in refusals]


def _refusal(system: JobSystem) -> str | None:
    """Why a system can't be tried."""
    reason = problem(system, MODEL, layout_of(system))
    return None if reason is None else f"the model that it is tried on: {reason}"


def layout_of(system: JobSystem) -> JobLayout:
    """The trial's, with the fewest micro-batches that are more than stages: a first, a last, and others between.

    Stages in chunks, and twice as many micro-batches, where the forward of one runs beside the backward of another.
    """
    spread = system.spread(LAYOUT)
    if isinstance(spread, str):
        return LAYOUT
    pipelines = LAYOUT.global_batch // spread.microbatches
    chunks, each = (2, 2 * STAGES) if spread.is_combined else (1, STAGES + 1)
    return replace(LAYOUT, global_batch=each * pipelines, chunks=chunks)


def run_rank(group: Group, systems: Sequence[str]) -> list[str | None]:
    """What is wrong with each system on this rank, or None."""
    return [_problem(group, get(name).on_few(RANKS, RANKS_PER_NODE)) for name in systems]


def _problem(group: Group, system: JobSystem) -> str | None:
    """What is wrong with one of them."""
    layout = layout_of(system)
    spread = system.spread(layout)
    assert isinstance(spread, Spread)
    weights, stages = random_model(MODEL), _stages(group, system, spread, layout)
    for number, stage in enumerate(stages):
        stage.load(_of_stage(weights, number, len(stages)))
    tolerance = TOLERANCE + 8 * system.rounding
    step_of = _combined_step if spread.is_combined else _step
    for step, wanted in enumerate(_of_one_rank(layout.global_batch)):
        loss = step_of(stages, spread, wanted.data, group)
        where = f"{system.name}, step {step + 1}, rank {group.index}"
        if not abs(float(loss - wanted.loss)) <= tolerance * float(wanted.loss):
            return f"{where}: the loss is {float(loss):.6g}, of one rank {float(wanted.loss):.6g}"
        for number, stage in enumerate(stages):
            theirs, moved = (_of_stage(of, number, len(stages)) for of in (wanted.weights, wanted.changes))
            reason = _difference(stage, theirs, moved, tolerance)
            if reason is not None:
                return f"{where}, stage {number}: {reason}"
    return None


@dataclass(frozen=True)
class _Wanted:
    """A step of one rank: its batch, the loss, all weights after it, and by how much it changed them."""

    data: Tensor
    loss: Tensor
    weights: dict[str, Tensor]
    changes: dict[str, Tensor]


@cache
def _of_one_rank(batch: int) -> tuple[_Wanted, ...]:
    """What is right, step by step; the same for all systems that are tried on as many sequences."""
    one, found = OneRank(MODEL, random_model(MODEL), TRAINING), []
    for step in range(STEPS):
        data = _clear_batch(one, batch, torch.Generator().manual_seed(100 + step))
        before = {name: weight.detach().clone() for name, weight in one.weights.items()}
        loss = one.step(data[:-1], data[1:])
        weights = {name: weight.detach().clone() for name, weight in one.weights.items()}
        found.append(_Wanted(data, loss, weights, {name: weights[name] - before[name] for name in weights}))
    return tuple(found)


def _clear_batch(one: OneRank, batch: int, generator: torch.Generator) -> Tensor:
    """Random sequences [S + 1, B], those in which no token is close to going elsewhere: rounding must not decide."""
    found = torch.randint(MODEL.vocabulary, (MODEL.sequence + 1, CANDIDATES), generator=generator)
    return found[:, one.clearness(found[:-1]).topk(batch).indices]


def _stages(group: Group, system: JobSystem, spread: Spread, layout: JobLayout) -> list[JobStage]:
    """All stages, or chunks of them, on these ranks: each rank is in every one, at the same place."""
    first, place = group.index // spread.ranks * spread.ranks, group.index % spread.ranks
    own = subgroup(group, "stage", group.ranks[first : first + spread.ranks])
    rail = subgroup(group, "replicas", group.ranks[place :: spread.ranks])
    made, count = [], STAGES * layout.chunks
    for number in range(count):
        ends = (number == 0, number == count - 1)
        where = StagePlace(own, rail, group, MODEL.layers // count, *ends, torch.device("cpu"), torch.float32)
        made.append(system.stage(MODEL, layout, where, TRAINING))
    return made


def _micro_batch(
    stages: Sequence[JobStage], spread: Spread, data: Tensor, group: Group, number: int
) -> tuple[Tensor, Tensor]:
    """Input and labels of a micro-batch of this rank's replica."""
    replica, many = group.index // spread.ranks, spread.sequences(LAYOUT.micro_batch)
    begin = (replica * spread.microbatches + number) * many
    part = data[:, begin : begin + many]
    return stages[0].rows(part[:-1]), stages[-1].rows(part[1:])


def _step(stages: Sequence[JobStage], spread: Spread, data: Tensor, group: Group) -> Tensor:
    """All micro-batches of this rank's replica through the stages and back, then the update; the mean loss of all."""
    total = torch.zeros(())
    for number in range(spread.microbatches):
        x, labels = _micro_batch(stages, spread, data, group, number)
        outs, inputs = [], [x]
        for place, stage in enumerate(stages):
            own = labels if place == len(stages) - 1 else None
            outs.append(stage.forward(inputs[-1], own, is_first=number == 0))
            inputs.append(outs[-1][0].detach().requires_grad_())
        total += outs[-1][0].detach() / (spread.microbatches * group.size)
        gradient = None
        for stage, out, x in zip(reversed(stages), reversed(outs), reversed(inputs[:-1])):
            stage.backward(out, gradient, is_last=number == spread.microbatches - 1)
            gradient = x.grad
    for stage in stages:
        stage.update()
    return all_reduce(total, group)


def _combined_step(stages: Sequence[Any], spread: Spread, data: Tensor, group: Group) -> Tensor:
    """As `_step`: each micro-batch goes forward through the chunks while the one before goes back through them."""
    total = torch.zeros(())
    before: list[tuple[tuple[Tensor, Tensor], Tensor]] = []
    for number in range(spread.microbatches):
        x, labels = _micro_batch(stages, spread, data, group, number)
        now, gradient = [], None
        for place, stage in enumerate(stages):
            own = labels if place == len(stages) - 1 else None
            if before:
                earlier, given = before[-1 - place]
                out = stage.forward_beside_backward(x, own, stages[-1 - place], earlier, gradient)
                gradient = given.grad
            else:
                out = stage.forward(x, own, is_first=True)
            now.append((out, x))
            x = out[0].detach().requires_grad_()
        total += now[-1][0][0].detach() / (spread.microbatches * group.size)
        before = now
    gradient = None
    for stage, (out, x) in zip(reversed(stages), reversed(before)):
        stage.backward(out, gradient, is_last=True)
        gradient = x.grad
    for stage in stages:
        stage.update()
    return all_reduce(total, group)


def _of_stage(named: dict[str, Tensor], number: int, count: int) -> dict[str, Tensor]:
    """Of weights by name, those of one of `count` stages, layers counted from its first."""
    layers = MODEL.layers // count
    found = {}
    for name, value in named.items():
        layer, _, rest = name.partition(".")
        if not rest:
            found[name] = value
        elif int(layer) // layers == number:
            found[f"{int(layer) % layers}.{rest}"] = value
    return found


def _difference(
    stage: JobStage, wanted: dict[str, Tensor], changes: dict[str, Tensor], tolerance: float
) -> str | None:
    stage.gather()
    for name, part in stage.parts().items():
        theirs, change = part.of(wanted[name]), changes[name]
        if part.tensor.shape != theirs.shape:
            return f"{name} is {list(part.tensor.shape)}, not {list(theirs.shape)}"
        far = float((part.tensor - theirs).abs().max() / change.abs().max())
        if not far <= tolerance:
            return f"{name} is {far:.2g} of its largest change from where one rank has it"
    return None


def _key(case: Case) -> str:
    here = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    tried = get(case.system).on_few(RANKS, RANKS_PER_NODE).name
    parts = [tried, RANKS, RANKS_PER_NODE, here, code_hash(), torch.__version__, sys.version]
    return hashlib.sha256(json.dumps(["job", *parts]).encode()).hexdigest()[:32]
