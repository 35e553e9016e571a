"""What joining sums costs, tried again and again: what comes before the sums in question is simulated once.

The same timeline as `simulate(fused(program, order, groups, ...))`, but for one group that is still open and sums alone
behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moebench.systems.lancet.instructions import Program


@dataclass
class _State:
    """Both streams up to a place in the order.

    Attributes:
        compute_s, communication_s: when each stream is free; latest_s: the end of what ended last.
        end_s: of every instruction that has run. unpacks: of joined sums, when each is there and its copy's time.
    """

    at: int
    compute_s: float
    communication_s: float
    latest_s: float
    end_s: list[float]
    unpacks: list[tuple[float, float]]

    def copy(self) -> "_State":
        """Another one to go on from."""
        place = (self.at, self.compute_s, self.communication_s, self.latest_s)
        return _State(*place, list(self.end_s), list(self.unpacks))


class Trials:
    """Makespans of an order with one open group of sums; groups are closed from the front.

    Args:
        all_reduce_s, copy_s: as for `fuse`.
    """

    def __init__(
        self,
        program: Program,
        order: Sequence[int],
        all_reduce_s: Callable[[int], float],
        copy_s: Callable[[int], float],
    ) -> None:
        self._program, self._all_reduce_s, self._copy_s = program, all_reduce_s, copy_s
        self._work = [(number, program[number].is_compute, program[number].time_s, program[number].needs)
                      for number in order]  # fmt: skip
        self._place = {number: at for at, number in enumerate(order)}
        self._state = _State(0, 0.0, 0.0, 0.0, [0.0] * len(program), [])

    def close(self, group: Sequence[int], before: int) -> None:
        """Go on to right before a sum, the open group being `group`."""
        self._run(self._state, group, self._place[before])

    def makespan_s(self, group: Sequence[int]) -> float:
        """Of the whole order, if the sums of `group` were one and all behind them alone."""
        state = self._state.copy()
        self._run(state, group, len(self._work))
        compute_s, latest_s = state.compute_s, state.latest_s
        for ready_s, time_s in state.unpacks:
            if time_s > 0:
                compute_s = max(ready_s, compute_s) + time_s
                latest_s = max(latest_s, compute_s)
        return latest_s

    def _run(self, state: _State, group: Sequence[int], until: int) -> None:
        members = set(group) if len(group) > 1 else set()
        last, end_s = group[-1] if members else -1, state.end_s
        for number, is_compute, time_s, needs in self._work[state.at : until]:
            if number in members:
                if number == last:
                    self._joined(state, group)
                continue
            ready_s = 0.0
            for need in needs:
                if end_s[need] > ready_s:
                    ready_s = end_s[need]
            if not is_compute:
                state.communication_s = ready_s = max(ready_s, state.communication_s) + time_s
            elif time_s > 0:
                state.compute_s = ready_s = max(ready_s, state.compute_s) + time_s
            end_s[number] = ready_s
            if ready_s > state.latest_s:
                state.latest_s = ready_s
        state.at = until

    def _joined(self, state: _State, group: Sequence[int]) -> None:
        """A copy into one vector, its sum, and later a copy out of it."""
        nbytes = sum(self._program[number].nbytes for number in group)
        ready_s = max((state.end_s[need] for number in group for need in self._program[number].needs), default=0.0)
        copy_s = self._copy_s(nbytes)
        if copy_s > 0:
            state.compute_s = ready_s = max(ready_s, state.compute_s) + copy_s
        state.communication_s = max(ready_s, state.communication_s) + self._all_reduce_s(nbytes)
        for number in group:
            state.end_s[number] = state.communication_s
        state.unpacks.append((state.communication_s, copy_s))
        state.latest_s = max(state.latest_s, state.communication_s)
