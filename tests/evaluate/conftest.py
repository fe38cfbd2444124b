"""One finished run of untrained models, and its evaluation, for all tests here."""

import shutil
from copy import deepcopy
from pathlib import Path

import pytest
from torch import Tensor

from ddm_ray.evaluate import reference
from ddm_ray.evaluate.features import FeatureNet, train_features
from ddm_ray.evaluate.run import evaluate
from ddm_ray.run.run import Run
from tests.random_run import make_run

# top-2 of two experts is full: the same images, if labels and seeds are the same.
SETTINGS = ("evaluate.strategies=[once, full, top-1, top-2]", "evaluate.num_samples=300", "sample.steps=4")

# Most runs here have the same rows, to which the same classifier is fitted: half of an evaluation's time.
_fitted: dict[tuple[object, ...], FeatureNet] = {}


def fitted_once(data_NCHW: Tensor, label_N: Tensor, num_classes: int, seed: int) -> FeatureNet:
    """What `train_features` gives, which is the same to the bit for the same rows."""
    key = (data_NCHW.shape, data_NCHW.numpy().tobytes(), label_N.numpy().tobytes(), num_classes, seed)
    if key not in _fitted:
        _fitted[key] = train_features(data_NCHW, label_N, num_classes, seed)
    return deepcopy(_fitted[key])


@pytest.fixture(autouse=True)
def classifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "train_features", fitted_once)


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


def copied(run: Run, path: Path) -> Run:
    """A copy of the run without its evaluations."""
    shutil.copytree(run.url, path, ignore=shutil.ignore_patterns("eval"))
    return Run.open(str(path))
