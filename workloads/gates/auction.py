"""Which token goes to which expert when every expert takes equally many and the scores add up to (nearly) the most.

The auction of BASE layers (Lewis et al. 2021, appendix; fairseq 1.0, balanced_assignment): in a round every expert bids
on its best tokens, as much more than their price as it would lose by the next best one, and epsilon; each token goes to
the highest bidder and costs that much more. A holder bids epsilon to keep a token, so prices rise on it too. That makes
the auction short, about ten rounds, and leaves the sum of scores without a bound. So the result is checked against the
bound that the prices give, and where it may be further than epsilon a token from the most, the auction goes on as
Bertsekas has it (1992): experts give back what they would not buy at these prices, and keep the rest at the price they
paid. At its end no expert is worse off than with other tokens by more than epsilon each.

T tokens, E experts, J = E ceil(T / E) tokens with stand-ins that nobody prefers, so that each expert takes J / E.
"""

import torch
from torch import Tensor

from moebench.kernels.host import read_ints

SHORT_ROUNDS = 100  # fairseq's max_iterations, after which it lets holders go and ends soon, wherever that is
_LARGEST = 1e100


def balanced_assignment(scores_TE: Tensor, epsilon: float, least_epsilon: float) -> tuple[Tensor, int]:
    """The expert of every token, int64 [T], at most ceil(T / E) tokens an expert, and how many rounds it took.

    The sum of the scores is within J x max(epsilon x range of the scores, least_epsilon) of the largest possible.
    One host read a round, and one for the check. Ties go to the lowest token and the lowest expert.

    Args:
        scores_TE: of any floating-point dtype. What is not finite counts as the lowest finite score.
        epsilon: where scores tie, the number of rounds may grow as 1 / epsilon.
    """
    tokens, experts = scores_TE.shape
    share = -(-tokens // experts)
    if tokens == 0 or experts == 1:
        return torch.zeros(tokens, dtype=torch.int64, device=scores_TE.device), 0
    scores_EJ = _with_stand_ins(_finite(scores_TE.detach().to(torch.float64)), experts * share)
    scores_EJ = scores_EJ - scores_EJ.min()  # or a price may be too small to change what it is taken from
    step = (scores_EJ.max() * epsilon).clamp(min=least_epsilon)
    price_J, holder_J, rounds = _short_auction(scores_EJ, share, step)
    if not _read(_is_near(scores_EJ, price_J, holder_J, share, step), rounds):
        holder_J, rounds = _exact_auction(scores_EJ, price_J, holder_J, share, step, rounds)
    return holder_J[:tokens], rounds


def _short_auction(scores_EJ: Tensor, share: int, step: Tensor) -> tuple[Tensor, Tensor, int]:
    """The published auction to its end: prices before the last bids, holders, rounds.

    Cut off after `SHORT_ROUNDS`, or after two an expert, which experts that all score alike need one of.
    """
    price_J = scores_EJ.new_zeros(scores_EJ.shape[1])
    holder_J = torch.full_like(price_J, -1, dtype=torch.int64)
    for rounds in range(1, max(SHORT_ROUNDS, 2 * len(scores_EJ)) + 1):
        held_EJ = _held(holder_J, len(scores_EJ))
        bids_EJ = _bids(scores_EJ, price_J, held_EJ, share, step)
        bid_J, holder_J = _winners(torch.where(held_EJ, step, bids_EJ), torch.full_like(holder_J, -1))
        if _read((holder_J >= 0).all(), rounds):
            break
        price_J = price_J + bid_J
    return price_J, holder_J, rounds


def _exact_auction(
    scores_EJ: Tensor, price_J: Tensor, holder_J: Tensor, share: int, step: Tensor, rounds: int
) -> tuple[Tensor, int]:
    """From any prices to holders that are within epsilon a token of the most: holders and rounds, all told."""
    held_EJ, gain_EJ = _held(holder_J, len(scores_EJ)), scores_EJ - price_J
    other_E1 = gain_EJ.masked_fill(held_EJ, -torch.inf).amax(1, keepdim=True)
    regretted_J = (held_EJ & (gain_EJ < other_E1 - step)).any(0)
    holder_J = holder_J.masked_fill(regretted_J, -1)
    while not _read((holder_J >= 0).all(), rounds):
        rounds += 1
        held_EJ = _held(holder_J, len(scores_EJ))
        bids_EJ = _bids(scores_EJ, price_J, held_EJ, share, step).masked_fill(held_EJ, 0.0)
        bid_J, holder_J = _winners(bids_EJ, holder_J)
        price_J = price_J + bid_J
    return holder_J, rounds


def _bids(scores_EJ: Tensor, price_J: Tensor, held_EJ: Tensor, share: int, step: Tensor) -> Tensor:
    """What every expert adds to the prices of its `share` best tokens, those it holds first; 0 for the others."""
    gain_EJ = (scores_EJ - price_J).masked_fill(held_EJ, torch.inf)
    best = torch.topk(gain_EJ, share + 1, dim=1).values
    last_E1, next_E1 = best[:, share - 1 : share], best[:, share:]
    above_EJ, equal_EJ = gain_EJ > last_E1, gain_EJ == last_E1
    # Of equals the first ones: topk leaves open which it takes.
    room_E1 = share - above_EJ.sum(1, keepdim=True)
    chosen_EJ = above_EJ | (equal_EJ & (equal_EJ.cumsum(1) <= room_E1))
    return torch.where(chosen_EJ, gain_EJ - next_E1 + step, 0.0)


def _winners(bids_EJ: Tensor, otherwise_J: Tensor) -> tuple[Tensor, Tensor]:
    """The highest bid for every token and who made it, the lowest expert of several; `otherwise_J` without a bid."""
    bid_J, bidder_J = bids_EJ.max(0)
    return bid_J, torch.where(bid_J > 0, bidder_J, otherwise_J)


def _is_near(scores_EJ: Tensor, price_J: Tensor, holder_J: Tensor, share: int, step: Tensor) -> Tensor:
    """Whether all tokens are held, and by those who get within epsilon a token of the most; maybe false if they do.

    No assignment is worth more than every token at its best expert, nor than the prices and what each expert would gain
    by its best tokens at these prices (weak duality).
    """
    held_EJ = _held(holder_J, len(scores_EJ))
    worth = scores_EJ.masked_fill(~held_EJ, 0.0).sum()
    gains = torch.topk(scores_EJ - price_J, share, dim=1).values.sum()
    most = torch.minimum(price_J.sum() + gains, scores_EJ.amax(0).sum())
    return (holder_J >= 0).all() & (most - worth <= step * scores_EJ.shape[1])


def _held(holder_J: Tensor, experts: int) -> Tensor:
    return holder_J == torch.arange(experts, device=holder_J.device)[:, None]


def _finite(scores_TE: Tensor) -> Tensor:
    """The scores with the lowest finite one in place of those that are not, as fairseq has it."""
    usable_TE = scores_TE.abs() < _LARGEST
    lowest = torch.where(usable_TE, scores_TE, torch.inf).min()
    return torch.where(usable_TE, scores_TE, torch.where(lowest < _LARGEST, lowest, 0.0))


def _with_stand_ins(scores_TE: Tensor, places: int) -> Tensor:
    """Scores [E, J]: more tokens, for which all experts score alike, so that they change no other's worth."""
    missing = places - len(scores_TE)
    return torch.cat((scores_TE, scores_TE.min().expand(missing, scores_TE.shape[1]))).t().contiguous()


def _read(flag: Tensor, rounds: int) -> bool:
    """A flag on the host. Under trace the number of all rounds is known, and nothing else: then true after the last."""
    return read_ints(torch.where(flag, rounds, 0), "rounds")[0] == rounds
