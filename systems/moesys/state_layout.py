"""What an expert's state is, byte by byte: steps taken, parameters, and the two moments of Adam.

One record an expert, the same on disk and in host memory:

    0      steps of the optimiser, int64
    64     parameters, P elements of the state's dtype, in the order of their names
    ...    first moments, P elements; second moments, P elements

so 3 b P + 64 bytes with b bytes an element: 12 P in FP32, as the paper counts for its SSD. On the device a state has P
elements of the layer's dtype, its parameters only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

HEAD_BYTES = 64
PARTS = ("parameters", "averages", "squares")


@dataclass(frozen=True)
class StateLayout:
    """The tensors of one expert.

    Attributes:
        shapes: by name, in order.
        dtype: on the device.
        state_dtype: of the record; FP32 unless the device computes in FP64.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Raises ValueError: no tensors, a negative size, or a dtype that is not floating point."""
        if not self.shapes:
            raise ValueError("an expert needs at least one tensor")
        for name, shape in self.shapes.items():
            if any(size < 0 for size in shape):
                raise ValueError(f"tensor {name} of an expert can't have the shape {list(shape)}")
        for dtype in (self.dtype, self.state_dtype):
            if not dtype.is_floating_point:
                raise ValueError(f"states are floating point; got {dtype}")

    @cached_property
    def elements(self) -> int:
        """P, parameters of an expert."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @cached_property
    def record_bytes(self) -> int:
        """Of a record on disk and in host memory."""
        return HEAD_BYTES + len(PARTS) * self.elements * self.state_dtype.itemsize

    @cached_property
    def device_bytes(self) -> int:
        """Of the parameters on the device."""
        return self.elements * self.dtype.itemsize

    def steps(self, record_B: Tensor) -> Tensor:
        """The step counter in a record, int64 [1]."""
        return record_B[:8].view(torch.int64)

    def part(self, record_B: Tensor, name: str) -> Tensor:
        """One of `PARTS` of a record, [P] in the state's dtype; a view."""
        size = self.elements * self.state_dtype.itemsize
        start = HEAD_BYTES + PARTS.index(name) * size
        return record_B[start : start + size].view(self.state_dtype)

    def split(self, flat_P: Tensor) -> list[Tensor]:
        """The tensors of an expert in a flat [P] tensor; views."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        return [part.view(shape) for part, shape in zip(flat_P.split(sizes), self.shapes.values())]

    def write(self, record_B: Tensor, parameters: Mapping[str, Tensor]) -> None:
        """Fill a record with parameters, moments of zero and no steps.

        Raises:
            ValueError: other names or shapes than the layout's.
        """
        given = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        if given != dict(self.shapes):
            raise ValueError(f"an expert has {dict(self.shapes)}; got {given}")
        record_B.zero_()
        for view, name in zip(self.split(self.part(record_B, "parameters")), self.shapes):
            view.copy_(parameters[name])

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "StateLayout":
        """From what `to_plain` gave.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: something else.
        """
        shapes = {str(name): tuple(map(int, shape)) for name, shape in plain["shapes"].items()}
        dtypes = [getattr(torch, plain[name]) for name in ("dtype", "state_dtype")]
        if not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
            raise ValueError(f"no dtypes: {dtypes}")
        return cls(shapes, *dtypes)

    def to_plain(self) -> dict[str, object]:
        """As JSON stores it."""
        return {
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "dtype": str(self.dtype).removeprefix("torch."),
            "state_dtype": str(self.state_dtype).removeprefix("torch."),
        }
