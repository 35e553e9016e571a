"""Results of operators on meta tensors are worked out once, and look as torch's own."""

import pytest
import torch

from moebench.trace import results

ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is remembered from other tests."""
    monkeypatch.setattr(results, "_known", {})
    monkeypatch.setattr(results, "_dtypes", {})


def meta(*shape, dtype=torch.float32):
    """A tensor without content."""
    return torch.empty(shape, dtype=dtype, device="meta")


def looks(out):
    """Size, stride, dtype and bytes of storage of each result."""
    found = out if isinstance(out, (tuple, list)) else [out]
    return [(one.size(), one.stride(), one.dtype, one.untyped_storage().nbytes()) for one in found]


@pytest.mark.parametrize(
    ("overload", "args"),
    [
        (ATEN.add.Tensor, (meta(4, 1), meta(3))),
        (ATEN.mm.default, (meta(8, 3).t(), meta(8, 5))),
        (ATEN.topk.default, (meta(5, 7), 2)),
        (ATEN.sum.dim_IntList, (meta(4, 6, dtype=torch.bool), [1], True)),
        (ATEN.cat.default, ([meta(2, 3), meta(4, 3)], 0)),
        (ATEN.where.self, (meta(6, dtype=torch.bool), meta(6), meta(dtype=torch.float64))),
    ],
)
def test_a_second_call_gives_what_the_first_one_gave(overload, args):
    """New tensors of the same size, stride, dtype and storage."""
    assert results.gives_anew(overload)
    first, second = results.result_of(overload, args, {}), results.result_of(overload, args, {})
    assert len(results._known) == 1
    assert looks(first) == looks(second) == looks(overload(*args))
    assert type(first) is type(second)


POINTWISE = {
    "relu": (ATEN.relu.default, lambda x: (x,), {}),
    "gradient": (ATEN.threshold_backward.default, lambda x: (x, x, 0), {}),
    "comparison": (ATEN.lt.Scalar, lambda x: (x, 0.5), {}),
    "quotient": (ATEN.div.Tensor_mode, lambda x: (x, 2), {"rounding_mode": "floor"}),
    "promotion": (ATEN.mul.Tensor, lambda x: (x, x.to(torch.float64)), {}),
}


@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.parametrize("shape", [(5, 3), (2, 2, 2), (7,), (5, 1), (1, 3), (), (0, 3)])
def test_element_wise_results_of_other_sizes_look_as_torchs_own(name, shape):
    """What was learnt from one size says the same as torch of others, also of those with dimensions of 0 and 1."""
    overload, arguments, kwargs = POINTWISE[name]
    results.result_of(overload, arguments(meta(4, 6)), kwargs)
    args = arguments(meta(*shape))
    assert looks(results.result_of(overload, args, kwargs)) == looks(overload(*args, **kwargs))
    assert len(results._dtypes) == 1


@pytest.mark.parametrize("args", [(meta(5, 1), meta(5, 3)), (meta(3, 5).t(), meta(3, 5).t()), (meta(5, 3), meta(3))])
def test_what_is_broadcast_or_has_gaps_is_torchs_affair(args):
    """Arguments of several sizes, or in another order of memory, are no case of the known one."""
    results.result_of(ATEN.add.Tensor, (meta(4, 6), meta(4, 6)), {})
    assert looks(results.result_of(ATEN.add.Tensor, args, {})) == looks(ATEN.add.Tensor(*args))


def test_an_element_wise_result_of_a_known_kind_needs_no_torch(monkeypatch):
    """A second size is made, not derived."""
    results.result_of(ATEN.relu.default, (meta(4, 6),), {})
    monkeypatch.setattr(results, "_remembered", None)  # asked for by every result that torch derives
    assert looks(results.result_of(ATEN.relu.default, (meta(9, 6),), {})) == looks(meta(9, 6))


def test_numbers_of_other_types_are_other_calls():
    """1, 1.0 and True are equal in Python and give other dtypes."""
    dtypes = [results.result_of(ATEN.add.Tensor, (meta(2, dtype=torch.int64), one), {}).dtype for one in (1, 1.0)]
    assert dtypes == [torch.int64, torch.float32]
    filled = [results.result_of(ATEN.full_like.default, (meta(2), 0), {"dtype": d}).dtype for d in (None, torch.bool)]
    assert filled == [torch.float32, torch.bool]


def test_a_result_in_an_arguments_memory_is_not_remembered():
    """`_unsafe_view` says nothing of it in its schema."""
    x = meta(4, 6)
    for _ in range(2):
        out = results.result_of(ATEN._unsafe_view.default, (x, [24]), {})
        assert out.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_real_tensors_are_computed_each_time():
    """Nothing of them is remembered."""
    assert results.result_of(ATEN.add.Tensor, (torch.ones(2), 1), {}).tolist() == [2, 2]
    assert not results._known


def test_operators_that_write_or_alias_are_left_alone():
    """Their results are no new tensors."""
    assert not any(map(results.gives_anew, (ATEN.add_.Tensor, ATEN.view.default, ATEN.split.Tensor)))
