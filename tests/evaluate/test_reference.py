"""Real rows as an evaluation's features see them: embedded once, whatever happens meanwhile, all of them counted."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.cli.fixes import phrase
from ddm_ray.data import no_progress
from ddm_ray.data.loading.loader import Rows, load_rows
from ddm_ray.data.sharded.serial import serial
from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.evaluate import reference as references
from ddm_ray.evaluate.distances import Gaussian, moments
from ddm_ray.evaluate.features import FeatureNet
from ddm_ray.evaluate.reference import Instruments, RealFeatures, make_reference, named
from ddm_ray.evaluate.run import evaluate, read_metrics
from ddm_ray.run.graph import PARTITION, shard
from ddm_ray.run.run import Run
from tests.random_run import make_run

pytestmark = pytest.mark.contract

SETTINGS = ("evaluate.strategies=[once]", "evaluate.num_samples=40", "sample.steps=1")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(str(tmp_path / "run"), settings=SETTINGS)


@pytest.fixture
def train(run: Run) -> Rows:
    return load_rows(run, [shard(0), shard(1)])


def made(run: Run, train: Rows, execute: Any = serial, elsewhere: tuple[int, ...] = ()) -> tuple[FeatureNet, Any]:
    return make_reference(run, train, elsewhere, Instruments(plain, None, execute, "cpu"), no_progress)


def plain(data_NCHW: torch.Tensor) -> torch.Tensor:
    return data_NCHW


def nobody(*_: Any) -> Iterator[Any]:
    raise AssertionError("it was embedded before")


def in_order(real: RealFeatures) -> np.ndarray:
    """Its rows in an order of their own, each with its label and cluster."""
    rows = np.column_stack([real.features_MD, real.label_M, real.cluster_M])
    return rows[np.lexsort(rows.T)]


@given(st.integers(0, 2**32), st.integers(2, 30), st.integers(1, 5), st.lists(st.integers(0, 30), max_size=6))
def test_moments_are_those_of_all_rows_however_they_come(seed: int, count: int, width: int, cuts: list[int]) -> None:
    rows_ND = np.random.default_rng(seed).normal(size=(count, width)) * 10 + 1e4
    mean_D, covariance_DD = moments(np.split(rows_ND, sorted(min(cut, count) for cut in cuts)))
    np.testing.assert_allclose(mean_D, rows_ND.mean(0), rtol=1e-12)
    np.testing.assert_allclose(covariance_DD, np.atleast_2d(np.cov(rows_ND, rowvar=False)), rtol=1e-7, atol=1e-8)


def test_it_is_what_all_rows_give_in_memory(run: Run, train: Rows) -> None:
    net, real = made(run, train)
    expected = RealFeatures.of(net, train)
    assert real.rows == len(train) == len(real.label_M) == sum(run.require(PARTITION).info["rows_K"])
    np.testing.assert_allclose(in_order(real), in_order(expected), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(real.gaussian.mean_D, expected.gaussian.mean_D, rtol=1e-5)
    np.testing.assert_allclose(real.gaussian.covariance_DD, expected.gaussian.covariance_DD, rtol=1e-4, atol=1e-6)


def test_interrupted_it_goes_on_and_is_made_once(
    run: Run, train: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*work: Any) -> Iterator[Any]:
        yield next(serial(*work))
        raise KeyboardInterrupt

    monkeypatch.setattr(references, "CHUNK_ROWS", 100)
    with pytest.raises(KeyboardInterrupt):
        made(run, train, ended)
    parts = {*(tmp_path / "run").glob("references/*/features/*")}
    assert len(parts) == 1
    net, real = made(run, train)
    every = {*(tmp_path / "run").glob("references/*/features/*")}
    assert parts < every and len(every) == 4, "180 rows a cluster"
    again, same = made(run, train, nobody)
    np.testing.assert_array_equal(real.features_MD, same.features_MD)
    np.testing.assert_array_equal(real.gaussian.root_DD, same.gaussian.root_DD)
    assert all((net.state_dict()[name] == tensor).all() for name, tensor in again.state_dict().items())


def test_evaluations_of_a_run_share_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(run, "one")
    assert run.require(named(run.config, ())).info == {"rows": 360, "features": 32}

    def unfitted(*_: Any) -> FeatureNet:
        raise AssertionError("it was fitted before")

    monkeypatch.setattr(references, "train_features", unfitted)
    evaluate(run, "two")
    one, two = (
        [{**row, "seconds_per_image": 0} for row in read_metrics(run, name)["models"]] for name in ("one", "two")
    )
    assert one == two


def test_of_more_rows_than_are_kept_some_are_drawn_and_all_counted(
    run: Run, train: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "KEPT_ROWS", 50)
    net, real = made(run, train)
    every = RealFeatures.of(net, train)
    assert real.features_MD.shape == (50, 32) and real.rows == len(train)
    rows = {row.tobytes() for row in np.round(in_order(every), 3)}
    assert sum(row.tobytes() in rows for row in np.round(in_order(real), 3)) > 40, "but for rounding"
    assert {*real.cluster_M} == {0, 1}
    np.testing.assert_allclose(real.gaussian.mean_D, every.gaussian.mean_D, rtol=1e-4, atol=1e-5)
    of_kept, of_all = Gaussian.of(real.features_MD), real.gaussian
    assert of_kept.measure(every.features_MD)[0] > 1e3 * of_all.measure(every.features_MD)[0]
    evaluate(run)
    metrics = read_metrics(run)
    assert metrics["num_real"] == len(train) and all(row["copied"] is None for row in metrics["models"])


def test_other_shards_are_another_one_and_other_rows_drift(run: Run, train: Rows) -> None:
    _, real = made(run, train)
    _, half = made(run, train, elsewhere=(1,))
    assert {*half.cluster_M} == {0} and half.rows == (real.cluster_M == 0).sum()
    seeded = run.config.evaluate.model_copy(update={"seed": 1})
    other = Run(run.store, run.config.model_copy(update={"evaluate": seeded}))
    with pytest.raises(DriftError, match=r"references/classifier-\w+ was made otherwise: .*seed") as refused:
        made(other, train)
    assert phrase(refused.value.fix).endswith("then: the same command again")
    evaluate(run)
    damaged = next(Path(run.url).glob("references/*/_statistics/*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CorruptArtifact, match=r"_statistics/\w+\.safetensors") as corrupt:
        evaluate(run, "another")
    assert phrase(corrupt.value.fix).endswith("then: the same command again")


def test_a_network_that_sees_otherwise_than_it_did_is_refused(run: Run, train: Rows) -> None:
    """As where a file of weights was replaced: samples would be in another space than rows."""
    made(run, train)
    nearly = Instruments(lambda data_NCHW: data_NCHW * 1.0001, None, serial, "cpu")
    make_reference(run, train, (), nearly, no_progress)
    with pytest.raises(DriftError, match="was made by another network, or other weights"):
        make_reference(run, train, (), replace(nearly, decode=lambda data_NCHW: -data_NCHW), no_progress)


@pytest.mark.parametrize("files", [1, 3])
def test_of_more_rows_than_are_asked_for_each_cluster_gives_its_share(tmp_path: Path, files: int) -> None:
    run = make_run(str(tmp_path / "run"), settings=(*SETTINGS, "evaluate.real_rows=90"), num_files=files)
    _, real = made(run, load_rows(run, [shard(0), shard(1)]))
    assert 84 <= real.rows == len(real.label_M) <= 90
    assert np.abs(np.diff(np.bincount(real.cluster_M))) <= files
    evaluate(run)
    assert read_metrics(run)["num_real"] == real.rows
