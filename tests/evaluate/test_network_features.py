"""Features of a network that a run names: images are compared in them, classes are still the classifier's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.config import EmbedderConfig
from ddm_ray.data.loading.loader import load_rows
from ddm_ray.errors import DataError
from ddm_ray.evaluate.compare import Side, compare
from ddm_ray.evaluate.compare_report import render_comparison
from ddm_ray.evaluate.features import features_in_words
from ddm_ray.evaluate.run import evaluate, read_metrics
from ddm_ray.models.embedder_networks import TimmEmbedder
from ddm_ray.run.graph import evaluation, shard
from ddm_ray.run.run import Run
from tests.random_run import make_run
from tests.small_vit import MODEL, write_small_vit

pytestmark = pytest.mark.contract

SETTINGS = ("evaluate.strategies=[once]", "evaluate.num_samples=60", "sample.steps=2")


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_small_vit(tmp_path_factory.mktemp("features") / "vit.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, features: dict[str, Any]) -> Run:
    path = tmp_path_factory.mktemp("network") / "run"
    run = make_run(str(path), settings=(*SETTINGS, f"evaluate.features={json.dumps(features)}"))
    evaluate(run)
    return run


def pixels(images_NCHW: torch.Tensor) -> np.ndarray:
    return ((images_NCHW.numpy() + 1) * 127.5).round().astype(np.uint8).transpose(0, 2, 3, 1)


def test_distances_are_those_of_its_features(run: Run, features: dict[str, Any]) -> None:
    embedder = TimmEmbedder(EmbedderConfig(**features))
    samples = next(each for each in Side(run, "demo", "run").sampled() if each.candidate == "once")
    sets = load_rows(run, [shard(0), shard(1)]).data_NCHW, torch.cat([*samples.images()])
    real_ND, once_MD = (embedder(pixels(images_NCHW)).astype(np.float64) for images_NCHW in sets)
    covariances = [np.cov(rows, rowvar=False) for rows in (real_ND, once_MD)]
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
    gap = real_ND.mean(0) - once_MD.mean(0)
    expected = gap @ gap + np.trace(covariances[0] + covariances[1] - 2 * root)
    (once,) = (row for row in read_metrics(run)["models"] if row["model"] == "once")
    assert once["frechet"] == pytest.approx(expected, rel=1e-3)
    assert expected > 0.01


def test_classes_are_the_classifiers(run: Run, tmp_path: Path) -> None:
    """The same models and seeds in the classifier's own features: other distances, the same accuracy."""
    plain = make_run(str(tmp_path / "run"), settings=SETTINGS)
    evaluate(plain)
    ours, theirs = ({row["model"]: row for row in read_metrics(each)["models"]} for each in (run, plain))
    assert {name: row["accuracy"] for name, row in ours.items()} == {
        name: row["accuracy"] for name, row in theirs.items()
    }
    assert ours["once"]["frechet"] != pytest.approx(theirs["once"]["frechet"], rel=0.1)


def test_reports_name_the_network_and_its_weights(run: Run) -> None:
    words = f"the 32 features of {MODEL} with the weights vit.safetensors"
    assert read_metrics(run)["features"] == words
    assert words in run.read(evaluation("demo"), "report.html").decode()
    compared = compare([Side(run, "demo", "run")])
    assert compared.as_json()["features"] == words and words in render_comparison(compared)
    rows = {row["model"]: row["frechet"] for row in read_metrics(run)["models"]}
    assert {line["model"]: line["frechet"] for line in compared.lines} == rows
    assert "small classifier" in features_in_words(None, 32)


def test_a_comparison_may_name_a_network_of_its_own(tmp_path: Path, run: Run, features: dict[str, Any]) -> None:
    plain = make_run(str(tmp_path / "plain"), settings=SETTINGS)
    evaluate(plain)
    words = ["compare", plain.url, "--output", str(tmp_path / "page.html"), "--json", str(tmp_path / "all.json")]
    named = CliRunner().invoke(main, [*words, "--features", json.dumps(features)])
    assert named.exit_code == 0, named.output
    compared = json.loads((tmp_path / "all.json").read_text())
    expected = {row["model"]: row["frechet"] for row in read_metrics(run)["models"]}
    assert {line["model"]: line["frechet"] for line in compared["lines"]} == pytest.approx(expected, rel=1e-6)
    for bad, why in (
        ("{kind: pixels}", "features: kind pixels compares no looks: choose timm or transformers"),
        ("", "names no network"),
        ("{kind: timm, mdoel: vit}", "mdoel"),
        ("{kind: [", "not YAML"),
    ):
        refused = CliRunner().invoke(main, [*words, "--features", bad])
        assert refused.exit_code == 1 and why in refused.output and "Traceback" not in refused.output


def test_weights_that_are_not_there_are_missed_before_anything_is_sampled(
    tmp_path: Path, features: dict[str, Any]
) -> None:
    lost = json.dumps(features | {"checkpoint": "/no/such.pt"})
    run = make_run(str(tmp_path / "run"), settings=(*SETTINGS, f"evaluate.features={lost}"))
    with pytest.raises(DataError, match=r"^evaluate\.features\.checkpoint /no/such\.pt: no such file"):
        evaluate(run)
    assert not run.store.sizes("eval")
