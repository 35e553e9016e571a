"""What is said of a plan in the terminal and in reports alike."""

from moebench.planner.search import Plan, Ranked
from moebench.workloads.models.mfu import flops_per_token


def mfu(plan: Plan, one: Ranked) -> float:
    """As the paper of the job's experiments counts it."""
    topology = plan.question.topology
    peak = topology.hardware.parameters[f"gpu.peak.{plan.question.dtype}"].value
    return plan.tokens / one.time_s * flops_per_token(plan.question.decoder) / (topology.ranks * peak)


def options_of(name: str, has_system: bool) -> str:
    """A system's options in words; the ranks of a layer are told elsewhere."""
    stem, *pairs = name.split("+")
    pairs = [pair for pair in pairs if not pair.startswith("ranks=")]
    return " ".join([stem, *pairs] if has_system else pairs) or "defaults"
