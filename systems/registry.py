"""Which systems there are: an explicit list, and other people's from the entry-point group `moebench.systems`.

A name may carry options, `tutel+degree=4`: such variants are made when asked for and not listed.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from moebench.systems.deepspeed import DEEPSPEED
from moebench.systems.deepspeed_sparse import DEEPSPEED_SPARSE
from moebench.systems.fastermoe import FASTERMOE
from moebench.systems.fastmoe import FASTMOE
from moebench.systems.hetumoe import HETUMOE, HETUMOE_2D, HETUMOE_LEADER
from moebench.systems.interface import Configurable, System
from moebench.systems.megatron.system import MEGATRON, MEGATRON_ALLGATHER
from moebench.systems.reference import REFERENCE
from moebench.systems.tutel.system import TUTEL
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.layer import GateSpec

ENTRY_POINTS = "moebench.systems"
BUILT_IN: tuple[System, ...] = (
    *(REFERENCE, DEEPSPEED, DEEPSPEED_SPARSE),
    *(HETUMOE, HETUMOE_LEADER, HETUMOE_2D),
    *(FASTMOE, FASTERMOE, TUTEL),
    *(MEGATRON, MEGATRON_ALLGATHER),
)


@cache
def systems() -> dict[str, System]:
    """Every system by name, built-in ones first.

    Raises:
        InputError: two systems of one name, or an entry point that gives no system.
    """
    found: dict[str, System] = {}
    origin: dict[str, str] = {}
    plugins = sorted(entry_points(group=ENTRY_POINTS), key=lambda point: (point.name, point.value))
    for system, place in [*((system, "moebench") for system in BUILT_IN), *((_load(p), p.value) for p in plugins)]:
        if system.name in found:
            raise InputError(f"two systems are named {system.name!r}: one of {origin[system.name]}, one of {place}")
        found[system.name], origin[system.name] = system, place
    return found


def get(name: str) -> System:
    """The system of a name, or of a name with options.

    Raises:
        InputError: unknown name or option; lists the valid ones.
    """
    found = systems()
    stem, *pairs = name.split("+")
    if stem not in found:
        raise one_of("system", stem, found)
    system = found[stem]
    if not pairs:
        return system
    if not isinstance(system, Configurable):
        raise InputError(f"system {name!r}: {stem} has no options")
    options: dict[str, str] = {}
    for pair in pairs:
        option, equals, value = pair.partition("=")
        if not equals or option in options:
            raise InputError(f"system {name!r}: write each option once, as +name=value, not {pair!r}")
        options[option] = value
    return system.variant(options)


def stem_of(name: str) -> str:
    """The name of a variant without its options."""
    return name.split("+")[0]


def reference() -> System:
    """The system that defines what is right."""
    return REFERENCE


def conventions_of(system: System, gate: GateSpec, name: str) -> Conventions:
    """The conventions of a case by name: `common`, or the system's own `as-shipped`.

    Raises:
        InputError: another name.
    """
    if name not in ("common", "as-shipped"):
        raise one_of("conventions", name, ("common", "as-shipped"))
    return COMMON if name == "common" else system.as_shipped(gate)


def _load(point: EntryPoint) -> System:
    """A plugin's system: an instance, or a class without arguments."""
    where = f"entry point {point.name} = {point.value} of {ENTRY_POINTS}"
    try:
        loaded = point.load()
        system = loaded() if isinstance(loaded, type) else loaded
    except Exception as error:
        raise InputError(f"{where} can't be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(system, System):
        missing = [name for name in ("name", "title", "source", "supports", "as_shipped", "build")
                   if not hasattr(system, name)]
        raise InputError(f"{where} is not a system; it lacks {', '.join(missing)}")
    return system
