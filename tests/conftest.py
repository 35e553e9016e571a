"""What every test shares: one thread, seeds, a cache of its own, and a fake world of any size.

The test folders are packages (each has an `__init__.py`), so that the repository root is on the path, two files of
one name don't clash, and rank functions can be named as `f"{__name__}:function"`.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: many ranks share few cores

from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings

from moebench.kernels.implementation import is_interpreted

settings.register_profile("moebench", deadline=None, database=None, print_blob=True)
settings.load_profile("moebench")
torch.set_num_threads(1)

# Triton's interpreter replaces its compiler for a whole process: those tests have their own (see Makefile).
collect_ignore = [] if is_interpreted() else ["interpreter"]


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory):
    """Tests read and write no cache of the user's."""
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture
def measured_machine(tmp_path, monkeypatch):
    """A machine that has been calibrated: `this-machine` is a hardware file in a home of the test's own."""
    from tests.workloads.files import hardware_text, written

    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    return written(tmp_path / "hardware", hardware_text(), "this-machine.toml")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder of installed packages on the path, gone after the test (tests/installed.py)."""
    from tests.installed import Site, forget

    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("MOEBENCH_CACHE", str(tmp_path / "cache"))
    yield Site(folder)
    monkeypatch.undo()
    forget(folder)


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state."""
    # Without a GPU `torch.manual_seed` notes down the whole stack, each time, for one that may come: milliseconds.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)


@pytest.fixture
def fake_world():
    """`with fake_world(size, rank) as group:` a moebench Group over torch's `fake` process group, without peers."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from moebench.kernels.collectives.group import process_group

    @contextmanager
    def world(size, rank=0):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            yield process_group()
        finally:
            dist.destroy_process_group()

    return world
