"""Generation with experts over all ranks, as parts: in two systems' layers, and with experts that lie in host memory.

A call is a prompt of every sequence and the tokens behind it. With experts elsewhere it begins with the first layers in
their slots, as the call before left them, and ends when they are there again: nothing is ahead of a series of calls.

R ranks, E experts, C slots of each (source rank, expert), K choices a token.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moebench.kernels.host import Answer, answering
from moebench.kernels.region import region
from moebench.systems.in_model import LayerInModel, load
from moebench.systems.moesys.copies import Copies
from moebench.systems.moesys.generation_check import logits_by_definition
from moebench.systems.moesys.hiding import LayerTimes, layer_s, pass_ends_s, synchronous_s
from moebench.systems.moesys.offload import slots_of
from moebench.systems.moesys.offloaded_model import Offload, layout_of, offloaded
from moebench.systems.part_interface import PartCall, Setting, far, number, parsed
from moebench.systems.registry import get as get_layer
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec
from moebench.workloads.model import shape_of as shape_of_model
from moebench.workloads.models.generate import Generation
from moebench.workloads.models.gpt2_moe import GPT2MoE
from moebench.workloads.models.shape import GPT2MoEShape
from moebench.workloads.part import PartWorkload

DEFAULT_SLOTS = 2  # the fewest in which a copy can run beside compute
MIB = 1 << 20
CLOSE = 1e-5  # routers work in FP32 whatever the rest does
_PROMPT = 7


def generation(setting: Setting) -> PartCall:
    """One call on this rank; the part's system says whose layers, or where the experts are."""
    workload, group, seed = setting.workload, setting.group, setting.workload.seed
    shape = shape_of(workload, group.size)
    offload = offload_of(workload, setting.system, group.size)
    copies: Copies | None = None
    if offload is None:
        model = _model(setting, shape)
    else:
        model, copies = offloaded(shape, group, setting.device, setting.dtype, seed, offload)
    prompt, tokens = workload.size("prompt"), workload.size("generated")
    has_scores = parsed(workload.part, setting.system)[1].get("attention") == "scores"
    generator = Generation(model, shape.batch_size, prompt + tokens - 1, has_scores)
    ids_BS = _prompt(setting, shape)

    def run() -> tuple[Tensor, Tensor]:
        found = generator.run(ids_BS, tokens)
        if copies is not None:
            with region("experts"):
                for slot in range(len(copies.slots)):
                    copies.wait_on_host(slot)
        return found

    def wrong(found: tuple[Tensor, Tensor]) -> str | None:
        return _wrong(setting, shape, ids_BS, *found)

    persistent = (*model.parameters(), *generator.kept, ids_BS, *(() if copies is None else copies.slots))
    reads = _reads(workload, shape, group.size) if setting.is_meta else None
    if reads is not None and offload is not None and offload.way == "chosen":
        with answering(reads):
            run()  # so that what is there is what a call before left
    return PartCall(run, wrong, persistent, reads)


def shape_of(workload: PartWorkload, ranks: int) -> GPT2MoEShape:
    """The model on so many ranks, with a rank's prompts as its batch.

    Raises:
        InputError: no such model, or an option that it can't have.
    """
    top_k = workload.size("top_k")
    gate = GateSpec("switch") if top_k == 1 else GateSpec("topk", top_k)
    shape = shape_of_model(workload.model, gate, workload.size("sequences"), ranks)
    factor = workload.size("capacity_percent") / 100
    return replace(shape, sequence=workload.size("prompt"), capacity_factor=factor)


def problem(workload: PartWorkload, system: str, ranks: int) -> str | None:
    """Why it has no meaning on so many ranks."""
    for name in ("sequences", "prompt", "generated", "top_k", "capacity_percent"):
        if workload.size(name) < 1:
            return f"{name} = {workload.size(name)}: must be at least 1"
    shape = shape_of(workload, ranks)
    positions = workload.size("prompt") + workload.size("generated") - 1
    if positions > shape.positions:
        return f"prompt and generated need {positions} positions, model {workload.model} has {shape.positions}"
    reason = shape.problem(ranks) or replace(shape, sequence=1).problem(ranks)
    if reason is not None:
        return reason
    return None


def check_options(workload: PartWorkload, system: str, ranks: int) -> None:
    """Refuse slots or a limit that can't be.

    Raises:
        InputError: as `offload_of`.
    """
    if shape_of(workload, ranks).problem(ranks) is None:
        offload_of(workload, system, ranks)


def offload_of(workload: PartWorkload, system: str, ranks: int) -> Offload | None:
    """Where a system has its experts; None: where the model computes.

    Raises:
        InputError: slots of none or of more than there are, a limit below one layer (of `chosen`: one expert), or both.
    """
    stem, options = parsed(workload.part, system)
    if workload.part == "generation" or stem == "no-offload":
        return None
    layout = layout_of(shape_of(workload, ranks), ranks, torch_dtype(workload.dtype))
    slots = number(options, "slots") if "slots" in options else None
    keep = number(options, "keep")
    limit = number(options, "limit_mib") * MIB if "limit_mib" in options else None
    if slots is None and limit is None:
        slots = {"synchronous": 1, "chosen": layout.experts}.get(stem, min(DEFAULT_SLOTS, layout.layers))
    try:
        count = slots_of(layout, "ring" if stem == "moesys" else stem, slots, limit, keep)
    except InputError as error:
        raise InputError(f"system {system!r} of model {workload.model}: {error}") from None
    return Offload(stem, count, keep)


def small_system(system: str) -> str:
    """One that does the same in a model of four layers: one slot, two, or more of them; layers that stay, or none."""
    stem, *pairs = system.split("+")
    options = dict(pair.split("=") for pair in pairs)
    if "limit_mib" in options:
        return stem
    if int(options.get("keep", 0)):
        return f"{stem}+slots=3+keep=1"
    return f"{stem}+slots={min(3, int(options['slots']))}" if "slots" in options else stem


def burden(workload: PartWorkload, system: str, ranks: int) -> tuple[float, float]:
    """Bytes that a rank holds in FP32, and FLOPs of its tokens."""
    shape = shape_of(workload, ranks)
    tokens = workload.size("sequences") * (workload.size("prompt") + workload.size("generated") - 1)
    of_token = shape.shared_parameters + len(shape.moe_blocks) * shape.gate.top_k * shape.expert_parameters
    return 4.0 * shape.parameters(ranks), 2.0 * tokens * of_token


def by_formula(
    workload: PartWorkload, system: str, ranks: int, compute_s: float, experts_s: float, copying_s: float
) -> float | None:
    """Seconds of a call by systems/moesys/hiding.py; None where it says nothing.

    Args:
        compute_s: of the call, copies aside. experts_s: of that in experts. copying_s: of all copies one by one.
    """
    offload = offload_of(workload, system, ranks)
    if offload is None or offload.way == "chosen":
        return None
    layers, passes = len(shape_of(workload, ranks).moe_blocks), workload.size("generated")
    if offload.slots == layers:
        return compute_s
    copied = layers - offload.keep
    times = LayerTimes(
        (compute_s - experts_s) / layers / passes, experts_s / layers / passes, copying_s / copied / passes
    )
    if offload.way == "synchronous":
        return synchronous_s(times) * layers * passes
    if offload.keep:
        ends = pass_ends_s(times, layers, offload.slots, 40, offload.keep)
        return (ends[-1] - ends[19]) / 20 * passes
    return layer_s(times, layers, offload.slots) * layers * passes


def _model(setting: Setting, shape: GPT2MoEShape) -> GPT2MoE:
    """With all experts where it computes, in MoESys' own layers or in those of another system."""
    group, seed, where = setting.group, setting.workload.seed, (setting.device, setting.dtype)
    plain = GPT2MoE(shape, group, *where, seed)
    stem = parsed(setting.workload.part, setting.system)[0]
    if stem != "deepspeed":
        return plain
    system = get_layer(stem)
    model = GPT2MoE(shape, group, *where, seed, lambda *of_model: LayerInModel(system, *of_model))
    if not setting.is_meta:
        load(model, plain)
    return model.eval()


def _prompt(setting: Setting, shape: GPT2MoEShape) -> Tensor:
    sizes = (shape.batch_size, setting.workload.size("prompt"))
    if setting.is_meta:
        return torch.empty(sizes, dtype=torch.int64, device=setting.device)
    generator = torch.Generator().manual_seed((setting.workload.seed + 1) * 1009 + _PROMPT + setting.group.index)
    return torch.randint(shape.vocabulary, sizes, generator=generator).to(setting.device)


def _reads(workload: PartWorkload, shape: GPT2MoEShape, ranks: int) -> Answer:
    """How many rows the experts of the first rank get, where every route is as likely to any expert."""
    random, local = np.random.default_rng(workload.seed), shape.experts // ranks
    prompt, generated = workload.size("prompt"), workload.size("generated")
    sizes = [shape.batch_size * prompt, *[shape.batch_size] * (generated - 1)]
    asked = 0

    def answer(quantity: str, values: Tensor) -> list[int]:
        nonlocal asked
        tokens = sizes[asked // len(shape.moe_blocks) % len(sizes)]
        asked += 1
        capacity = shape.conventions.capacity(tokens, shape.experts, shape.gate.top_k, shape.capacity_factor)
        share = [1 / shape.experts] * shape.experts
        counts_RE = random.multinomial(tokens * shape.gate.top_k, share, size=ranks)
        return [int(one) for one in counts_RE[:, :local].clip(max=capacity).sum(0)]

    return answer


def _wrong(setting: Setting, shape: GPT2MoEShape, ids_BS: Tensor, tokens_BG: Tensor, logits_BV: Tensor) -> str | None:
    """Against the definition on one rank that has all experts, everything computed anew, given the same tokens."""
    wanted: Sequence[Tensor] = logits_by_definition(shape, setting.device, setting.workload.seed, ids_BS, tokens_BG)
    for place, wanted_BV in enumerate(wanted):
        chosen = wanted_BV.gather(1, tokens_BG[:, place : place + 1]).squeeze(1)
        if bool((wanted_BV.amax(1) - chosen > CLOSE * wanted_BV.abs().max()).any()):
            return f"token {place} is not the most probable one"
    return far("logits", logits_BV, wanted[-1], CLOSE)
