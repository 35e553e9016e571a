"""Where the tokens go: what a routing rule returns, and the logits that a workload imposes on every system.

Legend: T tokens of a rank, E experts, K choices a token, D model, R ranks.
"""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.layer import ROUTINGS, LayerWorkload

_CHOSEN_LOGIT = 4.0  # `exact`: a chosen expert's lead over the others; below saturation, so that gradients are alive
_LOGITS, _POPULARITY, _FILLER, TOKEN_IDS = range(4)  # independent streams of one seed


@dataclass(frozen=True)
class Routing:
    """What a rule decided for the tokens of one rank.

    Attributes:
        experts_TK: chosen experts in the rule's order, best first where it ranks; -1 where it makes no j-th choice.
            K is at most E, and may differ from `GateSpec.top_k`.
        weights_TK: what multiplies the expert's output, 0 where the route was dropped; differentiable.
        keep_TK: whether the route found a slot.
        slots_TK: position of the route inside its expert's buffer, -1 where it has none.
        probs_TE: what the weights were taken from, most often the softmax of the logits; differentiable.
        aux: auxiliary loss, a scalar, the sum of `aux_terms`; differentiable, a constant 0 for rules without one.
        counts_E: routes to each expert before capacity, all K choices together.
        capacity: slots C of each (source rank, expert).
        aux_terms: the auxiliary losses by name.
        rounds: how many rounds a rule took whose work depends on the data; None for all others.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    keep_TK: Tensor
    slots_TK: Tensor
    probs_TE: Tensor
    aux: Tensor
    counts_E: Tensor
    capacity: int
    aux_terms: Mapping[str, Tensor] = field(default_factory=dict)
    rounds: int | None = None

    @property
    def dropped(self) -> int:
        """Routes without a slot, those that the rule never made left out."""
        return int(((self.experts_TK >= 0) & ~self.keep_TK).sum())


def logits_for(workload: LayerWorkload, rank: int) -> Tensor:
    """The logits [T, E] that `rank` feeds to its gate, float32, the same on every machine.

    They are rounded to the workload's dtype, so that an input of that dtype can carry them (`imposed_input`).

    Raises:
        InputError: unknown kind of routing, or a recorded file that can't serve the workload.
    """
    kind = workload.routing.kind
    if kind == "iid":
        logits_TE = _normal(workload, rank, workload.tokens, workload.experts)
    elif kind == "exact":
        logits_TE = _exact(workload, rank)
    elif kind == "zipf":
        logits_TE = _zipf(workload, rank)
    elif kind == "trace":
        logits_TE = _recorded(workload, rank)
    else:
        raise one_of("routing.kind", kind, ROUTINGS)
    return logits_TE.to(torch_dtype(workload.dtype)).to(torch.float32)


def imposed_input(workload: LayerWorkload, rank: int) -> tuple[Tensor, Tensor]:
    """Input x [T, D] and router [D, E] under which any system's linear gate computes exactly `logits_for`.

    The first E columns of x are the logits, the rest seeded normal values; the router's first E rows are the identity,
    the rest zero. Both are float32.

    Raises:
        InputError: D < E, where x has no room for the logits.
    """
    d_model, experts = workload.d_model, workload.experts
    if d_model < experts:
        raise InputError(
            f"d_model = {d_model} is below experts = {experts}: an input row has no room for the imposed logits; "
            f"choose d_model >= {experts}"
        )
    filler_TD = _normal(workload, rank, workload.tokens, d_model - experts, _FILLER)
    x_TD = torch.cat([logits_for(workload, rank), filler_TD], dim=1)
    gate_DE = torch.zeros(d_model, experts)
    gate_DE[:experts] = torch.eye(experts)
    return x_TD, gate_DE


def generator_for(workload: LayerWorkload, rank: int, stream: int) -> torch.Generator:
    """The random numbers of one stream of a rank."""
    words = np.random.SeedSequence([workload.routing.seed, rank, stream]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)


def _normal(workload: LayerWorkload, rank: int, rows: int, columns: int, stream: int = _LOGITS) -> Tensor:
    return torch.randn(rows, columns, generator=generator_for(workload, rank, stream))


def _exact(workload: LayerWorkload, rank: int) -> Tensor:
    """Choice j of token t is expert t + j + an offset; every expert gets T/E tokens of each choice where E divides T.

    A rule that can't choose so has balanced choices of its own (`Gate.exact`). The remainder of the division starts
    where the rank before stopped, so that it evens out over the ranks.
    """
    from moebench.workloads.gates.registry import get_gate  # here, because rules return what this file defines

    tokens, experts, top_k = workload.tokens, workload.experts, workload.gate.top_k
    start = rank * (tokens % experts)
    own = get_gate(workload.gate.name).exact
    if own is not None:
        choices_TK = own(workload.gate, tokens, experts, start)
    else:
        choices_TK = (torch.arange(tokens)[:, None] + torch.arange(top_k)[None, :] + start) % experts
    lead_K = _CHOSEN_LOGIT + torch.arange(top_k, 0, -1, dtype=torch.float32)
    return torch.zeros(tokens, experts).scatter_(1, choices_TK, lead_K.expand(tokens, top_k))


def _zipf(workload: LayerWorkload, rank: int) -> Tensor:
    """Gumbel trick: the k largest of log p + Gumbel are k draws from p without replacement.

    Which expert is the r-th most popular is a seeded permutation, the same on all ranks, so that popularity says
    nothing about where an expert lives.
    """
    experts = workload.experts
    log_p_E = -workload.routing.alpha * torch.arange(1, experts + 1, dtype=torch.float32).log()
    place_E = torch.randperm(experts, generator=generator_for(workload, 0, _POPULARITY))
    uniform_TE = torch.rand(workload.tokens, experts, generator=generator_for(workload, rank, _LOGITS))
    gumbel_TE = -(-uniform_TE.clamp(min=1e-20).log()).clamp(min=1e-20).log()
    return log_p_E[place_E] + gumbel_TE


def _recorded(workload: LayerWorkload, rank: int) -> Tensor:
    """Rows rank*T ... of a recorded routing."""
    path = workload.routing.path
    if not path:
        raise InputError("routing.path: a recorded routing (routing.kind = 'trace') needs the path of its file")
    logits_NE, _ = read_recorded(Path(path))
    if logits_NE.shape[1] != workload.experts:
        raise InputError(f"{path}: logits has shape {logits_NE.shape}, the workload has experts = {workload.experts}")
    first, last = rank * workload.tokens, (rank + 1) * workload.tokens
    if last > len(logits_NE):
        raise InputError(f"{path}: holds {len(logits_NE)} tokens, rank {rank} needs rows {first} to {last}")
    return torch.from_numpy(logits_NE[first:last].astype(np.float32))


def recorded_shape(path: str) -> tuple[int, int]:
    """Tokens and experts of a recorded routing.

    Raises:
        InputError: as `read_recorded`.
    """
    return _shape_of(Path(path), Path(path).stat().st_mtime_ns if Path(path).is_file() else 0)


@lru_cache(maxsize=16)  # a suite's cases ask many times
def _shape_of(path: Path, changed_ns: int) -> tuple[int, int]:
    tokens, experts = read_recorded(path)[0].shape
    return tokens, experts


def read_recorded(path: Path) -> tuple[np.ndarray, str]:
    """The logits [N, E] of a recorded routing, and what the file says of itself.

    Raises:
        InputError: no such file, not a NumPy .npz file, no array `logits` of numbers [tokens, experts], or one that is
            not finite, with its row.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file (routing.path)")
    try:
        with np.load(path, allow_pickle=False) as file:
            if "logits" not in file.files:
                held = f"it has {', '.join(file.files)}" if file.files else "it is empty"
                raise InputError(f"{path}: has no array `logits` of shape [tokens, experts]; {held}")
            logits_NE, about = np.asarray(file["logits"]), str(file["about"]) if "about" in file.files else ""
    except (OSError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: not a NumPy .npz file ({error})") from error
    if logits_NE.ndim != 2 or not logits_NE.shape[1] or logits_NE.dtype.kind not in "fiu":
        shape = f"{logits_NE.dtype} of shape {logits_NE.shape}"
        raise InputError(f"{path}: logits is {shape}; it must be numbers of shape [tokens, experts]")
    finite_N = np.isfinite(logits_NE.astype(np.float32)).all(axis=1)
    if not finite_N.all():
        raise InputError(f"{path}: logits, row {int(np.argmin(finite_N))}: not all finite")
    return logits_NE, about
