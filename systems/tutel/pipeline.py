"""Chunks of the experts' buffers on their way to the experts and back: Tutel's `a2a_ffn_overlap_forward`.

All chunks are sent off first; while one is computed, the next is under way to its experts and the one before on its way
back. The backward takes the chunks in reverse order with the gradients' exchanges in the same places, because every
start and wait is a node of its own (moebench.kernels.collectives.start_wait).
"""

from collections.abc import Callable

from torch import Tensor

from moebench.kernels.collectives.plan import Flight, Plan
from moebench.kernels.region import region

Compute = Callable[[Tensor], Tensor]


def pipelined(chunks: list[Tensor], plan: Plan, phases: int, compute: Compute) -> list[Tensor]:
    """Every chunk through the exchange, `compute`, and the exchange back.

    Args:
        chunks: emptied once they are sent, so that nobody holds them any longer.
        phases: collectives of one exchange. All but the first are started while another chunk is computed.
    """
    last, back_plan = len(chunks) - 1, plan.reversed()
    with region("exchange"):
        there = [plan.start(chunk) for chunk in chunks]
        chunks.clear()
        _advance(there[0], phases)
    back: list[Flight] = []
    for index, flight in enumerate(there):
        with region("exchange"):
            if index < last:
                _advance(there[index + 1], phases)
            chunk = flight.wait()
        with region("experts"):
            chunk = compute(chunk)
        with region("exchange"):
            if index > 0:
                _advance(back[-1], phases)
            back.append(back_plan.start(chunk))
            del chunk
    with region("exchange"):
        _advance(back[-1], phases)
        return [flight.wait() for flight in back]


def _advance(flight: Flight, phases: int) -> None:
    """Up to the last collective, whose wait is left to whoever needs the result."""
    for _ in range(phases - 1):
        flight.advance()
