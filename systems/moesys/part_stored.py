"""A training step whose expert states are on disk, in a cache of host memory and in slots of the device, as a part.

Blocks of a dense part in ZeRO-3 slices and an MoE part with stored experts (prefetched_model.py): forward and backward
of one micro-batch or several, and the update of slices and experts. Each has other tokens, four batches in turn, so
that what a layer needed before is a guess. The routing is imposed: the first E columns of a token are its logits, which
no block changes at the start, and every layer reads them in an order of its own.

T tokens of a rank, D model, E experts, K choices a token, R ranks.
"""

import math
import weakref
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moebench.kernels.explicit import count
from moebench.kernels.host import answering
from moebench.kernels.region import region
from moebench.systems.moesys.experts import AdamOptions, StoredExperts, create_store
from moebench.systems.moesys.part_cache import policy_of
from moebench.systems.moesys.prefetched_model import PrefetchedModel
from moebench.systems.moesys.shard_files import ExpertKey, check_room, needed_bytes
from moebench.systems.moesys.sliced import SlicedLayers
from moebench.systems.moesys.storage import HierarchicalStorage
from moebench.systems.moesys.stored_layer import StoredMoELayer, layout_of
from moebench.systems.moesys.stored_plain import PlainSteps
from moebench.systems.moesys.tiers import paper_bytes, storage_bytes
from moebench.systems.part_interface import PartCall, Setting, far, number, parsed
from moebench.systems.scratch import OwnFolder, remove_left, scratch
from moebench.workloads.conventions import Conventions
from moebench.workloads.dtypes import TORCH_DTYPES
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.part import PARTS, PartWorkload
from moebench.workloads.part_routing import alpha_of, spec_of
from moebench.workloads.routing import imposed_input, logits_for

PART, BATCHES = "stored-step", 4
OPTIONS = AdamOptions(lr=1e-5)
_UPSTREAM, _FIRST, _SECOND = range(3)
_DEFAULTS = {name: option.default or 0 for name, option in PARTS["expert-cache"].options["moesys"].items()}


def problem(workload: PartWorkload, system: str, ranks: int) -> str | None:
    """Why it has no meaning on so many ranks, naming the sizes."""
    sizes = dict(workload.sizes)
    for name in ("d_model", "d_ffn", "experts", "top_k", "layers", "accumulated"):
        if not sizes[name]:
            return f"{name} = 0: must be at least 1"
    for name in ("tokens", "experts"):
        if sizes[name] % ranks:
            return f"{name} = {sizes[name]} is not divisible by ranks = {ranks}"
    if sizes["top_k"] > sizes["experts"]:
        return f"top_k = {sizes['top_k']}: above experts = {sizes['experts']}"
    if sizes["d_model"] < sizes["experts"]:
        return f"d_model = {sizes['d_model']}: below experts = {sizes['experts']}, a token has no room for its logits"
    if alpha_of(workload.routing) is None:
        return f"routing {workload.routing}: a step's is drawn, such as zipf-1.5"
    if number(parsed(PART, system)[1], "cache_percent") > 100:
        return f"{system}: a cache holds 100 % of the states at most"
    return None


def work_of(workload: PartWorkload, ranks: int, dtype: str, batches: int = 1) -> LayerWorkload:
    """The layer of a rank, with the tokens of one batch; or of several, one after another, of the same popularity."""
    size, tokens = workload.size, workload.size("tokens") // ranks
    return LayerWorkload(
        GateSpec("topk", size("top_k")), batches, tokens, size("d_model"), size("d_ffn"), size("experts"), dtype,
        routing=spec_of(workload.routing, 0, workload.seed),
    )  # fmt: skip


def capacity_of(workload: PartWorkload, system: str, ranks: int) -> int:
    """States that a rank's cache holds."""
    states = workload.size("layers") * workload.size("experts") // ranks
    return round(states * number(parsed(PART, system)[1], "cache_percent") / 100)


def disk_bytes(workload: PartWorkload, ranks: int) -> int:
    """That the files of all ranks take at their fullest."""
    layout = layout_of(work_of(workload, ranks, workload.dtype))
    return ranks * needed_bytes(layout, workload.size("layers") * workload.size("experts") // ranks)


def burden(workload: PartWorkload, system: str, ranks: int) -> tuple[float, float]:
    """Bytes that a rank holds in memory, and FLOPs of a call."""
    size = workload.size
    layout = layout_of(work_of(workload, ranks, "fp32"))
    slots = number(parsed(PART, system)[1], "slots")
    dense = 2.0 * size("layers") * size("d_model") * size("d_ffn")
    held = capacity_of(workload, system, ranks) * layout.record_bytes + slots * layout.device_bytes + 16.0 * dense
    of_token = dense + size("layers") * size("top_k") * layout.elements
    return held, 6.0 * size("accumulated") * size("tokens") / ranks * of_token


def tiers(workload: PartWorkload, system: str, ranks: int) -> dict[str, tuple[float, float]]:
    """Bytes of all ranks' experts on each tier: as the storage takes them, and by the paper's inequalities.

    The paper's count of the dense parameters is left out on both sides; its share of active experts is the mean over
    the batches and layers here.
    """
    layout, options = layout_of(work_of(workload, ranks, workload.dtype)), parsed(PART, system)[1]
    experts, layers = workload.size("experts"), workload.size("layers")
    used = sum(sum(map(bool, _counts(workload, ranks, batch)[1])) for batch in range(BATCHES))
    alpha = used / (BATCHES * experts)
    paper = paper_bytes(0, layers * experts * layout.elements, alpha, layers)
    own = storage_bytes(
        layout, layers * experts // ranks, capacity_of(workload, system, ranks), number(options, "slots"),
        round(alpha * layers * experts / ranks),
    )  # fmt: skip
    return {
        "device": (ranks * own.device, paper.device),
        "host": (ranks * own.host, paper.host),
        "disk": (ranks * own.disk, paper.disk),
    }


def stored_step(setting: Setting) -> PartCall:
    """The step.

    Raises:
        InputError: the disk is too small, or the folder can't be written; nothing was.
    """
    workload, group = setting.workload, setting.group
    stem, options = parsed(PART, setting.system)
    work, layers = work_of(workload, group.size, _name(setting.dtype)), workload.size("layers")
    layout, local = layout_of(work), work.experts // group.size
    own = range(group.index * local, (group.index + 1) * local)
    keys = [(layer, expert) for layer in range(layers) for expert in own]
    policy = policy_of(str(options["policy"]), _DEFAULTS, capacity_of(workload, setting.system, group.size))
    folder = None if setting.is_meta else _folder(setting, len(keys))
    store = None
    if folder is not None:
        weights = {key: _expert(setting, work, key) for key in keys}
        store = create_store(folder.path / "states", layout, weights)
    storage = HierarchicalStorage(store, policy, number(options, "slots"), setting.device, layout, keys)
    stored, conventions = StoredExperts(storage, OPTIONS), _conventions(work)
    moe = [
        StoredMoELayer(work, group, conventions, setting.device, setting.dtype, stored, layer)
        for layer in range(layers)
    ]
    if not setting.is_meta:
        for layer, one in enumerate(moe):
            _impose(one, layer)
    dense = SlicedLayers([_dense(setting, work, layer) for layer in range(layers)], group, OPTIONS)
    model = PrefetchedModel(dense, _two_products, moe, stem)
    weakref.finalize(model, _close, storage, folder)
    batches = _tokens_of(setting, group.index)
    upstream_TD = setting.numbers(_UPSTREAM, group.index, (work.tokens, work.d_model))
    reads, done = _Reads(workload, group.size, group.index, layers), [0]

    def run() -> tuple[Tensor, Tensor | None]:
        for _ in range(workload.size("accumulated")):
            x_TD = batches[done[0] % BATCHES].detach().requires_grad_()
            done[0] += 1
            y_TD, _ = model(x_TD)
            y_TD.backward(upstream_TD)
        model.step()
        for one in moe:
            one.gate.zero_grad()
        return y_TD.detach(), x_TD.grad

    plain: list[PlainSteps] = []
    turns = BATCHES // math.gcd(BATCHES, workload.size("accumulated"))

    def wrong(found: tuple[Tensor, Tensor | None]) -> str | None:
        if not plain:
            plain.append(_plain(setting, work, layers))
        y_WD, gradient_WD = plain[0].after(done[0])
        assert found[1] is not None
        problem = far("tokens", found[0], y_WD.chunk(group.size)[group.index])
        return problem or far("their gradient", found[1], gradient_WD.chunk(group.size)[group.index])

    if setting.is_meta:
        with answering(reads):
            for _ in range(turns):  # caches are full, last experts are known
                with region("exchange"):
                    run()
    held = [slot.flat_P for slot in storage._slots]
    persistent = (*held, *dense.slices, *dense.optimizer.states, *batches)
    return PartCall(run, wrong, persistent, reads, turns=turns)


class _Reads:
    """What the layers read of their counts where tensors have no values: layer after layer, step after step."""

    def __init__(self, workload: PartWorkload, ranks: int, rank: int, layers: int) -> None:
        self.workload, self.ranks, self.rank, self.layers, self.asked = workload, ranks, rank, layers, -1

    def __call__(self, quantity: str, values: Tensor) -> list[int]:
        """The answer to a read; each layer first asks how many rows it sends."""
        self.asked += quantity == "kept_rows"
        step, layer = divmod(self.asked, self.layers)
        by_rank, _ = _counts(self.workload, self.ranks, step % BATCHES)
        with _disable_current_modes():
            order = _order(len(by_rank[0]), layer).tolist()
        counts_RE = [[counts[column] for column in order] for counts in by_rank]
        local = len(order) // self.ranks
        received_RL = [counts[self.rank * local : (self.rank + 1) * local] for counts in counts_RE]
        return {
            "kept_counts": counts_RE[self.rank],
            "kept_rows": [sum(counts_RE[self.rank])],
            "received_kept_counts": [rows for counts in received_RL for rows in counts],
            "received_kept_by_expert": [sum(rows) for rows in zip(*received_RL)],
            "received_kept_rows": [sum(map(sum, received_RL))],
        }[quantity]


@lru_cache(maxsize=64)
def _counts(workload: PartWorkload, ranks: int, batch: int) -> tuple[list[list[int]], list[int]]:
    """Rows that each rank sends by column of its tokens' logits, and their sums."""
    work = work_of(workload, ranks, workload.dtype, BATCHES)
    by_rank = []
    with _disable_current_modes():
        for rank in range(ranks):
            logits_TE = logits_for(work, rank)[batch * work.sequence : (batch + 1) * work.sequence]
            chosen_TK = logits_TE.topk(work.gate.top_k, dim=1).indices
            by_rank.append(count(chosen_TK, work.experts).tolist())
    return by_rank, [sum(counts) for counts in zip(*by_rank)]


def _order(experts: int, layer: int) -> Tensor:
    """Which column of a token's logits is which expert's."""
    with _disable_current_modes():
        return torch.randperm(experts, generator=torch.Generator().manual_seed(layer))


def _impose(layer: StoredMoELayer, place: int) -> None:
    weight_ED = layer.gate.weight_ED
    assert weight_ED is not None
    with torch.no_grad():
        weight_ED.zero_()
        weight_ED[torch.arange(len(weight_ED)), _order(len(weight_ED), place)] = 1


def _tokens_of(setting: Setting, rank: int) -> list[Tensor]:
    """[T, D] of each batch of a rank."""
    work = work_of(setting.workload, setting.group.size, _name(setting.dtype), BATCHES)
    if setting.is_meta:
        x_ND = torch.empty(work.tokens, work.d_model, dtype=setting.dtype, device=setting.device)
    else:
        x_ND = imposed_input(work, rank)[0].to(setting.device, setting.dtype)
    return list(x_ND.split(work.sequence)) if work.sequence else [x_ND] * BATCHES


def _dense(setting: Setting, work: LayerWorkload, layer: int) -> dict[str, Tensor]:
    """Two products, whose result leaves the logits alone."""
    return _pair(setting, work, 10 * layer, 0)


def _expert(setting: Setting, work: LayerWorkload, key: ExpertKey) -> dict[str, Tensor]:
    own, dtype = _pair(setting, work, 10 * key[0] + 5, key[1]), layout_of(work).state_dtype
    return {"w1_DF": own["w1"].to("cpu", dtype), "w2_FD": own["w2"].to("cpu", dtype)}


def _pair(setting: Setting, work: LayerWorkload, what: int, number: int) -> dict[str, Tensor]:
    d_model, d_ffn = work.d_model, work.d_ffn
    w1 = setting.numbers(what + _FIRST, number, (d_model, d_ffn), d_model**-0.5)
    w2 = setting.numbers(what + _SECOND, number, (d_ffn, d_model), d_ffn**-0.5)
    if not setting.is_meta:
        w2[:, : work.experts] = 0
    return {"w1": w1, "w2": w2}


def _two_products(x_TD: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return torch.relu(x_TD @ w1) @ w2


def _conventions(work: LayerWorkload) -> Conventions:
    return Conventions(capacity_rule="unlimited", gate_dtype="fp64" if work.dtype == "fp64" else "fp32")


def _name(dtype: torch.dtype) -> str:
    return next(name for name, known in TORCH_DTYPES.items() if known == dtype)


def _folder(setting: Setting, states: int) -> OwnFolder:
    """For a rank's files; removed with the part."""
    layout = layout_of(work_of(setting.workload, setting.group.size, _name(setting.dtype)))
    place = scratch()
    remove_left()
    check_room(place, layout, states)
    try:
        return OwnFolder()
    except OSError as error:
        raise InputError(f"{place}: {error.strerror}") from error


def _close(storage: HierarchicalStorage, folder: OwnFolder | None) -> None:
    """When nobody has the model any more: its files go."""
    storage.close()
    if folder is not None:
        folder.remove()


def _plain(setting: Setting, work: LayerWorkload, layers: int) -> PlainSteps:
    """The definition: all ranks' tokens on one, whole weights, every expert in memory."""
    ranks = range(setting.group.size)

    by_rank = [_tokens_of(setting, rank) for rank in ranks]
    batches_WD = [torch.cat([of_rank[batch] for of_rank in by_rank]) for batch in range(BATCHES)]

    upstream_WD = torch.cat([setting.numbers(_UPSTREAM, rank, (work.tokens, work.d_model)) for rank in ranks])
    dense = [list(_dense(setting, work, layer).values()) for layer in range(layers)]
    experts = [
        [list(_expert(setting, work, (layer, expert)).values()) for expert in range(work.experts)]
        for layer in range(layers)
    ]
    orders = [_order(work.experts, layer) for layer in range(layers)]
    return PlainSteps(batches_WD, upstream_WD, dense, experts, orders,
                      work.gate, _conventions(work), OPTIONS, _two_products,
                      setting.workload.size("accumulated"))  # fmt: skip

