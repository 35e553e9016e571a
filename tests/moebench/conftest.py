"""The harness under test runs on a fake engine: no trace, no replay, seconds for a whole suite."""

import sys
from types import SimpleNamespace

import pytest

from tests.moebench import fake_engine


@pytest.fixture
def fake(monkeypatch):
    """Replace the engines, the correctness check and the report by fakes; returns the fake engine's module."""
    on_fake_engine(monkeypatch)
    return fake_engine


def on_fake_engine(patch):
    """Replace them until the patch is undone."""
    engines = dict.fromkeys(("sim", "local", "count"), fake_engine.__name__)
    patch.setattr("moebench.run.ENGINES", engines)
    patch.setitem(sys.modules, "moebench.checks.correctness", SimpleNamespace(check_cases=fake_engine.check_cases))
    patch.setitem(sys.modules, "moebench.report.html", SimpleNamespace(write_report=_write_report))


def _write_report(folder, path, **_):
    path.write_text(f"<html>{folder.suite.name}</html>")


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
