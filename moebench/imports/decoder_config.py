"""The decoder of a config.json: what a model file's table `decoder` says of attention, dense layers and sizes."""

import json
from typing import TYPE_CHECKING, Any

from moebench.imports.config import Config

if TYPE_CHECKING:
    from moebench.imports.model_config import Family

SIZES = ("num_hidden_layers", "num_attention_heads", "vocab_size")
LATENT = {
    "query_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "nope_size": "qk_nope_head_dim",
    "rope_size": "qk_rope_head_dim", "value_size": "v_head_dim",
}  # fmt: skip


def decoder_lines(config: Config, family: "Family", renormalises: bool) -> list[str]:
    """The lines of the table; none where the config does not say how large the decoder is.

    Raises:
        InputError: a value without a meaning.
    """
    if not config.has(*SIZES):
        return []
    values: dict[str, Any] = {
        "layers": config.integer("num_hidden_layers"),
        "heads": config.integer("num_attention_heads"),
        "kv_heads": config.integer(SIZES[1] if config.get("num_key_value_heads") is None else "num_key_value_heads"),
        "head_size": _head_size(config),
        "vocabulary": config.integer("vocab_size"),
        "shared_ffn": _shared_ffn(config, family),
        **_dense(config),
        "renormalises": renormalises,
        "tied": bool(config.get("tie_word_embeddings")),
        "qk_norm": family.qk_norm,
        "biases": list(family.biases),
        "sinks": family.sinks,
        "rope_theta": config.number("rope_theta", 10_000.0),
        "eps": config.number("rms_norm_eps", 1e-5),
        "features": [*family.features, *_features(config)],
    }
    usual = {"shared_ffn": 0, "renormalises": True, "tied": False, "qk_norm": "none", "biases": [], "sinks": False,
             "rope_theta": 10_000.0, "eps": 1e-5, "features": []}  # fmt: skip
    said = {key: value for key, value in values.items() if key not in usual or value != usual[key]}
    lines = ["", "[decoder]", *(f"{key} = {json.dumps(value)}" for key, value in said.items())]
    if config.has(*LATENT.values()):
        lines += ["", "[decoder.latent]"]
        lines += [f"{key} = {config.integer(theirs)}" for key, theirs in LATENT.items()]
    return lines


def _head_size(config: Config) -> int:
    """Its own, that of values where keys are put together from parts, or an even share of the width."""
    for key in ("head_dim", "v_head_dim"):
        if config.has(key):
            return config.integer(key)
    return max(1, config.integer("hidden_size") // config.integer("num_attention_heads"))


def _shared_ffn(config: Config, family: "Family") -> int:
    """The width of all shared experts together."""
    if family.shared is None or not config.get(family.shared):
        return 0
    count = config.integer(family.shared)
    return count * config.integer(family.d_ffn) if family.shared.startswith("n_") else count


def _dense(config: Config) -> dict[str, int]:
    """The first layers, where they have no experts."""
    if not config.get("first_k_dense_replace"):
        return {}
    count = config.integer("first_k_dense_replace")
    return {"dense_layers": count, "dense_ffn": config.integer("intermediate_size")}


def _features(config: Config) -> list[str]:
    """What a decoder here has no word for."""
    found = []
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" in kinds:
        found.append(f"{kinds.count('sliding_attention')} layers see {config.get('sliding_window')} positions")
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        kind = scaling.get("rope_type") or scaling.get("type") or "a rule of its own"
        found.append(f"rotary positions stretched by {kind}")
    if config.get("num_nextn_predict_layers"):
        found.append("a module that predicts one token more")
    return found
