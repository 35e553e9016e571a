"""What the tests of the rules share: inputs, a short way to route, and the comparison with a naive rule."""

from collections import Counter
from dataclasses import replace

import torch

from moebench.workloads.conventions import COMMON
from moebench.workloads.gates import hash
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import get_gate
from tests.workloads import naive_gates

FP64 = replace(COMMON, gate_dtype="fp64")
DROPLESS = replace(FP64, capacity_rule="unlimited")
EVALUATION = GateContext(training=False)
D2S = "dense-to-sparse"


def logits(tokens, experts, seed=0, scale=1.0):
    return scale * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(spec, tokens, seed=0):
    vocabulary = dict(spec.options).get("vocabulary", hash.Options().vocabulary)
    return torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))


def route(rows, spec, conventions=FP64, factor=1.0, **rest):
    if spec.name == "hash":
        rest.setdefault("context", GateContext(token_ids_T=ids(spec, len(rows))))
    return get_gate(spec.name).route(rows, spec, conventions, factor, **rest)


def assert_is(routing, expected, capacity, choice_major=True):
    """Experts, weights, slots and loss terms are those of a naive rule; routes compared in the rule's own order."""
    chosen, weights, terms = expected
    slots = naive_gates.kept(chosen, capacity, choice_major)
    assert routing.capacity == capacity
    for t, (experts, own) in enumerate(zip(chosen, weights)):
        made = [j for j, e in enumerate(routing.experts_TK[t].tolist()) if e >= 0]
        assert routing.experts_TK[t, made].tolist() == experts
        keep = [(t, j) in slots for j in range(len(experts))]
        assert routing.keep_TK[t, made].tolist() == keep
        assert routing.slots_TK[t, made].tolist() == [slots.get((t, j), -1) for j in range(len(experts))]
        right = torch.tensor([w * k for w, k in zip(own, keep)], dtype=torch.float64)
        torch.testing.assert_close(routing.weights_TK[t, made].detach(), right)
        others = [j for j in range(routing.experts_TK.shape[1]) if j not in made]
        assert (routing.weights_TK[t, others] == 0).all()
    counts = Counter(e for row in chosen for e in row)
    assert routing.counts_E.tolist() == [counts[e] for e in range(routing.probs_TE.shape[1])]
    assert set(routing.aux_terms) == set(terms)
    for name, value in terms.items():
        torch.testing.assert_close(routing.aux_terms[name], torch.tensor(value, dtype=torch.float64))
    torch.testing.assert_close(routing.aux, torch.tensor(sum(terms.values()), dtype=torch.float64))
