"""Which systems run whole models: an explicit list.

A name may carry options, `lancet+moves=false`, `moesys+stage=3`, `tutel+degree=4`.
"""

from collections.abc import Mapping
from functools import cache

from moebench.systems.in_model import InModel
from moebench.systems.interface import System
from moebench.systems.lancet.system import LANCET, RAF, LancetSystem
from moebench.systems.model_interface import ModelSystem
from moebench.systems.moesys.model_system import MOESYS, MoESysModel
from moebench.systems.registry import get as get_layer
from moebench.systems.registry import options_of, stem_of
from moebench.workloads.errors import InputError, one_of

_SOURCES = {
    "tutel": "Tutel 0.3 in GPT-2, torch DistributedDataParallel (Lancet's artifact)",
    "deepspeed": "DeepSpeed 0.5.8 in GPT-2, ZeRO stage 0: sums behind the backward (Lancet's artifact)",
}
_STAGE_2 = "DeepSpeed in GPT-2, ZeRO stage 2 with overlap_comm: gradients and states divided, sums beside the backward"
_OVERLAPS = {"tutel": True, "deepspeed": False}
_WITH_OPTIONS: Mapping[str, LancetSystem | MoESysModel] = {LANCET.name: LANCET, MOESYS.name: MOESYS}
NAMES = (LANCET.name, RAF.name, *_SOURCES, MOESYS.name)


@cache
def get(name: str) -> ModelSystem:
    """The system of a name, or of a name with options.

    Raises:
        InputError: unknown name or option; lists the valid ones.
    """
    stem = stem_of(name)
    if stem in _SOURCES:
        zero = [pair for pair in name.split("+")[1:] if pair.startswith("zero=")]
        layer = get_layer("+".join(part for part in name.split("+") if part not in zero))
        if stem == "deepspeed" and zero:
            return _deepspeed(name, layer, zero)
        if not zero:
            return InModel(layer.name, f"{layer.title} in the model", _SOURCES[stem], layer, _OVERLAPS[stem])
    if stem not in NAMES:
        raise one_of("system for models", stem, NAMES)
    if name == RAF.name:
        return RAF
    if stem not in _WITH_OPTIONS:
        raise InputError(f"system {name!r}: {stem} has no options")
    options = options_of(name)
    return _WITH_OPTIONS[stem].variant(options) if options else _WITH_OPTIONS[stem]


def _deepspeed(name: str, layer: System, zero: list[str]) -> ModelSystem:
    if zero != ["zero=2"]:
        raise InputError(f"system {name!r}: zero=2 divides gradients and states; without it they are on every rank")
    return InModel(name, f"{layer.title}, ZeRO-2", _STAGE_2, layer, True, divides=True)


def reference() -> ModelSystem:
    """The system that defines what is right: the graph as it was captured."""
    return RAF
