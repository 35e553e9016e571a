"""Generation in a process that may not take more memory than so many bytes; apart, since the limit stays."""

import resource
import tempfile
from pathlib import Path

import torch

from moebench.systems.moesys.decoder import Decoder, expert_layout, write_random_model
from moebench.systems.moesys.expert_file import ExpertFile
from moebench.systems.moesys.offload import open_experts
from moebench.workloads.models.decoder import DecoderModel, DecoderShape

MODEL = DecoderModel("wide", "Wide", 8, DecoderShape(128, 4, 4, 32, 680, 8, 2), 50)
MIB = 1 << 20
BESIDE = 24 * MIB  # thread, keys and values, results


def data_bytes():
    """Memory that this process has, as the limit counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024


def tokens_under_a_limit(group):
    """Without a limit, then under one of two layers and a bit: what is wrong, in words."""
    wrong, prompt = [], torch.arange(12).view(4, 3)
    layer = expert_layout(MODEL).layer_bytes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experts.bin"
        dense = write_random_model(path, MODEL)
        file = ExpertFile(path)
        with open_experts(file, "none") as experts:
            wanted = Decoder(MODEL, dense, experts).generate(prompt, 4)
        if not 2 * layer + BESIDE < 8 * layer:
            wrong.append("the model is not larger than the limit")
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + 2 * layer + BESIDE, resource.RLIM_INFINITY))
        try:
            with open_experts(file, "none"):
                wrong.append("all layers fit")
        except OSError as error:
            if "allocate memory" not in str(error):
                wrong.append(str(error))
        with open_experts(file, "ring", slots=2) as experts:
            found = Decoder(MODEL, dense, experts).generate(prompt, 4)
        if not torch.equal(found, wanted):
            wrong.append("other tokens")
        file.close()
    return wrong
