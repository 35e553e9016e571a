"""`record-routing`: logits of a rule's router, of weights in files, of what can be called; used by a suite's case."""

import numpy as np
import pytest
import torch

from moebench.cases.plan import Filters, plan
from moebench.imports.routing import of_gate, of_router, write
from moebench.imports.tensors import read_tensors
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite
from moebench.workloads.routing import logits_for, read_recorded
from tests.moebench.cli.support import Moebench
from tests.moebench.imports.safetensors import safetensors
from tests.workloads.files import suite_text, written

MODULE = """
import numpy as np
import torch

router = torch.nn.Linear(6, 3)
torch.nn.init.ones_(router.weight)
logits = lambda: np.ones((40, 5), dtype=np.float64)
pair = lambda x, scale=2.0: (scale * x[:, :4], "indices")
class Class: pass
number = 5
def wrong(x): return x.sum()
def short(x): return x[:-1]
def fails(x): raise RuntimeError("no luck")
def infinite(x): return x / 0
def leaves(x): raise SystemExit(0)
"""


@pytest.fixture
def weights(tmp_path):
    """Two layers' routers in bfloat16, one with a bias, among other tensors."""
    torch.manual_seed(0)
    found = {
        "model.layers.0.mlp.gate.weight": torch.randn(4, 6).to(torch.bfloat16),
        "model.layers.1.mlp.gate.weight": torch.randn(4, 6).to(torch.bfloat16),
        "model.layers.1.mlp.gate.bias": torch.randn(4).to(torch.bfloat16),
        "model.layers.0.mlp.up_gate.weight": torch.randn(9, 6),
        "ids": torch.arange(3),
    }
    return found, safetensors(tmp_path / "model.safetensors", found)


def test_a_router_in_a_file_says_what_its_weights_say(tmp_path, weights):
    """x W^T + b in float32, for the tokens given; of safetensors only what is wanted is read."""
    tensors, path = weights
    x_ND = torch.randn(10, 6)
    np.save(tmp_path / "hidden.npy", x_ND.numpy())
    name = "model.layers.1.mlp.gate.weight"
    found = of_router(str(path), tokens=7, hidden=tmp_path / "hidden.npy", key=name)
    bias_E = tensors["model.layers.1.mlp.gate.bias"].float()
    torch.testing.assert_close(found.logits_TE, x_ND[:7] @ tensors[name].float().t() + bias_E)
    assert found.about == f"router {name} of model.safetensors on tokens of hidden.npy"
    assert set(read_tensors(path).shapes) == set(tensors) - {"ids"}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npz", ".npy"])
def test_every_kind_of_file_gives_the_same(tmp_path, suffix):
    """The only matrix needs no name; without hidden states the tokens are seeded normal values."""
    weight_ED = torch.randn(5, 8)
    path = tmp_path / f"router{suffix}"
    if suffix == ".safetensors":
        safetensors(path, {"w": weight_ED})
    elif suffix == ".pt":
        torch.save({"w": weight_ED}, path)
    else:
        np.save(path, weight_ED.numpy()) if suffix == ".npy" else np.savez(path, w=weight_ED.numpy())
    found = of_router(str(path), tokens=12, seed=3)
    x_TD = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(found.logits_TE, x_TD @ weight_ED.t())


def test_what_can_be_called_is_asked(tmp_path, monkeypatch):
    """A module, a function with options that gives a tuple, one that wants nothing."""
    (tmp_path / "ours_to_ask.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert of_router("ours_to_ask:router", tokens=9, d_model=6).logits_TE.shape == (9, 3)
    assert of_router("ours_to_ask:pair", tokens=9, d_model=6).logits_TE.shape == (9, 4)
    found = of_router("ours_to_ask:logits")
    assert (found.logits_TE.shape, found.logits_TE.dtype) == ((40, 5), torch.float32)
    assert len(of_router("ours_to_ask:logits", tokens=8).logits_TE) == 8
    for name, words in (
        ("Class", "is a class; name an instance"),
        ("number", "nothing that can be called"),
        ("absent", "can't be imported: AttributeError"),
        ("wrong", r"gives torch.float32 \(\); it must give logits \[T, E\]"),
        ("short", r"gives logits \(8, 6\) for 9 tokens"),
        ("fails", "fails: RuntimeError: no luck"),
        ("infinite", "not all finite"),
        ("leaves", "leaves: SystemExit: 0"),
    ):
        with pytest.raises(InputError, match=words):
            of_router(f"ours_to_ask:{name}", tokens=9, d_model=6)
    with pytest.raises(InputError, match="gives logits of 40 tokens, --tokens asks for 41"):
        of_router("ours_to_ask:logits", tokens=41)
    with pytest.raises(InputError, match="say it with --d-model"):
        of_router("ours_to_ask:router")


def test_a_trained_rule_is_recorded_and_routes_a_suite(tmp_path):
    """The same bytes for the same seed; another router before the training; every rank takes its own rows."""
    found = of_gate("topk-2", experts=4, tokens=64, steps=5, seed=1)
    for name, recorded in (("a", found), ("b", of_gate("topk-2", 4, 64, 5, 1))):
        write(recorded, tmp_path / f"{name}.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert not torch.equal(found.logits_TE, of_gate("topk-2", 4, 64, 0, 1).logits_TE)
    logits_NE, about = read_recorded(tmp_path / "a.npz")
    assert (logits_NE.shape, about) == ((64, 4), "router of gate topk-2 after 5 steps, seed 1")
    text = suite_text() + 'routing = { kind = "trace", path = "./a.npz" }\n'
    cases = plan(load_suite(str(written(tmp_path, text))), Filters(gates=("topk-2",)))
    np.testing.assert_array_equal(logits_for(cases[0].workload, 1).numpy(), logits_NE[16:32])


@pytest.mark.parametrize(
    ("label", "experts", "told"),
    [("hash", 4, "gate hash has no router"), ("topk-5", 4, "top_k = 5 is above"), ("tpk", 4, "unknown gate")],
)
def test_a_rule_that_has_nothing_to_record_is_told(label, experts, told):
    """It has no router, or no meaning with so many experts."""
    with pytest.raises(InputError, match=told):
        of_gate(label, experts)


def test_weights_that_are_not_clear_are_told(tmp_path, weights):
    """Which there are; wrong widths; files that are damaged."""
    _, path = weights
    with pytest.raises(InputError, match=r"2 matrices may be meant; choose one with --key: model.layers.0.mlp.gate"):
        of_router(str(path))
    with pytest.raises(InputError, match=r"--key 'x' is none of its matrices; choose one of: model.layers.0"):
        of_router(str(path), key="x")
    np.save(tmp_path / "hidden.npy", np.zeros((3, 5), np.float32))
    key = "model.layers.0.mlp.gate.weight"
    with pytest.raises(InputError, match="hidden states are 5 wide, the router takes 6"):
        of_router(str(path), hidden=tmp_path / "hidden.npy", key=key)
    with pytest.raises(InputError, match="holds 3 tokens, --tokens asks for 4"):
        of_router(str(path), tokens=4, hidden=tmp_path / "hidden.npy", key=key)
    whole = path.read_bytes()
    no_table = b"\2" + bytes(7) + b"[]"
    other_shape = whole.replace(b"[4, 6]", b"[4, 7]")
    for number, damaged in enumerate((b"", no_table, whole[:40], whole[:-9], b"\xff" * 64, other_shape)):
        bad = tmp_path / f"bad{number}.safetensors"
        bad.write_bytes(damaged)
        with pytest.raises(InputError, match=r"can't be read as .safetensors"):
            of_router(str(bad), key=key)
    (tmp_path / "bad.pt").write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"can't be read as .pt"):
        of_router(str(tmp_path / "bad.pt"))
    for router, words in (("model.txt", "write a file"), (str(tmp_path / "no.npz"), "no such file")):
        with pytest.raises(InputError, match=words):
            of_router(router)


def test_the_command(tmp_path, capsys, monkeypatch, weights):
    """It says what it wrote and how even the load is; options that don't fit together are refused."""
    moebench = Moebench(capsys)
    monkeypatch.chdir(tmp_path)
    rule = ("record-routing", "--gate", "switch", "--experts", "4", "--tokens", "50", "--steps", "2")
    said = moebench(*rule, "-o", "a.npz")
    assert said.out.startswith("a.npz: recorded routing, 50 tokens, 4 experts; router of gate switch after 2 steps")
    assert "first choices: the busiest expert has " in said.out
    for words, arguments in (
        ("is there already", (*rule, "-o", "a.npz")),
        ("a recorded routing is a .npz file", (*rule, "-o", "b.txt")),
        ("--key has no meaning beside --gate", (*rule, "--key", "x", "-o", "b.npz")),
        ("--experts is missing", ("record-routing", "--gate", "switch", "-o", "b.npz")),
        ("say either --gate", ("record-routing", "-o", "b.npz")),
        ("--steps has no meaning beside --router",
         ("record-routing", "--router", "m:o", "--steps", "3", "-o", "b.npz")),
    ):  # fmt: skip
        assert words in moebench.refused(*arguments)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("b.", ".moebench"))]
