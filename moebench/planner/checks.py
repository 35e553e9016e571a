"""Correct before fast: no setting is ranked before its system's settings train a small model as one rank does."""

from collections.abc import Mapping, Sequence

from moebench.cases.case import Case
from moebench.checks.correctness import Status
from moebench.checks.jobs import LAYOUT, MODEL, check
from moebench.systems.job_registry import get
from moebench.workloads.job import JobWorkload

SIZE = f"{LAYOUT.world // LAYOUT.node_ranks}x{LAYOUT.node_ranks}"


def trial_names(systems: Sequence[str]) -> list[str]:
    """What is tried of systems: all options that a planner would choose from on nodes as small as the trial's."""
    found: list[str] = []
    for name in systems:
        found += [get(name).name] if "+" in name else get(name).settings(MODEL, LAYOUT.node_ranks)
    return list(dict.fromkeys(found))


def checked(systems: Sequence[str]) -> Status:
    """The first one that is wrong or failed of what is tried of systems, with its name; else `passed`.

    Options that need more ranks than the trial has (experts on eight) are tried on those that it has; where a system
    has nothing that can be tried, it is `unsupported`.
    """
    statuses = checked_apart(systems)
    return next((one for one in statuses if one.status not in ("passed", "unsupported")), None) or next(
        (one for one in statuses if one.status == "unsupported"), Status("passed")
    )


def checked_apart(systems: Sequence[str]) -> list[Status]:
    """As `checked`, of each system; they share a start of the ranks."""
    names = {system: trial_names([system]) for system in systems}
    every = list(dict.fromkeys(name for own in names.values() for name in own))
    workload = JobWorkload(MODEL.name, MODEL, LAYOUT.stages, LAYOUT.global_batch, LAYOUT.micro_batch)
    cases = [Case("planner", "check", name, workload, SIZE, SIZE, "sim") for name in every]
    found = dict(zip(every, check(cases), strict=True))
    return [_joined({name: found[name] for name in names[system]}) for system in systems]


def _joined(found: Mapping[str, Status]) -> Status:
    """Of all that is tried of a system."""
    for name, status in found.items():
        if status.status not in ("passed", "unsupported"):
            return Status(status.status, f"{name}: {status.reason}", status.report)
    if all(status.status == "unsupported" for status in found.values()):
        name, status = next(iter(found.items()))
        return Status("unsupported", f"{name}: {status.reason}")
    return Status("passed")
