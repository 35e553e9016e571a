"""Which systems run whole models: an explicit list.

A name may carry options, `lancet+moves=false`, `tutel+degree=4`.
"""

from functools import cache

from moebench.systems.in_model import InModel
from moebench.systems.lancet.system import LANCET, RAF
from moebench.systems.model_interface import ModelSystem
from moebench.systems.registry import get as get_layer
from moebench.systems.registry import stem_of
from moebench.workloads.errors import InputError, one_of

_SOURCES = {
    "tutel": "Tutel 0.3 in GPT-2, torch DistributedDataParallel (Lancet's artifact)",
    "deepspeed": "DeepSpeed 0.5.8 in GPT-2, ZeRO stage 0: sums behind the backward (Lancet's artifact)",
}
_OVERLAPS = {"tutel": True, "deepspeed": False}
NAMES = (LANCET.name, RAF.name, *_SOURCES)


@cache
def get(name: str) -> ModelSystem:
    """The system of a name, or of a name with options.

    Raises:
        InputError: unknown name or option; lists the valid ones.
    """
    stem = stem_of(name)
    if stem in _SOURCES:
        return InModel(get_layer(name), _SOURCES[stem], _OVERLAPS[stem])
    if stem not in NAMES:
        raise one_of("system for models", stem, NAMES)
    if name == stem:
        return LANCET if stem == LANCET.name else RAF
    if stem != LANCET.name:
        raise InputError(f"system {name!r}: {stem} has no options")
    options: dict[str, str] = {}
    for pair in name.split("+")[1:]:
        option, equals, value = pair.partition("=")
        if not equals or option in options:
            raise InputError(f"system {name!r}: write each option once, as +name=value, not {pair!r}")
        options[option] = value
    return LANCET.variant(options)


def reference() -> ModelSystem:
    """The system that defines what is right: the graph as it was captured."""
    return RAF
