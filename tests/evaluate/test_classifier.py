"""The classifier that measures, and the scores that it gives."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm_ray.data.loading.loader import Rows, load_rows
from ddm_ray.evaluate.features import see, train_features
from ddm_ray.evaluate.image_set import Reference
from ddm_ray.evaluate.metrics import row_of
from ddm_ray.evaluate.reference import RealFeatures
from ddm_ray.run.graph import shard
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import mixture_info

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def train(random_run: Run) -> Rows:
    return load_rows(random_run, [shard(0), shard(1)])


@pytest.fixture(scope="module")
def heldout(random_run: Run) -> Rows:
    return load_rows(random_run, [shard(0), shard(1)], "heldout")


@pytest.fixture(scope="module")
def reference(random_run: Run, train: Rows) -> Reference:
    net = train_features(train.data_NCHW, train.label_N, 10, seed=0)
    prior_CK = mixture_info(random_run).prior_CK.numpy()
    return Reference(net, RealFeatures.of(net, train), train, prior_CK, seed=0)


def score(reference: Reference, images_NCHW: Tensor, label_N: Tensor) -> dict[str, Any]:
    return row_of(reference.see(lambda: [images_NCHW], label_N))


def test_it_reads_digits_that_it_never_saw(reference: Reference, heldout: Rows) -> None:
    assert (see(reference.net, [heldout.data_NCHW]).class_N == heldout.label_N.numpy()).mean() > 0.8


def test_features_of_training_rows_have_mean_variance_one(reference: Reference) -> None:
    assert reference.real.features_MD.var(axis=0).mean() == pytest.approx(1, rel=1e-4)


def test_the_same_seed_gives_the_same_network(train: Rows) -> None:
    rows = (train.data_NCHW, train.label_N, 10)
    nets = [train_features(*rows, seed=seed, steps=5) for seed in (3, 3, 4)]
    features = [see(net, [train.data_NCHW[:4]]).features_ND for net in nets]
    assert np.array_equal(features[0], features[1])
    assert not np.allclose(features[0], features[2])


def test_what_lies_outside_the_range_counts_as_clipped(reference: Reference, train: Rows) -> None:
    far = see(reference.net, [train.data_NCHW[:8] * 1000])
    assert np.array_equal(far.features_ND, see(reference.net, [train.data_NCHW[:8].sign()]).features_ND)


def test_real_rows_score_well_and_noise_badly(reference: Reference, heldout: Rows) -> None:
    real = score(reference, heldout.data_NCHW, heldout.label_N)
    noise = torch.randn(heldout.data_NCHW.shape, generator=torch.Generator().manual_seed(0))
    noisy = score(reference, noise, heldout.label_N)
    assert real["accuracy"] > 0.8 > 0.4 > noisy["accuracy"]
    assert real["precision"] > 0.6 > noisy["precision"]
    assert real["recall"] > noisy["recall"]
    assert real["frechet"] < noisy["frechet"] / 2
    assert real["n"] == len(heldout)


def test_accuracy_is_that_of_the_labels_asked_for(reference: Reference, heldout: Rows) -> None:
    wrong = (heldout.label_N + 1) % 10
    assert score(reference, heldout.data_NCHW, wrong)["accuracy"] < 0.1


def test_cluster_tv_sees_a_lost_cluster(reference: Reference, train: Rows) -> None:
    """Rows of one cluster alone are 1 - p(cluster | their labels) off; all rows are at 0."""
    every = score(reference, train.data_NCHW, train.label_N)
    assert every["cluster_tv"] == pytest.approx(0, abs=1e-6)
    only = train.cluster_N == 1
    expected = reference.prior_CK[train.label_N[only].numpy(), 1].mean()
    cluster_tv = score(reference, train.data_NCHW[only], train.label_N[only])["cluster_tv"]
    assert cluster_tv == pytest.approx(1 - expected)
    assert cluster_tv > 0.2


def test_the_floor_falls_with_n(reference: Reference) -> None:
    small, large = (row_of(reference.drawn_again(number)) for number in (40, 4000))
    assert 0 < large["frechet"] < small["frechet"] / 5
    assert large["cluster_tv"] < small["cluster_tv"] + 0.02
    assert small["accuracy"] is None
