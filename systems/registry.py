"""Which systems there are: an explicit list, and other people's (moebench.systems.plugins).

A name may carry options, `tutel+degree=4`: such variants are made when asked for and not listed.
"""

from functools import cache

from moebench.systems import plugins
from moebench.systems.deepspeed import DEEPSPEED
from moebench.systems.deepspeed_sparse import DEEPSPEED_SPARSE
from moebench.systems.fastermoe import FASTERMOE
from moebench.systems.fastmoe import FASTMOE
from moebench.systems.hetumoe import HETUMOE, HETUMOE_2D, HETUMOE_LEADER
from moebench.systems.interface import Configurable, System
from moebench.systems.megatron.system import MEGATRON, MEGATRON_ALLGATHER
from moebench.systems.plugins import Plugin, Unusable
from moebench.systems.reference import REFERENCE
from moebench.systems.tutel.system import TUTEL
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.layer import GateSpec

BUILT_IN: tuple[System, ...] = (
    *(REFERENCE, DEEPSPEED, DEEPSPEED_SPARSE),
    *(HETUMOE, HETUMOE_LEADER, HETUMOE_2D),
    *(FASTMOE, FASTERMOE, TUTEL),
    *(MEGATRON, MEGATRON_ALLGATHER),
)
_OWN = {system.name: system for system in BUILT_IN}
_loaded: dict[str, System] = {}  # of other packages


def names() -> tuple[str, ...]:
    """Every system's name, built-in ones first; nothing of another package is imported for it."""
    return (*_OWN, *_declared()[0])


def systems() -> dict[str, System]:
    """Every system by name, built-in ones first; other people's are loaded, and may be `Unusable`."""
    return {name: get(name) for name in names()}


def get(name: str) -> System:
    """The system of a name, or of a name with options; another package's may be `Unusable`.

    Raises:
        InputError: unknown name or option; lists the valid ones.
    """
    stem = stem_of(name)
    system = _OWN[stem] if stem in _OWN else _other(stem)
    if isinstance(system, Unusable):
        return Unusable(name, system.package, system.reason)
    if name == stem:
        return system
    if not isinstance(system, Configurable):
        raise InputError(f"system {name!r}: {stem} has no options")
    return system.variant(options_of(name))


def stem_of(name: str) -> str:
    """The name of a variant without its options."""
    return name.split("+")[0]


def options_of(name: str) -> dict[str, str]:
    """The options in the name of a variant, as text.

    Raises:
        InputError: one without a value, or twice.
    """
    options: dict[str, str] = {}
    for pair in name.split("+")[1:]:
        option, equals, value = pair.partition("=")
        if not equals or option in options:
            raise InputError(f"system {name!r}: write each option once, as +name=value, not {pair!r}")
        options[option] = value
    return options


def own_names() -> tuple[str, ...]:
    """Names that are moebench's own: of systems for layers, for whole models, and for training jobs."""
    from moebench.systems import job_registry, model_registry  # which builds on this module

    return tuple(dict.fromkeys((*_OWN, *model_registry.NAMES, *job_registry.NAMES)))


def packages() -> dict[str, str]:
    """Whose each system of another package is, by its name."""
    return {name: plugin.package for name, plugin in _declared()[0].items()}


def package_of(name: str) -> str | None:
    """Whose a system is, options or not; None for moebench's own and for names that nobody has."""
    plugin = _declared()[0].get(stem_of(name))
    return None if plugin is None else plugin.package


def misnamed() -> tuple[Unusable, ...]:
    """Systems of other packages that can't be asked for: their names are taken, or no names."""
    return _declared()[1]


def refuse(name: str, reason: str) -> None:
    """From now on a system of another package is `Unusable`."""
    plugin = _declared()[0][stem_of(name)]
    _loaded[stem_of(name)] = Unusable(stem_of(name), plugin.package, reason)


def forget() -> None:
    """Look anew for other people's systems at the next question."""
    _declared.cache_clear()
    _loaded.clear()


def reference() -> System:
    """The system that defines what is right."""
    return REFERENCE


def conventions_of(system: System, gate: GateSpec, name: str) -> Conventions:
    """The conventions of a case by name: `common`, or the system's own `as-shipped`.

    Raises:
        InputError: another name.
        TypeError: what the system gives for its own is something else.
    """
    if name not in ("common", "as-shipped"):
        raise one_of("conventions", name, ("common", "as-shipped"))
    if name == "common":
        return COMMON
    found = system.as_shipped(gate)
    if not isinstance(found, Conventions):
        raise TypeError(f"as_shipped of {system.name} gives {found!r}, which are no Conventions")
    return found


@cache
def _declared() -> tuple[dict[str, Plugin | Unusable], tuple[Unusable, ...]]:
    return plugins.declared(own_names)


def _other(name: str) -> System:
    """Another package's system, loaded once."""
    declared = _declared()[0]
    if name not in declared:
        raise one_of("system", name, names())
    if name not in _loaded:
        plugin = declared[name]
        _loaded[name] = plugin.load() if isinstance(plugin, Plugin) else plugin
    return _loaded[name]
