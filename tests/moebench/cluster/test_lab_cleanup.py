"""Nothing stays: after success, failure, Ctrl-C and SIGKILL of the owner no process, namespace or link is left."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moebench.cluster.lab import Lab, LabError, holder, ranks
from moebench.ranks.run import RanksError
from tests.moebench.cluster.support import F, eventually, is_alive, needs_lab

pytestmark = pytest.mark.slow

OWNER = """
import sys
from moebench.cluster.lab import Lab
with Lab(2, 1, 1e9) as lab:
    print(lab.network.holder, flush=True)
    lab.run(sys.argv[1], (sys.argv[2],), timeout_s=300)
"""


@pytest.fixture
def owner(tmp_path):
    """An owner with running ranks: its process, its holder's id, its ranks' ids."""
    needs_lab()
    command = [sys.executable, "-c", OWNER, F + "tells_and_waits", str(tmp_path)]
    root = str(Path(__file__).parents[3])
    environment = dict(os.environ) | {"PYTHONPATH": root}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root) as process:
        try:
            held = int(process.stdout.readline())
            files = [tmp_path / f"{rank}.pid" for rank in (0, 1)]
            assert eventually(lambda: all(file.exists() for file in files), 120)
            yield process, held, [int(file.read_text()) for file in files]
        finally:
            process.kill()


def namespaces_of_machine():
    """Inodes of every network namespace that a process is in, and the machine's links and named namespaces."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(path))
        except OSError:
            continue
    return found


def on_the_machine():
    """What must be as before: links, mounts, names of namespaces."""
    names = sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else None
    return sorted(os.listdir("/sys/class/net")), Path("/proc/self/mounts").read_text(), names


def test_a_lab_leaves_nothing_and_is_not_seen():
    """The machine's links, mounts and names are the same before, while and after."""
    needs_lab()
    before = on_the_machine()
    with Lab(2, 1, 1e9) as lab:
        assert on_the_machine() == before
        process = lab.network.holder
        inside = os.readlink(f"/proc/{process}/ns/net")
        assert inside in namespaces_of_machine()
    assert on_the_machine() == before
    assert inside not in namespaces_of_machine()
    assert not is_alive(process)


def test_a_failure_inside_leaves_nothing():
    """Ranks that fail end the block, and the lab with it."""
    needs_lab()
    lab, held = Lab(2, 1, 1e9), []

    def fail():
        with lab:
            held.append(lab.network.holder)
            lab.run("tests.moebench.rank_functions:raises", (0,))

    with pytest.raises(RanksError):
        fail()
    assert not is_alive(held[0])


def test_a_failure_to_build_leaves_nothing(monkeypatch):
    """What was begun is removed."""
    needs_lab()
    held = []

    def refuse(network, *_):
        held.append(network.holder)
        raise LabError("refused")

    monkeypatch.setattr(ranks, "shape", refuse)
    with pytest.raises(LabError, match="refused"), Lab(1, 1, 1e9):
        pass
    assert not is_alive(held[0])


def test_ctrl_c_leaves_nothing(tmp_path):
    """Interrupted while ranks run: ranks and lab are gone when the block is left."""
    needs_lab()
    files = [tmp_path / f"{rank}.pid" for rank in (0, 1)]

    def interrupt():
        eventually(lambda: all(file.exists() for file in files), 60)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    lab, held = Lab(2, 1, 1e9), []

    def run():
        with lab:
            held.append(lab.network.holder)
            interrupter.start()
            lab.run(F + "tells_and_waits", (str(tmp_path),), timeout_s=120)

    with pytest.raises(KeyboardInterrupt):
        run()
    interrupter.join()
    assert not is_alive(held[0])
    assert eventually(lambda: not any(is_alive(int(file.read_text())) for file in files))


def test_sigkill_of_the_owner_takes_ranks_and_namespaces_with_it(owner):
    """Nobody runs any clean-up: the kernel and the rank server see to it."""
    process, held, its_ranks = owner
    inside = [os.readlink(f"/proc/{pid}/ns/net") for pid in (held, *its_ranks)]
    assert len(set(inside)) == 3
    process.kill()
    assert eventually(lambda: not any(is_alive(pid) for pid in (held, *its_ranks)))
    assert not namespaces_of_machine() & set(inside)


def test_the_next_lab_removes_what_could_not_end_by_itself(owner):
    """A holder that was stopped outlives its owner, until the next run; while the owner lives it stays."""
    process, held, its_ranks = owner
    os.kill(held, signal.SIGSTOP)
    with Lab(1, 1, 1e9):
        assert is_alive(held)
        assert held not in holder.find_stale()
    process.kill()
    process.wait()
    assert eventually(lambda: not any(map(is_alive, its_ranks)))
    assert is_alive(held)
    assert held in holder.find_stale()
    with Lab(1, 1, 1e9) as lab:
        assert not is_alive(held)
        assert is_alive(lab.network.holder)
