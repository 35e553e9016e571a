"""What ranks run in test_training.py; apart, so that a rank does not import pytest."""

import torch
from torch import nn

from moebench.kernels.collectives.start_wait import start_all_to_all
from moebench.kernels.region import region
from moebench.systems.interface import MoELayer
from moebench.systems.training import TrainingStep

D = 4


class TwoExpertLayer(MoELayer):
    """A dense gate, which every rank holds, and one expert a rank; tokens go round-robin, half an exchange each way.

    Small enough to be checked by hand: y = expert_(t mod R)(x) * sigmoid(x . gate), aux = mean of (x . gate)^2.
    """

    def __init__(self, group, with_aux=True, forgets=False, device="cpu"):
        super().__init__()
        self.group, self.with_aux, self.forgets = group, with_aux, forgets
        self.gate = nn.Parameter(torch.linspace(-1, 1, D).to(device))
        self.unused = nn.Parameter(torch.ones(2, device=device))
        self.expert = nn.Parameter(torch.eye(D).to(device) * (group.rank + 1))
        self.expert.is_expert = True

    def _exchange(self, x, n):
        with region("exchange"):
            pending = start_all_to_all(x, self.group)
            return x + 0 if self.forgets and n else pending.wait()

    def forward(self, x):
        with region("gate"):
            score = x @ self.gate
            aux = score.square().sum() / max(1, len(x)) if self.with_aux else score.new_zeros(())
        received = self._exchange(x, 0)
        with region("experts"):
            y = received @ self.expert
        y = self._exchange(y, 1)
        with region("combine"):
            return y * score.sigmoid()[:, None], aux


def whole_job(xs, upstreams, gate, experts, with_aux):
    """The same step on one process: every rank's tokens, the mean of the losses, plain autograd."""
    ranks = len(xs)
    gate = gate.clone().requires_grad_()
    experts = [e.clone().requires_grad_() for e in experts]
    xs = [x.clone().requires_grad_() for x in xs]
    loss, outputs, auxes = 0.0, [], []
    for x, upstream in zip(xs, upstreams):
        score = x @ gate
        y = torch.cat([part @ expert for part, expert in zip(x.chunk(ranks), experts)]) * score.sigmoid()[:, None]
        aux = score.square().sum() / max(1, len(x)) if with_aux else torch.zeros(())
        loss = loss + (y * upstream).sum() + aux / ranks
        outputs.append(y.detach())
        auxes.append(aux.detach())
    loss.backward()
    return outputs, auxes, [x.grad for x in xs], gate.grad, [e.grad for e in experts]


def steps_equal_the_whole_job(group, tokens, with_aux):
    """Two steps on real ranks against the whole job on one process."""
    layer = TwoExpertLayer(group, with_aux)
    step = TrainingStep(layer, group, learning_rate=0.1)
    gate, experts = layer.gate.detach().clone(), [torch.eye(D) * (r + 1) for r in range(group.size)]
    for n in range(2):
        torch.manual_seed(n)
        xs = [torch.randn(tokens, D) for _ in range(group.size)]
        upstreams = [torch.randn(tokens, D) / group.size for _ in range(group.size)]
        outputs, auxes, x_grads, gate_grad, expert_grads = whole_job(xs, upstreams, gate, experts, with_aux)
        x = xs[group.index].clone().requires_grad_()
        y, aux = step(x, upstreams[group.index])
        expert_grad = expert_grads[group.index]
        for ours, theirs in (
            (y, outputs[group.index]),
            (aux, auxes[group.index]),
            (x.grad, x_grads[group.index]),
            (layer.gate.grad, gate_grad),
            (layer.expert.grad, torch.zeros(D, D) if expert_grad is None else expert_grad),
        ):
            assert torch.allclose(ours, theirs, 1e-5, 1e-6), (n, ours, theirs)
        gate = gate - 0.1 * gate_grad
        experts = [e - 0.1 * g for e, g in zip(experts, expert_grads)]
        assert torch.allclose(layer.gate, gate, 1e-5, 1e-6)
        assert torch.allclose(layer.expert, experts[group.index], 1e-5, 1e-6)
        assert torch.equal(layer.unused.detach(), torch.ones(2))
