"""A pytest plugin for mlx_lm_tests.py: a model in place of the hub's, and mlx-spec installed."""

import json
from collections.abc import Iterator
from typing import Any

import mlx_lm.utils
import pytest

from mlx_spec import plugin
from mlx_spec.options import SpecOptions
from mlx_spec.run import Tally


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hub-model", help="The directory that mlx_lm gets for any name on the hub.")
    parser.addoption("--mlx-spec", action="store_true", help="Install the plugin.")
    parser.addoption("--results", help="The file to write: one JSON object a line.")


def pytest_configure(config: pytest.Config) -> None:
    mlx_lm.utils.snapshot_download = lambda *args, **kwargs: config.getoption("--hub-model")
    tally = None
    if config.getoption("--mlx-spec"):
        tally = Tally()
        plugin.install(tally.add, SpecOptions(3, sampling="stock"))
    config.pluginmanager.register(Recorder(config.getoption("--results"), tally))


@pytest.fixture(autouse=True)
def stock_caches(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails half-way may leave its caches to the others of its class, which share the
    model."""
    yield
    model = getattr(request.cls, "model", None)
    if model is not None:
        vars(model).pop("make_cache", None)


class Recorder:
    """Writes what became of each test; of several lines for one, the last one holds."""

    def __init__(self, path: str, tally: Tally | None):
        self.file = open(path, "w", buffering=1)  # noqa: SIM115 (line by line: a test may hang)
        self.tally = tally

    def write(self, **record: Any) -> None:
        self.file.write(json.dumps(record) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(test=nodeid, outcome="unended", reason="it did not end")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.write_report(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.write_report(report)

    def write_report(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self.write(
            test=report.nodeid,
            outcome=report.outcome,
            reason=reason_of(report),
            text=report.longreprtext,
        )

    def pytest_sessionfinish(self) -> None:
        if self.tally is not None and (self.tally.engaged or self.tally.others):
            self.write(tally=self.tally.as_text())


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """One line: the exception, or why it was skipped."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines()
    if not lines:
        return ""
    return lines[0] if crash else lines[-1].removeprefix("E").strip()
