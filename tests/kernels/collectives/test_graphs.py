"""Start and Wait inside graphs: they stay nodes, in the order that overlaps, in the forward and the backward graph."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch.fx.experimental.proxy_tensor import make_fx

from moebench.kernels.collectives import start_wait as sw
from moebench.kernels.collectives.outstanding import check_finished
from moebench.ranks.run import run_ranks
from tests.kernels.collectives.on_ranks import overlapped

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def _aliasing_is_a_warning():
    """`wait` returns its argument; torch warns of that, and raises where CI is set (its own wait_tensor is exempt)."""
    with config.patch(error_on_custom_op_aliasing=False):
        yield


def _nodes(module):
    names = [str(node.target) for node in module.graph.nodes]
    return [n.split(".")[1] for n in names if n.startswith(("moebench.", "aten.mm."))]


class _Keep:
    """A compiler that runs the graph as it is and remembers its nodes."""

    def __init__(self):
        self.nodes = []

    def __call__(self, module, _inputs):
        self.nodes.append(_nodes(module))
        return make_boxed_func(module.forward)


ROOT = Path(__file__).parents[3]
OWN_PROCESS = "MOEBENCH_TEST_IN_ITS_OWN_PROCESS"
FORWARD = ["all_to_all_start", "mm", "mm", "wait"]
BACKWARD = ["all_to_all_start", "mm", "mm", "mm", "mm", "wait"]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_keeps_the_nodes(mode, fake_world):
    """One node for the start, one for the wait, the products between; the graph runs."""
    x, w = torch.randn(8, 3), torch.randn(3, 3)
    with fake_world(4) as group:
        module = make_fx(lambda a, b: overlapped(a, b, group), tracing_mode=mode)(x, w)
        assert _nodes(module) == FORWARD
        torch.testing.assert_close(module(x, w), overlapped(x, w, group))
    check_finished()


def _compiled(how, function, keep):
    if how == "dynamo":
        return torch.compile(function, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    partition = {"partition_fn": min_cut_rematerialization_partition} if how == "min-cut" else {}
    return aot_function(function, keep, keep, **partition)


@pytest.mark.parametrize("how", ["default", "min-cut", "dynamo"])
def test_aot_graphs_keep_nodes_and_order(how, fake_world):
    """Forward and backward graphs; outputs and gradients as in eager mode."""
    # Dynamo silently runs eagerly what anything earlier in its process has made it skip, so it gets a fresh one.
    if how == "dynamo" and OWN_PROCESS not in os.environ:
        test = f"{__file__}::test_aot_graphs_keep_nodes_and_order[dynamo]"
        command = [sys.executable, "-m", "pytest", "-q", test]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
        done = subprocess.run(command, env=kept | {OWN_PROCESS: "1"}, cwd=ROOT, capture_output=True, text=True)
        assert "1 passed" in done.stdout, done.stdout + done.stderr
        return
    keep = _Keep()
    x, w = torch.randn(8, 3), torch.randn(3, 3)
    results = []
    with fake_world(4) as group:
        for function in (lambda a, b: overlapped(a, b, group), None):
            function = function or _compiled(how, lambda a, b: overlapped(a, b, group), keep)
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            y, z = function(a, b)
            (y.square().sum() + z.square().sum()).backward()
            results.append((y.detach(), z.detach(), a.grad, b.grad))
    torch.testing.assert_close(results[0], results[1])
    forward, backward = keep.nodes
    assert forward == FORWARD
    assert [n for n in backward if n != "mm"] == ["all_to_all_start", "wait"]
    assert backward[-1] == "wait"
    assert backward.count("mm") >= 4
    assert backward.index("all_to_all_start") < 2  # at most the recomputed product comes before it
    check_finished()


@pytest.mark.parametrize(
    ("name", "function", "reverse"),
    [
        ("all_to_all", lambda x, g: sw.all_to_all(x, g, [2, 0, 5, 1], [2, 3, 0, 4]), "all_to_all"),
        ("all_gather", sw.all_gather, "reduce_scatter"),
        ("reduce_scatter", sw.reduce_scatter, "all_gather"),
        ("all_reduce", sw.all_reduce, "all_reduce"),
    ],
)
def test_shape_changing_collectives_have_backward_graphs(name, function, reverse, fake_world):
    """The gradient in flight has the input's shape, which need not be the result's."""
    keep = _Keep()
    x = torch.randn(8, 3, requires_grad=True)
    with fake_world(4) as group:
        y = aot_function(lambda a: function(a, group).cos(), keep, keep)(x)
        y.sum().backward()
    assert keep.nodes == [[f"{name}_start", "wait"], [f"{reverse}_start", "wait"]]
    assert x.grad.shape == x.shape
    check_finished()


def test_graphs_run_on_real_ranks():
    """With peers that really send, outputs and gradients are those of eager mode."""
    run_ranks("tests.kernels.collectives.on_ranks:compiled_graph_is_eager", 2)
