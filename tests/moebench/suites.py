"""Suites cut down for a test."""

from dataclasses import replace

from moebench.workloads.load import load_suite


def of_kind(name, kind):
    """The suite of a name with its experiments of one kind alone."""
    suite = load_suite(name)
    experiments = tuple(e for e in suite.experiments if e.kind == kind)
    names = {e.name for e in experiments}
    figures = tuple(f for f in suite.figures if f.not_drawn or f.experiment in names)
    return replace(suite, experiments=experiments, figures=figures)


def small_overall():
    """Step times of HetuMoE's suite with three of its systems and gates: a few hundred cases."""
    suite = load_suite("hetu")
    (whole,) = (e for e in suite.experiments if e.name == "overall")
    gates = tuple(gate for gate in whole.gates if gate.label in ("switch", "gshard", "topk-4"))
    systems = ("deepspeed", "deepspeed_sparse", "hetumoe")
    return replace(suite, experiments=(replace(whole, systems=systems, gates=gates),), figures=())
