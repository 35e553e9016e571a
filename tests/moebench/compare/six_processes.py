"""The `local` engine with six processes of four blocks a point: an engine by module name, as moebench.run takes one."""

from moebench.local import engine


def run_cases(cases, topologies, suite, jobs=1):
    """As the engine's own, of which only these numbers are others."""
    return engine.run_cases(cases, topologies, suite, jobs, processes=6, blocks=4, threads=1)
