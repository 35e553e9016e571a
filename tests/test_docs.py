"""The pages and the workflow for continuous integration: their commands exist, their examples are accepted."""

import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from moebench.cli import group as commands
from moebench.compare.rules import load_rules
from moebench.compare.side import Key

ROOT = Path(__file__).parent.parent
CI = (ROOT / "docs/ci.md").read_text()
WORKFLOW = (ROOT / "docs/ci/github-actions.yml").read_text()


def command_lines():
    """Every call of moebench in the workflow, continued lines joined."""
    lines = WORKFLOW.replace("\\\n", " ").splitlines()
    call = re.compile(r"moebench\"? ((?:run|check|accept|calibrate|compare|trend)\b.*)")
    return sorted({match[1] for line in lines if (match := call.search(line))})


@pytest.mark.parametrize("line", command_lines())
def test_every_command_exists(line):
    """The verb, and each option of it."""
    verb, *words = re.split(r"\s+", line.partition("#")[0].partition(">")[0].partition("&&")[0].strip())
    result = CliRunner().invoke(commands, [verb, "--help"])
    assert result.exit_code == 0
    for option in (word for word in words if word.startswith("--")):
        assert option in result.output, line


def test_there_are_commands():
    """The pattern finds them."""
    assert len(command_lines()) >= 5


def test_the_scripts_of_the_workflow_parse():
    """bash accepts each step, once GitHub has put its values in; nothing is indented by tabs."""
    assert "\t" not in WORKFLOW
    scripts = re.findall(r"^( +)run: \|\n((?:\1  .*\n|\n)+)", WORKFLOW, flags=re.M)
    assert len(scripts) >= 4
    text = "\n".join(re.sub(r"\$\{\{.*?\}\}", "1", body) for _, body in scripts)
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_example_of_thresholds_is_accepted(tmp_path):
    """And means what its comments say."""
    (example,) = re.findall(r"```toml\n(.*?)```", CI, flags=re.S)
    (tmp_path / "moebench.toml").write_text(example)
    rules = load_rules(tmp_path / "moebench.toml")
    memory = rules.of(Key("any", "sim", "peak_memory"), "B", measured=False)
    assert (memory.relative, memory.absolute) == (0.01, 65536)
    assert not rules.of(Key("overall/x", "local", "step_time", "hot"), "s", measured=True).gates
    assert rules.of(Key("other/x", "local", "step_time", "hot"), "s", measured=True).gates
    assert rules.of(Key("x", "local", "kernel_time", "hot"), "s", measured=True).by == "effect"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Relative links of a page are files."""
    targets = [target for target in re.findall(r"\]\(([^)#]+)", page.read_text()) if not target.startswith("http")]
    assert [target for target in targets if not (page.parent / target).exists()] == []
