"""`import model`: each family's keys become a layer, and what is missing, unknown or left out is said."""

import json

import pytest

from moebench.cases.plan import Filters, plan
from moebench.imports.model_config import FAMILIES, import_model
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_model, load_suite
from moebench.workloads.load_decoder import load_decoder
from tests.moebench.cli.support import Moebench
from tests.workloads.files import EXPERIMENT, suite_text, written

# Of each family the keys that its published config.json has, and what the layer must be.
CONFIGS = {
    "mixtral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "router_aux_loss_coef": 0.02,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "sliding_window": None,
    },
    "olmoe": {
        "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
        "norm_topk_prob": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-05, "rope_scaling": None,
    },
    "qwen2_moe": {
        "hidden_size": 2048, "moe_intermediate_size": 1408, "intermediate_size": 5632, "num_experts": 60,
        "num_experts_per_tok": 4, "norm_topk_prob": False, "shared_expert_intermediate_size": 5632,
        "hidden_act": "silu", "torch_dtype": "bfloat16",
    },
    "qwen3_moe": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "hidden_act": "silu", "torch_dtype": "bfloat16",
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "rope_theta": 1000000.0, "rms_norm_eps": 1e-06,
    },
    "deepseek_v3": {
        "hidden_size": 7168, "moe_intermediate_size": 2048, "intermediate_size": 18432, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "num_nextn_predict_layers": 1,
    },
    "gpt_oss": {
        "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
        "hidden_act": "silu", "swiglu_limit": 7.0,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 201088, "rope_theta": 150000, "rms_norm_eps": 1e-05,
    },
}  # fmt: skip
PACKAGED = {
    "mixtral": "mixtral-8x7b", "olmoe": "olmoe-1b-7b", "qwen3_moe": "qwen3-30b-a3b", "deepseek_v3": "deepseek-v3",
    "gpt_oss": "gpt-oss-20b",
}  # fmt: skip


def config(folder, kind, **changes):
    """A config.json in a folder named as the model; a key that is changed to None is left out."""
    data = {"model_type": kind, "architectures": ["X"], "use_cache": True} | CONFIGS.get(kind, {}) | changes
    text = json.dumps({key: value for key, value in data.items() if value is not None})
    return written(folder / "Some-Model", text, "config.json")


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_becomes_a_layer_that_runs(tmp_path, kind):
    """Its sizes, gate and dtype, in a suite that leaves them to the model's file."""
    found = import_model(config(tmp_path, kind))
    model = load_model(str(written(tmp_path, found.text, "model.toml")))
    own = CONFIGS[kind]
    family = FAMILIES[kind]
    assert (model.d_model, model.d_ffn, model.experts) == (
        own["hidden_size"], own[family.d_ffn], own[family.experts]
    )  # fmt: skip
    assert (model.title, model.activation, model.dtype) == ("Some-Model", "swiglu", "bf16")
    layer = '\n[experiments.layer]\nmodel = "./model.toml"\nsequence = 64\n'
    experiment = EXPERIMENT.replace('gates = ["switch", "topk-2"]\n', "").replace("1x2", "1x4")
    (case,) = plan(load_suite(str(written(tmp_path, suite_text(experiment, layer)))), Filters())
    assert case.workload.gate.top_k == own["num_experts_per_tok"]


@pytest.mark.parametrize("kind", PACKAGED)
def test_packaged_models_are_what_an_import_gives(tmp_path, kind):
    """The layer, and the decoder around it; all but title, source and what is said of it in words."""
    model = load_model(str(written(tmp_path, import_model(config(tmp_path, kind)).text, "model.toml")))
    ours = load_model(PACKAGED[kind])
    for field in ("d_model", "d_ffn", "experts", "gate", "activation", "dtype", "notes"):
        assert getattr(model, field) == getattr(ours, field), field
    decoder, own = load_decoder(str(tmp_path / "model.toml")), load_decoder(PACKAGED[kind])
    for field in ("shape", "layers", "vocabulary", "dense_layers", "dense_ffn", "tied", "norm", "qk_norm", "sinks",
                  "biases", "latent"):  # fmt: skip
        assert getattr(decoder, field) == getattr(own, field), field


def test_what_a_layer_has_no_word_for_is_a_note(tmp_path):
    """Shared experts, dense layers, divided weights; keys that say nothing about the layer are listed."""
    found = import_model(config(tmp_path, "deepseek_v3", rope_scaling={"type": "yarn", "factor": 40}))
    for words in ("divides the K weights", "n_shared_experts = 1", "first_k_dense_replace = 3"):
        assert words in found.text
    assert "moe_layer_freq" not in found.text
    assert found.unread == ("topk_method", "use_cache")
    assert "rotary positions stretched by yarn" in found.text
    assert "notes" not in import_model(config(tmp_path, "olmoe")).text
    assert 'gate = "sigmoid-8+groups=8+kept_groups=4+scale=2.5"' in found.text


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("mixtral", {"num_local_experts": None, "hidden_size": None},
         "missing key hidden_size, num_local_experts; a mixtral has hidden_size, intermediate_size, num_local_experts"),
        ("llama", {}, r"config.json: unknown model_type 'llama'; choose one of: deepseek_v3, gpt_oss, mixtral"),
        (None, {}, "unknown model_type None"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts: 0 is no whole number of at least 1"),
        ("mixtral", {"num_hidden_layers": 0}, "num_hidden_layers: 0 is no whole number of at least 1"),
        ("mixtral", {"rope_theta": -1}, "rope_theta: -1 is no positive number"),
        ("mixtral", {"hidden_size": True}, "hidden_size: True is no whole number"),
        ("mixtral", {"hidden_size": "4096"}, "hidden_size: '4096' is no whole number"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is above num_local_experts = 8"),
        ("mixtral", {"hidden_act": "gelu_new"}, "unknown hidden_act 'gelu_new'; choose one of: silu, swish"),
        ("mixtral", {"torch_dtype": "int8"}, "unknown torch_dtype 'int8'; choose one of: bfloat16, float16"),
        ("mixtral", {"torch_dtype": ["bfloat16"]}, r"unknown torch_dtype \['bfloat16'\]"),
        ("deepseek_v3", {"n_group": 7}, "its gate sigmoid-8.* has no meaning: gate sigmoid: experts = 256 is no"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "unknown scoring_func 'softmax'"),
    ],
)  # fmt: skip
def test_a_config_that_can_not_be_read_is_told(tmp_path, kind, changes, told):
    """File and key, and what is allowed."""
    with pytest.raises(InputError, match=told):
        import_model(config(tmp_path, kind, **changes))


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "[" * 100_000])
def test_what_is_no_json_object_is_told(tmp_path, text):
    """One line."""
    with pytest.raises(InputError, match=r"not a JSON (object|document)"):
        import_model(written(tmp_path, text, "config.json"))


def test_the_command_writes_a_checked_file_and_lists_what_it_left(tmp_path, capsys, monkeypatch):
    """Named as the model; what the file's own check refuses, of layer or decoder, is not written."""
    moebench = Moebench(capsys)
    monkeypatch.chdir(tmp_path)
    path = config(tmp_path, "mixtral")
    said = moebench("import", "model", path)
    assert said.out == "some-model.toml: model Some-Model, gate topk-2, 8 experts of 4096 x 14336, swiglu, bf16\n"
    assert said.err == "not read, as it says nothing that a model file has: router_aux_loss_coef, use_cache\n"
    assert 'title = "Ours \\"x\\""' in (moebench("import", "model", path, "--name", 'Ours "x"'),
                                      (tmp_path / "ours-x.toml").read_text())[1]  # fmt: skip
    config(tmp_path, "mixtral", hidden_size=2**40)
    assert "not written, as it would not be valid: x.toml, line 5: d_model" in moebench.refused(
        "import", "model", path, "-o", "x.toml"
    )
    config(tmp_path, "mixtral", num_key_value_heads=5)
    assert "kv_heads" in moebench.refused("import", "model", path, "-o", "x.toml")
    assert not (tmp_path / "x.toml").exists()
    assert "No such file" in moebench.refused("import", "model", "nowhere.json")
