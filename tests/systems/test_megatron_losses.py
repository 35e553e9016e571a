"""Megatron's auxiliary losses: over a batch, over sequences, over all ranks; the z-loss."""

from dataclasses import replace

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.ranks.run import run_ranks
from moebench.systems.megatron import losses
from moebench.systems.megatron.layer import MegatronLayer, Setting
from moebench.workloads.conventions import COMMON
from moebench.workloads.gates import steps
from moebench.workloads.layer import GateSpec, LayerWorkload
from tests.systems import megatron_on_ranks

TOP2 = GateSpec("topk", 2)


def logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def batch_loss(x, choices=2, coefficient=0.7, is_sigmoid=False):
    return losses.balance_loss(*losses.scores_and_map(x, choices, is_sigmoid), choices, coefficient)


def test_the_batch_loss_is_the_rules():
    """c E/K sum P f of softmax and its K largest, gradient included."""
    ours, theirs = logits(24, 6), logits(24, 6)
    probs = theirs.softmax(1)
    right = steps.balance_loss(probs, steps.ranked(probs, 2), replace(COMMON, auxiliary=0.7))
    loss = batch_loss(ours)
    torch.testing.assert_close(loss, right)
    loss.backward()
    right.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_balance_gives_the_coefficient(is_sigmoid):
    """Each expert chosen equally often, and equal mean scores."""
    x = torch.eye(6, dtype=torch.float64).repeat(4, 1)
    assert float(batch_loss(x, 1, 0.25, is_sigmoid)) == pytest.approx(0.25)
    assert float(batch_loss(2 * x, 1, 0.25, is_sigmoid)) == pytest.approx(0.25)


def test_the_sequence_loss_is_the_mean_of_the_sequences():
    """Opposite imbalances do not cancel, as they would in the batch's; gradients follow."""
    one, other = logits(24, 6), logits(24, 6)
    with torch.no_grad():
        for x in (one, other):
            x[:12, 0] += 3
            x[12:, 1] += 3
    loss = losses.sequence_loss(*losses.scores_and_map(one, 2, False), 2, 0.7, 2)
    parts = (batch_loss(other[:12]) + batch_loss(other[12:])) / 2
    torch.testing.assert_close(loss, parts)
    assert float(loss.detach()) > float(batch_loss(one.detach()))
    loss.backward()
    parts.backward()
    torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("sequences", [0, 5])
def test_sequences_of_different_lengths_are_refused(sequences):
    """24 tokens are no 5 sequences."""
    with pytest.raises(ValueError, match=f"24 tokens are not {sequences} sequences of one length"):
        losses.sequence_loss(*losses.scores_and_map(logits(24, 6), 2, False), 2, 0.7, sequences)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_mean_of_the_global_losses_is_the_loss_of_all_tokens(ranks):
    """So is the gradient: not smaller by the number of ranks (Megatron issue 3672)."""
    seen = run_ranks(f"{megatron_on_ranks.__name__}:global_loss_of_a_rank", ranks, (5, 0.7))
    torch.manual_seed(5)
    everything = torch.randn(ranks, 12, 6, dtype=torch.float64).view(-1, 6).requires_grad_()
    loss = batch_loss(everything)
    loss.backward()
    torch.testing.assert_close(torch.stack([of_rank for of_rank, _ in seen]).mean(), loss.detach())
    torch.testing.assert_close(torch.cat([gradient for _, gradient in seen]), everything.grad)


def test_the_z_loss_by_hand():
    """Mean squared log-sum-exp."""
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    log2 = torch.tensor(2.0).double().log()
    torch.testing.assert_close(losses.z_loss(x, 0.5), 0.25 * (log2**2 + (1 + log2) ** 2))


def test_no_tokens_no_loss():
    """Zero, not NaN, for each of them."""
    nothing = losses.scores_and_map(torch.zeros(0, 6), 2, False)
    found = [losses.balance_loss(*nothing, 2, 1.0), losses.sequence_loss(*nothing, 2, 1.0, 2)]
    found += [losses.global_loss(*nothing, 2, 1.0, described_group(1)), losses.z_loss(torch.zeros(0, 6), 1.0)]
    assert [float(loss) for loss in found] == [0.0] * 4


@pytest.mark.parametrize("balance", losses.BALANCES)
def test_a_setting_names_its_losses(balance):
    """The layer's loss is that of the setting, and the z-loss on top; auxiliary 0 leaves only the latter."""
    work = LayerWorkload(TOP2, 3, 8, 16, 12, 6)
    torch.manual_seed(0)
    x = torch.randn(24, 16)
    setting = Setting(balance=balance, z_loss=0.1)
    for auxiliary in (1.0, 0.0):
        conventions, device = replace(COMMON, auxiliary=auxiliary), torch.device("cpu")
        layer = MegatronLayer(work, described_group(1), conventions, device, torch.float32, setting)
        own = layer.gate(x)
        scores, chosen = losses.scores_and_map(own, 2, False)
        right = losses.z_loss(own, 0.1)
        if auxiliary:
            right = right + {
                "batch": losses.balance_loss(scores, chosen, 2, 1.0),
                "sequence": losses.sequence_loss(scores, chosen, 2, 1.0, 3),
                "global": losses.balance_loss(scores, chosen, 2, 1.0),
            }[balance]
        torch.testing.assert_close(layer(x)[1], right)
