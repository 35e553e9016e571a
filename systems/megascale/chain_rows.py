"""The lists where experts get their rows by all-to-all (`ep-a2a`), which sends less than all tokens where few experts
are chosen (section 3.2). What is not here is in chain_forward.py and chain_backward.py.

Rows of the routes go to their experts' ranks and are sorted by expert there; results come back and are summed. Every
rank has the whole shared expert, which runs while rows travel. Of the rows that were sent nothing is kept under
`selective`: the backward sends them again.
"""

from dataclasses import dataclass

import torch

from moebench.kernels.activation import activate
from moebench.kernels.collectives.blocks import reorder_blocks
from moebench.kernels.collectives.start_wait import start_all_gather, start_all_to_all
from moebench.kernels.grouped_gemm import grouped_gemm
from moebench.kernels.host import read_ints
from moebench.kernels.permute import permute, unpermute, weights_of_rows
from moebench.systems.megascale import chain_backward as back
from moebench.systems.megascale import chain_forward as there
from moebench.systems.megascale.chain import Operator, State
from moebench.systems.megascale.chain_backward import again
from moebench.systems.megascale.routing import rows_of

_activation_backward = torch.ops.moebench.activation_backward


@dataclass(frozen=True)
class Splits:
    """Rows, as the host knows them: to and from each rank; from each rank to each of this rank's experts."""

    sent_R: list[int]
    received_R: list[int]
    received_RL: list[int]
    local: int

    @property
    def by_expert(self) -> list[int]:
        """From each rank, expert after expert."""
        return [count for expert in range(self.local) for count in self.received_RL[expert :: self.local]]


def place(s: State) -> None:
    """Where this rank's routes lie by expert, and how many go where: counts of all ranks, one read."""
    rows = rows_of(s["experts_TK"], 0, s.shape.experts)
    s["rows_WK"], s["counts_E"] = rows.rows_WK, rows.counts_L
    s.flights["counts_RE"] = start_all_gather(rows.counts_L, s.group)


def pack(s: State) -> None:
    """The rows that are sent."""
    s["sent"] = permute(s["ln2_out"], s["rows_WK"], s["rows_WK"].numel(), zero_unused=False)


def pack_weights(s: State) -> None:
    """Their weights, and where rows begin and end on the host."""
    ranks, local = s.group.size, s.shape.experts // s.group.size
    s["sent_weights"] = weights_of_rows(s["weights_TK"], s["rows_WK"], s["rows_WK"].numel())
    counts_RE = s.land("counts_RE").view(ranks, s.shape.experts)
    received_RL = counts_RE[:, s.group.index * local : (s.group.index + 1) * local].contiguous()
    s["ends_L"] = received_RL.sum(0).cumsum(0)
    sent, received = read_ints(s["counts_E"], "expert_counts"), read_ints(received_RL, "received_counts")
    sent_R, received_R = (
        [sum(counts[at : at + local]) for at in range(0, s.shape.experts, local)] for counts in (sent, received)
    )
    s.splits = Splits(sent_R, received_R, received, local)
    s.rows = sum(received)
    s.drop("weights_TK", "counts_E")


def start_rows(s: State) -> None:
    """To their experts' ranks."""
    splits = s.splits
    s.flights["ffn_in"] = start_all_to_all(s["sent"], s.group, splits.sent_R, splits.received_R)
    s.drop("sent")


def start_weights(s: State) -> None:
    """Beside them."""
    splits = s.splits
    s.flights["weights_N"] = start_all_to_all(s["sent_weights"], s.group, splits.sent_R, splits.received_R)
    s.drop("sent_weights")


def _arrived(s: State, name: str) -> torch.Tensor:
    """By expert, in each by source rank."""
    return reorder_blocks(s.land(name), (s.group.size, s.splits.local), (1, 0), s.splits.received_RL)


def _by_rank(s: State, x: torch.Tensor) -> torch.Tensor:
    return reorder_blocks(x, (s.splits.local, s.group.size), (1, 0), s.splits.by_expert)


def land_rows(s: State) -> None:
    """ffn_in."""
    s["ffn_in"] = _arrived(s, "ffn_in")


def land_weights(s: State) -> None:
    """The weight of each row."""
    s["weights_N"] = _arrived(s, "weights_N")


def shared_products(s: State) -> None:
    """The shared expert on this rank's tokens, if there is one, while rows travel."""
    if "shared1_DF" in s.weights:
        s["shared1_out"] = torch.mm(s["ln2_out"], s.weights["shared1_DF"])
        s["shared3_out"] = torch.mm(s["ln2_out"], s.weights["shared3_DF"])
        h_TF = activate(s["shared1_out"], "swiglu", s["shared3_out"])
        s["shared_out"] = torch.mm(h_TF, s.weights["shared2_FD"])


def start_results(s: State) -> None:
    """Results back to the tokens' ranks."""
    y_ND = _by_rank(s, s["fc2_out"])
    s.flights["results"] = start_all_to_all(y_ND, s.group, s.splits.received_R, s.splits.sent_R)


def finish(s: State) -> None:
    """ffn_out, the sum of each token's rows, and with the residual the layer's output."""
    y_TD = unpermute(s.land("results"), s["rows_WK"])
    s["ffn_out"] = y_TD + s["shared_out"] if "shared_out" in s else y_TD
    s["next_hidden"] = s["ln2_in"] + s["ffn_out"]
    s.drop("shared_out")


FORWARD: list[Operator] = [
    *there.FORWARD[: there.FORWARD.index(("exchange", there.start_tokens))],
    ("gate", there.choose),
    ("dispatch", place),
    *(("dispatch", one) for one in (pack, pack_weights)),
    *(("exchange", one) for one in (start_rows, start_weights)),
    ("dense", shared_products),
    *(("dispatch", one) for one in (land_rows, land_weights)),
    *(("experts", one) for one in (there.products, there.gate_products, there.last_product)),
    ("exchange", start_results),
    ("combine", finish),
]


def start_g_results(s: State) -> None:
    """The gradient of each row's token to its expert's rank."""
    g_ND = permute(s["g_next_hidden"], s["rows_WK"], s["rows_WK"].numel(), zero_unused=False)
    s.flights["g_fc2_out"] = start_all_to_all(g_ND, s.group, s.splits.sent_R, s.splits.received_R)


def land_g_results(s: State) -> None:
    """g_fc2_out."""
    s["g_fc2_out"] = _arrived(s, "g_fc2_out")


def g_shared(s: State) -> None:
    """The shared expert, all of it, while gradients travel."""
    if "shared1_out" in s:
        g_TD = s["g_next_hidden"]
        h_TF = activate(s["shared1_out"], "swiglu", s["shared3_out"])
        s.note_gradient("shared2_FD", (h_TF, g_TD))
        g_h_TF = torch.mm(g_TD, s.weights["shared2_FD"].t())
        g1_TF, g3_TF, _ = _activation_backward(g_h_TF, s["shared1_out"], s["shared3_out"], None, "swiglu")
        g_TD = torch.mm(g1_TF, s.weights["shared1_DF"].t())
        s["g_shared"] = torch.addmm(g_TD, g3_TF, s.weights["shared3_DF"].t())
        s.note_gradient("shared1_DF", (s["ln2_out"], g1_TF))
        s.note_gradient("shared3_DF", (s["ln2_out"], g3_TF))
    s.drop("shared1_out", "shared3_out")


def send_again(s: State) -> None:
    """The rows once more."""
    pack(s)
    start_rows(s)


def g_products(s: State) -> None:
    """The gradient of each row."""
    g_ND = grouped_gemm(s["g_fc1_out"], s["ends_L"], s.weights["w1_EDF"].transpose(1, 2))
    g_ND = g_ND + grouped_gemm(s["g_fc3_out"], s["ends_L"], s.weights["w3_EDF"].transpose(1, 2))
    s["g_ffn_in"] = _by_rank(s, g_ND)


def start_g_rows(s: State) -> None:
    """Gradients of rows and of their weights to the tokens' ranks."""
    splits = s.splits
    s.flights["g_sent"] = start_all_to_all(s["g_ffn_in"], s.group, splits.received_R, splits.sent_R)
    g_weights_N = _by_rank(s, s["g_weights_N"])
    s.flights["g_weights"] = start_all_to_all(g_weights_N, s.group, splits.received_R, splits.sent_R)
    s.drop("g_ffn_in", "g_weights_N")


def land_g_rows(s: State) -> None:
    """g_ln2_out of the experts, and of the routes' weights."""
    g_TD = unpermute(s.land("g_sent"), s["rows_WK"])
    s["g_ln2_out"] = g_TD + s["g_shared"] if "g_shared" in s else g_TD
    rows_WK = s["rows_WK"]
    s["g_weights_TK"] = s.land("g_weights").index_select(0, rows_WK.reshape(-1)).view(rows_WK.shape)
    s.drop("g_shared")


BACKWARD: list[Operator] = [
    ("exchange", start_g_results),
    ("dense", again(there.norm2, "ln2_out")),
    ("dispatch", again(send_again, "ffn_in")),
    ("dense", g_shared),
    ("experts", again(there.gate_products, "fc2_in")),
    ("exchange", land_g_results),
    *(("experts", one) for one in (back.g_last_product, back.g_gate_products, g_products)),
    ("exchange", start_g_rows),
    ("dispatch", again(land_rows, "ffn_in")),
    ("experts", back.d_products),
    ("exchange", again(there.start_attn, "attn_a2a")),
    ("combine", land_g_rows),
    *back.BACKWARD[back.BACKWARD.index(("gate", back.g_choose)) :],
]
