"""A comparison for other programs: a JSON document, Markdown for a pull request's comment, JUnit XML for a server."""

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from moebench.compare.cells import COLUMNS, MOST_SHOWN, cells, change, headline, shown, summary, value
from moebench.compare.comparison import BROKEN, SAME, SLOWER, UNJUDGED, Comparison, Finding
from moebench.compare.escape import markdown, plain, prose
from moebench.compare.side import Side

SCHEMA_VERSION = 1
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_json(comparison: Comparison, strict: bool = False) -> dict[str, Any]:
    """Everything that was found."""
    return {
        "schema_version": SCHEMA_VERSION,
        "base": _side(comparison.base),
        "head": _side(comparison.head),
        "across_machines": comparison.across_machines,
        "notes": comparison.notes,
        "exit_status": comparison.exit_status(strict),
        "counts": dict(comparison.counts),
        "findings": [finding.to_json() for finding in comparison.findings],
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "name": side.name,
        "suite": side.suite,
        "created": side.created,
        "commit": side.commit,
        "machine": dict(side.machine.facts) if side.machine else None,
        "finished": side.finished,
        "whole": side.whole,
    }


def to_markdown(comparison: Comparison, everything: bool = False, strict: bool = False) -> str:
    """A heading, what to know, a table of what is not the same; no text of a run can leave its cell."""
    status = comparison.exit_status(strict)
    word = {0: "passed", 1: "failed"}.get(status, "not decided")
    lines = [f"### moebench: {word}", "", f"{prose(headline(comparison, strict))}. {prose(summary(comparison))}.", ""]
    lines += ["| | run | suite | commit |", "|---|---|---|---|"]
    for name, side in (("base", comparison.base), ("head", comparison.head)):
        lines.append(f"| {name} | {markdown(side.name)} | {markdown(side.suite)} | {markdown(side.commit[:12])} |")
    lines += ["", *(f"- {prose(note)}" for note in comparison.notes)]
    findings = shown(comparison, everything)
    kept = findings if everything else findings[:MOST_SHOWN]
    if kept:
        lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += [_markdown_row(cells(finding)) for finding in kept]
    if len(findings) > len(kept):
        lines.append(f"\nand {len(findings) - len(kept)} more: `moebench compare --all` shows every one")
    return "\n".join(lines) + "\n"


def _markdown_row(row: Sequence[str]) -> str:
    verdict, name, case, *numbers, why = row
    return "| " + " | ".join([prose(verdict), markdown(name), markdown(case), *map(prose, numbers), prose(why)]) + " |"


def to_junit(comparison: Comparison) -> bytes:
    """A test suite with a test a quantity that counts: slower and broken fail, what is not decided is skipped."""
    findings = [finding for finding in comparison.findings if finding.gates]
    failed = sum(finding.verdict in (SLOWER, BROKEN) for finding in findings)
    skipped = sum(finding.verdict in UNJUDGED for finding in findings)
    suite = ElementTree.Element(
        "testsuite", name=_xml(f"moebench {comparison.head.suite}"), tests=str(len(findings)), failures=str(failed),
        errors="0", skipped=str(skipped),
    )  # fmt: skip
    properties = ElementTree.SubElement(suite, "properties")
    for name, side in (("base", comparison.base), ("head", comparison.head)):
        ElementTree.SubElement(properties, "property", name=name, value=_xml(side.name))
    for number, note in enumerate(comparison.notes):
        ElementTree.SubElement(properties, "property", name=f"note {number + 1}", value=_xml(note))
    for finding in findings:
        _test_case(suite, finding)
    whole = ElementTree.Element("testsuites")
    whole.append(suite)
    return ElementTree.tostring(whole, encoding="utf-8", xml_declaration=True) + b"\n"


def _test_case(suite: ElementTree.Element, finding: Finding) -> None:
    test = ElementTree.SubElement(
        suite, "testcase", classname=_xml(f"{finding.key.engine}.{finding.key.case}"), name=_xml(finding.key.quantity)
    )
    numbers = f"{value(finding.base, finding.unit)} became {value(finding.head, finding.unit)}, {change(finding)}"
    text = "; ".join(filter(None, (numbers if finding.base is not None else "", finding.reason)))
    if finding.verdict in (SLOWER, BROKEN):
        ElementTree.SubElement(test, "failure", type=finding.verdict, message=_xml(text))
    elif finding.verdict in UNJUDGED:
        ElementTree.SubElement(test, "skipped", message=_xml(f"{finding.verdict}: {text}"))
    elif finding.verdict != SAME:
        ElementTree.SubElement(test, "system-out").text = _xml(f"{finding.verdict}: {text}")


def _xml(text: str) -> str:
    """Text without what XML can't hold; the writer escapes the rest."""
    return _NO_XML.sub("", plain(text, 1000))
