"""A run of a few cases of a suite on the fake engine, and one figure of it."""

from dataclasses import replace

from moebench.cases.plan import Filters
from moebench.figures.gather import gather
from moebench.run import begin, execute, prepare
from moebench.workloads.figure import PaperFigure
from tests.moebench.fake_engine import Watch
from tests.moebench.suites import small_overall

SAMPLES = 8
TRIO = ("deepspeed", "deepspeed_sparse", "hetumoe")


def suite_of(**figure):
    """Step times of three systems, with the default node type alone and one figure."""
    suite = replace(small_overall(), samples=SAMPLES)
    drawn = {"name": "one", "title": "One", "experiment": "overall", "value": "metric", "x": "batch_size"} | figure
    return replace(suite, figures=(PaperFigure(**drawn),))


def run_of(suite, path, **filters):
    """A finished run of a suite."""
    job = begin(prepare(suite, Filters(quick=True, **filters), "sim"), path)
    execute(job, Watch())
    return job.folder


def drawing_of(suite, folder=None):
    """The only figure of a suite."""
    (found,) = gather(suite, folder)
    return found
