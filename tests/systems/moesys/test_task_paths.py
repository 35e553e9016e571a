"""The choice between two networks: forward, gradient, evaluation, and what it is for."""

import math

import pytest
import torch

from moebench.kernels.optimizer import AdamW
from moebench.systems.moesys.task_model import TaskModel, TaskModelShape
from moebench.systems.moesys.task_paths import OWN, SHARED, path_weights

LOGITS = (0.4, -0.3)
SHAPE = TaskModelShape(6, 4, 8, 2, 2, 8, 16, (3, 4))


def naive(logits, row, temperature):
    """y of one sample, number by number."""
    noisy = [(a - math.log(-math.log(min(max(u, 1e-5), 0.9999)))) / temperature for a, u in zip(logits, row)]
    total = sum(math.exp(z) for z in noisy)
    return [math.exp(z) / total for z in noisy]


def drawn(samples=7, seed=0):
    uniform = torch.rand(samples, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    uniform[0], uniform[1] = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])  # whose logarithms are infinite
    return uniform


@pytest.mark.parametrize("is_hard", [True, False])
@pytest.mark.parametrize("temperature", [0.5, 5.0])
def test_weights_and_their_gradient_are_the_definitions(is_hard, temperature):
    """Hard: the larger of y; both ways the logits get sum over samples of dL/dw times the softmax's Jacobian."""
    uniform, logits = drawn(), torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    weights = path_weights(logits, uniform, temperature, is_hard)
    soft = [naive(LOGITS, row, temperature) for row in uniform.tolist()]
    wanted = [[float(y0 >= y1), float(y1 > y0)] for y0, y1 in soft] if is_hard else soft
    torch.testing.assert_close(weights, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    upstream = torch.linspace(-1, 2, 14, dtype=torch.float64).sin().view(7, 2)
    weights.backward(upstream)
    gradient = [0.0, 0.0]
    for y, g in zip(soft, upstream.tolist()):
        mean = sum(a * b for a, b in zip(y, g))
        for path in (0, 1):
            gradient[path] += y[path] * (g[path] - mean) / temperature
    torch.testing.assert_close(logits.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-10, atol=1e-14)


def test_each_path_is_drawn_as_often_as_its_softmax_says():
    """Gumbel-max: of 20,000 samples, softmax(logits) of them within four standard deviations."""
    uniform = torch.rand(20_000, 2, generator=torch.Generator().manual_seed(3))
    share = float(path_weights(torch.tensor(LOGITS), uniform)[:, OWN].mean())
    wanted = 1 / (1 + math.exp(LOGITS[0] - LOGITS[1]))
    assert abs(share - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / 20_000)


@pytest.mark.parametrize(
    ("logits", "uniform", "temperature", "words"),
    [
        (torch.zeros(3), torch.zeros(4, 2), 1.0, r"logits \[3\]"),
        (torch.zeros(2), torch.zeros(4, 3), 1.0, r"uniform \[4, 3\]"),
        (torch.zeros(2), torch.zeros(4, 2), 0.0, "temperature = 0.0"),
    ],
)
def test_what_can_not_be_drawn_is_refused(logits, uniform, temperature, words):
    """Shapes and temperature."""
    with pytest.raises(ValueError, match=words):
        path_weights(logits, uniform, temperature)


def test_no_sample_draws_nothing():
    """Zero rows of weights, and a gradient of zeros."""
    logits = torch.zeros(2, requires_grad=True)
    weights = path_weights(logits, torch.zeros(0, 2))
    weights.sum().backward()
    assert weights.shape == (0, 2)
    assert logits.grad.tolist() == [0.0, 0.0]


def test_evaluation_takes_the_larger_logits_network_alone():
    """As training without noise does; the network that was not chosen may be anything."""
    model = TaskModel(SHAPE, [0, 1], dtype=torch.float64)
    model.initialise(1)
    with torch.no_grad():
        for logits, pair in zip(model.branch(1).logits, ([0.0, 0.1], [2.0, 0.1])):
            logits.copy_(torch.tensor(pair))
    assert model.paths(1) == [OWN, SHARED]
    assert model.paths(0) == [SHARED, SHARED]  # a tie
    x = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    even = {1: torch.full((5, 2, 2), 0.5, dtype=torch.float64)}
    wanted = model({1: x}, even)[1]
    with torch.no_grad():
        model.branch(1).ffns[1].w2_FD.fill_(float("nan"))
        model.blocks[0].ffn.w1_DF.fill_(float("nan"))
    torch.testing.assert_close(model.evaluate(x, 1), wanted, rtol=1e-12, atol=1e-12)


def test_a_task_learns_to_leave_the_shared_network():
    """Two tasks with a shared network that doesn't train and drowns what samples say: both come to take their own, and
    evaluation by the larger logit is right nearly always."""
    torch.manual_seed(0)
    shape = TaskModelShape(6, 3, 16, 2, 1, 16, 16, (2, 2), temperature=1.0)
    model = TaskModel(shape, [0, 1])
    model.initialise(2)
    model.blocks[0].ffn.requires_grad_(False)
    with torch.no_grad():
        w2_FD = model.blocks[0].ffn.w2_FD
        w2_FD.copy_(50 * w2_FD[:1].expand_as(w2_FD))  # one large vector, whatever the sample is
    adam = AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    generator = torch.Generator().manual_seed(5)
    rule = torch.randn(6, generator=generator)
    losses = []
    for _ in range(100):
        x = torch.randn(64, 3, 6, generator=generator)
        y = ((x.mean(1) @ rule) > 0).long()
        uniform = {t: torch.rand(64, 1, 2, generator=generator) for t in (0, 1)}
        logits = model({0: x, 1: x}, uniform)
        loss = sum(torch.nn.functional.cross_entropy(logits[t], y if t == 0 else 1 - y) for t in (0, 1)) / 2
        model.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert model.paths(0) == model.paths(1) == [OWN]
    right = [float((model.evaluate(x, t).argmax(1) == (y if t == 0 else 1 - y)).float().mean()) for t in (0, 1)]
    assert min(right) > 0.9
