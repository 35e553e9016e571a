"""A run beside a baseline: which of the baseline's machines is the base."""

from moebench.compare.baseline import machines_of, read_baseline
from moebench.compare.comparison import Comparison, compare
from moebench.compare.rules import Rules
from moebench.compare.side import Side


def check(run: Side, rules: Rules, name: str, across_machines: bool = False) -> Comparison:
    """The comparison of a run with the baseline of a name.

    Raises:
        InputError: there is no such baseline, or nothing in it is comparable.
    """
    base = read_baseline(rules.baselines, name, run.machine)
    others = []
    if run.machine is not None and base.machine is None:
        others = machines_of(rules.baselines, name)
        if others and across_machines:
            base = read_baseline(rules.baselines, name, others[0])
    found = compare(base, run, rules, across_machines)
    if run.machine is not None and base.machine is None:
        there = "; it has some of: " + "; ".join(machine.title for machine in others) if others else ""
        found.notes.append(f"the baseline has no samples of this machine ({run.machine.title}){there}")
    return found
