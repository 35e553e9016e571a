"""What the lower floors may import."""

import subprocess
import sys

MODULES = """
import importlib, pkgutil, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pydantic", "pydantic_core"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
names = ["moebench.workloads.conventions", "moebench.workloads.layer", "moebench.workloads.routing"]
for package in ("moebench.kernels", "moebench.workloads.gates", "moebench.systems"):
    module = importlib.import_module(package)
    names += [m.name for m in pkgutil.walk_packages(module.__path__, package + ".")]
for name in names:
    importlib.import_module(name)
from moebench.systems.registry import systems
assert len(systems()) >= 4
harness = [m for m in sys.modules if m.startswith("moebench.")
           and m.split(".")[1] not in ("kernels", "workloads", "systems")]
print(len(names), harness)
"""


def test_kernels_gates_and_systems_run_without_pydantic_and_without_the_harness():
    """Every module of the three imports where pydantic is absent, and none of them imports the harness."""
    done = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    count, harness = done.stdout.split(maxsplit=1)
    assert int(count) > 20
    assert harness.strip() == "[]"
