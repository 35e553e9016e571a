"""The experts' activation as one operator: definition, dtypes, strides, opcheck, costs, errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.activation import ACTIVATIONS, activate, activate_reference
from moebench.kernels.cost import declared_cost
from tests.kernels.support import OperatorList, assert_matches, assert_same_operators, random

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def form(function, activation, weighted):
    """The function on (h, weights if weighted, h3 if gated)."""

    def call(h, *rest):
        return function(h, activation, rest[-1] if activation == "swiglu" else None, rest[0] if weighted else None)

    return call


def inputs(activation, weighted, rows, columns, dtype=torch.float64, weights_dtype=torch.float64):
    """(h, weights if weighted, h3 if gated)."""
    weights = (random(rows, dtype=weights_dtype),) if weighted else ()
    return random(rows, columns, dtype=dtype), *weights, *(
        (random(rows, columns, dtype=dtype),) if activation == "swiglu" else ()
    )


@given(
    rows=st.integers(0, 5), columns=st.integers(0, 5), activation=st.sampled_from(ACTIVATIONS), weighted=st.booleans()
)
def test_equals_the_definition(rows, columns, activation, weighted):
    """Rows and the gradients of h, h3 and weights, in float64, without rows and columns too."""
    assert_matches(
        form(activate, activation, weighted), form(activate_reference, activation, weighted),
        *inputs(activation, weighted, rows, columns),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weights_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_dtypes_is_within_its_rounding(dtype, weights_dtype, activation):
    """Taken in at least fp32 and rounded once; gradients have the dtypes of what they belong to."""
    given_inputs = inputs(activation, True, 4, 30, dtype, weights_dtype)
    wide = [leaf.detach().double().requires_grad_() for leaf in given_inputs]
    got, expected = form(activate, activation, True)(*given_inputs), form(activate_reference, activation, True)(*wide)
    upstream = torch.randn(4, 30).to(dtype)
    got.backward(upstream)
    expected.backward(upstream.double())
    assert got.dtype == dtype
    pairs = [(got, expected), *((leaf.grad, grad.grad) for leaf, grad in zip(given_inputs, wide, strict=True))]
    for value, right in pairs:
        tolerance = TOLERANCES[value.dtype]
        torch.testing.assert_close(value.double(), right.double(), rtol=tolerance, atol=tolerance * 4)
    assert [leaf.grad.dtype for leaf in given_inputs] == [leaf.dtype for leaf in given_inputs]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_any_strides(activation):
    """Halves of one product, rows that are columns of memory, weights and gradients with gaps."""
    both = random(8, 6)

    def of(function):
        def call(both, weights):
            h3 = both.t()[:, 4:] if activation == "swiglu" else None
            return function(both.t()[:, :4], activation, h3, weights[::2]).t()

        return call

    assert_matches(of(activate), of(activate_reference), both, random(12))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_is_one_operator_each_way(activation, weighted):
    """The same on CPU and meta; autograd adds no other."""
    program, arguments = form(activate, activation, weighted), inputs(activation, weighted, 3, 4)
    assert_same_operators(program, *arguments)
    with OperatorList() as recorded:
        out = program(*arguments)
        out.backward(out.detach())
    names = [name for name in recorded.names if "detach" not in name]
    assert names == ["moebench.activation.default", "moebench.activation_backward.default"]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_passes_opcheck(activation, weighted):
    """Schema, fake kernels and autograd registration agree."""
    h, *rest = inputs(activation, weighted, 3, 4, torch.float32, torch.float64)
    arguments = (h, rest[-1] if activation == "swiglu" else None, rest[0] if weighted else None, activation)
    torch.library.opcheck(torch.ops.moebench.activation.default, arguments)
    backward = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in (torch.ones(3, 4), *arguments)]
    torch.library.opcheck(torch.ops.moebench.activation_backward.default, tuple(backward))


def test_compiles():
    """One graph, forward and backward."""
    compiled = torch.compile(lambda h, w, g: activate(h, "swiglu", g, w), backend="aot_eager", fullgraph=True)
    assert_matches(compiled, form(activate_reference, "swiglu", True), *inputs("swiglu", True, 3, 4))


def test_relu_keeps_nan():
    """A NaN is seen, not clipped."""
    assert activate(torch.tensor([[float("nan"), -1.0]])).isnan().tolist() == [[True, False]]


def test_declared_bytes():
    """Forward: rows in, rows out. Backward: gradient and inputs in, a gradient of each out."""
    h, weights = torch.zeros(10, 16, dtype=torch.bfloat16), torch.zeros(10)
    rows = h.nbytes
    cost, backward_cost = (declared_cost(f"moebench::{name}") for name in ("activation", "activation_backward"))
    declared = cost(h, h, h, weights, "swiglu")
    assert (declared.bytes_read, declared.bytes_written, declared.flops) == (2 * rows + 40, rows, 0)
    declared = cost(h, h, None, None, "relu")
    assert (declared.bytes_read, declared.bytes_written) == (rows, rows)
    declared = backward_cost((h, h, weights), h, h, h, weights, "swiglu")
    assert (declared.bytes_read, declared.bytes_written) == (3 * rows + 40, 2 * rows + 40)


@pytest.mark.parametrize("function", [activate, activate_reference])
def test_bad_input(function):
    """What has no meaning raises one clear ValueError."""
    h, weights = torch.zeros(3, 4), torch.zeros(3)
    with pytest.raises(ValueError, match="activation is 'tanh'; choose one of relu, gelu, swiglu"):
        function(h, "tanh")
    with pytest.raises(ValueError, match="got 'swiglu' without h3"):
        function(h, "swiglu")
    with pytest.raises(ValueError, match="got 'relu' with h3"):
        function(h, "relu", h)
    with pytest.raises(ValueError, match=r"h must be a floating-point tensor \[N, F\]; got float32 \[4\]"):
        function(h[0])
    with pytest.raises(ValueError, match=r"h is torch.float8_e5m2; choose one of torch.float64, "):
        function(h.to(torch.float8_e5m2))
    with pytest.raises(ValueError, match=r"h3 must have shape \[3, 4\] to fit h; got \[4, 3\]"):
        function(h, "swiglu", h.t())
    with pytest.raises(ValueError, match=r"h3 is torch.bfloat16, h is torch.float32; cast one of them first"):
        function(h, "swiglu", h.bfloat16())
    with pytest.raises(ValueError, match="h3 is on meta, h on cpu"):
        function(h, "swiglu", h.to("meta"))
    with pytest.raises(ValueError, match=r"weights must have shape \[3\] to fit the rows of h; got \[4\]"):
        function(h, "relu", None, torch.zeros(4))
    with pytest.raises(ValueError, match=r"weights must be a floating-point tensor \[N\]; got int64 \[3\]"):
        function(h, "relu", None, weights.long())
    with pytest.raises(ValueError, match="weights is on meta, h on cpu"):
        function(h, "relu", None, weights.to("meta"))
