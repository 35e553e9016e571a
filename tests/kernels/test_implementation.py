"""Which implementation runs: the device decides, the environment over it, a block over both."""

import subprocess
import sys
import threading

import pytest
import torch

from moebench.kernels import implementation
from moebench.kernels.implementation import IMPLEMENTATIONS, chosen, use_implementation
from moebench.kernels.permute import permute

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ROWS = torch.tensor([[0], [1]])


@pytest.fixture(autouse=True)
def _uninterpreted(monkeypatch):
    """The interpreter is off, and nothing is asked for, whatever the process was started with."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(implementation.VARIABLE, raising=False)


@pytest.fixture
def recent_gpu(monkeypatch):
    """A GPU that Triton supports."""
    monkeypatch.setattr(implementation, "_is_installed", lambda: True)
    monkeypatch.setattr(implementation, "_is_recent", lambda index: True)


def test_the_device_decides(recent_gpu):
    """Triton on a GPU, torch elsewhere."""
    assert chosen(CUDA) == "triton"
    assert chosen(CPU) == "torch"
    assert chosen("meta") == "torch"


def test_old_gpus_and_machines_without_triton_run_torch(monkeypatch, recent_gpu):
    """Unless Triton is asked for, where the reason is an error."""
    monkeypatch.setattr(implementation, "_is_recent", lambda index: False)
    assert chosen(CUDA) == "torch"
    with use_implementation("triton"):
        assert chosen(CUDA) == "triton"
    monkeypatch.setattr(implementation, "_is_installed", lambda: False)
    assert chosen(CUDA) == "torch"
    with use_implementation("triton"), pytest.raises(RuntimeError, match="Triton is not installed"):
        chosen(CUDA)


def test_the_environment_asks_for_a_process_and_a_block_wins(monkeypatch, recent_gpu):
    """Blocks nest, and end."""
    monkeypatch.setenv("MOEBENCH_KERNELS", "torch")
    assert chosen(CUDA) == "torch"
    with use_implementation("auto"):
        assert chosen(CUDA) == "triton"
        with use_implementation("torch"):
            assert chosen(CUDA) == "torch"
        assert chosen(CUDA) == "triton"
    assert chosen(CUDA) == "torch"


def test_the_choice_holds_in_other_threads(recent_gpu):
    """Autograd runs backwards of a device in a thread of its own."""
    seen = []
    with use_implementation("torch"):
        thread = threading.Thread(target=lambda: seen.append(chosen(CUDA)))
        thread.start()
        thread.join()
    assert seen == ["torch"]


def test_unknown_names_list_the_valid_ones(monkeypatch):
    """In a block and in the environment."""
    with pytest.raises(ValueError, match="no implementation 'cuda'; choose one of auto, torch, triton"):
        use_implementation("cuda").__enter__()
    monkeypatch.setenv("MOEBENCH_KERNELS", "fast")
    with pytest.raises(ValueError, match="MOEBENCH_KERNELS: no implementation 'fast'"):
        chosen(CPU)
    assert IMPLEMENTATIONS == ("auto", "torch", "triton")


def test_triton_on_the_cpu_needs_its_interpreter(monkeypatch):
    """One clear error before any launch; with the interpreter on, Triton."""
    monkeypatch.setattr(implementation, "_is_installed", lambda: True)
    with use_implementation("triton"):
        with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"):
            chosen(CPU)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert chosen(CPU) == "triton"
        with pytest.raises(RuntimeError, match="not on xpu"):
            chosen("xpu")


def test_meta_tensors_run_nothing():
    """Whatever is asked for: a trace needs no GPU and no Triton."""
    with use_implementation("triton"):
        assert permute(torch.ones(2, 3, device="meta"), ROWS.to("meta"), 4).shape == (4, 3)


def test_triton_is_imported_at_the_first_launch():
    """Not by the kernels: it takes as long to import as all of them."""
    code = "import sys; import moebench.kernels.registry, moebench.systems.registry; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
