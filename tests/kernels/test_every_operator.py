"""What holds for all kernels: FP8 is refused, autocast changes nothing, second derivatives are right or refused."""

import pytest
import torch

from benchmarks.kernel_calls import ARGUMENTS, moved
from moebench.kernels.fp8 import fp8_round_trip
from moebench.kernels.permute import slot_rows, sorted_rows
from moebench.kernels.registry import KERNELS
from tests.kernels.support import random

CALLS = {
    f"{kernel.name}/{name}": (function, ARGUMENTS[kernel.name])
    for kernel in KERNELS.values()
    for name, function in kernel.implementations.items()
}
# Plain operators, which autocast casts as it would anywhere.
PLAIN = ("expert_ffn", "layout/deepspeed", "layout_inverse/deepspeed", "layout_inverse/fastmoe")
FUSED = [name for name in CALLS if not name.startswith(PLAIN) and not name.endswith("/reference")]
TWICE = ["topk/torch", "topk/triton", "topk/hetu", "permute/torch", "grouped_gemm/torch", "grouped_gemm_dw/torch",
         "rope/torch"]
ONCE = ["topk_gate/torch", "unpermute/torch", "activation/torch", "attention/torch", "rms_norm/torch"]
ONCE += [f"layout_inverse/{name}" for name in ("torch", "hetu", "tutel")]


def _wide(args):
    return [
        arg.detach().double().requires_grad_(arg.requires_grad) if _is_floating(arg) else arg
        for arg in moved(args, "cpu")
    ]


def _is_floating(arg):
    return isinstance(arg, torch.Tensor) and arg.dtype.is_floating_point


def _outputs(function, args):
    out = function(*args)
    return [each for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, torch.Tensor)]


def _results(function, args):
    """Outputs and gradients."""
    outputs = _outputs(function, args)
    roots = [out for out in outputs if out.requires_grad]
    leaves = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    grads = torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots]) if roots else ()
    return [result.detach() for result in (*outputs, *grads)]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64])
def test_dtypes_that_nothing_is_computed_in_are_refused(name, dtype):
    """FP8 and complex numbers, for every argument of real ones: one ValueError that names the argument."""
    function, make = CALLS[name]
    args = make()
    for place, arg in enumerate(args):
        if not _is_floating(arg) or arg.dtype == torch.float8_e4m3fn:
            continue
        wrong = [*args[:place], arg.detach().to(dtype), *args[place + 1 :]]
        with pytest.raises(ValueError, match=r"must be|choose one of|cast one of them"):
            function(*wrong)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("wrong", [None, 2.5, [1.0], torch.eye(4).to_sparse()], ids=["none", "float", "list", "sparse"])
def test_what_is_no_dense_tensor_is_refused(name, wrong):
    """One ValueError, in the place of each tensor that a call needs."""
    function, make = CALLS[name]
    args = make()
    for place, arg in enumerate(args):
        is_optional = name.startswith(("activation", "unpermute")) and place > 1
        if not isinstance(arg, torch.Tensor) or (wrong is None and is_optional):
            continue
        with pytest.raises(ValueError, match=r"must be an? .* tensor"):
            function(*args[:place], wrong, *args[place + 1 :])


@pytest.mark.parametrize("name", [name for name in CALLS if any(type(arg) is int for arg in CALLS[name][1]())])
def test_sizes_are_whole_numbers(name):
    """A capacity that a factor was multiplied with, and nobody rounded."""
    function, make = CALLS[name]
    args = make()
    for place, arg in enumerate(args):
        if type(arg) is int:
            with pytest.raises(ValueError, match=f"must be a whole number; got {arg}.0"):
                function(*args[:place], float(arg), *args[place + 1 :])


@pytest.mark.parametrize("name", CALLS)
def test_tensors_on_two_devices_are_refused(name):
    """Each tensor in turn on another device than the rest: one ValueError, from every implementation."""
    function, make = CALLS[name]
    args = make()
    tensors = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    for place in tensors if len(tensors) > 1 else ():
        wrong = [*args[:place], args[place].detach().to("meta"), *args[place + 1 :]]
        with pytest.raises(ValueError, match="must share a device"):
            function(*wrong)


def test_maps_of_rows_want_ids_and_positions_on_one_device():
    """Where nothing is launched that would notice."""
    ids, positions = torch.tensor([[0, 1]]), torch.tensor([[0, 0]], device="meta")
    for call in (lambda: slot_rows(ids, positions, 2), lambda: sorted_rows(ids, positions, torch.tensor([1, 1]))):
        with pytest.raises(ValueError, match="positions is on meta, experts on cpu; they must share a device"):
            call()


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("layout_inverse")])
def test_the_inverse_wants_weights(name):
    """Those of other systems work without; this is not one of their calls."""
    function, make = CALLS[name]
    y, experts, positions, _ = make()
    with pytest.raises(ValueError, match=r"weights must be a floating-point tensor .*; got None"):
        function(y, experts, positions, None)


@pytest.mark.parametrize("name", FUSED)
def test_autocast_changes_nothing(name):
    """Dtypes and bits, forward and backward, are those outside: shape functions and Triton's code know no autocast."""
    function, make = CALLS[name]
    torch.manual_seed(0)
    args = make()
    for dtype in (torch.float32, torch.bfloat16):
        cast = [
            arg.detach().to(dtype).requires_grad_(arg.requires_grad)
            if _is_floating(arg) and arg.dtype != torch.float8_e4m3fn and not name.startswith("dequantise") else arg
            for arg in args
        ]  # fmt: skip
        expected = _results(function, cast)
        with torch.autocast("cpu", torch.bfloat16):
            got = _results(function, cast)
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(name):
    """Right where the backward is made of operators that have one."""
    function, make = CALLS[name]
    args = _wide(make())
    leaves = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]

    def program(*values):
        given = iter(values)
        outputs = _outputs(function, [next(given) if any(arg is leaf for leaf in leaves) else arg for arg in args])
        return tuple(out for out in outputs if out.requires_grad)

    assert torch.autograd.gradgradcheck(program, leaves)


@pytest.mark.parametrize("name", ONCE)
def test_second_derivatives_that_do_not_exist_are_refused(name):
    """Fused gradients have none: an error that says so, where zero would come out silently."""
    function, make = CALLS[name]
    args = _wide(make())
    leaves = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    roots = [out for out in _outputs(function, args) if out.requires_grad]
    grads = torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], create_graph=True)
    with pytest.raises(RuntimeError, match="is a gradient, and has no gradient itself"):
        sum(grad.square().sum() for grad in grads).backward()


def test_a_round_trip_through_fp8_is_differentiated_once():
    """Its gradient is rounded, and rounding has no derivative that is worth anything."""
    x = random(4, 8)
    (grad,) = torch.autograd.grad(fp8_round_trip(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.parametrize("name", [name for name in FUSED if not name.startswith(("assign_slots", "dequantise"))])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_runs_one_call_after_another(name):
    """No batching rules: torch's own loop, with the results of separate calls."""
    function, make = CALLS[name]
    calls = [make() for _ in range(2)]
    batched = [
        torch.stack([first, second]).detach() if _is_floating(first) else first
        for first, second in zip(*calls)
    ]  # fmt: skip
    axes = tuple(0 if _is_floating(arg) else None for arg in batched)
    got = torch.vmap(lambda *args: tuple(_outputs(function, args)), in_dims=axes)(*batched)
    for place in range(2):
        args = [arg[place] if axis == 0 else arg for arg, axis in zip(batched, axes, strict=True)]
        for ours, theirs in zip(got, _outputs(function, args), strict=True):
            torch.testing.assert_close(ours[place].float(), theirs.float())
