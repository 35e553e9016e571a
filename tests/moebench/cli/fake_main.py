"""`moebench` on the fake engine, as a process of its own: `python -m tests.moebench.cli.fake_main run ...`.

FAKE_PAUSE_S makes each case take that long, so that a test can interrupt it.
"""

import os
import sys
import time
from types import SimpleNamespace

import moebench.run
from moebench.cli import main
from tests.moebench import fake_engine


def run_cases(cases, topologies, suite, jobs=1):
    """The fake engine, slowed down."""
    for rows in fake_engine.run_cases(cases, topologies, suite, jobs):
        time.sleep(float(os.environ.get("FAKE_PAUSE_S", "0")))
        yield rows


if __name__ == "__main__":
    sys.modules["moebench.tests_slow_engine"] = SimpleNamespace(run_cases=run_cases)
    moebench.run.ENGINES.update(sim="moebench.tests_slow_engine")
    sys.modules["moebench.checks.correctness"] = SimpleNamespace(check_cases=fake_engine.check_cases)
    html = SimpleNamespace(write_report=lambda folder, path, **_: path.write_text("<html></html>"))
    sys.modules["moebench.report.html"] = html
    main()
