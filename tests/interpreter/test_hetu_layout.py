"""HetuMoE's and Tutel's layout kernels in the interpreter: values, gradients, poisoned memory, bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.cost import declared_cost
from moebench.kernels.hetu_layout import hetu_layout, hetu_layout_inverse, tutel_layout, tutel_layout_inverse
from moebench.kernels.layout import layout_inverse_reference, layout_reference
from moebench.kernels.triton import hetu_layout as launchers
from tests.interpreter.counter import count
from tests.interpreter.support import TOLERANCES, assert_matches_float64
from tests.kernels.support import expert_ids

PAIRS = {"hetu": (hetu_layout, hetu_layout_inverse), "tutel": (tutel_layout, tutel_layout_inverse)}


@pytest.fixture(autouse=True)
def _small_launches(request, monkeypatch):
    """Few and narrow blocks, so that tokens outnumber blocks and rows take several steps in short tests."""
    if request.function is not test_the_authors_launches:
        monkeypatch.setattr(launchers, "_BLOCKS", 4)
        monkeypatch.setattr(launchers, "_THREADS", 32)


def _leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def _routing(tokens, top_k, num_experts):
    experts = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)])
    return experts, assign_slots(experts, num_experts)[0]


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=12)
@given(routing=expert_ids(), capacity=st.integers(1, 6), width=st.sampled_from((1, 3, 70)))
def test_both_ways_equal_the_definitions(name, routing, capacity, width):
    """Any routing: no token, one expert, one crowded expert, empty ones, dropped and absent routes."""
    (ids, num_experts), (there, back) = routing, PAIRS[name]
    positions = assign_slots(ids, num_experts)[0]
    x, y, weights = _leaf(ids.shape[0], width), _leaf(num_experts, capacity, width), _leaf(*ids.shape)
    assert_matches_float64(
        lambda x: there(x, ids, positions, num_experts, capacity),
        lambda x: layout_reference(x, ids, positions, num_experts, capacity),
        x,
    )
    assert_matches_float64(
        lambda y, w: back(y, ids, positions, w),
        lambda y, w: layout_inverse_reference(y, ids, positions, w),
        y,
        weights,
    )


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype(name, dtype):
    """Three choices, rows of more than one step, some dropped routes. Tutel takes weights in fp16 where rows are."""
    there, back = PAIRS[name]
    width = launchers._step(dtype.itemsize) + 5
    experts, positions = _routing(9, 3, 6)
    capacity = int(positions.max())
    x, y = _leaf(len(experts), width, dtype=dtype), _leaf(6, capacity, width, dtype=dtype)
    weights = _leaf(*experts.shape)
    assert_matches_float64(
        lambda x: there(x, experts, positions, 6, capacity),
        lambda x: layout_reference(x, experts, positions, 6, capacity),
        x,
    )
    assert_matches_float64(
        lambda y, w: back(y, experts, positions, w),
        lambda y, w: layout_inverse_reference(y, experts, positions, w),
        y,
        weights,
        tolerance=TOLERANCES[dtype] if dtype == torch.float16 else None,
    )


def test_the_authors_launches():
    """128 blocks of 1,024 threads, four bytes a thread: fewer tokens than blocks, rows of more than a step."""
    assert (launchers._BLOCKS, launchers._step(4), launchers._step(2), launchers._step(8)) == (128, 1024, 2048, 1024)
    experts, positions = _routing(5, 2, 3)
    x = torch.randn(5, 1029)
    slots = launchers.scatter(x, experts, positions, None, 3, 5, False, True)
    assert torch.equal(slots.view(3, 5, 1029), layout_reference(x, experts, positions, 3, 5))


def test_slots_are_cleared_only_where_asked():
    """Hetu's own form leaves slots that nobody has as the memory was; Tutel's clears them always."""
    experts, positions = _routing(20, 2, 4)
    slots = layout_reference(torch.ones(20, 1), experts, positions, 4, 16).bool().view(-1)
    assert not slots.all()
    x = torch.randn(20, 9)
    expected = layout_reference(x, experts, positions, 4, 16).view(-1, 9)
    left = launchers.scatter(x, experts, positions, None, 4, 16, False, False)
    assert torch.equal(left[slots], expected[slots])
    assert bool(left[~slots].isnan().all())
    for tutel, clear in ((False, True), (True, True), (True, False)):
        assert torch.equal(launchers.scatter(x, experts, positions, None, 4, 16, tutel, clear), expected)


@pytest.mark.parametrize("tutel", [False, True])
def test_unused_slots_and_dropped_routes_are_never_read(tutel):
    """NaN in unused slots, in weights of dropped routes and in tokens without a route reaches nothing."""
    nan = float("nan")
    experts, positions = _routing(20, 2, 4)
    experts[3], positions[3] = -1, -1
    kept = (positions >= 0) & (positions < 5)
    slots = layout_reference(torch.ones(20, 1), experts, positions, 4, 5).bool()
    y = torch.randn(4, 5, 9).masked_fill(~slots, nan)
    weights, grad = torch.rand(20, 2).masked_fill(~kept, nan), torch.randn(20, 9)
    grad[3] = nan
    tokens = launchers.gather(y, experts, positions, weights, tutel)
    rows = launchers.scatter(grad, experts, positions, weights, 4, 5, tutel, True)
    dots = launchers.dots(grad, y, experts, positions, weights)
    assert all(bool(tensor.isfinite().all()) for tensor in (tokens, rows, dots))
    assert not dots[~kept].any()
    assert not tokens[~kept.any(1)].any()


@pytest.mark.parametrize("tutel", [False, True])
@pytest.mark.parametrize("wrong", [(4, 0), (2**40, 0), (-5, 1), (1, 2**40), (1, -2)])
def test_routes_out_of_range_are_never_an_address(tutel, wrong):
    """Experts that do not exist and places that no slot has are dropped routes."""
    experts, positions = _routing(6, 2, 4)
    clean = experts.clone(), positions.clone()
    experts[2, 1], positions[2, 1] = wrong
    clean[0][2, 1], clean[1][2, 1] = -1, -1
    x, y, weights = torch.randn(6, 9), torch.randn(4, 8, 9), torch.rand(6, 2)
    for function in (
        lambda *routes: launchers.scatter(x, *routes, None, 4, 8, tutel, True),
        lambda *routes: launchers.gather(y, *routes, weights, tutel),
        lambda *routes: launchers.dots(x, y, *routes, weights),
    ):
        assert torch.equal(function(experts, positions), function(*clean))


@pytest.mark.parametrize("tutel", [False, True])
def test_non_contiguous_inputs(tutel):
    """Transposed data, ids and weights, and expanded gradients, give the bits of contiguous ones."""
    experts, positions = _routing(6, 2, 4)
    spread = [ids.t().contiguous().t() for ids in (experts, positions)]
    x, y, weights = torch.randn(9, 6).t(), torch.randn(9, 4, 8).permute(1, 2, 0), torch.rand(2, 6).t()
    grad = torch.ones(()).expand(6, 9)
    whole = [tensor.contiguous() for tensor in (x, y, weights, grad)]
    for function in (
        lambda x, y, w, grad, *routes: launchers.scatter(x, *routes, w, 4, 8, tutel, True),
        lambda x, y, w, grad, *routes: launchers.gather(y, *routes, w, tutel),
        lambda x, y, w, grad, *routes: launchers.dots(grad, y, *routes, w),
    ):
        assert torch.equal(function(x, y, weights, grad, *spread), function(*whole, experts, positions))


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_declared(top_k, dtype):
    """Every lane of every launch, and torch's fills and sums, where each expert has room for all routes."""
    tokens, num_experts, capacity, width = 7, 8, 7, 33
    routes = _routing(tokens, top_k, num_experts)
    x, y = torch.randn(tokens, width).to(dtype), torch.randn(num_experts, capacity, width).to(dtype)
    weights = torch.rand(tokens, top_k)
    # (tutel, clear); Tutel's form adds to fp32, never to bf16
    forms = [(False, False), (False, True)] + [(True, True)] * (dtype == torch.float32)
    calls = [
        *(("choice_scatter", launchers.scatter, (x, *routes, None, num_experts, capacity, *form)) for form in forms),
        ("choice_scatter", launchers.scatter, (x, *routes, weights, num_experts, capacity, False, True)),
        *(("choice_gather", launchers.gather, (y, *routes, weights, tutel)) for tutel in (False, True)),
        ("choice_gather", launchers.gather, (y, *routes, None, False)),
        ("choice_dots", launchers.dots, (x, y, *routes, weights)),
    ]
    for name, launch, arguments in calls:
        traffic = count(launch, *arguments)
        cost = declared_cost(f"moebench::{name}")(launch(*arguments), *arguments)
        assert (traffic.loaded, traffic.stored) == (cost.bytes_read, cost.bytes_written), (name, arguments[3:])
        assert traffic.launches == top_k
