import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.sim.uncertainty import draw, influence, nominal
from tests.moebench.sim.sim_machines import exact, uncertain

positive = st.floats(1e-6, 1e12)


@given(st.lists(positive, min_size=3, max_size=3).map(sorted), st.integers(0, 200), st.integers(0, 5))
def test_draws_stay_in_their_range_and_start_with_the_nominal_value(points, samples, seed):
    """Index 0 is the value, everything else lies between low and high."""
    low, value, high = points
    drawn = draw({"a": uncertain(value, low, high)}, samples, seed)["a"]
    assert drawn.shape == (samples + 1,)
    assert drawn[0] == value
    assert (drawn >= low).all()
    assert (drawn <= high).all()


def test_half_of_the_draws_lie_on_either_side_of_the_value():
    """The hypercube puts equally many strata below and above the nominal value, however lopsided the range."""
    drawn = draw({"a": uncertain(2.0, 1.0, 100.0)}, 1000, 3)["a"][1:]
    assert (drawn < 2.0).sum() == 500


def test_a_positive_range_is_drawn_on_a_log_scale():
    """The median of the upper half is the geometric middle of value and high."""
    drawn = draw({"a": uncertain(1.0, 0.01, 100.0)}, 10_000, 0)["a"][1:]
    assert np.median(drawn[drawn > 1]) == pytest.approx(10, rel=0.01)


def test_every_stratum_is_drawn_once():
    """A Latin hypercube: n draws fall into n equal parts of the quantiles."""
    drawn = draw({"a": uncertain(0.5, 0.0, 1.0)}, 64, 7)["a"][1:]
    assert sorted((drawn * 64).astype(int)) == list(range(64))


def test_a_parameter_draws_the_same_whatever_stands_beside_it():
    """Streams are seeded by name, so that draw i is the same machine in every topology; names and seeds differ."""
    alone = draw({"a": uncertain(1.0, 0.5, 2.0)}, 32, 1)
    beside = draw({"b": uncertain(1.0, 0.5, 2.0), "a": uncertain(1.0, 0.5, 2.0)}, 32, 1)
    assert np.array_equal(alone["a"], beside["a"])
    assert not np.array_equal(beside["a"], beside["b"])
    assert not np.array_equal(alone["a"], draw({"a": uncertain(1.0, 0.5, 2.0)}, 32, 2)["a"])


def test_certain_parameters_are_constant():
    """A datasheet number is the same in every draw."""
    assert (draw({"a": exact(5.0)}, 10, 0)["a"] == 5.0).all()
    assert nominal({"a": uncertain(3.0, 1.0, 4.0)})["a"].tolist() == [3.0]


def test_negative_samples_are_refused():
    """There are at least no samples."""
    with pytest.raises(ValueError, match="negative"):
        draw({}, -1, 0)


def test_influence_finds_the_parameter_that_moves_the_outcome():
    """A monotone function of one parameter has rank correlation 1 with it, and next to none with others."""
    parameters = {"a": uncertain(1.0, 0.1, 10.0), "b": uncertain(1.0, 0.1, 10.0), "c": exact(1.0)}
    values = draw(parameters, 500, 0)
    found = influence(parameters, values, -(values["b"] ** 3))
    assert list(found) == ["b", "a"]
    assert found["b"] == pytest.approx(-1)
    assert abs(found["a"]) < 0.2


def test_nothing_moves_a_constant():
    """No parameter is blamed where the outcome doesn't change."""
    parameters = {"a": uncertain(1.0, 0.1, 10.0)}
    assert influence(parameters, draw(parameters, 50, 0), np.ones(51)) == {}


def test_a_call_that_is_issued_ahead_costs_no_host_on_a_gpu():
    """A kernel's time is the device's; on a CPU issuing it is part of it, and of a layer everywhere."""
    from dataclasses import replace

    from moebench.sim.uncertainty import seen_by
    from moebench.workloads.kernel import KernelWorkload
    from moebench.workloads.layer import GateSpec, LayerWorkload
    from moebench.workloads.load import load_topology

    gpu = load_topology("1x1-titan-rtx").hardware
    values = draw(gpu.parameters, 4, 0)
    kernel, layer = KernelWorkload("topk", 8, experts=2, top_k=1), LayerWorkload(GateSpec("switch"), 1, 8, 8, 8, 2)
    ahead = seen_by(kernel, gpu, values)
    assert all(not ahead[name].any() for name in values if name.startswith("host.issue."))
    assert all((ahead[name] == values[name]).all() for name in values if not name.startswith("host.issue."))
    assert seen_by(layer, gpu, values) is values
    assert seen_by(kernel, replace(gpu, kind="cpu"), values) is values
