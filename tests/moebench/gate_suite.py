"""A small experiment of routing rules for tests: one evaluates otherwise, one has a schedule, one neither."""

from dataclasses import replace
from functools import cache

from moebench.cases.plan import Filters, plan
from moebench.workloads.gates.registry import gate
from tests.moebench.suites import of_kind

RULES = (gate("switch"), gate("base"), gate("dense-to-sparse"))
IN_TRAINING = {"dense-to-sparse": gate("dense-to-sparse", dense_steps=2, decay_steps=2, hard_after=4)}
STEPS = 8


@cache
def small():
    """The experiment of the hetu suite with these rules, few tokens and steps."""
    suite = of_kind("hetu", "gate")
    (experiment,) = suite.experiments
    training = replace(experiment.training, steps=STEPS, tokens=64)
    own = replace(experiment, gates=RULES, tokens=256, experts=8, training=training, in_training=IN_TRAINING)
    return replace(suite, experiments=(own,))


def case_of(label, system="reference", **changes):
    """One of its cases, perhaps with another workload."""
    cases = plan(small(), Filters(gates=(label,), systems=(system,)))
    return replace(cases[0], workload=replace(cases[0].workload, **changes))
