import os
import sys
from pathlib import Path

import pytest

from moebench.local.child import ALLOCATOR, ChildFailed, child_environment, run_child, usable_cores

ECHO = """
from moebench.local.child import Parent
import os
parent = Parent()
print("a library's banner")
parent.send(got=parent.request, threads=os.environ["OMP_NUM_THREADS"], malloc=os.environ["MALLOC_MMAP_MAX_"])
if parent.request == "fail":
    raise ValueError("broken on purpose")
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "echo_child"


def test_a_child_answers_in_the_fixed_environment_whatever_libraries_print(echo):
    """The request arrives, the answer comes back alone, allocator and threads are set."""
    (message,) = run_child(echo, {"a": 1}, threads=1)
    assert message == {"got": {"a": 1}, "threads": "1", "malloc": "0"}


def test_a_child_that_fails_is_an_error_with_its_own_words(echo):
    """What was sent before is delivered; then the traceback's end is in the error."""
    messages = run_child(echo, "fail", threads=1)
    assert next(messages)["got"] == "fail"
    with pytest.raises(ChildFailed, match="broken on purpose"):
        next(messages)


def test_a_child_module_that_does_not_exist_is_an_error():
    """The name of the module is in the text."""
    with pytest.raises(ChildFailed, match="no_such_module"):
        list(run_child("no_such_module", 1))


def test_threads_are_pinned_one_a_core_and_never_more_than_cores():
    """Places list the usable cores; asking for more threads gives one a core."""
    environment = child_environment(threads=10_000, inherited={"KEPT": "1"})
    cores = usable_cores()
    assert environment["OMP_NUM_THREADS"] == str(len(cores))
    assert environment["OMP_PLACES"] == ",".join(f"{{{core}}}" for core in cores)
    assert environment["KEPT"] == "1"
    assert ALLOCATOR.items() <= environment.items()


def children():
    """Process ids of this process's children, zombies included."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


def test_a_reader_who_stops_early_leaves_no_process_behind(echo):
    """Closing the iterator ends the child."""
    before = children()
    messages = run_child(echo, "stay", threads=1)
    next(messages)
    assert children() - before
    messages.close()
    assert not children() - before
