"""What a traced layer reads on the host where every expert gets as many of each rank's tokens; for any size."""

from torch import Tensor

from moebench.kernels.host import Answer, UnansweredRead
from moebench.workloads.models.decoder import DecoderShape


def balanced_reads(
    shape: DecoderShape, tokens: int, ranks: int, chunks: int = 1, expert_ranks: int | None = None
) -> Answer:
    """Answers for `moebench.kernels.host.answering`.

    Args:
        tokens: of a rank; chunks: as of `DecoderLayer`.
        expert_ranks: among which experts are divided by their number, where others of the ranks cut their width.

    Raises:
        ValueError: the routes of a chunk can't be dealt evenly to the experts, or the experts to the ranks.
    """
    routes = tokens * shape.top_k
    holders = ranks if expert_ranks is None else expert_ranks
    if shape.experts % holders or routes % (shape.experts * chunks):
        where = f"experts = {shape.experts} on ranks = {holders}"
        raise ValueError(f"{routes} routes in chunks = {chunks} can't be dealt evenly to {where}")
    share, local = routes // shape.experts, shape.experts // holders
    answers = {
        "expert_counts": [share] * shape.experts,
        "received_counts": [share] * (ranks * local),
        "received_kept_by_expert": [share * ranks] * local,
        "received_kept_by_part": [share * ranks // chunks] * local * chunks,
    }

    def answer(quantity: str, values: Tensor) -> list[int]:
        if quantity not in answers:
            raise UnansweredRead(f"the program reads {quantity}; balanced routing answers {', '.join(answers)}")
        return answers[quantity]

    return answer
