"""Scripts of study/ as modules; they import what lies beside them and in benchmarks/."""

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.conftest import ROOT

Script = Callable[[str], ModuleType]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Imports a script by its name."""
    for folder in ("benchmarks", "study"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module
