"""What is missing of a reported step: products as long as another claim has them, stages that wait for a longer one."""

from types import SimpleNamespace

import pandas as pd

from moebench.report.job_gap import PRODUCTS, SLOWER, STEP, _products, by_case
from moebench.report.job_view import _uneven

CASE, OTHER = "jobs/a/4x8-h800/x", "jobs/b/4x8-h800/x"


def rows(*found):
    """Of case, metric, value, detail."""
    return pd.DataFrame(found, columns=["case", "metric", "value", "detail"])


def test_steps_with_longer_products_are_in_proportion_to_what_was_replayed():
    """A quarter longer is half of the way to half as long again; the factor is the system's on that node type."""
    own = rows((CASE, STEP, 10.0, {}), (CASE, SLOWER, 13.0, {"times": 1.5}), (CASE, PRODUCTS, 6.0, {}))
    step = SimpleNamespace(
        claim=SimpleNamespace(system="x", id="paper-step"), case=CASE, node_type="h800", reported_s=12.5
    )
    (table,) = _products([step], own, {("x", "h800"): (1.25, "paper-products")})
    assert table.rows == [["paper-step", "1.25x", "paper-products", "12.5", "10.0", "11.5", "20 %", "8 %"]]
    assert _products([step], own, {("x", "a100"): (1.25, "paper-products")}) == []
    assert by_case(own, SLOWER) == {}


def test_only_a_bubble_that_is_mostly_a_wait_for_a_longer_stage_is_listed():
    """Shares of all stages' time."""
    own = rows(
        (CASE, "bubble", 0.12, {}), (CASE, "bubble_uneven", 0.07, {}),
        (OTHER, "bubble", 0.3, {}), (OTHER, "bubble_uneven", 0.07, {}),
    )  # fmt: skip
    (table,) = _uneven(own)
    assert table.rows == [[CASE, "12 %", "7 %"]]
    assert _uneven(own[own["case"] == OTHER]) == []
