"""Suites cut down for a test."""

from dataclasses import replace

from moebench.workloads.load import load_suite


def of_kind(name, kind):
    """The suite of a name with its experiments of one kind alone."""
    suite = load_suite(name)
    return replace(suite, experiments=tuple(e for e in suite.experiments if e.kind == kind))
