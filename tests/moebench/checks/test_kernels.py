"""No number of a kernel before it gives the reference's results, Triton's code in its interpreter where no GPU is."""

from dataclasses import replace

import pytest
import torch

from moebench.cases.case import Case
from moebench.cases.kernels import check_key
from moebench.checks import kernels as check_kernels
from moebench.checks.correctness import Status, check_cases
from moebench.checks.kernels import CPU, INTERPRETER, Trial, check, small, trials, tried
from moebench.kernels.registry import KERNELS
from moebench.workloads.kernel import OPERATIONS, KernelWorkload
from moebench.workloads.kernel_calls import implementations_of
from moebench.workloads.layer import GateSpec, LayerWorkload

GATE = KernelWorkload("topk_gate", 65536, experts=16, top_k=2)


def case(workload=GATE, name="torch", engine="sim"):
    return Case("s", "e", name, workload, "1x1-h200", "1x1", engine, implementation=name)


def calls(dtype):
    for op, operation in OPERATIONS.items():
        if dtype not in operation.dtypes and dtype != "fp32":
            continue
        for direction in operation.directions:
            sizes = {name: 64 if name == "tokens" else 4 for name in operation.dimensions}
            used = dtype if dtype in operation.dtypes else operation.dtypes[0]
            for variant in operation.variants or ("",):
                for name in implementations_of(op):
                    if name != "triton":
                        yield KernelWorkload(op, **sizes, variant=variant, direction=direction, dtype=used), name


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_every_implementation_is_right_on_the_cpu(dtype):
    """Each implementation of each operator that runs here, forward and backward."""
    found = {(w.labels, name): tried(Trial(small(w), name, CPU)) for w, name in calls(dtype)}
    assert found
    assert {key: status.reason for key, status in found.items() if status.status != "passed"} == {}


def test_triton_s_code_is_right_in_its_interpreter():
    """A process of its own runs a forward and a backward of it, with products, in the case's own dtype."""
    layout = KernelWorkload("layout", 64, experts=4, top_k=2, d_model=16, dtype="bf16", direction="backward")
    product = KernelWorkload("grouped_gemm", 64, experts=4, d_model=16, d_ffn=16)
    cases = [case(GATE, "triton"), case(layout, "triton"), case(product, "triton"), case(GATE, "reference")]
    assert [(s.status, s.reason) for s in check(cases)] == [("passed", "")] * 4


def broken(monkeypatch, op, name, function):
    """Replace an implementation; what is known of the right one says nothing about it."""
    monkeypatch.setattr(check_kernels, "own_hash", lambda: f"{id(function)}")
    kernel = KERNELS[op]
    changed = replace(kernel, implementations={**kernel.implementations, name: function})
    monkeypatch.setattr("moebench.workloads.kernel_calls.KERNELS", {**KERNELS, op: changed})


def test_a_wrong_implementation_is_called_wrong(monkeypatch):
    """What differs, where, and by how much; the call that shows it."""
    right = KERNELS["topk"].implementations["torch"]

    def off(scores_TE, top_k):
        values_TK, experts_TK = right(scores_TE, top_k)
        return values_TK * 1.001, experts_TK

    broken(monkeypatch, "topk", "torch", off)
    (status,) = check([case(KernelWorkload("topk", 64, experts=4, top_k=2))])
    assert status.status == "wrong"
    assert "torch of topk, t37-e5-k2-fp32, on the CPU: output 0: relative error 1.0e-03" in status.reason


def test_a_wrong_choice_or_gradient_is_wrong(monkeypatch):
    """Integers must be equal, and a backward is compared in its gradients."""
    right = KERNELS["topk"].implementations["torch"]
    broken(monkeypatch, "topk", "torch", lambda s, k: (right(s, k)[0], right(s, k)[1].flip(1)))
    (status,) = check([case(KernelWorkload("topk", 64, experts=4, top_k=2))])
    assert "output 1: " in status.reason
    assert "values differ" in status.reason
    broken(monkeypatch, "topk", "torch", lambda s, k: (_DoubledGradient.apply(right(s, k)[0]), right(s, k)[1]))
    forward = KernelWorkload("topk", 64, experts=4, top_k=2)
    assert [s.status for s in check([case(replace(forward, seed=1))])] == ["passed"]
    (status,) = check([case(replace(forward, direction="backward"))])
    assert "gradient of argument 0: relative error" in status.reason


class _DoubledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_an_implementation_that_raises_has_failed(monkeypatch):
    """The error's first line, and which call it was."""

    def raises(*_):
        raise RuntimeError("out of luck\nand more")

    broken(monkeypatch, "topk", "hetu", raises)
    (status,) = check([case(KernelWorkload("topk", 64, experts=4, top_k=1), "hetu")])
    assert status == Status("failed", "hetu of topk, t37-e5-k1-fp32, on the CPU: RuntimeError: out of luck")


def test_what_came_out_is_remembered(monkeypatch):
    """Until the code changes: a second check runs nothing."""
    one = [case(KernelWorkload("topk", 64, experts=4, top_k=3))]
    assert [s.status for s in check(one)] == ["passed"]
    monkeypatch.setattr(check_kernels, "tried", lambda trial: pytest.fail("ran again"))
    assert [s.status for s in check(one)] == ["passed"]
    monkeypatch.setattr(check_kernels, "own_hash", lambda: "other code")
    monkeypatch.setattr(check_kernels, "tried", lambda trial: Status("wrong", "new"))
    assert [s.reason for s in check(one)] == ["new"]


def test_where_what_is_tried():
    """Definition and torch on the CPU; Triton, and other systems' kernels beside the CPU, in the interpreter."""
    assert [t.place for t in trials(case(name="reference"))] == [CPU]
    assert [t.place for t in trials(case(name="torch"))] == [CPU]
    assert [t.place for t in trials(case(name="triton"))] == [INTERPRETER]
    hetu = case(KernelWorkload("topk", 64, experts=4, top_k=1), "hetu")
    assert [t.place for t in trials(hetu)] == [CPU, INTERPRETER]


def test_without_triton_its_code_has_no_number(monkeypatch):
    """What can't be checked is not shown."""
    monkeypatch.setattr(check_kernels, "_is_triton_installed", lambda: False)
    (status,) = check([case(name="triton")])
    assert status.status == "unsupported"
    assert "can't be checked" in status.reason


def test_cases_that_differ_in_size_alone_are_checked_once():
    """Tokens and widths are the check's own; choices, dtype, variant and direction are the case's."""
    assert check_key(case()) == check_key(case(replace(GATE, tokens=8, experts=512)))
    for changes in ({"top_k": 1}, {"dtype": "bf16"}, {"direction": "backward"}):
        assert check_key(case()) != check_key(case(replace(GATE, **changes)))
    assert check_key(case()) != check_key(case(name="triton"))
    assert check_key(case()) != check_key(case(engine="local"))


def test_layers_and_kernels_are_checked_in_one_run():
    """Each by its own kind's check, in the order of the cases."""
    layer = LayerWorkload(GateSpec("switch"), 1, 8, 8, 8, 2)
    layers = Case("s", "e", "reference", layer, "1x2-h200", "1x2", "sim")
    assert [s.status for s in check_cases([case(), layers, case(name="reference")])] == ["passed"] * 3
