"""A ranked setting as `moebench run` has it: every layer traced, ranks compared, parts of the step told apart."""

from moebench.case import Case
from moebench.planner.estimate import Values
from moebench.planner.search import Ranked
from moebench.planner.space import Question, Setting
from moebench.sim.job import JobTime, composed
from moebench.trace.job import traced
from moebench.workloads.job import JobWorkload


def job_case(question: Question, setting: Setting) -> Case:
    """The setting as a case of an experiment of jobs."""
    layout, topology = setting.layout, question.topology
    workload = JobWorkload(
        question.decoder.name, question.decoder, layout.stages, layout.global_batch, layout.micro_batch, layout.chunks,
        dtype=question.dtype,
    )  # fmt: skip
    size = f"{topology.nodes}x{topology.gpus_per_node}"
    return Case("planner", "plan", setting.system, workload, topology.name, size, "sim")


def exactly(question: Question, setting: Setting, values: Values) -> JobTime:
    """The step of a setting, nothing carried on from stages of few layers.

    Raises:
        Unsupported: as `moebench.trace.job.traced`.
    """
    return composed(traced(job_case(question, setting), question.topology), setting.layout, question.topology, values)


def deviation(ranked: Ranked, found: JobTime) -> float:
    """How far the ranked time is from it, nominally, as a share."""
    return abs(ranked.time_s / float(found.timeline.time_s[0]) - 1)
