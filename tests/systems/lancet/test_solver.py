"""ortools, as Lancet's exact programs use it."""

import signal
import subprocess
import sys
import textwrap

from moebench.systems.lancet.solver import new_solver, solver_module


def test_ctrl_c_still_raises_after_a_solve():
    """ortools by default leaves a SIGINT behind that ends the process at once."""
    script = """
        import os, signal
        from moebench.systems.lancet.solver import new_solver, solver_module
        signal.signal(signal.SIGINT, signal.default_int_handler)
        new_solver().Solve(solver_module().CpModel())
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("raised")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "raised\n"), done.stderr


def test_a_solver_is_deterministic():
    """One worker; the model's optimum."""
    model = solver_module().CpModel()
    number = model.NewIntVar(0, 7, "number")
    model.Maximize(3 * number)
    solver, before = new_solver(), signal.getsignal(signal.SIGINT)
    solver.Solve(model)
    assert solver.parameters.num_workers == 1
    assert solver.ObjectiveValue() == 21
    assert signal.getsignal(signal.SIGINT) is before
