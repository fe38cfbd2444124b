"""Why a worker of pytest-xdist died: the report of the test that it ran then shows where its threads were."""

import faulthandler
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_FOLDER = "crashes"
_OF_PYTEST = ("/pluggy/", "/_pytest/", "/xdist/", "/execnet/", '"<string>"')


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the process that prints: where each worker writes."""
    config = node.config
    if not hasattr(config, _FOLDER):
        config.crashes = tempfile.TemporaryDirectory(prefix="ddm-crashes-")
    node.workerinput[_FOLDER] = config.crashes.name


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    yield
    if folder := getattr(session.config, "workerinput", {}).get(_FOLDER):
        session.config.crash_file = path = open(Path(folder, os.environ["PYTEST_XDIST_WORKER"]), "w")  # noqa: SIM115
        faulthandler.enable(path)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """In the process that prints. A worker that was killed could write nothing."""
    lines = Path(report.node.config.crashes.name, report.node.gateway.id).read_text().splitlines()
    ours = [line for line in lines if not any(name in line for name in _OF_PYTEST)]
    report.longrepr += "\n" + "\n".join(ours or ["it left no trace: SIGKILL, or os._exit"])
