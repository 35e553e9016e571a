"""`lancet` and `raf` as systems: the same captured graph and the same executor, passes on or off.

    lancet+parts=false+moves=true+fuses=true+sums=true+most_parts=8+groups=5+longest=0+full_experts=false

`parts`: the forward in parts; `moves`: weight gradients under all-to-alls; `sums`: gradient sums into gaps; `fuses`:
sums joined. `longest` groups of a range at most, 0 for the default: as far as from one MoE layer to the next.
`full_experts`: believe that experts take their full time in every part, as the artifact's cost model does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.systems.lancet.capture import StepGraph, capture
from moebench.systems.lancet.gradient_sync import with_gradient_sync
from moebench.systems.lancet.optimise import Optimised, Passes, charging_full_experts, optimise
from moebench.systems.lancet.partition import Limits
from moebench.systems.lancet.plan import Plan, plan_of
from moebench.systems.lancet.profile import planned_once
from moebench.systems.lancet.schedule import Switches
from moebench.systems.lancet.training import PlannedStep
from moebench.systems.model_interface import ModelStep, Place
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.models.gpt2_moe import GPT2MoE
from moebench.workloads.models.shape import GPT2MoEShape

_SOURCE = "Lancet, arXiv 2404.19429; awslabs artifact 2c31f36"


def sample_data(shape: GPT2MoEShape, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids [B, S] and those that follow them, seeded; on meta nothing is drawn."""
    ids_BS = torch.empty(shape.batch_size, shape.sequence + 1, dtype=torch.int64, device=device)
    if device.type != "meta":
        generator = torch.Generator().manual_seed(seed)
        ids_BS = torch.randint(shape.vocabulary, ids_BS.shape, generator=generator).to(device)
    return ids_BS[:, :-1].contiguous(), ids_BS[:, 1:].contiguous()


class GraphSystem:
    """Runs a captured graph as it is: RAF, the compiler that Lancet's passes were written for."""

    is_profiled = False

    def __init__(self, name: str = "raf", title: str = "RAF (Lancet's passes off)") -> None:
        self.name, self.title, self.source = name, title, _SOURCE

    def supports(self, shape: GPT2MoEShape, ranks: int) -> str | None:
        """None, or why the model has no meaning, or how it trains is no part of a captured graph."""
        if shape.optimizer != "sgd" or shape.recompute or shape.clip_norm:
            return "a captured graph trains with sgd, recomputes nothing and clips nothing"
        return shape.problem(ranks)

    def build(self, shape: GPT2MoEShape, place: Place, seed: int = 0, learning_rate: float = 0.0) -> ModelStep:
        """The step of this rank; where ranks are real the first one captures and plans, the others load."""
        model = GPT2MoE(shape, place.group, place.device, seed=seed)
        plan, planned = self._planned(model, shape, place)
        step = PlannedStep(model, plan, place.group, learning_rate)
        names = [name for name, _ in model.named_parameters()]

        def gradients() -> dict[str, Tensor]:
            return {name: p.grad for name, p in zip(names, model.parameters()) if p.grad is not None}

        return ModelStep(step, list(model.parameters()), gradients, planned)

    def _planned(self, model: GPT2MoE, shape: GPT2MoEShape, place: Place) -> tuple[Plan, Optimised | None]:
        return planned_once(place.group, lambda: (plan_of(self._captured(model, shape, place).graph), None))

    def _captured(self, model: GPT2MoE, shape: GPT2MoEShape, place: Place) -> StepGraph:
        """The graph of a rank; nothing is computed, whatever the model lies on."""
        place.tell("capture")
        if place.device.type == "meta":
            return _on_paper(shape, place.group)
        return with_gradient_sync(capture(model, sample_data(shape, place.device)), place.group)


@lru_cache(maxsize=2)  # graphs are never changed, and a shape is asked for by one system and machine after another
def _on_paper(shape: GPT2MoEShape, group: Group) -> StepGraph:
    model = GPT2MoE(shape, group, "meta")
    return with_gradient_sync(capture(model, sample_data(shape, torch.device("meta"))), group)


@dataclass(frozen=True)
class LancetOptions:
    """What a name may say; see above."""

    passes: Passes = field(default_factory=Passes)
    full_experts: bool = False


class LancetSystem(GraphSystem):
    """The graph behind Lancet's passes."""

    is_profiled = True

    def __init__(self, options: LancetOptions | None = None, name: str = "lancet") -> None:
        super().__init__(name, "Lancet" + name.removeprefix("lancet").replace("+", " "))
        self.options = options or LancetOptions()

    def variant(self, options: Mapping[str, str]) -> "LancetSystem":
        """The system with options.

        Raises:
            InputError: an option that it does not have, or a value that it refuses.
        """
        name = "lancet" + "".join(f"+{key}={text}" for key, text in options.items())
        found = LancetOptions()
        for key, text in options.items():
            if key not in _OPTIONS:
                raise one_of("option of lancet", key, _OPTIONS)
            read, change = _OPTIONS[key]
            found = change(found, read(key, text))
        return LancetSystem(found, name)

    def _planned(self, model: GPT2MoE, shape: GPT2MoEShape, place: Place) -> tuple[Plan, Optimised | None]:
        if place.profile is None:
            raise InputError("lancet plans by what things cost where it runs: give a profile")
        profile = place.profile(model, sample_data(shape, place.device), place.group)
        passes = replace(self.options.passes, memory_bytes=place.memory_bytes)
        expecting = charging_full_experts(profile) if self.options.full_experts else profile

        def plan() -> tuple[Plan, Optimised]:
            done = optimise(self._captured(model, shape, place), expecting, passes, place.tell)
            return plan_of(done.step.graph), done

        return planned_once(place.group, plan, getattr(profile, "serve", None))


def _switch(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise one_of(f"{key} of lancet", text, ("true", "false"))
    return text == "true"


def _count(key: str, text: str) -> int:
    if not text.isdecimal():
        raise InputError(f"lancet+{key}={text}: write a whole number")
    return int(text)


def _of_backward(name: str) -> Callable[[LancetOptions, bool], LancetOptions]:
    def change(options: LancetOptions, value: bool) -> LancetOptions:
        backward: Switches = replace(options.passes.backward, **{name: value})
        return replace(options, passes=replace(options.passes, backward=backward))

    return change


def _of_limits(name: str) -> Callable[[LancetOptions, int], LancetOptions]:
    def change(options: LancetOptions, value: int) -> LancetOptions:
        changes: dict[str, Any] = {name: value or None}
        limits: Limits = replace(options.passes.limits, **changes)
        return replace(options, passes=replace(options.passes, limits=limits))

    return change


_OPTIONS: Mapping[str, tuple[Callable[[str, str], bool | int], Callable[..., LancetOptions]]] = {
    "full_experts": (_switch, lambda options, value: replace(options, full_experts=value)),
    "parts": (_switch, lambda options, value: replace(options, passes=replace(options.passes, partitions=value))),
    "moves": (_switch, _of_backward("moves_weight_gradients")),
    "sums": (_switch, _of_backward("moves_sums")),
    "fuses": (_switch, _of_backward("fuses_sums")),
    "most_parts": (_count, _of_limits("most_parts")),
    "groups": (_count, _of_limits("groups_between")),
    "longest": (_count, _of_limits("longest")),
}
RAF, LANCET = GraphSystem(), LancetSystem()

