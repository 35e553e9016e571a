"""Is Dense-to-Sparse with Gumbel noise right? Its weights are shares that sum to 1, and the noise can be read off them.

T tokens of a rank, E experts, D model.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moebench.checks.instance import Instance, Observed, data
from moebench.checks.verdict import ALL_EQUAL, Seen, compare, dense, is_mixture, tolerance
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates import steps as rule_steps
from moebench.workloads.gates.dense_to_sparse import DENSE, HARD, SOFT, Options, phase, temperature
from moebench.workloads.routing import Routing

_VARIANCE = math.pi**2 / 6  # of Gumbel(0, 1)
_SPREAD = (0.5, 1.7)  # of the observed variance over it; its standard error is 0.2 with the fewest shares
_FEWEST_SHARES = 100


def tempered_problem(instance: Instance, quiet: Sequence[Routing], seen: Seen) -> str | None:
    """The first invariant that a rank breaks; `quiet` is the rule without noise on every rank."""
    options = gate_options.read(Options, instance.workload.gate)
    now, logits = phase(options, 0), _logits(instance)
    for rank, rule in enumerate(quiet):
        for step, own in enumerate(seen[rank]):
            found = _problem(instance, options, now, rule, logits[rank], own)
            if found is not None:
                return f"rank {rank} in step {step + 1}: {found}"
        first, second = (own.y_TD for own in seen[rank][:2])
        is_drawn = now == HARD or (now == SOFT and options.weights == "tempered")
        if is_drawn and len(first) and compare(first, second, tolerance(instance)) is None:
            return ALL_EQUAL
    return _spread_problem(instance, options, logits, seen) if now == SOFT else None


def _logits(instance: Instance) -> list[Tensor]:
    """Every rank's, without noise."""
    everything, conventions = data(instance), instance.conventions
    router_DE = everything.weights.gate_DE
    return [rule_steps.router_logits(x_TD, router_DE, conventions, training=False) for x_TD in everything.xs]


def _problem(
    instance: Instance, options: Options, now: str, rule: Routing, logits_TE: Tensor, own: Observed
) -> str | None:
    experts, allowed = instance.workload.experts, tolerance(instance)
    weights_TE = own.y_TD[:, :experts]
    kept_TE = weights_TE.abs() > 1e-9
    if not is_mixture(own.y_TD, experts):
        return "the output is not a mixture of its experts' outputs"
    if int(kept_TE.sum(0).max()) > rule.capacity:
        return f"an expert kept {int(kept_TE.sum(0).max())} tokens of a rank, capacity is {rule.capacity}"
    if now == DENSE:
        return compare(weights_TE, dense(rule, rule.weights_TK), allowed)
    if now == HARD:
        return "a token has more than one expert" if (kept_TE.sum(1) > 1).any() else None
    if len(weights_TE) and instance.conventions.normalisation != "none":
        return compare(weights_TE.sum(1), torch.ones(len(weights_TE), dtype=torch.float64), allowed)
    if options.weights == "softmax":
        return compare(weights_TE, logits_TE.softmax(dim=1).to(torch.float64) * kept_TE, allowed)
    return _shares_problem(instance, options, weights_TE, own) if len(weights_TE) else None


def _shares_problem(instance: Instance, options: Options, weights_TE: Tensor, own: Observed) -> str | None:
    allowed, sums_T = tolerance(instance), weights_TE.sum(1)
    used_TE = weights_TE.abs() > 1e-9
    if (weights_TE.masked_fill(~used_TE, 1.0) <= options.threshold * (1 - allowed)).any():
        return f"a share below the threshold {options.threshold} was used"
    unused_T = (~used_TE).sum(1) * options.threshold
    if (sums_T > 1 + allowed).any() or (sums_T < 1 - unused_T - allowed).any():
        return "shares do not sum to 1 but for those below the threshold"
    uses_E = used_TE.to(torch.float64).mean(0)
    aux = instance.conventions.auxiliary * len(uses_E) * (weights_TE.mean(0) * uses_E).sum() / uses_E.sum()
    difference = compare(own.aux, aux, allowed)
    return None if difference is None else f"auxiliary loss: {difference}"


def _spread_problem(
    instance: Instance, options: Options, logits: Sequence[Tensor], seen: Seen
) -> str | None:
    """tau log(share) - logit is the noise but for a constant of the token: its variance must be Gumbel's."""
    if options.weights != "tempered" or instance.conventions.normalisation != "none":
        return None
    squares, free = 0.0, 0
    for logits_TE, of_rank in zip(logits, seen, strict=True):
        for own in of_rank:
            weights_TE = own.y_TD[:, : logits_TE.shape[1]]
            used_TE = weights_TE.abs() > 1e-9
            noise_TE = temperature(options, 0) * weights_TE.masked_fill(~used_TE, 1.0).log() - logits_TE
            mean_T1 = (noise_TE * used_TE).sum(1, keepdim=True) / used_TE.sum(1, keepdim=True).clamp(min=1)
            squares += float(((noise_TE - mean_T1).square() * used_TE).sum())
            free += int((used_TE.sum(1) - 1).clamp(min=0).sum())
    ratio = squares / max(free, 1) / _VARIANCE
    if free < _FEWEST_SHARES or _SPREAD[0] <= ratio <= _SPREAD[1]:
        return None
    return f"the noise has {ratio:.2f} times the variance of Gumbel(0, 1)"
