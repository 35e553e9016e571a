"""Whether a lab can be built here: the answer is true, and where it is no it says what is missing and what to do."""

import shutil
import sys

import pytest

from moebench.cluster.lab import Lab, LabError, lab_problem, tools


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """`commands(name="shell script", ...)`: the only commands that are found, besides the shell's own."""

    def only(**scripts):
        shell = shutil.which("sh")
        for name in ("sh", "cat"):
            (tmp_path / name).symlink_to(shutil.which(name))
        for name, script in scripts.items():
            (tmp_path / name).write_text(f"#!{shell}\n{script}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(tools, "_SYSTEM_FOLDERS", ())

    return only


GRANTED = "echo ready; read -r _"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


def test_the_answer_is_what_happens():
    """None: a lab can be built and asked; a reason: it can't, and the reason ends with what to do."""
    problem = lab_problem()
    if problem is None:
        with Lab(1, 1, 1e9) as lab:
            assert len(lab.counters()) == 1
    else:
        assert problem.endswith("or run plain ranks without a network between them (--unshaped)")
        with pytest.raises((LabError, OSError)), Lab(1, 1, 1e9):
            pass


def test_another_operating_system_is_named(monkeypatch):
    """Namespaces are Linux's."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux network namespaces, this is darwin" in lab_problem()


@linux_only
def test_missing_commands_are_named_with_their_packages(commands):
    """Only those that are missing, and what to install."""
    commands(ip="", tc="", nsenter="", unshare="")
    assert "needs the commands bridge: install iproute2, or" in lab_problem()


@linux_only
def test_every_missing_command_is_named(commands):
    """Both packages where both are needed."""
    commands(ip="")
    assert "needs the commands tc, bridge, unshare, nsenter: install iproute2 and util-linux, or" in lab_problem()


@linux_only
def test_missing_rights_are_told_with_every_refusal(commands):
    """Neither as root nor in a user namespace: what each was told, and how to get the right."""
    commands(ip="", tc="", bridge="", nsenter="", unshare='echo "refused $1" >&2; exit 1')
    problem = lab_problem()
    assert "may not create network namespaces" in problem
    assert "refused --net" in problem
    assert "refused --user" in problem
    assert "run as root" in problem


@linux_only
@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ("ip", "does not link namespaces (nsenter"),
        ("bridge", "load the kernel modules veth, bridge and tcp_cubic"),
        ("tc", "load the kernel modules sch_htb and sch_tbf"),
    ],
)
def test_a_kernel_without_the_features_is_told(commands, refused, words):
    """What the kernel refused, and the modules to load."""
    nsenter = f'case " $* " in *" {refused} "*) echo "kind is unknown" >&2; exit 2;; esac; cat > /dev/null'
    commands(ip="", tc="", bridge="", unshare=GRANTED, nsenter=nsenter)
    problem = lab_problem()
    assert words in problem
    assert "kind is unknown" in problem


@linux_only
def test_slow_and_fast_shapers_are_both_tried(commands):
    """A kernel that has one and lacks the other is told too."""
    nsenter = 'case "$(cat)" in *htb*) echo "htb is unknown" >&2; exit 2;; esac'
    commands(ip="", tc="", bridge="", unshare=GRANTED, nsenter=nsenter)
    assert "does not hold a fast NIC to its rate" in lab_problem()


@pytest.mark.parametrize(
    "arguments",
    [(0, 1, 1e9), (1, 0, 1e9), (1, 1, 0.0), (1, 1, float("nan")), (1, 1, 1e9, 1000), (1001, 1, 1e9)],
)
def test_a_lab_without_meaning_is_refused(arguments):
    """Nothing is started for nodes, ranks, rates or buffers that can't be."""
    with pytest.raises(ValueError, match=r"at least|held to|holds"):
        Lab(*arguments)
