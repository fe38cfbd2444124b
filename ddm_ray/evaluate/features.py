"""Features to measure samples by: those of a small classifier fitted to the run's own rows, or of a network.

Shapes: N rows, C channels, H, W, D features.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm_ray.config import EmbedderConfig
from ddm_ray.models.embedders import Embedder, make_embedder
from ddm_ray.pictures.images import to_bytes, to_unit

NUM_FEATURES = 32
CHUNK, CHUNK_PIXELS = 512, 2**22
"""Maximum images, and pixels of images, per forward pass of the classifier: a GiB in its widest layers."""


class FeatureNet(nn.Module):
    """Three convolutions, a layer of NUM_FEATURES, and a linear head for classes. Images (N, C, H, W) in [-1, 1]."""

    scale: Tensor

    def __init__(self, channels: int, num_classes: int, width: int = 16):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(2 * width * 16, NUM_FEATURES),
        )
        self.head = nn.Sequential(nn.GELU(), nn.Linear(NUM_FEATURES, num_classes))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, images_NCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Features (N, D), scaled to mean variance 1 over the rows of the fit, and class logits."""
        features_ND = self.body(images_NCHW)
        return features_ND * self.scale, self.head(features_ND)


@dataclass(frozen=True)
class Seen:
    """Images as the networks see them: features (float64), and the classifier's likeliest class (int64)."""

    features_ND: np.ndarray
    class_N: np.ndarray


def train_features(
    data_NCHW: Tensor, label_N: Tensor, num_classes: int, seed: int, steps: int = 400, batch: int = 64
) -> FeatureNet:
    """Fit a FeatureNet to real rows. The same rows, seed and number of threads give the same network."""
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = FeatureNet(data_NCHW.shape[1], num_classes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows_B = torch.randint(len(data_NCHW), (batch,), generator=random)
        loss = F.cross_entropy(net(data_NCHW[rows_B])[1], label_N[rows_B], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    net.eval()
    variance = np.var(see(net, [data_NCHW]).features_ND, axis=0).mean()
    net.scale.fill_(float(variance**-0.5))
    return net


def at_once(images_BCHW: Tensor) -> int:
    """Number of these images per forward pass."""
    return max(1, min(CHUNK, CHUNK_PIXELS // (images_BCHW.shape[2] * images_BCHW.shape[3])))


@torch.inference_mode()
def see(net: FeatureNet, parts: Iterable[Tensor], embedder: Embedder | None = None) -> Seen:
    """Features and classes of images in [-1, 1], in parts (B, C, H, W). Values outside are clipped, as in pictures.

    With an `embedder` the features are the embedder's, of images rounded to 256 levels as they are stored.
    """
    features, classes = [], []
    for part_BCHW in parts:
        for images_BCHW in part_BCHW.split(at_once(part_BCHW)):
            features_BD, logits_BC = net(images_BCHW.clamp(-1, 1))
            if embedder is not None:
                features_BD = torch.from_numpy(embedder(to_bytes(to_unit(images_BCHW))))
            features.append(features_BD.double())
            classes.append(logits_BC.argmax(1))
    return Seen(torch.cat(features).numpy(), torch.cat(classes).numpy())


def load_embedder(config: EmbedderConfig | None, device: str) -> Embedder | None:
    """The network that gives the features; None: the classifier does.

    Raises DataError, ConfigError or CorruptArtifact if it can't be loaded.
    """
    return make_embedder(config, None, device, "evaluate.features", exact=True) if config else None


def features_in_words(config: EmbedderConfig | None, num_features: int) -> str:
    """Describe the features that images are compared by, and the weights of their network."""
    if config is None:
        return f"the {num_features} features (of mean variance 1) of a small classifier fitted to such rows"
    name = Path(config.network).name if Path(config.network).is_dir() else config.network
    weights = f" with the weights {Path(config.checkpoint).name}" if config.checkpoint else ""
    return f"the {num_features} features of {name}{weights}"
