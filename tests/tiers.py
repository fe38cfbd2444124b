"""The tiers of tests: unit, contract, integration, chaos. CONTRIBUTING says what belongs into each.

A test has the latest tier that a marker of it, of its file or of a parameter names, and is of `unit` without one.
"""

import sys
from collections import Counter

import pytest

TIERS = ("unit", "contract", "integration", "chaos")
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec")
"""What Python announces before it starts a process."""
_unit_test: list[str] = []
"""The test that runs, if it is of the tier unit."""


def tier_of(names: object) -> str:
    """The tier of a test with these markers, or of its report with these keywords."""
    return next(tier for tier in reversed(TIERS) if tier == "unit" or tier in names)  # type: ignore[operator]


def forbid_processes(event: str, arguments: object) -> None:
    """Audit hook: a unit test starts no process."""
    if _unit_test and event in STARTS:
        raise AssertionError(f"{_unit_test[0]} starts a process ({event}): mark it `contract` or later")


def pytest_configure(config: pytest.Config) -> None:
    for tier in TIERS:
        config.addinivalue_line("markers", f"{tier}: tier of tests, see CONTRIBUTING")
    sys.addaudithook(forbid_processes)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> object:
    for item in items:
        item.add_marker(tier_of({mark.name for mark in item.iter_markers()}))
    yield  # type: ignore[misc]
    if share := config.getoption("slice"):
        kept = in_slice([item.nodeid for item in items], share)
        left = [item for item in items if item.nodeid not in kept]
        items[:] = [item for item in items if item.nodeid in kept]
        config.hook.pytest_deselected(items=left)


def in_slice(tests: list[str], share: str) -> set[str]:
    """The tests of a share, as `2/10`; all shares together are all tests."""
    which, number = map(int, share.split("/"))
    return set(sorted(tests)[which % number :: number])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> object:
    unit = tier_of(item.keywords) == "unit"
    if unit:
        _unit_test.append(item.nodeid)
    try:
        return (yield)
    finally:
        if unit:
            _unit_test.clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The seconds of each tier, over all workers."""
    seconds, numbers = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tier = tier_of(report.keywords)
                seconds[tier] += report.duration  # type: ignore[assignment]
                numbers[tier] += report.when == "call"
    parts = [f"{tier} {numbers[tier]} in {seconds[tier]:.0f} s" for tier in TIERS if tier in seconds]
    if parts:
        terminalreporter.write_line(f"tests by tier, seconds of all workers together: {', '.join(parts)}")
