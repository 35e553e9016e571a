"""Which part of the step an operator belongs to, forward and backward.

The backward runs outside the forward's `with region` blocks. Autograd numbers its nodes in the order of the forward, so
a backward operator takes the region of the forward operator whose node it runs in.
"""

import os
import sys
from bisect import bisect_right, insort
from types import FrameType

import torch

from moebench.kernels.region import current_region, is_backward_region
from moebench.program import BACKWARD, FORWARD, OPTIMIZER
from moebench.trace.errors import UnattributedOperator

_ACCUMULATION = 2**64 - 1
_ROOT = "torch::autograd::GraphRoot"
_MACHINERY = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_get_node = torch._C._current_autograd_node
_get_next_number = torch.autograd._get_sequence_nr


class Attribution:
    """Region and phase of each operator, in issue order.

    `backward` must not be called inside an open region: there an open region means one that the backward itself opened,
    by recomputing a part of the forward or in a hook.
    """

    def __init__(self) -> None:
        self._region_of: dict[int, str] = {}
        self._numbers: list[int] = []

    def locate(self, name: str) -> tuple[str, str]:
        """Region and phase of the operator that is about to run.

        Raises:
            UnattributedOperator: no region is open and no forward operator tells.
        """
        node = _get_node()
        region = current_region()
        if node is None:
            if region is None:
                return self._root_gradient(name)
            self._remember(region)
            if region == "optimizer":
                return region, OPTIMIZER
            return region, BACKWARD if region == "grad-sync" or is_backward_region() else FORWARD
        # What is recomputed makes nodes of its own, those of autograd Functions with gradients off.
        makes_nodes = region is not None or torch.is_grad_enabled()
        if region is None:
            region = self._region_of_node(node, name)
        if makes_nodes:
            self._remember(region)
        return region, BACKWARD

    def _remember(self, region: str) -> None:
        """First writer wins: later operators without a node of their own see the same number."""
        number = _get_next_number() - 1
        if number not in self._region_of:
            self._region_of[number] = region
            if not self._numbers or number > self._numbers[-1]:
                self._numbers.append(number)
            else:
                insort(self._numbers, number)

    def _region_of_node(self, node: torch.autograd.graph.Node, name: str) -> str:
        number = node._sequence_nr()
        if number == _ACCUMULATION:
            return "grad-sync"
        region = self._region_of.get(number)
        if region is None:
            if node.name() == _ROOT:
                return "loss"
            below = bisect_right(self._numbers, number)
            if below == 0:
                raise UnattributedOperator(
                    f"{name} in the backward node {node.name()}, whose forward was not recorded: "
                    "record forward and backward together"
                )
            region = self._region_of[self._numbers[below - 1]]
        return region

    def _root_gradient(self, name: str) -> tuple[str, str]:
        if name == "aten::ones_like" and _is_called_by("_make_grads"):
            return "loss", BACKWARD
        raise UnattributedOperator(
            f"{name} runs outside every region: put it into `with moebench.kernels.region.region(...)`{_place()}"
        )


def _is_called_by(function: str) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


def _place() -> str:
    """` (file:line)` of the innermost frame outside torch and this package's trace, for the error text."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_MACHINERY):
            return f" ({path}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
