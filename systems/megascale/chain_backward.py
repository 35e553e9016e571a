"""The backward as a list of operators (Fig 8b is its beginning): what was not kept is made again where its time hides
behind a collective, and each collective runs beside products that do not need it.

`g_x` is the gradient of x. Every operator reads what the ones before left and lets go what
nobody reads any more.
"""

from collections.abc import Callable

import torch

from moebench.kernels.activation import activate
from moebench.kernels.collectives.start_wait import start_all_gather, start_all_to_all, start_reduce_scatter
from moebench.kernels.grouped_gemm import grouped_gemm
from moebench.kernels.permute import permute, unpermute
from moebench.kernels.rms_norm import rms_norm_backward
from moebench.systems.megascale.chain import Operator, State
from moebench.systems.megascale.chain_forward import (
    gate_products,
    heads_of,
    land_attn,
    land_tokens,
    norm1,
    norm2,
    scatter,
    start_attn,
    start_tokens,
    turned,
)
from moebench.systems.megascale.heads import by_head, by_row, merge_heads, pack_heads, unpack_heads

_activation_backward = torch.ops.moebench.activation_backward


def start_g_results(s: State) -> None:
    """Every rank gets the gradients of all tokens' results."""
    s.flights["g_fc2_out_rs"] = start_all_gather(s["g_next_hidden"], s.group)


def again(operator: Callable[[State], None], name: str) -> Callable[[State], None]:
    """The forward's operator that makes a tensor or starts its collective, where the tensor was not kept."""

    def unless_kept(s: State) -> None:
        if name not in s:
            operator(s)

    return unless_kept


def g_scatter(s: State) -> None:
    """g_fc2_out: the gradient of each row's token."""
    s["g_fc2_out_rs"] = s.land("g_fc2_out_rs")
    s["g_fc2_out"] = permute(s["g_fc2_out_rs"], s["rows_WK"], s.rows, zero_unused=False)


def g_last_product(s: State) -> None:
    """g_fc2_in and the gradient of w2."""
    s["g_fc2_in"] = grouped_gemm(s["g_fc2_out"], s["ends_L"], s.weights["w2_EFD"].transpose(1, 2))
    s.note_grouped_gradient("w2_EFD", s["fc2_in"], s["g_fc2_out"])
    s.drop("g_fc2_out", "fc2_in", "fc2_out", "fc2_out_rs", "ffn_out")


def g_gate_products(s: State) -> None:
    """g_fc1_out, g_fc3_out and the gradient of the rows' weights."""
    found = _activation_backward(s["g_fc2_in"], s["fc1_out"], s["fc3_out"], s["weights_N"], "swiglu")
    s["g_fc1_out"], s["g_fc3_out"], s["g_weights_N"] = found
    s.drop("g_fc2_in", "fc1_out", "fc3_out")


def g_shared(s: State) -> None:
    """The shared expert: what it adds to the tokens' gradient, and the gradient of its last product."""
    if "shared1_out" in s:
        h_WF = activate(s["shared1_out"], "swiglu", s["shared3_out"])
        s.note_gradient("shared2_FD", (h_WF, s["g_fc2_out_rs"]))
        g_h_WF = torch.mm(s["g_fc2_out_rs"], s.weights["shared2_FD"].t())
        s["g_shared1"], s["g_shared3"], _ = _activation_backward(
            g_h_WF, s["shared1_out"], s["shared3_out"], None, "swiglu"
        )
        g_WD = torch.mm(s["g_shared1"], s.weights["shared1_DF"].t())
        s["g_shared"] = torch.addmm(g_WD, s["g_shared3"], s.weights["shared3_DF"].t())
    s.drop("g_fc2_out_rs", "shared1_out", "shared3_out")


def g_products(s: State) -> None:
    """g_ffn_in, summed at its tokens, and with a shared expert the part of that."""
    g_ND = grouped_gemm(s["g_fc1_out"], s["ends_L"], s.weights["w1_EDF"].transpose(1, 2))
    g_ND = g_ND + grouped_gemm(s["g_fc3_out"], s["ends_L"], s.weights["w3_EDF"].transpose(1, 2))
    g_WD = unpermute(g_ND, s["rows_WK"])
    s["g_ln2_out_ag"] = g_WD + s["g_shared"] if "g_shared" in s else g_WD
    s.drop("g_shared")


def start_g_tokens(s: State) -> None:
    """Gradients of tokens and of routes' weights to the ranks that they came from."""
    s.flights["g_ln2_out"] = start_reduce_scatter(s["g_ln2_out_ag"], s.group)
    places = s["rows_WK"].masked_fill(s["rows_WK"] < 0, s.rows)
    padded = torch.cat([s["g_weights_N"], s["g_weights_N"].new_zeros(1)])
    g_weights_WK = padded.index_select(0, places.reshape(-1)).view(places.shape)
    s.flights["g_weights_TK"] = start_reduce_scatter(g_weights_WK, s.group)
    s.drop("g_weights_N")


def d_products(s: State) -> None:
    """The gradients of w1 and w3, which the reduce-scatter runs beside."""
    s.note_grouped_gradient("w1_EDF", s["ffn_in"], s["g_fc1_out"])
    s.note_grouped_gradient("w3_EDF", s["ffn_in"], s["g_fc3_out"])
    s.drop("ffn_in", "g_fc1_out", "g_fc3_out")


def d_shared(s: State) -> None:
    """The gradients of the shared expert's first products."""
    if "g_shared1" in s:
        s.note_gradient("shared1_DF", (s["ln2_out_ag"], s["g_shared1"]))
        s.note_gradient("shared3_DF", (s["ln2_out_ag"], s["g_shared3"]))
    s.drop("g_shared1", "g_shared3", "ln2_out_ag", "g_ln2_out_ag")


def g_choose(s: State) -> None:
    """The router, from the routes' weights and from the balance loss."""
    tokens, devices = len(s["probs_TE"]), len(s["shares_M"])
    share_E = s["shares_M"].repeat_interleave(s.shape.experts // devices)
    g_probs_TE = (s["g_aux"] * devices / tokens * share_E).expand(tokens, -1)
    g_logits_TE = torch.ops.moebench.topk_gate_backward(
        g_probs_TE, s.land_rows("g_weights_TK"), s["probs_TE"], s["experts_TK"], s.shape.renormalises
    )
    wide, router_DE = g_logits_TE.dtype, s.weights["router_DE"]
    s.gradients["router_DE"] = torch.mm(s["ln2_out"].to(wide).t(), g_logits_TE).to(router_DE.dtype)
    s["g_routed"] = torch.mm(g_logits_TE, router_DE.to(wide).t()).to(s["ln2_out"].dtype)


def g_norm2(s: State) -> None:
    """g_ln2_in, with the residual's."""
    g_TD = s.land_rows("g_ln2_out") + s["g_routed"]
    g_TD, s.gradients["norm2_D"] = rms_norm_backward(g_TD, s["ln2_in"], s.weights["norm2_D"], s["inverse2"])
    s["g_ln2_in"] = g_TD + s["g_next_hidden"]
    s.drop("ln2_out", "ln2_in", "g_routed", "g_next_hidden", "attn_out")


def g_out(s: State) -> None:
    """g_attn_a2a on its way to the heads' ranks."""
    g_TQ = torch.mm(s["g_ln2_in"], s.weights["out_QD"].t())
    s["packed"] = pack_heads((g_TQ.unflatten(0, (-1, s.batch)),), s.group.size)


def start_g_attn(s: State) -> None:
    """Rows of this rank to the ranks of their heads."""
    s.flights["g_attn"] = start_all_to_all(s["packed"], s.group)
    s.drop("packed")


def d_out(s: State) -> None:
    """The gradient of the output projection, meanwhile."""
    again(land_attn, "attn_a2a")(s)
    s.note_gradient("out_QD", (s["attn_a2a"], s["g_ln2_in"]))
    s.drop("attn_a2a")


def g_attend(s: State) -> None:
    """Attention's backward."""
    size, inputs = s.shape.head_size, heads_of(s, s["qkv_a2a"])
    grads = torch.ops.moebench.attention_backward(
        by_head(s.land_positions("g_attn"), size), *inputs, by_head(s["attn"], size), s["lse"], True, size**-0.5
    )
    s["g_qkv_a2a"] = torch.cat([by_row(one) for one in grads], 2)
    s.drop("qkv_a2a", "attn")


def start_g_qkv(s: State) -> None:
    """Gradients of heads back to the rows' ranks."""
    s.flights["g_qkv"] = start_all_to_all(s["g_qkv_a2a"], s.group)
    s.drop("g_qkv_a2a")


def g_turn(s: State) -> None:
    """q and k turned back."""
    parts = unpack_heads(s.land("g_qkv"), s.shape, s.group.size)
    q, k, v = (merge_heads(one, s.group.size).flatten(0, 1) for one in parts)
    q, k = g_normed(s, turned(s, q, True), "query"), g_normed(s, turned(s, k, True), "key")
    s["g_qkv"] = torch.cat([q, k, v], 1)


def g_normed(s: State, g_TC: torch.Tensor, which: str, of_chunk: str = "") -> torch.Tensor:
    """Before the norms of heads, where there are; the gradients of their weights add up over chunks."""
    if not s.shape.qk_norm:
        return g_TC
    name = f"{which}_norm"
    raw, inverse = (s.tensors.pop(f"{which}_{what}{of_chunk}") for what in ("raw", "inverse"))
    g, d_norm = rms_norm_backward(g_TC.reshape(raw.shape), raw, s.weights[name], inverse)
    before = s.gradients.get(name)
    s.gradients[name] = d_norm if before is None else before + d_norm
    return g.view(g_TC.shape)


def g_project(s: State) -> None:
    """The projection."""
    s["g_ln1_out"] = torch.mm(s["g_qkv"], s.weights["qkv_DC"].t())
    s.note_gradient("qkv_DC", (s["ln1_out"], s["g_qkv"]))
    s.drop("g_qkv", "ln1_out")


def g_norm1(s: State) -> None:
    """g_hidden, with the residual's."""
    g_TD, s.gradients["norm1_D"] = rms_norm_backward(s["g_ln1_out"], s["hidden"], s.weights["norm1_D"], s["inverse1"])
    s["g_hidden"] = g_TD + s["g_ln2_in"]


BACKWARD: list[Operator] = [
    ("exchange", start_g_results),
    ("dense", again(norm2, "ln2_out")),
    ("exchange", again(start_tokens, "ln2_out_ag")),  # hidden by the products of fc2's backward
    ("experts", again(gate_products, "fc2_in")),
    ("dispatch", g_scatter),
    *(("experts", one) for one in (g_last_product, g_gate_products)),
    ("dense", g_shared),
    ("experts", g_products),
    ("exchange", start_g_tokens),
    ("exchange", again(land_tokens, "ln2_out_ag")),
    ("dispatch", again(scatter, "ffn_in")),
    ("experts", d_products),
    ("dense", d_shared),
    ("exchange", again(start_attn, "attn_a2a")),  # beside the backward of router and norm
    ("gate", g_choose),
    ("dense", g_norm2),
    ("attention", g_out),
    ("exchange", start_g_attn),
    *(("attention", one) for one in (d_out, g_attend)),
    ("exchange", start_g_qkv),
    *(("attention", one) for one in (again(norm1, "ln1_out"), g_turn, g_project, g_norm1)),
]
