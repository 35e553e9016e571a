"""Every operator has a kind, or is refused with the way out."""

import pytest
import torch

from moebench.kernels.cost import KINDS, Cost, declare_cost
from moebench.kernels.region import region
from moebench.trace.errors import UnknownOperator
from moebench.trace.kinds import KIND_BY_NAME, kind_of
from moebench.trace.recorder import Recorder

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        (aten.mm.default, "product"),
        (aten.bmm.default, "product"),
        (aten.add.Tensor, "pointwise"),
        (aten.add_.Tensor, "pointwise"),
        (aten.lt.Scalar, "pointwise"),
        (aten._to_copy.default, "pointwise"),
        (aten.where.self, "pointwise"),
        (aten.threshold_backward.default, "pointwise"),
        (aten.gelu_backward.default, "pointwise"),
        (aten._foreach_add_.List, "pointwise"),
        (aten._foreach_sqrt.default, "pointwise"),
        (aten.clone.default, "copy"),
        (aten.cat.default, "copy"),
        (aten.zeros.default, "fill"),
        (aten.zero_.default, "fill"),
        (aten._foreach_zero_.default, "fill"),
        (aten.sum.dim_IntList, "reduction"),
        (aten.argmax.default, "reduction"),
        (aten._foreach_norm.Scalar, "reduction"),
        (aten._softmax.default, "softmax"),
        (aten.cumsum.default, "scan"),
        (aten.gather.default, "gather"),
        (aten.index.Tensor, "gather"),
        (aten.scatter_add_.default, "scatter"),
        (aten.index_put_.default, "scatter"),
        (aten.embedding_dense_backward.default, "scatter"),
        (aten.topk.default, "sort"),
        (aten.sort.stable, "sort"),
        (aten.view.default, "view"),
        (aten.t_.default, "view"),
        (aten._unsafe_view.default, "view"),
        (aten.split.Tensor, "view"),
        (aten.empty.memory_format, "allocation"),
    ],
)
def test_kind_of_an_operator(operator, kind):
    """Table, tags and schema give the kind, in-place and foreach forms that of their operator."""
    assert kind_of(operator) == kind


def test_the_table_names_only_kinds_that_a_hardware_file_knows():
    """Each kind of the table is one of kernels.cost.KINDS."""
    assert set(KIND_BY_NAME.values()) <= set(KINDS)


def test_unknown_aten_operator_is_refused():
    """No kind is guessed; the error says what to do."""
    x = torch.zeros(2, 2)
    with Recorder([x]), region("dense"), pytest.raises(UnknownOperator, match=r"aten::linalg_qr .*declare_cost"):
        torch.linalg.qr(x)


def test_custom_operator_needs_a_declared_cost():
    """A custom operator is refused until its cost is declared, and is then one Op with that cost."""
    library = torch.library.Library("moebench_test_kinds", "DEF")
    for name in ("without", "with_cost"):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x.clone(), "CompositeExplicitAutograd")
    cost = Cost("sort", flops=7, bytes_read=11, bytes_written=13, workspace_bytes=1000)
    declare_cost("moebench_test_kinds::with_cost", lambda out, x: cost)
    x = torch.zeros(4)
    with Recorder([x]) as recorder, region("dense"):
        with pytest.raises(UnknownOperator, match="no declared cost"):
            torch.ops.moebench_test_kinds.without(x)
        torch.ops.moebench_test_kinds.with_cost(x)
    (op,) = recorder.ops
    assert (op.kind, op.flops, op.bytes_read, op.bytes_written) == ("sort", 7, 11, 13)
    assert recorder.peak_bytes == 16 + 16 + 1000
