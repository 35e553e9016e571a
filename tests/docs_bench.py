"""A place to run the pages' commands in: runs by the names that they use, a machine that counts as calibrated."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import torch
from click.testing import CliRunner, Result

from moebench.cli import group as commands
from tests.moebench.imports.nccl_logs import write_log
from tests.moebench.imports.safetensors import safetensors
from tests.workloads.files import suite_text, topology_text, written

ROOT = Path(__file__).parent.parent
_MEASURED = "validation-amd-epyc-family-25-model-17-2-threads/2x2"
# Minutes, or ranks: everything up to the first case is done, and nothing is written.
_LONG = {"run": "--dry-run", "plan": "--dry-run"}
_NEVER = {"calibrate"}  # minutes of measuring: the options are checked alone
_STANDS_FOR = {"batched": "tutel"}  # a system of the reader's own
SMOKE = "moebench run --suite smoke --gate switch --batch-size 1 --topology 2x2-titan-rtx --out runs/first"
HETU = (
    "moebench run --suite hetu --experiment overall --experiment breakdown --gate switch --batch-size 32 "
    "--topology 1x8-titan-rtx --topology 2x8-titan-rtx --system hetumoe --system deepspeed "
    "--out runs/hetu-20261129-1200"
)
EXCHANGES = (
    "moebench run --suite hetu --experiment hierarchical-alltoall --topology 2x8-titan-rtx --out runs/exchanges"
)
_COPIES = ("runs/before", "runs/after", "run", "base", "head", "measured")  # of the smoke run, by the pages' names


def shell_lines(page: Path) -> list[str]:
    """Every call of moebench in a page's shell blocks, continued lines joined, comments and redirections off."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    calls = (line.partition("#")[0].partition(">")[0].partition("&&")[0].strip() for line in lines)
    return [call for call in calls if call.startswith("moebench ")]


def make_home(folder: Path) -> Path:
    """A home in which this machine has been measured: by the committed calibration."""
    measured = ROOT / "results/measured" / _MEASURED
    for kind in ("hardware", "topologies"):
        (folder / ".config/moebench" / kind).mkdir(parents=True)
    shutil.copy(measured / "emulated-hardware.toml", folder / ".config/moebench/hardware/this-machine.toml")
    return folder


def make_runs(folder: Path) -> None:
    """The runs that the pages speak of, in the current folder, and files of the reader's own."""
    make_own_files(folder / "my")
    for line in (SMOKE, HETU, EXCHANGES):
        assert (result := call(line, is_quick=False)).exit_code == 0, result.output
    for name in _COPIES:
        shutil.copytree(folder / "runs/first", folder / name)


def make_own_files(folder: Path) -> None:
    """A suite and a node type, in a folder of workloads; and the suite of the page on new systems beside it."""
    node = topology_text().replace("nodes = 2\ngpus_per_node = 4", "max_nodes = 4\ngpus_per_node = 8")
    sizes = 'sizes = ["1x8", "4x8"]\n[parameters]'
    written(folder / "topologies", node.replace("[parameters]", sizes), "our-node.toml")
    page = (ROOT / "docs/new-system.md").read_text(encoding="utf-8")
    (compared,) = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    written(folder.parent, compared.replace('"grouped"', '"tutel"'), "compare.toml")
    make_foreign_files(folder.parent)
    suite = suite_text().replace("1x2", "4x8").replace("titan-rtx", "our-node").replace("max(4, world)", "world")
    written(folder / "suites", suite, "ours.toml")


def make_foreign_files(folder: Path) -> None:
    """What other tools leave: a model's folder, hidden states, logs of nccl-tests; and a suite with the model."""
    model = folder / "Mixtral-8x7B"
    config = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 8}
    written(model, json.dumps(config | {"num_experts_per_tok": 2}), "config.json")
    safetensors(model / "model.safetensors", {"model.layers.12.block_sparse_moe.gate.weight": torch.ones(8, 64)})
    np.save(folder / "layer12-inputs.npy", np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32))
    write_log(folder / "alltoall-1-node.log", "1x8-h100", "all_to_all")
    write_log(folder / "alltoall-4-nodes.log", "4x8-h100", "all_to_all")
    layer = '\n[experiments.layer]\nmodel = "./mixtral.toml"\nsequence = 64\n'
    layer += 'experts = ["max(8, world)"]\n'
    written(folder, suite_text(layer=layer), "with-mixtral.toml")


def call(line: str, is_quick: bool = True) -> Result:
    """Run one command as written; `is_quick`: what takes minutes only as far as --dry-run or --help go."""
    words = [_STANDS_FOR.get(word, word) for word in shlex.split(line)[1:]]
    verb = next(word for word in words if word in commands.list_commands(None))
    if verb in _NEVER:
        return _only_its_options(verb, words[1:])
    if is_quick and verb in _LONG and _LONG[verb] not in words:
        words.append(_LONG[verb])
    return CliRunner().invoke(commands, words, catch_exceptions=True)


def _only_its_options(verb: str, words: list[str]) -> Result:
    result = CliRunner().invoke(commands, [verb, "--help"])
    for option in (word for word in words if word.startswith("-")):
        assert option in result.output, f"{verb} {option}"
    return result
