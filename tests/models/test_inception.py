"""The FID's Inception: torch-fidelity's own features, of random weights from a file."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from ddm_ray.config import EmbedderConfig
from ddm_ray.errors import DataError
from ddm_ray.evaluate.features import features_in_words
from ddm_ray.models.embedders import make_embedder

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, str]:
    """A network of random weights, and the file of these.

    The package isn't in the tests' environment: its wheel brings a package `tests`, which would hide this one.
    """
    inception = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3", reason="it needs the extra fid")

    class Untrained(inception.FeatureExtractorInceptionV3):  # type: ignore[misc, name-defined]
        """The network as it is before it loads weights."""

        def load_state_dict(self, *_: object) -> None:
            pass

    folder = tmp_path_factory.mktemp("inception")
    torch.save({}, folder / "none.pth")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Untrained("untrained", ["2048"], feature_extractor_weights_path=folder / "none.pth")
    torch.save(network.state_dict(), folder / "weights.pth")
    return network, str(folder / "weights.pth")


def config(checkpoint: str) -> EmbedderConfig:
    return EmbedderConfig(kind="inception", checkpoint=checkpoint, batch_size=2)


def test_features_are_torch_fidelitys_own(network: tuple[torch.nn.Module, str]) -> None:
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, (3, 40, 40, 3), np.uint8)
    embedder = make_embedder(config(network[1]), None, field="evaluate.features")
    with torch.inference_mode():
        (expected_ND,) = network[0](torch.tensor(pixels_NHWC).permute(0, 3, 1, 2))
    features_ND = embedder(pixels_NHWC)
    assert features_ND.shape == (3, embedder.dim) and features_ND.dtype == np.float32
    assert np.allclose(features_ND, expected_ND.numpy(), rtol=1e-4, atol=1e-5) and features_ND.std() > 0
    grey = pixels_NHWC[:1, ..., :1]
    assert np.array_equal(embedder(grey), embedder(np.repeat(grey, 3, axis=3)))
    words = features_in_words(config(network[1]), embedder.dim)
    assert words == "the 2048 features of Inception-v3 with the weights weights.pth"


class Code:
    """What a stranger's file may hold: opened carelessly, it writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("damage", ["missing", "cut", "other", "code"])
def test_weights_that_cant_be_used_are_told(network: tuple[torch.nn.Module, str], tmp_path: Path, damage: str) -> None:
    path = tmp_path / "weights.pth"
    if damage == "cut":
        path.write_bytes(Path(network[1]).read_bytes()[:5000])
    elif damage == "other":
        torch.save({"a": torch.zeros(2)}, path)
    elif damage == "code":
        path.write_bytes(pickle.dumps(Code(tmp_path / "touched")))
    with pytest.raises(DataError, match=r"^evaluate\.features.* .*weights\.pth") as refusal:
        make_embedder(config(str(path)), None, field="evaluate.features")
    assert "\n" not in str(refusal.value) and not (tmp_path / "touched").exists()
