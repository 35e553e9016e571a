import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.cost import Product
from moebench.sim.cost import LIMITS, Machine, compute_time_s, op_costs, share_at, tiled_flops
from moebench.sim.uncertainty import draw, nominal
from moebench.workloads.errors import InputError
from tests.moebench.sim.sim_machines import ProgramBuilder, curve, hardware, uncertain

dimension = st.integers(1, 5000)


def time_of(write, hw=None):
    """Nominal device seconds of the one operator that `write(builder)` adds."""
    hw = hw or hardware()
    builder = ProgramBuilder()
    write(builder)
    return float(compute_time_s(builder.ops[0], hw, nominal(hw.parameters))[0])


def test_a_large_product_runs_at_its_share_of_the_peak():
    """Three-parameter law: FLOPs over share of peak, plus the fixed cost."""
    flops = 2 * 4096**3
    assert time_of(lambda b: b.product(4096, 4096, 4096)) == pytest.approx(flops / (16e12 * 0.8) + 5e-6)


def test_a_skinny_product_is_bound_by_memory():
    """Bytes over share of bandwidth, where that takes longer."""
    moved = (32768 * 2048 + 2048 * 16 + 32768 * 16) * 4
    assert time_of(lambda b: b.product(32768, 16, 2048)) == pytest.approx(moved / (600e9 * 0.7) + 5e-6)


def test_a_dtype_has_its_own_peak_and_share():
    """`gpu.peak.fp16` and `gpu.product.compute_share.fp16` price fp16 products only."""
    hw = hardware(gpu__product__compute_share__fp16=0.5)
    flops = 2 * 8192**3
    assert time_of(lambda b: b.product(8192, 8192, 8192, dtype="fp16"), hw) == pytest.approx(flops / 50e12 + 5e-6)
    assert time_of(lambda b: b.product(8192, 8192, 8192), hw) == pytest.approx(flops / (16e12 * 0.8) + 5e-6)


def test_a_product_curve_replaces_the_share():
    """Share of the peak by FLOPs, geometric between points."""
    hw = hardware(curves={"product.fp32": curve((1e9, 0.4), (1e11, 0.8))})
    flops = 2 * 2048 * 2048 * 1192  # 1e10
    expected = flops / (16e12 * 0.32**0.5) + 5e-6
    assert time_of(lambda b: b.product(2048, 2048, 1192), hw) == pytest.approx(expected, rel=1e-4)


def test_memory_operators_follow_the_curve_of_their_kind():
    """Bytes over bandwidth, efficiency by size, and the kind's factor; kinds without a curve use `memory`."""
    hw = hardware(curves={"memory": curve((1e6, 0.5), (1e8, 0.9))}, gpu__efficiency__pointwise=0.5)
    assert time_of(lambda b: b.pointwise(10**7), hw) == pytest.approx(1e7 / (600e9 * 0.45**0.5 * 0.5) + 3e-6)


def test_nothing_to_do_takes_no_device_time():
    """Views, waits, host reads and empty tensors run no kernel."""
    assert time_of(lambda b: b.view()) == 0
    assert time_of(lambda b: b.read()) == 0
    assert time_of(lambda b: b.pointwise(0)) == 0
    assert time_of(lambda b: b.product(0, 0, 5)) == 0


def test_several_products_of_one_operator_add_up():
    """A fused operator's products are priced one by one."""
    parts = (Product(4096, 4096, 4096), Product(2048, 4096, 4096))
    flops = sum(p.flops for p in parts)
    time = time_of(lambda b: b.add("moebench::ffn", "product", flops=flops, bytes_read=8, products=parts))
    assert time == pytest.approx(flops / (16e12 * 0.8) + 5e-6)


def test_a_product_that_states_flops_only_is_priced_by_them():
    """Attention declares FLOPs without a matrix shape."""
    assert time_of(lambda b: b.add("moebench::attention", "product", flops=10**12)) == pytest.approx(
        1e12 / (16e12 * 0.8) + 5e-6
    )


def test_issue_costs_by_kind():
    """The host pays by what it issues."""
    hw, builder = hardware(), ProgramBuilder()
    builder.pointwise(8)
    builder.view()
    builder.add("moebench::permute", "gather", bytes_read=8)
    builder.read()
    issue = op_costs(builder.ops, Machine(hw, nominal(hw.parameters))).issue_s[:, 0]
    assert issue.tolist() == [6e-6, 2e-6, 30e-6, 15e-6]


def test_limits_name_what_bounds_an_operator():
    """Compute, memory, the fixed cost, or nothing."""
    hw, builder = hardware(), ProgramBuilder()
    builder.product(4096, 4096, 4096)
    builder.pointwise(10**9)
    builder.pointwise(8)
    builder.view()
    limits = op_costs(builder.ops, Machine(hw, nominal(hw.parameters))).limits
    assert [LIMITS[i] for i in limits] == ["compute", "memory", "fixed", "none"]


def test_a_missing_parameter_names_itself_and_its_kind():
    """A GPU without bf16 says so."""
    with pytest.raises(InputError, match=r"gpu\.peak\.bf16 is missing.*gpu\.peak\.fp16, gpu\.peak\.fp32"):
        time_of(lambda b: b.product(64, 64, 64, dtype="bf16"))


@given(dimension, dimension, dimension, st.integers(1, 8), st.sampled_from([0, 72, 132]))
def test_whole_tiles_take_no_less_than_the_product(m, n, k, batch, sms):
    """Quantisation only adds work, and four times as much covers shapes of at least one tile and one wave."""
    product = Product(m, n, k, batch)
    busy = float(tiled_flops([product], max(1, sms))[0])
    assert busy >= product.flops * (1 - 1e-12)
    waves = batch * m * n / (128 * 128 * max(1, sms))
    if min(m, n) >= 128 and k >= 64 and waves >= 1:
        assert busy <= 8 * product.flops


def test_tiles_that_leave_most_of_the_gpu_idle_cost_more():
    """73 tiles on 72 SMs need two waves; a large product none to speak of."""
    full, one_more = tiled_flops([Product(128 * 72, 128, 64), Product(128 * 73, 128, 64)], 72)
    assert one_more / full > 1.3
    large = Product(8192, 8192, 8192)
    assert float(tiled_flops([large], 72)[0]) < 1.1 * large.flops


@pytest.mark.parametrize("shape", [(1, 2048, 4), (1, 4, 2048), (4, 2048, 1), (2048, 1, 2048)])
def test_products_with_vectors_are_bound_by_memory(shape):
    """32,768 small ones of a weighted sum a token are not padded to tiles: their bytes take longer than their FLOPs."""
    m, n, k = shape
    product = Product(m, n, k, 32768)
    assert tiled_flops([product], 72)[0] == product.flops
    moved = 32768 * (m * k + k * n + m * n) * 4
    assert time_of(lambda b: b.product(m, n, k, 32768)) == pytest.approx(moved / (600e9 * 0.7) + 5e-6)
    assert tiled_flops([Product(2, 2048, 4, 32768)], 72)[0] > 2 * product.flops


def test_a_long_k_is_split_over_idle_sms():
    """The weight gradient of a narrow product [D, T] x [T, E] has few tiles, so libraries split T."""
    gradient = Product(2048, 16, 32768)
    assert float(tiled_flops([gradient], 72)[0]) < 6 * gradient.flops


@given(dimension, dimension, st.integers(1, 20_000), st.integers(1, 64), st.integers(1, 132))
def test_a_longer_k_is_never_faster(m, n, k, more, sms):
    """Splitting k, allowed from a length on, makes no step down there: 512 is not half of 511."""
    shorter, longer = tiled_flops([Product(m, n, k), Product(m, n, k + more)], sms)
    assert longer >= shorter
    assert tiled_flops([Product(64, 64, 512)], 72) >= tiled_flops([Product(64, 64, 511)], 72)


@given(dimension, dimension, dimension, dimension)
def test_more_work_is_never_faster(m, n, k, more):
    """Growing a product or an element-wise operator never shortens it."""
    hw = hardware(gpu__sms=72.0, curves={"memory": curve((1e5, 0.1), (1e6, 0.5), (1e8, 0.9))})
    base = time_of(lambda b: b.product(m, n, k), hw) * (1 - 1e-9)
    for larger in ((m + more, n, k), (m, n + more, k), (m, n, k + more)):
        assert time_of(lambda b, shape=larger: b.product(*shape), hw) >= base
    assert time_of(lambda b: b.pointwise((m + more) * 100), hw) >= time_of(lambda b: b.pointwise(m * 100), hw) - 1e-15


def test_draws_are_priced_as_each_alone():
    """Vectorised over draws equals one draw at a time."""
    hw = hardware(
        gpu__memory__bandwidth=uncertain(600e9, 400e9, 700e9), gpu__product__fixed=uncertain(5e-6, 1e-6, 9e-6)
    )
    builder = ProgramBuilder()
    builder.product(512, 512, 512)
    builder.pointwise(10**7)
    values = draw(hw.parameters, 20, 0)
    together = op_costs(builder.ops, Machine(hw, values)).device_s
    for i in range(21):
        alone = op_costs(builder.ops, Machine(hw, {name: v[i : i + 1] for name, v in values.items()})).device_s
        assert np.array_equal(together[:, i : i + 1], alone)


def test_curves_are_flat_outside_their_points():
    """No extrapolation beyond what was measured."""
    found = share_at(curve((1e3, 0.2), (1e5, 0.6)), np.array([1.0, 1e3, 1e4, 1e5, 1e9]))
    assert found == pytest.approx([0.2, 0.2, 0.12**0.5, 0.6, 0.6])
