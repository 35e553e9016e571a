"""The layer under `sp` and `ep-ag` as a chain of named tensors (Fig 9), and which of them are kept for the backward.

Autograd keeps what each operator asks for. Here the operators are listed (chain_forward.py, chain_backward.py), so
what is kept is a choice: all of Fig 9's tensors, or those with an asterisk, from which the backward gets the others
again: by two norms, an activation, a permutation, and two collectives that are repeated (section 4.1).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import Pending
from moebench.kernels.region import region
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
# two products.
BESIDES = (
    *("inverse1", "inverse2", "lse", "probs_TE", "experts_TK", "shares_M", "rows_WK", "ends_L", "weights_N"),
    *("shared1_out", "shared3_out"),
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
        flights: collectives under way, by the name of their result.
        capacity_factor: of a device; None drops nobody.
        rows: N, of this rank's experts.
    """

    shape: DecoderShape
    group: Group
    weights: dict[str, Tensor]
    cos: Tensor
    sin: Tensor
    batch: int
    capacity_factor: float | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    flights: dict[str, Pending] = field(default_factory=dict)
    rows: int = 0

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def land(self, name: str) -> Tensor:
        """Wait for the collective of that result."""
        return self.flights.pop(name).wait()

    def drop(self, *names: str) -> None:
        """Let tensors go whose last reader was here."""
        for name in names:
            self.tensors.pop(name, None)


Operator = tuple[str, Callable[[State], None]]  # region, what it does


def run(operators: list[Operator], state: State) -> None:
    """One after another, each in its region."""
    for name, operator in operators:
        with region(name):
            operator(state)
