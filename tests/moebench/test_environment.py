"""What a run records about the machine and the code."""

import json
import subprocess
import sys

from moebench import environment as env


def test_everything_that_moves_a_number_is_recorded():
    """Versions, code, CPU, seed and command are there, and nothing that names the host or the user."""
    found = env.environment(["/usr/bin/moebench", "run", "--suite", "a b"], seed=3)
    assert found["command"] == "moebench run --suite 'a b'"
    assert found["seed"] == 3
    assert found["packages"]["torch"]
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 0
    assert json.loads(json.dumps(found)) == found


def test_python_dash_m_is_recorded_as_moebench():
    """The command is what a person types again."""
    assert env.command_line(["/x/moebench/__main__.py", "claims"]) == "moebench claims"


def test_git_state_is_that_of_the_code(tmp_path):
    """The commit of the checkout and whether tracked files changed; nothing outside of a checkout."""
    assert env.git_state(tmp_path) is None

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    file = tmp_path / "__init__.py"
    file.write_text("")
    assert env.git_state(tmp_path) is None  # a checkout of something else
    git("add", ".")
    git("commit", "-q", "-m", "first")
    state = env.git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert state["changed"] is False
    file.write_text("x = 1\n")
    assert env.git_state(tmp_path)["changed"] is True


def test_facts_that_can_not_be_had_are_none():
    """A command that is absent or fails gives None; a package that is absent has no version."""
    assert env.output_of(["no-such-command-at-all"]) is None
    assert env.output_of([sys.executable, "-c", "raise SystemExit(1)"]) is None
    assert env.version("no-such-package-at-all") is None
