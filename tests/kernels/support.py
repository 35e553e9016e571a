"""Shared by the kernel tests: operator lists, random routings, comparison with a reference through autograd."""

import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorList(TorchDispatchMode):
    """Records the name and the tensor shapes of every operator that runs inside the block."""

    def __init__(self):
        super().__init__()
        self.ops = []

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # else torch imports its compiler, for a second or more

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor))
        self.ops.append((str(func), shapes))
        return out

    @property
    def names(self):
        return [name for name, _ in self.ops]


def record(program, inputs, device):
    """Operators of `program(*inputs)` and of its backward, on copies of the inputs on `device`."""
    copies = [
        leaf.detach().to(device).requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in inputs
    ]
    with OperatorList() as recorded:
        outputs = [out for out in _tuple(program(*copies)) if out.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])
    return recorded


def assert_same_operators(program, *inputs):
    """The program runs the same operators on the same shapes on CPU and on meta tensors, forward and backward."""
    on_cpu, on_meta = record(program, inputs, "cpu"), record(program, inputs, "meta")
    assert on_cpu.ops == on_meta.ops
    assert on_cpu.ops


def assert_matches(program, reference, *inputs, rtol=1e-10, atol=1e-12):
    """Outputs and gradients of `program` equal those of `reference` under random upstream gradients."""
    results = []
    generator_state = torch.get_rng_state()
    for function in (program, reference):
        torch.set_rng_state(generator_state)
        copies = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in inputs]
        outputs = _tuple(function(*copies))
        roots = [out for out in outputs if out.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.randn(out.shape, dtype=out.dtype) for out in roots])
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in copies if leaf.requires_grad]
        results.append(([out.detach() for out in outputs], grads))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def random(*shape, dtype=torch.float64, grad=True):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


@st.composite
def expert_ids(draw, max_tokens=12, max_experts=5, max_choices=3):
    """(ids_TK with -1 for no route, E): zero tokens, one expert, one crowded expert and empty ones all occur."""
    experts = draw(st.integers(1, max_experts))
    tokens, choices = draw(st.integers(0, max_tokens)), draw(st.integers(1, max_choices))
    highest = draw(st.sampled_from((0, experts - 1)))
    ids = draw(st.lists(st.integers(-1, highest), min_size=tokens * choices, max_size=tokens * choices))
    return torch.tensor(ids, dtype=torch.int64).reshape(tokens, choices), experts


@st.composite
def row_maps(draw, max_tokens=12, max_choices=3):
    """(rows_TK, N): distinct rows below N, -1 for dropped routes, unused rows anywhere."""
    tokens, choices = draw(st.integers(0, max_tokens)), draw(st.integers(1, max_choices))
    routes = tokens * choices
    num_rows = draw(st.integers(0, routes + 4))
    kept = draw(st.integers(0, min(routes, num_rows)))
    rows = torch.full((routes,), -1, dtype=torch.int64)
    order = draw(st.permutations(range(routes)))
    places = draw(st.permutations(range(num_rows)))
    rows[torch.tensor(order[:kept], dtype=torch.int64)] = torch.tensor(places[:kept], dtype=torch.int64)
    return rows.reshape(tokens, choices), num_rows


def _tuple(value):
    return value if isinstance(value, tuple) else (value,)
