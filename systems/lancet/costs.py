"""What the passes believe that things cost: profiled computation, cached by operator and shapes; linear pieces for
communication.

The artifact's interpolation takes the slope of the segment above the queried point; that is a switch, so that its
effect can be measured.
"""

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, fx

from moebench.systems.lancet.executor import Span
from moebench.systems.lancet.nodes import collective_of, is_view, is_wait, value_of
from moebench.systems.lancet.schedule import Times

_TRIMMED = 1 / 16  # of the samples, on each side: 6.25 %


@dataclass(frozen=True)
class LinearPieces:
    """Seconds of a message by its bytes, linear between measured points.

    Outside of them the nearest segment goes on, but no message is faster than the smallest.

    Attributes:
        points: (bytes, seconds), ascending in bytes, at least two.
        slope_above: between two points take the slope of the next segment, as the artifact does; above the last but
            one there is none, and the own slope is taken.

    Raises:
        ValueError: fewer points, or not ascending.
    """

    points: tuple[tuple[int, float], ...]
    slope_above: bool = False

    def __post_init__(self) -> None:
        sizes = [nbytes for nbytes, _ in self.points]
        if len(sizes) < 2 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"at least two points, ascending in bytes; got {sizes}")

    def __call__(self, nbytes: int) -> float:
        """Seconds of a message of so many bytes."""
        sizes = [size for size, _ in self.points]
        at = min(max(bisect_right(sizes, nbytes) - 1, 0), len(sizes) - 2)
        start, seconds = self.points[at]
        slope = self._slope(at)
        if self.slope_above and nbytes > start and nbytes != self.points[at + 1][0]:
            slope = self._slope(min(at + 1, len(sizes) - 2))
        return max(seconds + slope * (nbytes - start), min(self.points[0][1], seconds))

    def _slope(self, at: int) -> float:
        (small, fast), (large, slow) = self.points[at], self.points[at + 1]
        return (slow - fast) / (large - small)


def trimmed_mean(samples: Sequence[float]) -> float:
    """The mean without the 6.25 % smallest and as many largest."""
    ordered = sorted(samples)
    cut = int(len(ordered) * _TRIMMED)
    return statistics.fmean(ordered[cut : len(ordered) - cut])


class Profile:
    """Seconds of computation by operator and shapes, from timed runs of a plan that has the graph's nodes.

    On a GPU the spans must have been taken with a synchronisation behind each call.
    """

    def __init__(self, graph: fx.Graph, runs: Iterable[Sequence[Span]]) -> None:
        nodes = {node.name: node for node in graph.nodes if node.op == "call_function"}
        samples: dict[object, list[float]] = {}
        for run in runs:
            for span in run:
                node = nodes.get(span.name)
                if node is not None and not (collective_of(node) or is_wait(node) or is_view(node)):
                    samples.setdefault(signature(node), []).append(span.end_s - span.start_s)
        self._seconds: Mapping[object, float] = {key: trimmed_mean(found) for key, found in samples.items()}

    def __len__(self) -> int:
        return len(self._seconds)

    def knows(self, node: fx.Node) -> bool:
        """Whether anything with its operator and shapes has run."""
        return node.op == "call_function" and signature(node) in self._seconds

    def seconds(self, node: fx.Node) -> float:
        """Of a node that computes.

        Raises:
            KeyError: nothing with its operator and shapes has run.
        """
        return self._seconds[signature(node)]


def signature(node: fx.Node) -> tuple[object, ...]:
    """What a node's time depends on: operator, shapes, strides and dtypes that it reads and makes, other arguments."""

    def described(value: object) -> object:
        if isinstance(value, fx.Node):
            return described(value.meta["val"])
        if isinstance(value, Tensor):
            return (tuple(value.shape), tuple(value.stride()), value.dtype)
        return tuple(described(one) for one in value) if isinstance(value, (tuple, list)) else str(value)

    kwargs = tuple((name, described(arg)) for name, arg in sorted(node.kwargs.items()))
    return (node.target, described(node.args), kwargs, described(node.meta["val"]))


def times_of(profile: Profile, all_to_all_s: LinearPieces, all_reduce_s: LinearPieces, copy_s: LinearPieces) -> Times:
    """What `schedule` takes; other collectives are charged as all-to-alls of their bytes."""

    def node_s(node: fx.Node) -> float:
        kind = collective_of(node)
        if kind is None:
            return profile.seconds(node)
        nbytes = value_of(node.args[0]).nbytes  # type: ignore[arg-type]
        return all_reduce_s(nbytes) if kind == "all_reduce" else all_to_all_s(nbytes)

    return Times(node_s, all_reduce_s, copy_s)
