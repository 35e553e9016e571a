"""The decoder of a model's file: what workloads/models/decoder.py describes."""

from pathlib import Path

from moebench.workloads.errors import InputError
from moebench.workloads.load_model import model_names
from moebench.workloads.models.decoder import DecoderModel, DecoderShape, LatentAttention, Published
from moebench.workloads.places import MODELS, find
from moebench.workloads.schema import DecoderFile, ModelFile, parse_file
from moebench.workloads.toml_file import TomlFile, read_toml

_OF_MODEL = ("layers", "vocabulary", "sequence", "dense_layers", "dense_ffn", "tied", "norm", "qk_norm", "sinks")


def decoder_names() -> tuple[str, ...]:
    """Names of models whose files have a decoder."""
    return tuple(name for name in model_names() if read_toml(find(MODELS, name)).data.get("decoder") is not None)


def load_decoder(name: str, where: str = "", beside: Path | None = None) -> DecoderModel:
    """The decoder of a model's name or file.

    Raises:
        InputError: no such model, a fault in its file, no table `decoder` in it, or sizes that have no meaning; one
            line that names file, line, key and what is allowed.
    """
    from moebench.workloads.gates.registry import parse_label  # torch, which a suite's file may do without

    file = read_toml(find(MODELS, name, where, beside))
    model = parse_file(ModelFile, file)
    if model.decoder is None:
        raise InputError(f"{file.where()}: no table decoder; the decoder needs layers, heads, kv_heads and so on")
    gate = parse_label(model.gate, file.where(["gate"]))
    shape = _shape(model, model.decoder, gate.top_k)
    reason = shape.problem() or _problem(model, model.decoder)
    if reason is not None:
        raise InputError(f"{_place(file, reason)}: {reason}")
    # The K largest of a softmax, nobody dropped, is what layers here route by.
    rules = () if gate.name == "topk" else (f"rule of gate {gate.label}",)
    return _decoder(file.path.stem, model.title, shape, model.decoder, rules)


def _shape(model: ModelFile, decoder: DecoderFile, top_k: int) -> DecoderShape:
    same = ("heads", "kv_heads", "head_size", "shared_ffn", "renormalises", "rope_theta", "eps")
    fields = {key: getattr(decoder, key) for key in same}
    qk_norm = decoder.qk_norm == "head"
    return DecoderShape(
        d_model=model.d_model, d_ffn=model.d_ffn, experts=model.experts, top_k=top_k, qk_norm=qk_norm, **fields
    )


def _problem(model: ModelFile, decoder: DecoderFile) -> str | None:
    if model.activation != "swiglu":
        return f"activation = {model.activation}: the experts of a decoder are swiglu"
    if decoder.dense_layers > decoder.layers:
        return f"dense_layers = {decoder.dense_layers}: the decoder has layers = {decoder.layers}"
    if bool(decoder.dense_layers) != bool(decoder.dense_ffn):
        return f"dense_ffn = {decoder.dense_ffn} does not fit dense_layers = {decoder.dense_layers}"
    return None


def _place(file: TomlFile, reason: str) -> str:
    """Where the key that a reason begins with stands."""
    key = reason.split(" ")[0]
    return file.where([key] if key in file.data else ["decoder", key])


def _decoder(
    name: str, title: str, shape: DecoderShape, decoder: DecoderFile, rules: tuple[str, ...]
) -> DecoderModel:
    latent = None if decoder.latent is None else LatentAttention(**decoder.latent.model_dump())
    published = Published() if decoder.published is None else Published(**decoder.published.model_dump())
    return DecoderModel(
        name=name,
        title=title,
        shape=shape,
        biases=tuple(decoder.biases),
        latent=latent,
        features=(*rules, *decoder.features),
        published=published,
        **{key: getattr(decoder, key) for key in _OF_MODEL},
    )
