"""A model's config.json, as Hugging Face keeps it, into a model file: the MoE layer that it describes, and the decoder.

What a family calls things is data below; what a layer of moebench has no word for becomes a note.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebench.imports.config import Config
from moebench.imports.decoder_config import decoder_lines
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.layer import GateSpec
from moebench.workloads.toml_file import SCHEMA_VERSION

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
DTYPE_KEYS = ("torch_dtype", "dtype")


@dataclass(frozen=True)
class Family:
    """What the models of one `model_type` call the parts of an MoE layer.

    Attributes:
        experts, d_ffn, top_k: keys.
        normalises: key of whether the K weights are divided by their sum, or True where the family always does so,
            which a softmax over the K logits is too.
        scores: the rule: `topk` or `sigmoid`.
        shared: key of how many experts every token visits, or of the width of one; None where there is none.
        notes: what else a layer here leaves out.
        qk_norm, biases, sinks, features: of the decoder, where the config says nothing of it.
    """

    experts: str
    d_ffn: str
    top_k: str = "num_experts_per_tok"
    normalises: str | bool = "norm_topk_prob"
    scores: str = "topk"
    shared: str | None = None
    notes: tuple[str, ...] = ()
    qk_norm: str = "none"
    biases: tuple[str, ...] = ()
    sinks: bool = False
    features: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = {
    "mixtral": Family("num_local_experts", "intermediate_size", normalises=True),
    "olmoe": Family("num_experts", "intermediate_size", qk_norm="full"),
    "qwen2_moe": Family(
        "num_experts", "moe_intermediate_size", shared="shared_expert_intermediate_size", biases=("qkv",)
    ),
    "qwen3_moe": Family("num_experts", "moe_intermediate_size", qk_norm="head"),
    "deepseek_v3": Family(
        "n_routed_experts",
        "moe_intermediate_size",
        scores="sigmoid",
        shared="n_shared_experts",
        biases=("router",),
    ),
    "gpt_oss": Family(
        "num_local_experts",
        "intermediate_size",
        normalises=True,
        notes=("The experts' biases and the clamping inside their SwiGLU are left out.",),
        biases=("qkv", "out", "experts", "router"),
        sinks=True,
        features=("clamped SwiGLU with an offset",),
    ),
}
# Keys of layers that are dense, beside the MoE layers of the same model, and from which value on (or which length).
DENSE = {"first_k_dense_replace": 1, "moe_layer_freq": 2, "decoder_sparse_step": 2, "mlp_only_layers": 1}


@dataclass(frozen=True)
class Imported:
    """A model file's text, and what was read for it.

    Attributes:
        unread: keys of the config that say nothing that a layer here has.
    """

    text: str
    name: str
    family: str
    unread: tuple[str, ...]


def import_model(path: Path, name: str | None = None) -> Imported:
    """The model file of a config.json.

    Args:
        name: of the model; default by its `_name_or_path`, its folder, or its family.

    Raises:
        InputError: no JSON object, a family that is not known, missing keys or values without a meaning; names them.
    """
    config = Config.of(path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise one_of("model_type", kind, FAMILIES, str(path))
    family = FAMILIES[kind]
    config.require(["hidden_size", family.d_ffn, family.experts, family.top_k], kind)
    title = name or _name(path, config) or kind
    values = {
        "d_model": config.integer("hidden_size"),
        "d_ffn": config.integer(family.d_ffn),
        "experts": config.integer(family.experts),
        "gate": _gate(config, family).label,
        "activation": _activation(config),
        "dtype": _dtype(config),
    }
    renormalises = _renormalises(config, family)
    notes = [*_notes(config, family, renormalises), *family.notes]
    text = _text(title, kind, path, values, notes, decoder_lines(config, family, renormalises))
    return Imported(text, title, kind, tuple(sorted(set(config.data) - config.read)))


def _name(path: Path, config: Config) -> str | None:
    """`Mixtral-8x7B-v0.1` of `mistralai/Mixtral-8x7B-v0.1`, or of the folder that the file is in."""
    own = config.get("_name_or_path")
    if isinstance(own, str) and own.strip("/. "):
        return own.rstrip("/").rpartition("/")[2]
    return path.absolute().parent.name if path.name == "config.json" else path.stem


def _gate(config: Config, family: Family) -> GateSpec:
    top_k, experts = config.integer(family.top_k), config.integer(family.experts)
    if top_k > experts:
        raise InputError(f"{config.path}: {family.top_k}: {top_k} is above {family.experts} = {experts}")
    if family.scores == "topk":
        return GateSpec("topk", top_k)
    scoring = config.get("scoring_func") or "sigmoid"
    if scoring != "sigmoid":
        raise one_of("scoring_func", scoring, ("sigmoid",), str(config.path))
    options: list[tuple[str, Any]] = []
    if config.data.get("n_group") is not None and config.data.get("topk_group") is not None:
        groups, kept = config.integer("n_group"), config.integer("topk_group")
        options += [("groups", groups), ("kept_groups", kept)] if groups > 1 else []
    scale = config.get("routed_scaling_factor")
    if isinstance(scale, int | float) and not isinstance(scale, bool) and scale not in (1, 1.0):
        options.append(("scale", float(scale)))
    gate = GateSpec("sigmoid", top_k, tuple(options))
    _check(gate, experts, config.path)
    return gate


def _check(gate: GateSpec, experts: int, path: Path) -> None:
    from moebench.workloads.conventions import COMMON
    from moebench.workloads.gates.registry import problem

    reason = problem(gate, COMMON, experts)
    if reason is not None:
        raise InputError(f"{path}: its gate {gate.label} has no meaning: {reason}")


def _activation(config: Config) -> str:
    """All of these families have two input products, so that the activation can only be SiLU."""
    name = config.get("hidden_act") or "silu"
    if name not in ("silu", "swish"):
        raise one_of("hidden_act", name, ("silu", "swish"), str(config.path))
    return "swiglu"


def _dtype(config: Config) -> str:
    for key in DTYPE_KEYS:
        value = config.get(key)
        if value is not None:
            if not isinstance(value, str) or value not in DTYPES:
                raise one_of(key, value, DTYPES, str(config.path))
            return DTYPES[value]
    return "bf16"


def _renormalises(config: Config, family: Family) -> bool:
    return family.normalises if isinstance(family.normalises, bool) else bool(config.get(family.normalises))


def _notes(config: Config, family: Family, renormalises: bool) -> list[str]:
    """What the model has and a layer here has not."""
    notes = []
    if renormalises:
        notes.append(
            "The model divides the K weights by their sum; the common conventions, under which systems are compared, "
            "do not."
        )
    if family.shared is not None and config.get(family.shared):
        notes.append(f"Shared experts ({family.shared} = {config.get(family.shared)}) are not part of the layer.")
    dense = [f"{key} = {config.get(key)}" for key, least in DENSE.items() if _counts(config.get(key), least)]
    if dense:
        notes.append(f"Some of the model's layers have no experts ({', '.join(dense)}); the layer is one that has.")
    return notes


def _counts(value: Any, least: int) -> bool:
    size = len(value) if isinstance(value, list) else value
    return isinstance(size, int) and size >= least


def _text(
    title: str, kind: str, path: Path, values: Mapping[str, Any], notes: Sequence[str], decoder: Sequence[str]
) -> str:
    source = f"{path.name} of {title}, model_type {kind}"
    lines = [
        f"# Written by `moebench import model` from {json.dumps(path.name)}.",
        f"schema_version = {SCHEMA_VERSION}",
        f"title = {json.dumps(title)}",
        f"source = {json.dumps(source)}",
        *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
    ]
    if notes:
        lines += ["notes = [", *(f"  {json.dumps(note)}," for note in notes), "]"]
    return "\n".join([*lines, *decoder]) + "\n"
