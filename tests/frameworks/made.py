"""A pytest plugin for a framework's own tests: which of them made something of ours, and how they ended.

`--made FILE` lists them as JSON: what a test does without one says nothing of it. Law: what makes one calls `note`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

_running: list[pytest.Item] = []
_ended = dict[str, str]()


def note() -> None:
    """The running test made one."""
    if _running:
        _running[-1].user_properties.append(("made", ""))  # which its report carries from a worker of xdist to here


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--made", type=Path, help="write here, as JSON, how the tests ended that made one of ours")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    _running[:] = [item]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if ("made", "") in report.user_properties and _ended.get(report.nodeid, "passed") == "passed":
        _ended[report.nodeid] = report.outcome


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.option.made and not hasattr(config, "workerinput"):
        config.option.made.write_text(json.dumps(_ended, indent=1, sort_keys=True))
