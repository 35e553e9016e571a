"""Dense-to-Sparse (EvoMoE, Nie et al. 2021, arXiv 2112.14397): all experts at first, fewer as a temperature falls.

Training goes through three phases. Dense: the plain softmax over all experts, no loss. Soft: the softmax of the logits
over a falling temperature; an expert is used where its share is above a threshold. Hard: the best share alone.
Evaluation is top-1 of the plain softmax. With the noise `gumbel` the soft and hard phases add Gumbel(0, 1) to the
logits, as the authors do.

Until it is hard nothing is dropped: C = T, or the largest count where a layer is dropless. Hard and evaluation obey the
capacity rule. No tensor is larger than T x E: token t's row of the dispatch is its number, not a one-hot row of T.

T tokens, E experts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates import steps
from moebench.workloads.gates.context import Choice, GateContext
from moebench.workloads.gates.gate import Gate
from moebench.workloads.gates.noise import gumbel_like
from moebench.workloads.layer import GateSpec

SCHEDULES = ("linear", "exponential", "constant")
WEIGHTS = ("tempered", "softmax")
DENSE, SOFT, HARD = "dense", "soft", "hard"


@dataclass(frozen=True)
class Options:
    """What the rule leaves open; the defaults are the authors' for WMT 17 (kdd_scripts/wmt17_en_de_gumbel.sh).

    Attributes:
        dense_steps: training steps of the dense phase; the schedule starts after it.
        schedule: how the temperature falls: `linear`, `exponential`, or `constant`, where it stays at tau_max.
        tau_max: temperature at the start of the schedule.
        tau_min: temperature at its end, and from there on.
        decay_steps: training steps that the temperature takes to fall.
        hard_after: steps of the schedule after which the phase is hard; 0 is never.
        threshold: share from which on an expert is used in the soft phase.
        weights: combine weights: the `tempered` shares, or the plain `softmax`.
        first_step: added to the layer's step, so that a benchmark can stand anywhere in the schedule.
    """

    dense_steps: int = 0
    schedule: str = "linear"
    tau_max: float = 2.0
    tau_min: float = 0.5
    decay_steps: int = 5000
    hard_after: int = 6000
    threshold: float = 0.001
    weights: str = "tempered"
    first_step: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise one_of("schedule", self.schedule, SCHEDULES)
        if self.weights not in WEIGHTS:
            raise one_of("weights", self.weights, WEIGHTS)
        for name, least in (("dense_steps", 0), ("decay_steps", 1), ("hard_after", 0), ("first_step", 0)):
            gate_options.at_least(name, getattr(self, name), least)
        if not 0 < self.tau_min <= self.tau_max < math.inf:
            raise InputError(f"tau_min = {self.tau_min}, tau_max = {self.tau_max}: need 0 < tau_min <= tau_max")
        if not 0 <= self.threshold < 1:
            raise InputError(f"threshold = {self.threshold}: must be at least 0 and below 1")


def phase(options: Options, step: int) -> str:
    """`dense`, `soft` or `hard` after `step` training steps."""
    scheduled = step + options.first_step - options.dense_steps
    if scheduled < 0:
        return DENSE
    return HARD if options.hard_after and scheduled >= options.hard_after else SOFT


def temperature(options: Options, step: int) -> float:
    """tau after `step` training steps; `tau_max` in the dense phase, which has none."""
    scheduled = max(step + options.first_step - options.dense_steps, 0)
    done = min(scheduled / options.decay_steps, 1.0)
    if options.schedule == "linear":
        return options.tau_max - done * (options.tau_max - options.tau_min)
    if options.schedule == "exponential":
        return options.tau_max * (options.tau_min / options.tau_max) ** done
    return options.tau_max


def choose(
    logits_TE: Tensor,
    gate: GateSpec,
    conventions: Conventions,
    context: GateContext,
    generator: torch.Generator | None,
) -> Choice:
    """The rule `dense-to-sparse`: a `moebench.workloads.gates.context.Rule`. Until it is hard, choice j is expert j."""
    options = gate_options.read(Options, gate)
    now = phase(options, context.step)
    if not context.training:
        return _best(logits_TE.softmax(dim=1), None, conventions)
    if now == DENSE:
        probs_TE = logits_TE.softmax(dim=1)
        return Choice(_all(probs_TE), probs_TE, probs_TE, capacity=_room(probs_TE, conventions))
    if conventions.noise == "gumbel":
        noisy_TE = logits_TE + gumbel_like(logits_TE.detach(), generator)
    else:
        noisy_TE = logits_TE
    shares_TE = (noisy_TE / temperature(options, context.step)).softmax(dim=1)
    weights_TE = shares_TE if options.weights == "tempered" else logits_TE.softmax(dim=1)
    if now == HARD:
        return _best(weights_TE, shares_TE, conventions)
    used_TE = shares_TE.detach() > options.threshold
    experts_TE = _all(shares_TE).where(used_TE, steps.NO_ROUTE)
    weights_TE = weights_TE * used_TE
    aux = balance_loss(weights_TE, used_TE, conventions)
    if conventions.normalisation == "before-drop":
        weights_TE = steps.normalised(weights_TE)
    return Choice(experts_TE, weights_TE, shares_TE, {"balance": aux}, capacity=_room(shares_TE, conventions))


def _best(weights_TE: Tensor, shares_TE: Tensor | None, conventions: Conventions) -> Choice:
    """The expert with the largest share; in evaluation (no shares) that with the largest weight."""
    experts_T1 = steps.ranked(weights_TE if shares_TE is None else shares_TE, 1)
    used_TE = torch.zeros_like(weights_TE, dtype=torch.bool).scatter(1, experts_T1, True)
    aux = balance_loss(weights_TE * used_TE, used_TE, conventions)
    return Choice(experts_T1, steps.weights_of(weights_TE, experts_T1, conventions), weights_TE, {"balance": aux})


def _all(probs_TE: Tensor) -> Tensor:
    """Every token's choices 0..E-1."""
    return torch.arange(probs_TE.shape[1], device=probs_TE.device).expand(probs_TE.shape)


def _room(probs_TE: Tensor, conventions: Conventions) -> int | None:
    """C = T slots, so that nobody is dropped; a dropless layer finds less where it can."""
    return None if conventions.is_dropless else len(probs_TE)


def balance_loss(weights_TE: Tensor, used_TE: Tensor, conventions: Conventions) -> Tensor:
    """auxiliary x (E/N) sum_e W_e f_e: W_e the mean weight of e, f_e the share of tokens that use it, N = sum f_e.

    N, the mean number of experts a token, makes it `auxiliary` when the weights sum to 1 and all is even; the authors'
    own loss lacks it. The uses carry no gradient.
    """
    tokens, experts = weights_TE.shape
    if tokens == 0:
        return weights_TE.sum() * 0
    share_E = used_TE.to(weights_TE.dtype).mean(dim=0)
    return conventions.auxiliary * experts * (weights_TE.mean(dim=0) * share_E).sum() / share_E.sum()


def limits(gate: GateSpec, experts: int) -> str | None:
    """The largest share is at least 1/E; a threshold above it could leave a token without an expert."""
    threshold = gate_options.read(Options, gate).threshold
    if threshold * experts >= 1:
        return f"gate dense-to-sparse: threshold = {threshold} may leave a token no expert; need below 1 / {experts}"
    return None


DENSE_TO_SPARSE = Gate(
    name="dense-to-sparse",
    title="Dense-to-Sparse",
    formula="s = softmax(logits / tau), tau falling; every e with s_e > threshold; at last argmax s",
    weight="s_e",
    default_top_k=1,
    choose=choose,
    source="Nie et al. 2021 (arXiv 2112.14397), section 4; codecaution/EvoMoE, topkgate.py",
    aux="E/N sum W_e f_e, N experts a token; none while dense",
    capacity="T until hard, then the rule",
    conventions={"noise": ("none", "gumbel")},
    options=Options,
    evaluation="argmax p, weight p_e",
    fixes_capacity=True,
    limits=limits,
)
