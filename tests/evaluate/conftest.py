"""One finished run of untrained models, and its evaluation, for all tests here."""

from pathlib import Path

import pytest

from ddm_ray.evaluate.run import evaluate
from ddm_ray.storage.run import Run
from tests.random_run import make_run

# top-2 of two experts is full: the same images, if labels and seeds are the same.
SETTINGS = ("evaluate.strategies=[once, full, top-1, top-2]", "evaluate.num_samples=300", "sample.steps=4")


@pytest.fixture(scope="session")
def random_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("evaluate") / "run"), settings=SETTINGS)


@pytest.fixture(scope="session")
def progress_notes() -> list[tuple[float, str]]:
    return []


@pytest.fixture(scope="session")
def evaluated(random_run: Run, progress_notes: list[tuple[float, str]]) -> Path:
    """The folder of the run's evaluation `demo`."""
    evaluate(random_run, on_progress=lambda share, note: progress_notes.append((share, note)))
    return Path(random_run.url) / "eval" / "demo"
