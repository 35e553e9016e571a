"""Which systems train decoders in parallel: an explicit list. A name may carry options, `megascale+overlap=none`."""

from functools import cache
from typing import Any

from moebench.systems.job_interface import JobSystem
from moebench.systems.megascale.system import MEGASCALE
from moebench.systems.megatron.job import MEGATRON_0_10, MEGATRON_MODERN
from moebench.systems.registry import options_of, stem_of
from moebench.workloads.errors import InputError, one_of

_OWN: dict[str, Any] = {system.name: system for system in (MEGASCALE, MEGATRON_0_10, MEGATRON_MODERN)}
NAMES = tuple(_OWN)


@cache
def get(name: str) -> JobSystem:
    """The system of a name, or of a name with options (systems that have some have `variant`).

    Raises:
        InputError: unknown name or option; lists the valid ones.
    """
    stem = stem_of(name)
    if stem not in _OWN:
        raise one_of("system for jobs", stem, NAMES)
    system = _OWN[stem]
    if name == stem:
        return system
    if not hasattr(system, "variant"):
        raise InputError(f"system {name!r}: {stem} has no options")
    return system.variant(options_of(name))
