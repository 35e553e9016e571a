"""The suite smoke against its committed baseline: FLOPs, bytes, launches, messages, memory and simulated time, exactly.

Where a change was meant, accept it and commit the file: `moebench run --suite smoke --out RUN`, then
`moebench accept RUN --baseline smoke`. Where the cost model was changed, raise `moebench.sim.COST_MODEL` first.
"""

from importlib.metadata import version
from pathlib import Path

from moebench.cases.plan import Filters
from moebench.compare.cells import cells
from moebench.compare.check import check
from moebench.compare.read import read_side
from moebench.compare.rules import load_rules
from moebench.run import begin, execute, prepare
from moebench.workloads.load import load_suite
from tests.moebench.fake_engine import Watch, check_cases

ROOT = Path(__file__).parent.parent


def test_nothing_costs_more_than_was_accepted(tmp_path):
    """Every case of the suite; what another torch explains is re-based, and then nothing else is asked."""
    job = begin(prepare(load_suite("smoke"), Filters()), tmp_path / "run")
    # Whether the systems are right is asked in tests/moebench/checks; here it is what they cost.
    execute(job, Watch(), check=check_cases)
    found = check(read_side(tmp_path / "run"), load_rules(ROOT / "moebench.toml"), "smoke")
    told = "\n".join("  ".join(cells(f)) for f in found.findings if f.gates and f.verdict != "same")
    assert found.exit_status() == 0, f"{told[:4000]}\n{__doc__}"
    stored = {case.torch for case in found.base.cases.values()}
    if stored == {version("torch").partition("+")[0]}:
        assert found.exit_status(strict=True) == 0, told[:4000]
        assert found.counts["same"] >= 700
