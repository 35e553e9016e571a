"""The forward's list where a rank's rows are cut into chunks, each with collectives of its own: what was chained one
collective after one product runs beside it (section 4.3). What is not here is in chain_forward.py.

Chunk i is the i-th part of this rank's positions, and of its tokens. Tokens of all ranks lie chunk by chunk, in a chunk
rank by rank; the experts' rows in one buffer, by expert, in it chunk by chunk (`moebench.kernels.parts`), so that what
is kept, and what the weights' gradients take, is as without chunks.
"""

from collections.abc import Callable

import torch

from moebench.kernels.activation import activate
from moebench.kernels.collectives.start_wait import start_all_gather, start_all_to_all, start_reduce_scatter
from moebench.kernels.explicit import count
from moebench.kernels.host import read_ints
from moebench.kernels.parts import grouped_gemm_part_, permute_part_, unpermute_part
from moebench.kernels.permute import weights_of_rows
from moebench.systems.megascale import chain_forward as whole
from moebench.systems.megascale.chain import Operator, State
from moebench.systems.megascale.heads import merge_heads, pack_heads
from moebench.systems.megascale.overlapped import cut
from moebench.systems.megascale.routing import rows_of

Part = Callable[[State, int], None]  # an operator on a chunk


def of(operator: Part, chunk: int) -> Callable[[State], None]:
    """The operator on that chunk."""
    return lambda s: operator(s, chunk)


def project(s: State, chunk: int) -> None:
    """qkv of a chunk's rows, q and k turned."""
    x_TD = s["ln1_out"].chunk(s.chunks)[chunk]
    s[f"qkv.{chunk}"] = torch.mm(x_TD, s.weights["qkv_DC"])
    q_TC, k_TC, _ = s[f"qkv.{chunk}"].split([s.shape.queries, s.shape.keys, s.shape.keys], 1)
    s[f"q_rope.{chunk}"] = whole.turned(s, whole.normed(s, q_TC, "query", f".{chunk}"), chunk=chunk)
    s[f"k_rope.{chunk}"] = whole.turned(s, whole.normed(s, k_TC, "key", f".{chunk}"), chunk=chunk)


def start_qkv(s: State, chunk: int) -> None:
    """A chunk's heads to their ranks."""
    v_TC = s[f"qkv.{chunk}"][:, s.shape.queries + s.shape.keys :]
    parts = (s[f"q_rope.{chunk}"], s[f"k_rope.{chunk}"], v_TC)
    packed = pack_heads(tuple(x.unflatten(0, (-1, s.batch)) for x in parts), s.group.size)
    s.flights[f"qkv_a2a.{chunk}"] = start_all_to_all(packed, s.group)


def start_attn(s: State) -> None:
    """Rows back to their ranks, chunk by chunk."""
    by_rank = s["attn"].unflatten(0, (s.group.size, -1))
    for name, piece in zip(s.of_chunks("attn_a2a"), by_rank.chunk(s.chunks, 1), strict=True):
        s.flights[name] = start_all_to_all(piece.flatten(0, 1).contiguous(), s.group)


def land_attn(s: State, chunk: int) -> None:
    """attn_a2a of a chunk: the heads of a row side by side again."""
    name = f"attn_a2a.{chunk}"
    s[name] = merge_heads(s.land(name), s.group.size).flatten(0, 1)


def out(s: State, chunk: int) -> None:
    """attn_out of a chunk, beside the next one's way."""
    land_attn(s, chunk)
    s[f"attn_out.{chunk}"] = torch.mm(s[f"attn_a2a.{chunk}"], s.weights["out_QD"])


def add_out(s: State) -> None:
    """ln2_in, with the residual."""
    s["ln2_in"] = s["hidden"] + torch.cat([s[name] for name in s.of_chunks("attn_out")])


def start_tokens(s: State) -> None:
    """Every rank gets all rows, chunk by chunk."""
    start_first_tokens(s)
    start_other_tokens(s)


def start_first_tokens(s: State) -> None:
    """The first chunk, while the router runs."""
    s.flights["ln2_out_ag.0"] = start_all_gather(s["ln2_out"].chunk(s.chunks)[0], s.group)


def start_other_tokens(s: State) -> None:
    """The others, behind the routes: these are few, and rows are put in order while the tokens travel."""
    for chunk in range(1, s.chunks):
        s.flights[f"ln2_out_ag.{chunk}"] = start_all_gather(s["ln2_out"].chunk(s.chunks)[chunk], s.group)


def place(s: State) -> None:
    """The rows of this rank's experts: by expert, then by chunk, then by source rank."""
    experts_WK, weights_WK = (
        torch.cat(cut(s.land(name), s.group.size, s.chunks)) for name in ("experts_WK", "weights_WK")
    )
    local = s.shape.experts // s.group.size
    rows = rows_of(experts_WK, s.group.index * local, local)
    s["rows_WK"], s["ends_L"] = rows.rows_WK, rows.ends_L
    s.runs = _runs(s, experts_WK, local)
    s.rows = sum(s.part(chunk) for chunk in range(s.chunks))
    s["weights_N"] = weights_of_rows(weights_WK, s["rows_WK"], s.rows)
    s.drop("weights_TK")
    like = s["ln2_out"]
    s["ffn_in"] = like.new_empty(s.rows, s.shape.d_model)
    for name in ("fc1_out", "fc3_out"):
        s[name] = like.new_empty(s.rows, s.shape.d_ffn)


def _runs(s: State, experts_WK: torch.Tensor, local: int) -> list[tuple[list[int], list[int]]]:
    """Where each chunk's rows of each expert lie; one read on the host."""
    own_CR = (experts_WK - s.group.index * local).view(s.chunks, -1)
    chunk_C1 = torch.arange(s.chunks, device=own_CR.device).unsqueeze(1)
    is_own_CR = own_CR.clamp(0, local - 1) == own_CR
    counts_CL = count((own_CR + local * chunk_C1).where(is_own_CR, -1), s.chunks * local).view(s.chunks, local)
    found = read_ints(counts_CL, "received_kept_by_part")
    by_chunk = [found[begin : begin + local] for begin in range(0, len(found), local)]
    runs: list[tuple[list[int], list[int]]] = [([], []) for _ in by_chunk]
    end = 0
    for expert in range(local):
        for (begins, ends), counts in zip(runs, by_chunk, strict=True):
            begins.append(end)
            end += counts[expert]
            ends.append(end)
    return runs


def land_tokens(s: State, chunk: int) -> None:
    """ln2_out_ag of a chunk."""
    name = f"ln2_out_ag.{chunk}"
    s[name] = s.land(name)


def scatter(s: State, chunk: int) -> None:
    """A chunk's rows of ffn_in."""
    permute_part_(s["ffn_in"], s[f"ln2_out_ag.{chunk}"], s["rows_WK"].chunk(s.chunks)[chunk], s.part(chunk))


def products(s: State, chunk: int) -> None:
    """A chunk's rows of fc1_out and fc3_out, beside the next one's way."""
    grouped_gemm_part_(s["fc1_out"], s["ffn_in"], *s.runs[chunk], s.weights["w1_EDF"])
    grouped_gemm_part_(s["fc3_out"], s["ffn_in"], *s.runs[chunk], s.weights["w3_EDF"])


def shared_products(s: State, chunk: int) -> None:
    """The shared expert's part of this rank, if there is one."""
    if "shared1_DF" in s.weights:
        x_WD = s[f"ln2_out_ag.{chunk}"]
        s[f"shared1_out.{chunk}"] = torch.mm(x_WD, s.weights["shared1_DF"])
        s[f"shared3_out.{chunk}"] = torch.mm(x_WD, s.weights["shared3_DF"])
        h_WF = activate(s[f"shared1_out.{chunk}"], "swiglu", s[f"shared3_out.{chunk}"])
        s[f"shared_out.{chunk}"] = torch.mm(h_WF, s.weights["shared2_FD"])


def gate_products(s: State) -> None:
    """fc2_in of all chunks, and room for fc2_out."""
    whole.gate_products(s)
    s["fc2_out"] = s["fc2_in"].new_empty(s.rows, s.shape.d_model)


def last_product(s: State, chunk: int) -> None:
    """A chunk's rows of fc2_out."""
    grouped_gemm_part_(s["fc2_out"], s["fc2_in"], *s.runs[chunk], s.weights["w2_EFD"])


def gather(s: State, chunk: int) -> None:
    """What this rank's experts add to a chunk's tokens."""
    y_WD = unpermute_part(s["fc2_out"], s["rows_WK"].chunk(s.chunks)[chunk], s.part(chunk))
    shared = f"shared_out.{chunk}"
    s[f"fc2_out_rs.{chunk}"] = y_WD + s[shared] if shared in s else y_WD
    s.tensors.pop(shared, None)


def start_results(s: State, chunk: int) -> None:
    """Sums to the tokens' ranks, beside the next chunk's product."""
    s.flights[f"ffn_out.{chunk}"] = start_reduce_scatter(s[f"fc2_out_rs.{chunk}"], s.group)


def forward_in_chunks(chunks: int) -> list[Operator]:
    """The list."""
    each = range(chunks)
    sends = [("attention", project), ("exchange", start_qkv)]
    comes = [("exchange", land_tokens), ("dispatch", scatter), ("experts", products), ("dense", shared_products)]
    goes = [("experts", last_product), ("combine", gather), ("exchange", start_results)]
    return [
        ("attention", whole.norm1),
        *((name, of(one, chunk)) for chunk in each for name, one in sends),
        ("attention", whole.attend),
        ("exchange", start_attn),
        *(("attention", of(out, chunk)) for chunk in each),
        ("attention", add_out),
        ("dense", whole.norm2),
        ("exchange", start_first_tokens),
        ("gate", whole.choose),
        ("exchange", whole.start_routes),
        ("exchange", start_other_tokens),
        ("dispatch", place),
        *((name, of(one, chunk)) for chunk in each for name, one in comes),
        ("experts", gate_products),
        *((name, of(one, chunk)) for chunk in each for name, one in goes),
        ("dense", whole.finish),
    ]
