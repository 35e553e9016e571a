"""Megatron's combined 1F1B on ranks, for test_megatron_decoder.py: forward of a micro-batch beside backward of another.

Apart, so that a rank does not import pytest. A check returns words.
"""

import torch

from moebench.kernels.collectives.group import Group
from moebench.systems.job_interface import StagePlace, Training
from moebench.systems.job_reference import random_model
from moebench.systems.megatron.decoder import DecoderSetting
from moebench.systems.megatron.trained import MegatronStage
from moebench.workloads.models.decoder import DecoderModel, DecoderShape

MODEL = DecoderModel("small", "Small", 4, DecoderShape(16, 4, 4, 4, 8, 8, 2, shared_ffn=8), 24, sequence=8)
MICRO_BATCHES, BATCH = 3, 4
TRAINING = Training(balance=0.05)
SETTINGS = (
    DecoderSetting("modern"),
    DecoderSetting("modern", 2, chunks=2),
    DecoderSetting("modern", attention="ulysses", recompute="activation"),
)


def stages_of(group: Group, setting: DecoderSetting, overlap: str) -> list[MegatronStage]:
    """The model's two chunks on this rank, one replica."""
    alone, weights, made = Group("replicas", [group.rank], group.rank), random_model(MODEL, seed=1), []
    for number in range(2):
        place = StagePlace(
            group, alone, group, 2, number == 0, number == 1, torch.device("cpu"), torch.float32
        )
        made.append(MegatronStage(MODEL, BATCH, MICRO_BATCHES, place, setting, TRAINING, overlap))
        made[-1].load({
            name if "." not in name else f"{int(name.split('.')[0]) % 2}.{name.partition('.')[2]}": weight
            for name, weight in weights.items()
            if "." not in name or int(name.split(".")[0]) // 2 == number
        })  # fmt: skip
    return made


def data_of(stages, number):
    """Input and labels of a micro-batch on this rank."""
    ids = torch.randint(MODEL.vocabulary, (MODEL.sequence + 1, BATCH), generator=torch.Generator().manual_seed(number))
    return stages[0].rows(ids[:-1]), stages[1].rows(ids[1:])


def leaf(out):
    """What the next chunk takes."""
    return out[0].detach().requires_grad_()


def plain(stages):
    """Micro-batch by micro-batch; results of all."""
    found = []
    for number in range(MICRO_BATCHES):
        x, labels = data_of(stages, number)
        first = stages[0].forward(x)
        between = leaf(first)
        last = stages[1].forward(between, labels)
        stages[1].backward(last)
        stages[0].backward(first, between.grad)
        found += [last[0].detach(), first[1].detach(), last[1].detach()]
    return found


def combined(stages):
    """Each forward but the first beside a backward: of the other chunk, and once of the same one."""
    found, before = [], None
    for number in range(MICRO_BATCHES):
        x, labels = data_of(stages, number)
        if before is None:
            first = stages[0].forward(x)
            between = leaf(first)
            last = stages[1].forward(between, labels)
        elif number == 1:
            first = stages[0].forward_beside_backward(x, None, stages[1], before[2])
            between = leaf(first)
            last = stages[1].forward_beside_backward(between, labels, stages[0], before[0], before[1].grad)
        else:
            first = stages[0].forward(x)
            between = leaf(first)
            last = stages[1].forward_beside_backward(between, labels, stages[1], before[2])
            stages[0].backward(before[0], before[1].grad)
        before = first, between, last
        found += [last[0].detach(), first[1].detach(), last[1].detach()]
    stages[1].backward(before[2])
    stages[0].backward(before[0], before[1].grad)
    return found


def combined_steps_have_the_same_losses_and_gradients(group):
    """Of both chunks, summed over micro-batches: nothing but the order of work differs, and that of some sums."""
    wrong = []
    for setting in SETTINGS:
        if setting.tensor_parallel > 1 and group.size != 2 * setting.tensor_parallel:
            continue
        right = stages_of(group, setting, "none")
        wanted = plain(right)
        for overlap in ("combined", "delayed"):
            for run in (plain, combined):
                ours = stages_of(group, setting, overlap)
                pairs = list(zip(run(ours), wanted, strict=True))
                for own, other in zip(ours, right, strict=True):
                    pairs += zip(own.gradients, other.gradients, strict=True)
                far = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs)
                if not far < 1e-6:
                    wrong.append(f"{setting} {overlap} {run.__name__}: {far:.2g}")
        if not all(float(sums.abs().max()) > 0 for stage in right for sums in stage.gradients):
            wrong.append(f"{setting}: sums without gradients")
    return wrong
