"""Every implementation of the layout transform and its inverse against the definitions, and what else each promises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.registry import KERNELS
from tests.kernels.support import assert_matches, assert_same_operators, expert_ids, random

D = 3
LAYOUTS = KERNELS["layout"].implementations
INVERSES = KERNELS["layout_inverse"].implementations
FAST = sorted(LAYOUTS.keys() - {"reference"})
SPARSE = sorted(set(FAST) - {"deepspeed"})
EXPERTS = torch.tensor([[0, 2], [2, 1], [2, 0], [-1, 2]])
POSITIONS = torch.tensor([[0, 2], [0, 0], [1, 1], [-1, 3]])


@st.composite
def routings(draw):
    """(experts, positions, E, C): dropped and absent routes, empty and crowded experts, no tokens."""
    ids, num_experts = draw(expert_ids())
    order = draw(st.sampled_from(("choice-major", "token-major")))
    return *(ids, assign_slots(ids, num_experts, order)[0]), num_experts, draw(st.integers(1, 8))


@pytest.mark.parametrize("name", FAST)
@given(routing=routings())
def test_layout_equals_the_definition(name, routing):
    """Slots and the tokens' gradient are those of one copy a route, in float64."""
    x = random(routing[0].shape[0], D)
    assert_matches(lambda x: LAYOUTS[name](x, *routing), lambda x: LAYOUTS["reference"](x, *routing), x)


@pytest.mark.parametrize("name", FAST)
@given(routing=routings())
def test_inverse_equals_the_definition(name, routing):
    """Tokens, and the gradients of outputs and weights, are those of one multiply-add a route, in float64."""
    experts, positions, num_experts, capacity = routing
    y, weights = random(num_experts, capacity, D), random(*experts.shape)
    assert_matches(
        lambda y, w: INVERSES[name](y, experts, positions, w),
        lambda y, w: INVERSES["reference"](y, experts, positions, w),
        y,
        weights,
    )


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(name, dtype):
    """A dispatched token is the token, bit for bit; combining rounds a few times at most. Results have y's dtype."""
    x = torch.randn(4, 70).to(dtype)
    slots = LAYOUTS[name](x, EXPERTS, POSITIONS, 3, 3)
    assert torch.equal(slots, LAYOUTS["reference"](x, EXPERTS, POSITIONS, 3, 3))
    weights = torch.rand(4, 2)
    tokens = INVERSES[name](slots, EXPERTS, POSITIONS, weights)
    expected = INVERSES["reference"](slots.double(), EXPERTS, POSITIONS, weights.double())
    assert tokens.dtype == dtype
    error = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(tokens.double(), expected, rtol=error, atol=error)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(("experts", "positions"), [((3, 0), (0, -1)), ((2**40, -7), (1, 2)), ((1, 1), (3, 2**40))])
def test_routes_out_of_range_are_dropped(name, experts, positions):
    """An expert that does not exist, a negative position, a place beyond the slots: no address, nobody's slot."""
    ids, places = torch.tensor([[0, 1], experts]), torch.tensor([[0, 0], positions])
    x, y, weights = random(2, D, grad=False), random(3, 3, D, grad=False), random(2, 2, grad=False)
    clean = torch.tensor([[0, 1], [-1, -1]])
    none = torch.tensor([[0, 0], [-1, -1]])
    torch.testing.assert_close(LAYOUTS[name](x, ids, places, 3, 3), LAYOUTS[name](x, clean, none, 3, 3))
    torch.testing.assert_close(INVERSES[name](y, ids, places, weights), INVERSES[name](y, clean, none, weights))


@pytest.mark.parametrize("name", SPARSE)
def test_what_nobody_uses_is_not_read(name):
    """NaN in unused slots and in weights of dropped routes reaches no token and no gradient; einsums promise less."""
    y = random(3, 3, D, grad=False)
    used = INVERSES["reference"](torch.ones(3, 3, 1), EXPERTS, POSITIONS, torch.ones(4, 2))
    assert float(used.sum()) == 6
    slots = LAYOUTS["reference"](torch.ones(4, 1), EXPERTS, POSITIONS, 3, 3) > 0
    y = y.masked_fill(~slots, float("nan")).requires_grad_()
    weights = random(4, 2, grad=False)
    weights[3] = float("nan")
    weights.requires_grad_()
    out = INVERSES[name](y, EXPERTS, POSITIONS, weights)
    out.sum().backward()
    for tensor in (out, y.grad, weights.grad):
        assert bool(tensor.isfinite().all())
    assert not y.grad[~slots.expand_as(y)].any()
    assert not weights.grad[3].any()


@pytest.mark.parametrize("name", FAST)
def test_slots_that_need_not_be_zero(name):
    """Without `zero_unused` the used slots are the same; gradients never look at the others."""
    x = random(4, D)
    slots = LAYOUTS["reference"](torch.ones(4, 1), EXPERTS, POSITIONS, 3, 3).bool().expand(3, 3, D)
    out = LAYOUTS[name](x, EXPERTS, POSITIONS, 3, 3, zero_unused=False)
    expected = LAYOUTS["reference"](x, EXPERTS, POSITIONS, 3, 3)
    assert torch.equal(out[slots], expected[slots])
    upstream = torch.ones_like(out)
    if name in SPARSE:
        upstream = upstream.masked_fill(~slots, float("nan"))
    (grad,) = torch.autograd.grad(out, x, upstream)
    assert grad.tolist() == [[2.0] * D, [2.0] * D, [2.0] * D, [0.0] * D]


@pytest.mark.parametrize("name", FAST)
def test_non_contiguous_inputs_and_gradients(name):
    """Transposed data, ids and weights, and expanded gradients, give the result of contiguous ones."""
    experts, positions = EXPERTS.t().contiguous().t(), POSITIONS.t().contiguous().t()
    x, y, weights = random(D, 4).t(), random(D, 3, 3).permute(1, 2, 0), random(2, 4).t()
    assert_same = torch.testing.assert_close
    assert_same(LAYOUTS[name](x, experts, positions, 3, 3), LAYOUTS["reference"](x, EXPERTS, POSITIONS, 3, 3))
    upstream = torch.ones((), dtype=torch.float64).expand(4, D)
    results = []
    for function, ids, places in ((INVERSES[name], experts, positions), (INVERSES["reference"], EXPERTS, POSITIONS)):
        out = function(y, ids, places, weights)
        results.append((out, *torch.autograd.grad(out, (y, weights), upstream)))
    assert_same(*results)


@pytest.mark.parametrize("name", FAST)
def test_the_same_bits_twice(name):
    """Nothing depends on the run."""
    x, weights = torch.randn(4, 64), torch.rand(4, 2)
    first, again = (
        INVERSES[name](LAYOUTS[name](x, EXPERTS, POSITIONS, 3, 3), EXPERTS, POSITIONS, weights) for _ in range(2)
    )
    assert torch.equal(first, again)


@pytest.mark.parametrize("name", FAST)
def test_work_under_a_graph_compiler(name):
    """One graph, forward and backward, whose results are those of eager mode."""

    def program(x, weights):
        slots = LAYOUTS[name](x, EXPERTS, POSITIONS, 3, 3)
        return INVERSES[name](slots * 2.0, EXPERTS, POSITIONS, weights)

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert_matches(compiled, program, random(4, D), random(4, 2))


@pytest.mark.parametrize("name", FAST)
def test_run_the_same_operators_on_meta(name):
    """CPU and meta agree for the whole way there and back, forward and backward."""

    def program(x, weights, experts, positions):
        return INVERSES[name](LAYOUTS[name](x, experts, positions, 3, 3) * 2.0, experts, positions, weights)

    assert_same_operators(program, random(4, D), random(4, 2), EXPERTS, POSITIONS)


def test_the_einsums_cost_what_deepspeed_says():
    """10 T E C D FLOPs forward and backward: dispatch 2 and 2, combine 2 and 4; the masks' own do not depend on D."""

    def flops(d_model):
        x, weights = random(4, d_model), random(4, 2)
        with FlopCounterMode(display=False) as counter:
            slots = LAYOUTS["deepspeed"](x, EXPERTS, POSITIONS, 3, 3)
            INVERSES["deepspeed"](slots, EXPERTS, POSITIONS, weights).sum().backward()
        return counter.get_total_flops()

    assert flops(50) - flops(10) == 10 * 4 * 3 * 3 * 40


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_bad_input_to_layout(name):
    """What has no meaning raises one clear ValueError; no slots are an error where there are tokens."""
    function, x = LAYOUTS[name], torch.zeros(4, D)
    with pytest.raises(ValueError, match="capacity must be at least 1; got 0"):
        function(x, EXPERTS, POSITIONS, 3, 0)
    with pytest.raises(ValueError, match="num_experts must be at least 1; got 0"):
        function(x, EXPERTS, POSITIONS, 0, 3)
    with pytest.raises(ValueError, match="experts must be an int64 tensor"):
        function(x, EXPERTS.int(), POSITIONS, 3, 3)
    with pytest.raises(ValueError, match=r"positions must have shape \[4, 2\] to fit experts; got \[4, 1\]"):
        function(x, EXPERTS, POSITIONS[:, :1], 3, 3)
    with pytest.raises(ValueError, match=r"experts must have shape \[5, 2\] to fit the tokens of x; got \[4, 2\]"):
        function(torch.zeros(5, D), EXPERTS, POSITIONS, 3, 3)
    with pytest.raises(ValueError, match="must share a device"):
        function(x, EXPERTS.to("meta"), POSITIONS.to("meta"), 3, 3)
    with pytest.raises(ValueError, match="the number of choices must be at least 1; got 0"):
        function(x, EXPERTS[:, :0], POSITIONS[:, :0], 3, 3)
    assert function(x[:0], EXPERTS[:0], POSITIONS[:0], 3, 0).shape == (3, 0, D)


@pytest.mark.parametrize("name", sorted(INVERSES))
def test_bad_input_to_the_inverse(name):
    """What has no meaning raises one clear ValueError."""
    function, y, weights = INVERSES[name], torch.zeros(3, 3, D), torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"weights must have shape \[4, 2\] to fit experts; got \[4, 1\]"):
        function(y, EXPERTS, POSITIONS, weights[:, :1])
    with pytest.raises(ValueError, match="weights must be a floating-point tensor"):
        function(y, EXPERTS, POSITIONS, weights.long())
    with pytest.raises(ValueError, match=r"y must be a floating-point tensor \[E, C, D\]"):
        function(y[0], EXPERTS, POSITIONS, weights)
    with pytest.raises(ValueError, match="capacity must be at least 1; got 0"):
        function(y[:, :0], EXPERTS, POSITIONS, weights)
    assert function(y[:, :0], EXPERTS[:0], POSITIONS[:0], weights[:0]).shape == (0, D)
