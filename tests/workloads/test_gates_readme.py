"""The tables of workloads/gates/README.md say what the rules and the systems say.

`python -m tests.workloads.test_gates_readme` writes them anew, between the marks that stand around each.
"""

import re
from pathlib import Path

import moebench.workloads.gates
from moebench.systems.registry import BUILT_IN
from moebench.workloads.conventions import COMMON
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates.gate import QUIET_OR_JITTER
from moebench.workloads.gates.registry import GATES, gate
from moebench.workloads.layer import LayerWorkload, option_text

README = Path(moebench.workloads.gates.__file__).parent / "README.md"
EXPERTS = 16


def table(columns, rows):
    """Lines of Markdown."""
    cells = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def rules():
    """A row a rule."""
    columns = ["gate", "who is chosen", "weight w", "loss", "slots C", "evaluation", "source", "systems"]
    rows = [
        [
            f"`{gate(name).label}`",
            rule.formula,
            rule.weight,
            rule.aux,
            rule.capacity,
            rule.evaluation or "the same",
            rule.source,
            ", ".join(supporting(name)),
        ]
        for name, rule in GATES.items()
    ]
    return table(columns, rows)


def supporting(name):
    """Systems that run the rule under the common conventions, or their own."""
    workload = LayerWorkload(gate(name), 1, 8, 32, 8, EXPERTS)
    return [
        system.name
        for system in BUILT_IN
        if any(system.supports(workload, one) is None for one in (COMMON, system.as_shipped(workload.gate)))
    ]


def conventions():
    """A row a rule: the values of each field that have a meaning, where not all have."""
    fields, rows = ("noise", "normalisation", "drop_order"), []
    for name, rule in GATES.items():
        known = {"noise": QUIET_OR_JITTER, **rule.conventions}
        assert set(known) <= set(fields)
        rows.append([f"`{name}`", *(", ".join(known.get(field, ("all",))) for field in fields)])
    return table(["gate", *fields], rows)


def options():
    """A row an option, with what the rule's file says about it."""
    rows = []
    for name, rule in GATES.items():
        told = meanings(rule.options.__doc__ or "")
        for option in gate_options.types_of(rule.options):
            default = option_text(getattr(rule.options(), option))
            rows.append([f"`{name}`", f"`{option}`", f"`{default}`", told[option]])
    return table(["gate", "option", "default", "meaning"], rows)


def meanings(docstring):
    """Option -> text, from the section Attributes of a docstring."""
    found = {}
    for line in docstring.partition("Attributes:")[2].splitlines():
        match = re.match(r" {8}(\w+): (.*)", line)
        if match:
            name, found[match[1]] = match[1], match[2]
        elif line.startswith(" " * 12):
            found[name] += " " + line.strip()
    return {option: text.rstrip(".") for option, text in found.items()}


TABLES = {"rules": rules, "conventions": conventions, "options": options}


def filled(text):
    """The README with each table as it should be."""
    for name, make in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        assert text.count(start) == text.count(end) == 1, name
        head, rest = text.split(start)
        text = f"{head}{start}{make()}\n{end}{rest.split(end)[1]}"
    return text


def test_the_tables_are_true():
    """Formulas, losses, sources, options and their defaults, and who supports what."""
    text = README.read_text(encoding="utf-8")
    assert text == filled(text), "run: python -m tests.workloads.test_gates_readme"


def test_every_gate_has_its_file_and_is_explained():
    """A link to the file of each rule."""
    text = README.read_text(encoding="utf-8")
    for name in GATES:
        file = f"{name.replace('-', '_')}.py"
        assert f"[{file}]({file})" in text
        assert (README.parent / file).is_file()


def test_everyone_supports_something_and_the_reference_all():
    """The reference is the specification."""
    assert all("reference" in supporting(name) for name in GATES)
    assert {one for name in GATES for one in supporting(name)} == {system.name for system in BUILT_IN}


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
