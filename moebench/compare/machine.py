"""What of an environment makes two machines the same to a clock, and what else may move a measured time."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from moebench.compare.escape import plain
from moebench.compare.side import Machine


def machine_of(environment: Mapping[str, Any]) -> Machine:
    """The machine of a run's environment; drivers and kernels are updates of the same one."""
    gpus = [str(gpu).rpartition(",")[0] or str(gpu) for gpu in environment.get("gpus") or ()]
    facts = {
        "cpu": environment.get("cpu") or "unknown processor",
        "cores": environment.get("cores"),
        "architecture": environment.get("machine"),
        "system": str(environment.get("system") or "").partition(" ")[0],
        "gpus": "; ".join(gpus),
    }
    return _machine(facts)


def machine_of_pytest(info: Mapping[str, Any]) -> Machine:
    """The machine of a pytest-benchmark file; its host name tells no two alike machines apart."""
    cpu = info.get("cpu")
    cpu = cpu if isinstance(cpu, Mapping) else {}
    facts = {
        "cpu": cpu.get("brand_raw") or info.get("processor") or "unknown processor",
        "cores": cpu.get("count"),
        "architecture": info.get("machine"),
        "system": info.get("system"),
    }
    return _machine(facts)


def versions_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """Versions that may move a measured time without a change of the code."""
    packages = environment.get("packages")
    packages = packages if isinstance(packages, Mapping) else {}
    found = {"python": environment.get("python"), "system": environment.get("system")}
    found |= {name: packages.get(name) for name in ("torch", "triton", "numpy")}
    gpus = environment.get("gpus") or ()
    found |= {"driver": str(gpus[0]).rpartition(",")[2].strip()} if gpus else {}
    variables = environment.get("variables")
    found |= variables if isinstance(variables, Mapping) else {}
    return {plain(str(name), 60): plain(str(value), 80) for name, value in found.items() if value}


def slug_of(machine: Machine) -> str:
    """A file name for it: readable, and apart from every other machine's."""
    words = re.sub(r"[^a-z0-9]+", "-", machine.title.lower()).strip("-")[:60].strip("-")
    digest = hashlib.sha256(json.dumps(dict(machine.facts), sort_keys=True).encode()).hexdigest()[:8]
    return f"{words}-{digest}"


def _machine(facts: Mapping[str, Any]) -> Machine:
    return Machine({name: plain(str(value), 120) for name, value in facts.items() if value})
