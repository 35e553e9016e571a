"""ortools' constraint solver, imported when it is first needed, deterministic and without a hand on Ctrl-C."""

from typing import Any

from moebench.workloads.errors import InputError


def solver_module() -> Any:
    """`ortools.sat.python.cp_model`.

    Raises:
        InputError: ortools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise InputError("Lancet's exact programs need ortools, which is not installed: pip install ortools") from error
    return cp_model


def new_solver() -> Any:
    """A solver on one thread, so that equal models have equal answers.

    By itself ortools takes SIGINT while it solves and leaves the system's default behind, so that the next Ctrl-C
    would end the process at once instead of raising KeyboardInterrupt.
    """
    solver = solver_module().CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False
    return solver
