"""The backward's list in chunks, see chain_chunks_forward.py. What is not here is in chain_backward.py.

Weights' gradients are one product each, of the rows of all chunks.
"""

import torch

from moebench.kernels.activation import activate
from moebench.kernels.collectives.start_wait import start_all_gather, start_all_to_all, start_reduce_scatter
from moebench.kernels.parts import grouped_gemm_part_, permute_part_, unpermute_part
from moebench.systems.megascale import chain_backward as whole
from moebench.systems.megascale import chain_chunks_forward as forward
from moebench.systems.megascale.chain import Operator, State
from moebench.systems.megascale.chain_backward import again
from moebench.systems.megascale.chain_chunks_forward import of
from moebench.systems.megascale.chain_forward import gate_products, norm1, norm2, turned
from moebench.systems.megascale.heads import merge_heads, pack_heads, unpack_heads

_activation_backward = torch.ops.moebench.activation_backward


def start_g_results(s: State) -> None:
    """Every rank gets the gradients of all tokens' results, chunk by chunk."""
    for name, piece in zip(s.of_chunks("g_fc2_out_rs"), s["g_next_hidden"].chunk(s.chunks), strict=True):
        s.flights[name] = start_all_gather(piece, s.group)
    s["g_fc2_out"] = s["g_next_hidden"].new_empty(s.rows, s.shape.d_model)
    s["g_fc2_in"] = s["g_next_hidden"].new_empty(s.rows, s.shape.d_ffn)


def g_scatter(s: State, chunk: int) -> None:
    """A chunk's rows of g_fc2_out."""
    name = f"g_fc2_out_rs.{chunk}"
    s[name] = s.land(name)
    permute_part_(s["g_fc2_out"], s[name], s["rows_WK"].chunk(s.chunks)[chunk], s.part(chunk))


def g_last_product(s: State, chunk: int) -> None:
    """A chunk's rows of g_fc2_in, beside the next one's way."""
    grouped_gemm_part_(s["g_fc2_in"], s["g_fc2_out"], *s.runs[chunk], s.weights["w2_EFD"].transpose(1, 2))


def d_last_product(s: State) -> None:
    """The gradient of w2, and room for g_ffn_in."""
    s.note_grouped_gradient("w2_EFD", s["fc2_in"], s["g_fc2_out"])
    s["g_ffn_in"] = s["g_fc2_out"].new_empty(s.rows, s.shape.d_model)
    s.drop("g_fc2_out", "fc2_in", "fc2_out", "fc2_out_rs", "ffn_out")


def g_shared(s: State) -> None:
    """The shared expert, chunk by chunk: what it adds to the tokens' gradient, the gradient of its last product."""
    if "shared1_out.0" in s:
        pairs = []
        for chunk, name in enumerate(s.of_chunks("g_fc2_out_rs")):
            h1_WF, h3_WF = s[f"shared1_out.{chunk}"], s[f"shared3_out.{chunk}"]
            pairs.append((activate(h1_WF, "swiglu", h3_WF), s[name]))
            g_h_WF = torch.mm(s[name], s.weights["shared2_FD"].t())
            g1_WF, g3_WF, _ = _activation_backward(g_h_WF, h1_WF, h3_WF, None, "swiglu")
            g_WD = torch.mm(g1_WF, s.weights["shared1_DF"].t())
            s[f"g_shared.{chunk}"] = torch.addmm(g_WD, g3_WF, s.weights["shared3_DF"].t())
            s[f"g_shared1.{chunk}"], s[f"g_shared3.{chunk}"] = g1_WF, g3_WF
        s.note_gradient("shared2_FD", *pairs)
    s.drop("g_fc2_out_rs", "shared1_out", "shared3_out")


def g_products(s: State, chunk: int) -> None:
    """A chunk's rows of g_ffn_in, summed at its tokens, and with a shared expert the part of that."""
    into, runs = s["g_ffn_in"], s.runs[chunk]
    grouped_gemm_part_(into, s["g_fc1_out"], *runs, s.weights["w1_EDF"].transpose(1, 2))
    grouped_gemm_part_(into, s["g_fc3_out"], *runs, s.weights["w3_EDF"].transpose(1, 2), adds=True)
    g_WD = unpermute_part(into, s["rows_WK"].chunk(s.chunks)[chunk], s.part(chunk))
    shared = f"g_shared.{chunk}"
    s[f"g_ln2_out_ag.{chunk}"] = g_WD + s[shared] if shared in s else g_WD
    s.tensors.pop(shared, None)


def start_g_tokens(s: State, chunk: int) -> None:
    """Gradients of a chunk's tokens to the ranks that they came from, beside the next chunk's products."""
    name = f"g_ln2_out.{chunk}"
    s.flights[name] = start_reduce_scatter(s[f"g_ln2_out_ag.{chunk}"], s.group)


def start_g_weights(s: State) -> None:
    """Gradients of the routes' weights, in the ranks' order."""
    places = s["rows_WK"].masked_fill(s["rows_WK"] < 0, s.rows)
    padded = torch.cat([s["g_weights_N"], s["g_weights_N"].new_zeros(1)])
    by_chunk = padded.index_select(0, places.reshape(-1)).view(s.chunks, s.group.size, -1)
    g_weights_WK = by_chunk.transpose(0, 1).reshape(places.shape)
    s.flights["g_weights_TK"] = start_reduce_scatter(g_weights_WK, s.group)
    s.drop("g_weights_N", "g_ffn_in", "g_ln2_out_ag")


def again_in_chunks(s: State) -> None:
    """ln2_out_ag and ffn_in, where they were not kept."""
    has_rows = "ffn_in" in s
    if not has_rows:
        s["ffn_in"] = s["ln2_out"].new_empty(s.rows, s.shape.d_model)
    for chunk, name in enumerate(s.of_chunks("ln2_out_ag")):
        if name not in s:
            forward.land_tokens(s, chunk)
        if not has_rows:
            forward.scatter(s, chunk)


def d_shared(s: State) -> None:
    """The gradients of the shared expert's first products."""
    if "g_shared1.0" in s:
        tokens = [s[name] for name in s.of_chunks("ln2_out_ag")]
        for number in (1, 3):
            gradients = [s[name] for name in s.of_chunks(f"g_shared{number}")]
            s.note_gradient(f"shared{number}_DF", *zip(tokens, gradients, strict=True))
    s.drop("g_shared1", "g_shared3", "ln2_out_ag")


def g_out(s: State, chunk: int) -> None:
    """g_attn_a2a of a chunk, on its way to the heads' ranks while the next one is multiplied."""
    g_TQ = torch.mm(s["g_ln2_in"].chunk(s.chunks)[chunk], s.weights["out_QD"].t())
    s["packed"] = pack_heads((g_TQ.unflatten(0, (-1, s.batch)),), s.group.size)


def start_g_attn(s: State, chunk: int) -> None:
    """Rows of a chunk to the ranks of their heads."""
    s.flights[f"g_attn.{chunk}"] = start_all_to_all(s["packed"], s.group)
    s.drop("packed")


def d_out(s: State) -> None:
    """The gradient of the output projection, meanwhile."""
    for chunk, name in enumerate(s.of_chunks("attn_a2a")):
        if name not in s:
            forward.land_attn(s, chunk)
    s.note_gradient("out_QD", (torch.cat([s[name] for name in s.of_chunks("attn_a2a")]), s["g_ln2_in"]))
    s.drop("attn_a2a")


def start_g_qkv(s: State) -> None:
    """Gradients of heads back to the rows' ranks, chunk by chunk."""
    by_rank = s["g_qkv_a2a"].unflatten(0, (s.group.size, -1))
    for name, piece in zip(s.of_chunks("g_qkv"), by_rank.chunk(s.chunks, 1), strict=True):
        s.flights[name] = start_all_to_all(piece.flatten(0, 1).contiguous(), s.group)
    s.drop("g_qkv_a2a")


def g_project(s: State, chunk: int) -> None:
    """A chunk turned back and through the projection, beside the next one's way."""
    name = f"g_qkv.{chunk}"
    parts = unpack_heads(s.land(name), s.shape, s.group.size)
    q, k, v = (merge_heads(one, s.group.size).flatten(0, 1) for one in parts)
    q = whole.g_normed(s, turned(s, q, True, chunk), "query", f".{chunk}")
    k = whole.g_normed(s, turned(s, k, True, chunk), "key", f".{chunk}")
    s[name] = torch.cat([q, k, v], 1)
    s[f"g_ln1_out.{chunk}"] = torch.mm(s[name], s.weights["qkv_DC"].t())


def d_project(s: State) -> None:
    """The gradient of the projection, and g_ln1_out of all rows."""
    s["g_ln1_out"] = torch.cat([s.tensors.pop(name) for name in s.of_chunks("g_ln1_out")])
    s.note_gradient("qkv_DC", (s["ln1_out"], torch.cat([s.tensors.pop(name) for name in s.of_chunks("g_qkv")])))
    s.drop("ln1_out")


def backward_in_chunks(chunks: int) -> list[Operator]:
    """The list."""
    each = range(chunks)
    come = [("dispatch", g_scatter), ("experts", g_last_product)]
    go = [("experts", g_products), ("exchange", start_g_tokens)]
    send = [("attention", g_out), ("exchange", start_g_attn)]
    return [
        ("exchange", start_g_results),
        ("dense", again(norm2, "ln2_out")),
        ("exchange", again(forward.start_tokens, "ln2_out_ag.0")),
        ("experts", again(gate_products, "fc2_in")),
        *((name, of(one, chunk)) for chunk in each for name, one in come),
        *(("experts", one) for one in (d_last_product, whole.g_gate_products)),
        ("dense", g_shared),
        *((name, of(one, chunk)) for chunk in each for name, one in go),
        ("exchange", start_g_weights),
        ("dispatch", again_in_chunks),
        ("experts", whole.d_products),
        ("dense", d_shared),
        ("exchange", again(forward.start_attn, "attn_a2a.0")),
        ("gate", whole.g_choose),
        ("dense", whole.g_norm2),
        *((name, of(one, chunk)) for chunk in each for name, one in send),
        *(("attention", one) for one in (d_out, whole.g_attend)),
        ("exchange", start_g_qkv),
        ("attention", again(norm1, "ln1_out")),
        *(("attention", of(g_project, chunk)) for chunk in each),
        *(("attention", one) for one in (d_project, whole.g_norm1)),
    ]
