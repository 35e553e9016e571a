"""The forward as a list of operators (Fig 8a).

Collectives start as soon as their rows are there and are waited for when they are needed; the router runs while the
tokens travel.
"""

import torch
from torch import Tensor

from moebench.kernels.activation import activate
from moebench.kernels.collectives.start_wait import start_all_gather, start_all_to_all, start_reduce_scatter
from moebench.kernels.grouped_gemm import grouped_gemm
from moebench.kernels.permute import permute, unpermute, weights_of_rows
from moebench.kernels.rms_norm import rms_norm_with_inverse
from moebench.kernels.rope import rope
from moebench.systems.megascale.chain import Operator, State
from moebench.systems.megascale.heads import by_head, by_row, merge_heads, pack_heads, unpack_heads
from moebench.systems.megascale.routing import device_shares, route, rows_here


def norm1(s: State) -> None:
    """ln1_out, and the inverse root of every row."""
    s["ln1_out"], s["inverse1"] = rms_norm_with_inverse(s["hidden"], s.weights["norm1_D"], s.shape.eps)


def project(s: State) -> None:
    """qkv of this rank's rows, all heads."""
    s["qkv"] = torch.mm(s["ln1_out"], s.weights["qkv_DC"])


def turn(s: State) -> None:
    """q_rope and k_rope."""
    q_TC, k_TC, _ = s["qkv"].split([s.shape.queries, s.shape.keys, s.shape.keys], 1)
    s["q_rope"] = turned(s, normed(s, q_TC, "query"))
    s["k_rope"] = turned(s, normed(s, k_TC, "key"))


def normed(s: State, x_TC: Tensor, which: str, of_chunk: str = "") -> Tensor:
    """Heads of rows normed, where the model norms them; they are kept as they were, with their inverse roots."""
    if not s.shape.qk_norm:
        return x_TC
    raw = s[f"{which}_raw{of_chunk}"] = x_TC.reshape(-1, s.shape.head_size)
    y, s[f"{which}_inverse{of_chunk}"] = rms_norm_with_inverse(raw, s.weights[f"{which}_norm"], s.shape.eps)
    return y.view(x_TC.shape)


def turned(s: State, x_TC: Tensor, inverse: bool = False, chunk: int | None = None) -> Tensor:
    """Heads of rows, or of a chunk of them, turned by their positions, or back: [T, columns]."""
    cos, sin = (s.cos, s.sin) if chunk is None else (table.chunk(s.chunks)[chunk] for table in (s.cos, s.sin))
    x_SHD = x_TC.reshape(len(cos), -1, s.shape.head_size)
    return rope(x_SHD, cos, sin, inverse).view(x_TC.shape)


def start_qkv(s: State) -> None:
    """Heads to their ranks."""
    v_TC = s["qkv"][:, s.shape.queries + s.shape.keys :]
    parts = tuple(x.unflatten(0, (-1, s.batch)) for x in (s["q_rope"], s["k_rope"], v_TC))
    s.flights["qkv_a2a"] = start_all_to_all(pack_heads(parts, s.group.size), s.group)


def attend(s: State) -> None:
    """attn of this rank's heads over all positions."""
    s["qkv_a2a"] = s.land_positions("qkv_a2a")
    out, s["lse"] = torch.ops.moebench.attention(*heads_of(s, s["qkv_a2a"]), True, s.shape.head_size**-0.5)
    s["attn"] = by_row(out)


def heads_of(s: State, x_SBC: Tensor) -> list[Tensor]:
    """Views of q, k and v as attention takes them."""
    return [by_head(one, s.shape.head_size) for one in unpack_heads(x_SBC, s.shape, s.group.size)]


def start_attn(s: State) -> None:
    """Rows back to their ranks."""
    s.flights["attn_a2a"] = start_all_to_all(s["attn"], s.group)


def land_attn(s: State) -> None:
    """attn_a2a: the heads of a row side by side again."""
    s["attn_a2a"] = merge_heads(s.land("attn_a2a"), s.group.size).flatten(0, 1)


def out(s: State) -> None:
    """attn_out and, with the residual, ln2_in."""
    s["attn_out"] = torch.mm(s["attn_a2a"], s.weights["out_QD"])
    s["ln2_in"] = s["hidden"] + s["attn_out"]


def norm2(s: State) -> None:
    """ln2_out, and the inverse root of every row."""
    s["ln2_out"], s["inverse2"] = rms_norm_with_inverse(s["ln2_in"], s.weights["norm2_D"], s.shape.eps)


def start_tokens(s: State) -> None:
    """Every rank gets all rows."""
    s.flights["ln2_out_ag"] = start_all_gather(s["ln2_out"], s.group)


def choose(s: State) -> None:
    """The router, and the shares of the devices that the balance loss counts."""
    routes = route(s["ln2_out"], s.weights["router_DE"], s.shape)
    s["probs_TE"], s["experts_TK"] = routes.probs_TE, routes.experts_TK
    s["shares_M"] = device_shares(routes.experts_TK, s.shape.experts, s.group.size, routes.probs_TE.dtype)
    s["weights_TK"] = routes.weights_TK


def start_routes(s: State) -> None:
    """Every rank gets all routes."""
    s.flights["experts_WK"] = start_all_gather(s["experts_TK"], s.group)
    s.flights["weights_WK"] = start_all_gather(s["weights_TK"], s.group)


def place(s: State) -> None:
    """The rows of this rank's experts, while the tokens still travel."""
    experts_WK, weights_WK = s.land("experts_WK"), s.land("weights_WK")
    rows, s.rows = rows_here(experts_WK, weights_WK, "ep-ag", s.shape, s.group, s.capacity_factor)
    s["rows_WK"], s["ends_L"] = rows.rows_WK, rows.ends_L
    s["weights_N"] = weights_of_rows(weights_WK, s["rows_WK"], s.rows)
    s.drop("weights_TK")


def land_tokens(s: State) -> None:
    """ln2_out_ag."""
    s["ln2_out_ag"] = s.land("ln2_out_ag")


def scatter(s: State) -> None:
    """ffn_in: rows by expert, then by source rank."""
    s["ffn_in"] = permute(s["ln2_out_ag"], s["rows_WK"], s.rows, zero_unused=False)


def products(s: State) -> None:
    """fc1_out and fc3_out."""
    s["fc1_out"] = grouped_gemm(s["ffn_in"], s["ends_L"], s.weights["w1_EDF"])
    s["fc3_out"] = grouped_gemm(s["ffn_in"], s["ends_L"], s.weights["w3_EDF"])


def gate_products(s: State) -> None:
    """fc2_in, times the rows' weights."""
    s["fc2_in"] = activate(s["fc1_out"], "swiglu", s["fc3_out"], s["weights_N"])


def last_product(s: State) -> None:
    """fc2_out."""
    s["fc2_out"] = grouped_gemm(s["fc2_in"], s["ends_L"], s.weights["w2_EFD"])


def shared_products(s: State) -> None:
    """The shared expert's part of this rank, if there is one."""
    if "shared1_DF" in s.weights:
        s["shared1_out"] = torch.mm(s["ln2_out_ag"], s.weights["shared1_DF"])
        s["shared3_out"] = torch.mm(s["ln2_out_ag"], s.weights["shared3_DF"])
        h_WF = activate(s["shared1_out"], "swiglu", s["shared3_out"])
        s["shared_out"] = torch.mm(h_WF, s.weights["shared2_FD"])


def gather(s: State) -> None:
    """fc2_out_rs: what this rank's experts add to every token."""
    y_WD = unpermute(s["fc2_out"], s["rows_WK"])
    s["fc2_out_rs"] = y_WD + s["shared_out"] if "shared_out" in s else y_WD
    s.drop("shared_out")


def start_results(s: State) -> None:
    """Sums to the tokens' ranks."""
    s.flights["ffn_out"] = start_reduce_scatter(s["fc2_out_rs"], s.group)


def finish(s: State) -> None:
    """ffn_out and, with the residual, the layer's output."""
    s["ffn_out"] = s.land_rows("ffn_out")
    s["next_hidden"] = s["ln2_in"] + s["ffn_out"]


FORWARD: list[Operator] = [
    *(("attention", one) for one in (norm1, project, turn)),
    ("exchange", start_qkv),
    ("attention", attend),
    ("exchange", start_attn),
    *(("attention", one) for one in (land_attn, out)),
    ("dense", norm2),
    ("exchange", start_tokens),
    ("gate", choose),
    ("exchange", start_routes),
    ("dispatch", place),
    ("exchange", land_tokens),
    ("dispatch", scatter),
    *(("experts", one) for one in (products, gate_products, last_product)),
    ("dense", shared_products),
    ("combine", gather),
    ("exchange", start_results),
    ("dense", finish),
]
