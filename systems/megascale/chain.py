"""The layer under `sp` and `ep-ag` as a chain of named tensors (Fig 9), and which of them are kept for the backward.

Autograd keeps what each operator asks for. Here the operators are listed (chain_forward.py, chain_backward.py), so
what is kept is a choice: all of Fig 9's tensors, or those with an asterisk, from which the backward gets the others
again: by two norms, an activation, a permutation, and two collectives that are repeated (section 4.1).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import Pending
from moebench.kernels.region import region
from moebench.systems.decoder.products import grouped_weight_gradient, weight_gradient_of_parts
from moebench.systems.megascale.volumes import Sizes
from moebench.workloads.models.decoder import DecoderShape

# Fig 9's tensors in the order of the chain: elements in units of b s h / n, by n, m, k and f = F / D. What the layer
# returns, `next_hidden`, is the next layer's `hidden`: the printed sum of all has it, that of the kept ones has not.
FIG_9: dict[str, Callable[[int, float, int, float], float]] = {
    "hidden": lambda n, m, k, f: 1,
    "ln1_out": lambda n, m, k, f: 1,
    "qkv": lambda n, m, k, f: 1 + 2 / m,
    "q_rope": lambda n, m, k, f: 1,
    "k_rope": lambda n, m, k, f: 1 / m,
    "qkv_a2a": lambda n, m, k, f: 1 + 2 / m,
    "attn": lambda n, m, k, f: 1,
    "attn_a2a": lambda n, m, k, f: 1,
    "attn_out": lambda n, m, k, f: 1,
    "ln2_in": lambda n, m, k, f: 1,
    "ln2_out": lambda n, m, k, f: 1,
    "ln2_out_ag": lambda n, m, k, f: n,
    "ffn_in": lambda n, m, k, f: k,
    "fc1_out": lambda n, m, k, f: k * f,
    "fc3_out": lambda n, m, k, f: k * f,
    "fc2_in": lambda n, m, k, f: k * f,
    "fc2_out": lambda n, m, k, f: k,
    "fc2_out_rs": lambda n, m, k, f: n,
    "ffn_out": lambda n, m, k, f: 1,
    "next_hidden": lambda n, m, k, f: 1,
}
SELECTIVE = ("hidden", "qkv_a2a", "attn", "ln2_in", "fc1_out", "fc3_out")
KEPT = {"all": tuple(name for name in FIG_9 if name != "next_hidden"), "selective": SELECTIVE}
# What is kept besides under either choice: one number a row or a route, the router's probabilities, a shared expert's
# two products, queries and keys before norms of heads.
BESIDES = (
    *("inverse1", "inverse2", "lse", "probs_TE", "experts_TK", "shares_M", "rows_WK", "ends_L", "weights_N"),
    *("shared1_out", "shared3_out", "query_raw", "query_inverse", "key_raw", "key_inverse"),
)


def kept_elements(sizes: Sizes, ffn_ratio: float, keep: str) -> float:
    """Elements of Fig 9 that a rank keeps of a layer: `all`, (2n + 2k + 3kf + 11 + 5/m) bsh/n, one bsh/n less than is
    printed, as the layer's output is the next one's; `selective`, (2kf + 4 + 2/m) bsh/n.

    Args:
        ffn_ratio: f = F / D.

    Raises:
        ValueError: another choice.
    """
    if keep not in KEPT:
        raise ValueError(f"keep is {keep!r}; choose one of {', '.join(KEPT)}")
    ratios = sizes.ranks, sizes.gqa_ratio, sizes.top_k, ffn_ratio
    return sum(FIG_9[name](*ratios) for name in KEPT[keep]) * sizes.elements / sizes.ranks


@dataclass
class State:
    """What the operators of one pass read and write.

    Attributes:
        weights: this rank's, by the layer's names; cos, sin: of its positions.
        tensors: by name, as long as they are needed; gradients as `g_` and the name.
        flights: collectives under way, by the name of their result; gradients: of weights.
        capacity_factor: of a device; None drops nobody.
        chunks: into which a rank's rows are cut; what belongs to the i-th is named with `.i` behind.
        rows: N, of this rank's experts; runs: of each chunk, where its rows of each expert begin and end; splits: of
            all-to-alls (chain_rows.py).
        own: the parameters, whose gradients may be added up in FP32 (decoder/products.py).
    """

    shape: DecoderShape
    group: Group
    weights: dict[str, Tensor]
    cos: Tensor
    sin: Tensor
    batch: int
    capacity_factor: float | None = None
    chunks: int = 1
    own: Mapping[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    flights: dict[str, Pending] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    rows: int = 0
    runs: list[tuple[list[int], list[int]]] = field(default_factory=list)
    splits: Any = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def land(self, name: str) -> Tensor:
        """Wait for the collective of that result."""
        return self.flights.pop(name).wait()

    def land_rows(self, name: str) -> Tensor:
        """Wait for all chunks of it; one after another they are the rows. What has landed is given."""
        if name in self.tensors:
            return self.tensors.pop(name)
        return self.land(name) if name in self.flights else torch.cat([self.land(one) for one in self.of_chunks(name)])

    def land_positions(self, name: str) -> Tensor:
        """Wait for all chunks, each of positions of every rank in the ranks' order; put together by rank."""
        if name in self.flights:
            return self.land(name)
        found = [self.land(one).unflatten(0, (self.group.size, -1)) for one in self.of_chunks(name)]
        return torch.stack(found, 1).flatten(0, 2)

    def of_chunks(self, name: str) -> list[str]:
        """The names of its chunks."""
        return [f"{name}.{chunk}" for chunk in range(self.chunks)]

    def part(self, chunk: int) -> int:
        """Rows of a chunk."""
        return sum(self.runs[chunk][1]) - sum(self.runs[chunk][0])

    def drop(self, *names: str) -> None:
        """Let tensors go whose last reader was here, those of chunks too."""
        for name in names:
            for one in (name, *(self.of_chunks(name) if self.chunks > 1 else ())):
                self.tensors.pop(one, None)

    def note_gradient(self, name: str, *parts: tuple[Tensor, Tensor]) -> None:
        """The gradient of a weight, of what went in and the gradient of what came out; None where its sum has it."""
        self.gradients[name] = weight_gradient_of_parts(parts, self.own[name])

    def note_grouped_gradient(self, name: str, x_ND: Tensor, grad_NF: Tensor) -> None:
        """The same of the experts' rows."""
        self.gradients[name] = grouped_weight_gradient(x_ND, self["ends_L"], grad_NF, self.own[name])


Operator = tuple[str, Callable[[State], None]]  # region, what it does


def run(operators: list[Operator], state: State) -> None:
    """One after another, each in its region."""
    for name, operator in operators:
        with region(name):
            operator(state)
