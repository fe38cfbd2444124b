"""Measures beside torch-fidelity's, the field's own code, on stored features."""

import numpy as np
import pytest
import torch

from ddm_ray.evaluate.distances import KID_ROWS, Gaussian, RealNeighbours, kid

# Not in the tests' environment: its wheel brings a package `tests` of its own, which would hide ours.
pytest.importorskip("torch_fidelity", reason="torch-fidelity isn't installed (extra fid)")

from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric


@pytest.fixture(scope="module", params=[(600, 500, 16), (300, 300, 64)], ids=["16 features", "64 features"])
def features(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray]:
    """Real rows and samples that overlap in part."""
    num_real, num_samples, width = request.param
    random = np.random.default_rng(0)
    real_ND = random.standard_normal((num_real, width)) @ random.standard_normal((width, width)) / width**0.5
    return real_ND, 0.9 * real_ND[:num_samples][:, ::-1] + 0.3 * random.standard_normal((num_samples, width))


def test_frechet_distance(features: tuple[np.ndarray, np.ndarray]) -> None:
    statistics = [fid_features_to_statistics(torch.tensor(rows)) for rows in features]
    expected = fid_statistics_to_metric(*statistics, False)["frechet_inception_distance"]
    assert Gaussian.of(features[0]).measure(features[1])[0] == pytest.approx(expected, rel=1e-3)


def test_kernel_distance_of_whole_sets(features: tuple[np.ndarray, np.ndarray]) -> None:
    size = min(map(len, features))
    real_ND, samples_MD = (rows[:size] for rows in features)
    assert size <= KID_ROWS, "so that a subset is the whole set"
    settings = {"kid_subsets": 1, "kid_subset_size": size, "verbose": False}
    expected = kid_features_to_metric(torch.tensor(samples_MD), torch.tensor(real_ND), **settings)
    value, spread = kid(real_ND, samples_MD, seed=0, subsets=2)
    assert value == pytest.approx(expected["kernel_inception_distance_mean"], rel=1e-3)
    assert spread < 1e-9


def test_precision_and_recall(features: tuple[np.ndarray, np.ndarray]) -> None:
    real_ND, samples_MD = features
    expected = prc_features_to_metric(torch.tensor(samples_MD), torch.tensor(real_ND), verbose=False)
    measured = RealNeighbours.of(real_ND).compare(samples_MD)
    assert measured.precision == pytest.approx(expected["precision"], rel=1e-3)
    assert measured.recall == pytest.approx(expected["recall"], rel=1e-3)
    assert 0 < measured.precision < 1, "or any formula would do"
