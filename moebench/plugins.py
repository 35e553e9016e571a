"""Other people's systems are tried before anything depends on them: in a process of their own, under a time limit.

What raises is the affair of whoever calls; what ends a process or never returns can only be found out in another one.
A system that fails is `Unusable` from then on, and its cases say why.
"""

from collections.abc import Iterable

from moebench.cluster.blame import blame
from moebench.kernels.collectives.group import Group
from moebench.ranks.run import RanksError, run_ranks
from moebench.systems import registry
from moebench.systems.interface import supported
from moebench.systems.plugins import Unusable
from moebench.workloads.conventions import COMMON
from moebench.workloads.gates.registry import GATES, parse_label
from moebench.workloads.layer import LayerWorkload

LOAD_S = 60.0  # to be imported and to answer what a plan asks

_tried: set[tuple[str, str]] = set()


def vet(names: Iterable[str]) -> None:
    """Try those of some systems that come from other packages, each once in this process."""
    for name in dict.fromkeys(map(registry.stem_of, names)):
        package = registry.package_of(name)
        if package is None or (name, package) in _tried:
            continue
        _tried.add((name, package))
        try:
            [reason] = run_ranks(f"{__name__}:problem_of", 1, (name,), LOAD_S)
        except RanksError as error:
            reason = f"loading it, or asking what it supports, failed: {blame(str(error)).reason}"
        if reason is not None:
            registry.refuse(name, reason)


def problem_of(group: Group, name: str) -> str | None:
    """Why a system can't be used, or None: it is loaded and asked what every plan asks, about every gate."""
    system = registry.get(name)
    if isinstance(system, Unusable):
        return system.reason
    for label in GATES:
        gate = parse_label(label)
        workload = LayerWorkload(gate, 1, 16, 64, 64, 64)
        try:
            for conventions in (COMMON, registry.conventions_of(system, gate, "as-shipped")):
                supported(system, workload, conventions)
        except Exception as error:
            return f"asked about gate {label}: {type(error).__name__}: {error}"
    return None


def forget() -> None:
    """Try all of them again."""
    _tried.clear()
