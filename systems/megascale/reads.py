"""What a traced layer reads on the host where every rank routes its tokens to the experts in the same shares."""

from collections.abc import Sequence

from torch import Tensor

from moebench.kernels.host import Answer, UnansweredRead


def counts_of(shares: Sequence[float], routes: int) -> list[int]:
    """So many routes dealt to the experts in these shares, in whole numbers that sum up: largest remainders first.

    Raises:
        ValueError: no shares, or one below 0, or all 0.
    """
    total = sum(shares)
    if not shares or min(shares) < 0 or not total:
        raise ValueError(f"shares = {list(shares)}: must not be negative, nor all zero")
    exact = [routes * share / total for share in shares]
    counts = [int(value) for value in exact]
    left = routes - sum(counts)
    for expert in sorted(range(len(exact)), key=lambda e: (counts[e] - exact[e], e))[:left]:
        counts[expert] += 1
    return counts


def reads_of_shares(shares: Sequence[float], routes: int, ranks: int, index: int, chunks: int = 1) -> Answer:
    """Answers for `moebench.kernels.host.answering` on rank `index`.

    Args:
        shares: of the routes, expert by expert; E a multiple of the ranks where they have experts of their own.
        routes: of a rank's tokens, K of each.
        chunks: as of `DecoderLayer`.
    """
    experts = len(shares)
    local = experts // ranks or experts
    own = slice(index * local, (index + 1) * local) if experts % ranks == 0 else slice(0, experts)
    sent = counts_of(shares, routes)
    by_part = [counts_of(shares, routes // chunks) for _ in range(chunks)]

    def answer(quantity: str, values: Tensor) -> list[int]:
        everyone = values.numel() == experts * (chunks if quantity == "received_kept_by_part" else 1)
        place = slice(0, experts) if everyone and ranks > 1 else own
        answers = {
            "expert_counts": sent,
            "received_counts": sent[own] * ranks,
            "received_kept_by_expert": [count * ranks for count in sent[place]],
            "received_kept_by_part": [count * ranks for part in by_part for count in part[place]],
        }
        if quantity not in answers:
            raise UnansweredRead(f"the program reads {quantity}; shares of the routes answer {', '.join(answers)}")
        return answers[quantity]

    return answer
