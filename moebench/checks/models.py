"""Correct before fast, for whole models: no number of a system before its loss and gradients are those of plain
autograd.

Tried on 4 real gloo ranks: a small model, two steps, under prices that are made up so that a system that plans has
something to do. Where the model trains with Adam, the second step is that of weights which the first one changed. What
came out is remembered with a hash of the code.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from moebench.cases.case import Case
from moebench.cases.models import model_of
from moebench.checks.correctness import RANKS, RANKS_PER_NODE, Status, code_hash, on_ranks, remembered
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.kernels.optimizer import AdamW
from moebench.systems.model_interface import Place, Profile
from moebench.systems.model_registry import get
from moebench.systems.planning import PartTimes, Prices, Times, collective_of, even_part_s, sample_data
from moebench.workloads.layer import GateSpec
from moebench.workloads.models.gpt2_moe import GPT2MoE
from moebench.workloads.models.shape import GPT2MoEShape

TIMEOUT_S, TIMEOUT_MORE_S = 150.0, 30.0  # of a trial, and for each other one beside it
TOLERANCE = 2e-4  # of the largest entry, in fp32
LEARNING_RATE = 1e-2  # of Adam
CLIP_NORM = 0.05  # below that of the small model's gradients
TARGET = f"{__name__}:run_rank"


def small(gate: GateSpec, optimizer: str = "sgd", recompute: bool = False, clips: bool = False) -> GPT2MoEShape:
    """A model whose experts overflow; where it clips, its gradients are above the norm."""
    return GPT2MoEShape(
        3, 16, 2, 32, 2 * RANKS, 8, sequence=6, gate=gate, vocabulary=40, positions=8, optimizer=optimizer,
        recompute=recompute, clip_norm=CLIP_NORM if clips else 0.0,
    )  # fmt: skip


def check(cases: Sequence[Case]) -> Iterator[Status]:
    """Whether the system of each case trains the model, in their order; one start for all not remembered."""
    yield from remembered(
        cases, _key, lambda left: _tried([_trial(case) for case in left])
    )


def _trial(case: Case) -> tuple:
    shape = model_of(case).shape
    return case.system, shape.gate, shape.optimizer, shape.recompute, bool(shape.clip_norm)


def _tried(trials: Sequence[tuple]) -> list[Status]:
    """Statuses of systems, each with a gate, and an optimiser, recomputation and clipping where they are not the
    default."""
    refusals = [get(system).supports(small(*of_model), RANKS) for system, *of_model in trials]
    able = [one for one, refusal in zip(trials, refusals) if refusal is None]
    seen = iter(on_ranks(TARGET, able, TIMEOUT_S, TIMEOUT_MORE_S))
    return [next(seen) if refusal is None else Status("unsupported", refusal) for refusal in refusals]


def run_rank(group: Group, trials: Sequence[tuple]) -> list[str | None]:
    """What is wrong with each system on this rank, or None."""
    return [_problem(group, *trial) for trial in trials]


def _problem(group: Group, system: str, gate: GateSpec, optimizer: str = "sgd", *training: bool) -> str | None:
    """What is wrong with one of them."""
    shape, cpu = small(gate, optimizer, *training), torch.device("cpu")
    rate = LEARNING_RATE if optimizer == "adamw" else 0.0
    step = get(system).build(shape, Place(group, cpu, made_up), seed=1, learning_rate=rate)
    data = sample_data(shape, cpu, 100 + group.rank)
    definition = step.define()
    model = GPT2MoE(replace(shape, recompute=False), group, cpu, seed=1, make_layer=definition.make_layer)
    adam = AdamW(model.parameters(), rate) if rate else None
    for run in (1, 2):
        definition.begin()
        wanted_loss, wanted = _by_autograd(model, data, group)
        loss, found = step.run(data), step.gradients()
        if shape.clip_norm:  # experts of some systems have no biases, whose gradients then count in no norm
            _clip(model, {name: wanted[name] for name in wanted if name in found}, group)
        pairs = {"loss": (loss, wanted_loss), **{name: (found[name], wanted[name]) for name in wanted if name in found}}
        for name, (ours, theirs) in pairs.items():
            far = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
            if not far <= TOLERANCE:
                return f"{system}, run {run}, rank {group.index}: {name} is {far:.2g} from plain autograd, relatively"
        missing = [name for name in wanted if name not in found and not name.endswith(("b1_LF", "b2_LD"))]
        if missing:
            return f"{system}: no gradient of {', '.join(missing)}"
        if adam is not None:
            for name, parameter in model.named_parameters():
                parameter.grad = wanted[name] if name in found else None
            adam.step()
    return None


def _by_autograd(model: GPT2MoE, data: Sequence[Tensor], group: Group) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(*data)
    names, parameters = zip(*model.named_parameters())
    gradients = torch.autograd.grad(loss, parameters, torch.full_like(loss, 1 / group.size))
    with torch.no_grad():
        summed = [
            gradient if getattr(parameter, "is_expert", False) else all_reduce(gradient.contiguous(), group)
            for parameter, gradient in zip(parameters, gradients)
        ]
    return loss.detach(), dict(zip(names, summed))


def _clip(model: GPT2MoE, gradients: Mapping[str, Tensor], group: Group) -> None:
    """Scale them by the norm over all ranks' experts, and over the rest once."""
    squares = {True: torch.zeros(1, dtype=torch.float64), False: torch.zeros(1, dtype=torch.float64)}
    for name, parameter in model.named_parameters():
        if name in gradients:
            squares[getattr(parameter, "is_expert", False)] += gradients[name].double().square().sum()
    norm = float((all_reduce(squares[True], group) + squares[False]).sqrt())
    if not norm > model.shape.clip_norm:
        raise ValueError(f"gradients of norm {norm:.3g} don't try a limit of {model.shape.clip_norm:g}")
    for gradient in gradients.values():
        gradient.mul_(model.shape.clip_norm / norm)


def made_up(model: nn.Module, data: Sequence[Tensor], group: Group) -> Profile:
    """A profile by bytes alone: collectives slow enough for several products to fit under one."""

    def node_s(node: fx.Node) -> float:
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        nbytes = sum(value.nbytes for value in values if isinstance(value, Tensor))
        return 1e-6 + nbytes * (1e-7 if collective_of(node) else 2e-8)

    times = Times(node_s, lambda nbytes: 1e-6 + nbytes * 1e-7, lambda nbytes: nbytes * 1e-10)
    return lambda step: Prices(times, PartTimes(even_part_s(node_s, 1e-7), lambda nbytes: nbytes * 1e-10))


def _key(case: Case) -> str:
    here = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    system, gate, *training = _trial(case)
    parts = [system, gate.label, *training, RANKS, RANKS_PER_NODE, here, code_hash(), torch.__version__, sys.version]
    return hashlib.sha256(json.dumps(["model", *parts]).encode()).hexdigest()[:32]


