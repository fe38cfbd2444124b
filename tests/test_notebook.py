"""The notebook of examples/ is stored without outputs, and runs from top to bottom."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

from tests.conftest import BIN, ROOT

NOTEBOOK = ROOT / "examples" / "from_data_to_picture.ipynb"


@pytest.fixture
def notebook() -> NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_stored_without_outputs(notebook: NotebookNode) -> None:
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert [cell.source for cell in code if cell.outputs or cell.execution_count] == []


@pytest.mark.chaos
def test_it_runs_from_data_to_picture(notebook: NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    for name in ("first.png", "routing.png", "threes.png"):
        with Image.open(tmp_path / "runs" / name) as picture:
            picture.verify()
    printed = "".join(output.get("text", "") for output in outputs)
    assert "Traceback" not in printed and "error" not in printed.lower()
