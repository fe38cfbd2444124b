"""What mixtures of `changes.py` are measured by: pictures that no run has, in the features of evaluations.

Shapes: M images, B rows, K experts, D features, CHW image, F families.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ddm_ray.config import EmbedderConfig, SamplingSettings
from ddm_ray.core.streams import SeedPurpose, consecutive_seeds
from ddm_ray.data.loading.loader import Rows
from ddm_ray.evaluate.distances import Gaussian
from ddm_ray.evaluate.features import FeatureNet, load_embedder, see, train_features
from ddm_ray.evaluate.router import router_score
from ddm_ray.evaluate.samples import BATCH
from ddm_ray.models.embedders import Embedder
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import Models

REAL = 800
"""Pictures of each family that images are compared with."""
SETTINGS = SamplingSettings(solver="ab2", steps=25, guidance_scale=1.0)
Pictures = Callable[[int, int], Iterable[np.ndarray]]


@dataclass(frozen=True)
class Ruler:
    """Features of real pictures by family, and a classifier of families with its `accuracy`.

    `others_FND`: features of as many other pictures as images are asked for, the best that a mixture could draw.
    """

    embedder: Embedder
    net: FeatureNet
    real_FND: np.ndarray
    others_FND: np.ndarray
    accuracy: float

    @classmethod
    def of(cls, file: Path, pictures: Pictures, families: int, images: int) -> Self:
        """Draw pictures by a seed of their own, and see them once; features are kept in a file."""
        parts = [np.stack(list(islice(pictures(1, family), REAL + images))) for family in range(families)]
        data_FNCHW = torch.from_numpy(np.stack(parts)).permute(0, 1, 4, 2, 3).float() / 127.5 - 1
        label_N = torch.arange(families).repeat_interleave(REAL)
        net = train_features(data_FNCHW[:, :REAL].flatten(0, 1), label_N, families, seed=0)
        embedder = load_embedder(EmbedderConfig(kind="lite0", image_size=64), "cpu")
        assert embedder is not None
        kept = file.with_suffix(".npy")
        if not kept.exists():
            features = [see(net, [data_NCHW], embedder).features_ND.astype(np.float32) for data_NCHW in data_FNCHW]
            kept.parent.mkdir(parents=True, exist_ok=True)
            np.save(kept, np.stack(features))
        features_FND = np.load(kept)
        class_N = see(net, [data_FNCHW[:, REAL:].flatten(0, 1)]).class_N
        accuracy = float((class_N == np.arange(families).repeat(images)).mean())
        return cls(embedder, net, features_FND[:, :REAL], features_FND[:, REAL:], accuracy)

    def floor(self, old: Sequence[int]) -> dict[str, Any]:
        """Distances of other real pictures, as many as images are asked for."""
        own = {str(family): self._distance(self.others_FND[family], [family]) for family in range(len(self.real_FND))}
        old_distance = self._distance(np.concatenate([self.others_FND[family] for family in old]), old)
        return {"by family": own, "old": old_distance, "classifier's accuracy": self.accuracy}

    def score(
        self, models: Models, strategy: str, labels: Sequence[int] | None, old: Sequence[int], seed: int, images: int
    ) -> dict[str, Any]:
        """Distances and recognised families of a mixture's images, so many of each family.

        `labels`: the families that are asked for; None: all, untold. Of untold images those that are recognised as
        `old` families are compared, always as many of them.
        """
        families = len(self.real_FND)
        # An image has its seed by its number and family, so that arms are asked for the same ones.
        label_M = torch.arange(families * images) % families
        seeds = consecutive_seeds(seed, len(label_M), SeedPurpose.EVALUATION)
        request = SampleRequest(seeds, label_M if labels is not None else torch.full_like(label_M, families), SETTINGS)
        if labels is not None:
            request = request.rows(torch.isin(label_M, torch.tensor(labels)))
            label_M = label_M[torch.isin(label_M, torch.tensor(labels))]
        images_MCHW = _sampled(models, request.changed(strategy=strategy))
        seen = see(self.net, [images_MCHW], self.embedder)
        shares = np.bincount(seen.class_N, minlength=families) / len(seen.class_N)
        score: dict[str, Any] = {"shares": shares.tolist()}
        if labels is None:
            is_old_M = np.isin(seen.class_N, old)
            compared = seen.features_ND[is_old_M][: int(images * len(old) * 0.94)]
            return score | {"old": self._distance(compared, old), "compared": len(compared)}
        own = {str(family): seen.features_ND[label_M.numpy() == family] for family in labels}
        score["recognised"] = float((seen.class_N == label_M.numpy()).mean())
        score["by family"] = {family: self._distance(rows, [int(family)]) for family, rows in own.items()}
        return score | {"old": self._distance(seen.features_ND[np.isin(label_M.numpy(), old)], old)}

    def _distance(self, features_MD: np.ndarray, families: Sequence[int]) -> float:
        return _gaussian(self, tuple(families)).measure(features_MD)[0]

    def __hash__(self) -> int:
        return id(self)


@cache
def _gaussian(ruler: Ruler, families: tuple[int, ...]) -> Gaussian:
    return Gaussian.of(np.concatenate([ruler.real_FND[family] for family in families]).astype(np.float64))


def _sampled(models: Models, request: SampleRequest) -> Tensor:
    parts = [models.sample(request.rows(slice(at, at + BATCH))) for at in range(0, len(request.seeds), BATCH)]
    return torch.cat([part.images_BCHW for part in parts])


def router_accuracy(models: Models, heldout: Rows, seed: int) -> dict[str, Any]:
    """The router's accuracy and cross-entropy on noised held-out rows by tenths of t, told families and untold."""
    assert models.info.num_classes is not None
    untold = replace(heldout, label_N=torch.full_like(heldout.label_N, models.info.num_classes))
    measured = {}
    for telling, rows in {"told": heldout, "untold": untold}.items():
        score = asdict(router_score(models, rows, seed))
        measured[telling] = {
            "accuracy": score["accuracy"],
            "cross_entropy": score["cross_entropy"],
            "by_t": [tenth["accuracy"] for tenth in score["by_t"]],
            "shares": score["shares"]["likeliest"],
        }
    return measured
