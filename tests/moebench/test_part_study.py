"""What compression does to numbers, on real ranks."""

import pytest

from moebench.cases.case import Case
from moebench.part_study import REPLICAS, expected, rows_of
from moebench.workloads.part import PARTS, workload_of


def values(part, system, **sizes):
    """By metric, and what tells rows of one metric apart."""
    case = Case("s", "e", system, workload_of(part, sizes), "1x8-h800", "1x8", "count")
    assert expected(case) == (expected(case)[0], "")
    rows = rows_of(case, "h800")
    return {(row.metric, *row.detail.values()): row.value for row in rows} | {row.metric: row.value for row in rows}


@pytest.mark.parametrize("replicas", REPLICAS)
def test_only_the_rings_errors_grow_with_replicas(replicas):
    """FP32 has next to none; one rounding a replica adds up as the root, a rounding a hop faster."""
    of_way = {way: values("gradient-error", way, parameters=2000) for way in PARTS["gradient-error"].systems}
    errors = {way: found["error", replicas] for way, found in of_way.items()}
    assert errors["fp32-reduce-scatter"] < 1e-6
    assert 1e-4 < errors["bf16-all-to-all"] < errors["bf16-ring"] < 2e-2
    growth = of_way["bf16-ring"]["error", REPLICAS[-1]] / of_way["bf16-ring"]["error", REPLICAS[0]]
    assert growth > 1.5
    assert of_way["bf16-all-to-all"]["largest_error", replicas] <= 2**-8


def test_fp8_rows_are_further_off_than_bf16_ones_and_within_a_sixteenth():
    """Sums of terms, each off by a sixteenth at most; gradients are off once, BF16's not at all."""
    bf16, fp8 = (values("row-error", way, tokens=256, d_model=64) for way in PARTS["row-error"].systems)
    assert bf16["error"] < fp8["error"] < 1 / 16
    assert bf16["gradient_error"] == 0 < fp8["gradient_error"] < 1 / 16
    assert fp8["gradient_largest_error"] <= 1 / 16 + 2**-8


def test_a_training_is_compared_with_the_one_in_fp32():
    """Step by step; FP32 differs from itself by nothing, and two runs that mean the same by next to nothing."""
    exact, compressed = (values("training", way, steps=3) for way in ("fp32-reduce-scatter", "bf16-all-to-all"))
    assert exact["deviation"] == 0 < compressed["deviation"] < 0.01
    assert exact["control_deviation"] < 1e-5
    assert exact["loss", 1] == compressed["loss", 1]
    assert {key[1] for key in exact if key[0] == "loss" and len(key) == 2} == {1, 2, 3}
    assert values("training", "bf16-ring", steps=0)["deviation"] == 0


def test_a_training_with_parameters_in_fp8_is_compared_with_the_one_in_bf16():
    """Their first loss is the same, as masters begin alike; later ones are further off than two BF16 runs' are."""
    wide, narrow = (values("parameter-training", way, steps=5) for way in PARTS["parameter-training"].systems)
    assert wide["deviation"] == 0 < wide["control_deviation"] < narrow["deviation"] < 0.1
    assert wide["loss", 1] == narrow["loss", 1]
