"""What compression does to numbers, on real ranks: errors of sums, and the losses of a small model in training.

Everything follows from seeds, so that a study gives the same numbers every time on the same machine.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group, described_group
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.systems.megascale.gradients import padded_size, reduce_gradients
from moebench.systems.megascale.part_sums import row_sum
from moebench.systems.megascale.sharded import ShardedAdamW
from moebench.systems.megascale.stage import DecoderStage
from moebench.systems.part_interface import Setting
from moebench.workloads.models.decoder import DecoderModel, DecoderShape
from moebench.workloads.part import PartWorkload

# Two layers of eight experts, whose tokens have two choices.
MODEL = DecoderModel("small", "Small", 2, DecoderShape(32, 4, 2, 8, 32, 8, 2), 64)
SEQUENCE, BATCH = 16, 8  # of a replica
LEARNING_RATE, BALANCE = 3e-3, 0.01


def training_losses(group: Group, ways: Sequence[str], steps: int, seed: int) -> dict[str, list[float]]:
    """The loss of every step by way to sum gradients, the mean of all replicas before the step.

    Each token follows from the one before, but for one in ten. Beside the ways there is `control`: FP32 once more, from
    weights that are one rounding off, which shows how far two runs part that differ in nothing that matters; and of
    `parameters`, and of `tokens` of a step, the number.
    """
    found = {way: _losses(group, way, steps, seed) for way in ways}
    return found | {"control": _losses(group, "fp32-reduce-scatter", steps, seed, 1 + 2.0**-23)} | _counts(group)


def parameter_losses(group: Group, ways: Sequence[str], steps: int, seed: int) -> dict[str, list[float]]:
    """The same by way in which new parameters of products travel and are kept, with gradients summed in FP32.

    The control has them in BF16 once more.
    """
    of = {way: way.partition("-")[0] for way in ways}
    found = {way: _losses(group, "fp32-reduce-scatter", steps, seed, 1.0, short) for way, short in of.items()}
    control = _losses(group, "fp32-reduce-scatter", steps, seed, 1 + 2.0**-23, "bf16")
    return found | {"control": control} | _counts(group)


def _counts(group: Group) -> dict[str, list[float]]:
    return {"parameters": [float(_parameters())], "tokens": [float(group.size * BATCH * SEQUENCE)]}


def _losses(
    group: Group, way: str, steps: int, seed: int, scale: float = 1.0, parameters: str | None = None
) -> list[float]:
    stage = DecoderStage(MODEL, MODEL.layers, SEQUENCE, BATCH, described_group(1))
    generator = torch.Generator().manual_seed(seed)
    for weight in stage.parameters():
        normal = torch.randn(weight.shape, generator=generator) * 0.1
        weight.data.copy_((normal + (weight.dim() == 1)) * scale)
    # Weights of products travel the way that is tried; norms, router and embedding as they are.
    products = [weight for weight in stage.parameters() if getattr(weight, "adds_gradients", False)]
    others = [weight for weight in stage.parameters() if not any(weight is one for one in products)]
    parts = [(stage.parameters(), None)] if parameters is None else [(products, parameters), (others, None)]
    optimisers = [ShardedAdamW(own, group, way, lr=LEARNING_RATE, parameters=how) for own, how in parts]
    data = torch.Generator().manual_seed((seed + 1) * 1000 + group.index)
    found = []
    for _ in range(steps):
        ids = _tokens(data)
        loss, aux = stage(ids[:-1], ids[1:])
        (loss + BALANCE * aux).backward()
        for optimiser in optimisers:
            optimiser.accumulate()
            optimiser.step(1 / group.size)
        found.append(float(all_reduce(loss.detach().clone().view(1), group)) / group.size)
    return found


def _tokens(generator: torch.Generator) -> Tensor:
    """[S + 1, B]"""
    rows = [torch.randint(MODEL.vocabulary, (BATCH,), generator=generator)]
    for _ in range(SEQUENCE):
        odd = torch.rand(BATCH, generator=generator) < 0.1
        chance = torch.randint(MODEL.vocabulary, (BATCH,), generator=generator)
        rows.append(torch.where(odd, chance, (3 * rows[-1] + 1) % MODEL.vocabulary))
    return torch.stack(rows)


def _parameters() -> int:
    stage = DecoderStage(MODEL, MODEL.layers, SEQUENCE, BATCH, described_group(1))
    return sum(weight.numel() for weight in stage.parameters())


def gradient_errors(group: Group, ways: Sequence[str], parameters: int, seed: int) -> dict[str, tuple[float, float]]:
    """Of each way, how far its sums are from those in float64: root mean square over that of the sums; and the furthest
    over the sum of magnitudes.

    Gradients of all sizes from 10^-6 to 10^2, of both signs.
    """
    size, found = padded_size(parameters, group.size), {}
    for way in ways:
        all_DN = torch.stack([_gradients(rank, size, seed) for rank in range(group.size)])
        shard = reduce_gradients(all_DN[group.index].clone(), group, way)
        own_DN = all_DN.double().chunk(group.size, 1)[group.index]
        found[way] = _relative(shard.double() - own_DN.sum(0), own_DN.sum(0), own_DN.abs().sum(0), group)
    return found


def _gradients(rank: int, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed + 1) * 1000 + rank)
    scale = 10.0 ** torch.randint(-6, 3, (size,), generator=torch.Generator().manual_seed(seed))
    return torch.randn(size, generator=generator) * scale


def row_errors(
    group: Group, systems: Sequence[str], sizes: tuple[tuple[str, int], ...], seed: int
) -> dict[str, tuple[float, float, float, float]]:
    """Of each way, `gradient_errors`' two numbers of the sums, then of the gradients; rows in BF16."""
    found = {}
    for system in systems:
        workload = PartWorkload("row-sum", sizes, seed=seed)
        setting = Setting(workload, system, group, torch.device("cpu"), torch.bfloat16)
        sums, gradient = row_sum(setting).run()
        terms = [setting.numbers(0, rank, (workload.size("tokens"), sums.shape[1])) for rank in range(group.size)]
        own = torch.stack([one.double().chunk(group.size)[group.index] for one in terms])
        back = torch.cat([setting.numbers(1, rank, tuple(sums.shape)).double() for rank in range(group.size)])
        found[system] = (
            *_relative(sums.double() - own.sum(0), own.sum(0), own.abs().sum(0), group),
            *_relative(gradient.double() - back, back, back.abs(), group),
        )
    return found


def _relative(off: Tensor, exact: Tensor, magnitude: Tensor, group: Group) -> tuple[float, float]:
    """Over all ranks."""
    totals = all_reduce(torch.stack([off.square().sum(), exact.square().sum()]), group)
    furthest = torch.zeros(group.size, dtype=torch.float64)
    furthest[group.index] = (off.abs() / magnitude.clamp(min=1e-300)).max() if off.numel() else 0.0
    return float((totals[0] / totals[1].clamp(min=1e-300)).sqrt()), float(all_reduce(furthest, group).max())
