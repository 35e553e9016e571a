"""One real run of a part of the hetu suite, simulated once for all report tests."""

import types
from dataclasses import replace

import pytest

from moebench.cases.plan import Filters
from moebench.report.html import write_report
from moebench.run import begin, execute, prepare
from moebench.workloads.load import load_suite
from tests.moebench.suites import of_kind


class Silent:
    """Follows a run without a word."""

    def phase(self, title, total):
        pass

    def step(self, name):
        pass


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """The Switch gate at batch size 32 under every assumption, few draws; the correctness gate has its own tests."""
    suite = replace(load_suite("hetu"), samples=16)
    systems = ("deepspeed", "deepspeed_sparse", "hetumoe")
    filters = Filters(gates=("switch",), batch_sizes=(32,), systems=systems)
    job = begin(prepare(suite, filters, "sim"), tmp_path_factory.mktemp("run") / "hetu")
    execute(job, Silent(), 1, lambda cases: [types.SimpleNamespace(status="passed", reason="")] * len(cases))
    return job.folder


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory):
    """The kernel experiments of the hetu suite on their first device, few draws."""
    suite = replace(of_kind("hetu", "kernel"), samples=8)
    job = begin(prepare(suite, Filters(quick=True), "sim"), tmp_path_factory.mktemp("kernels") / "hetu")
    execute(job, Silent(), 1, lambda cases: [types.SimpleNamespace(status="passed", reason="")] * len(cases))
    return job.folder


@pytest.fixture(scope="session")
def report(run_folder):
    """The path of its report."""
    return write_report(run_folder)


@pytest.fixture(scope="session")
def exchange_folder(tmp_path_factory):
    """The exchanges of the hetu suite on the default machines, few draws."""
    suite = replace(of_kind("hetu", "exchange"), samples=8)
    job = begin(prepare(suite, Filters(quick=True), "sim"), tmp_path_factory.mktemp("exchanges") / "hetu")
    execute(job, Silent(), 1, lambda cases: [types.SimpleNamespace(status="passed", reason="")] * len(cases))
    return job.folder
