"""What DeepSpeed costs: a step of our engine beside the same step in plain PyTorch, over sizes of the model.

As a script: `train_engine.py REPEATS SECONDS POINT ...`, a point being SIZE:BATCH; prints seconds of each side's steps.
B rows, C channels, H x W pixels.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from claims import Claim, Report, interleaved, median_and_spread
from data_compute import add, quotients

# Time of a step, of PyTorch's: speed at least 0.95 of it.
MOST_ENGINE = 1 / 0.95
# Image size, channels, and the DiT's (patch_size, width, depth, heads): 32 thousand to 32 million parameters.
SIZES: dict[str, tuple[int, int, tuple[int, int, int, int]]] = {
    "32k": (8, 1, (4, 32, 1, 2)),
    "0.4M": (8, 1, (4, 96, 2, 4)),
    "1.3M": (16, 4, (2, 128, 4, 4)),
    "8.6M": (16, 4, (2, 256, 7, 4)),
    "32M": (32, 4, (2, 384, 12, 6)),
}
# A small batch, where what a parameter costs shows, and a large one, where arithmetic does.
POINTS = ("32k:4", "32k:128", "0.4M:4", "0.4M:128", "1.3M:1", "1.3M:32", "8.6M:1", "8.6M:32", "32M:1", "32M:8")
QUICK = ("32k:4", "0.4M:4", "1.3M:1", "1.3M:16")
# Where the claim is made.
CLAIMED = ("8.6M:32", "32M:8")
RATE, DECAY, CLIP = 1e-4, 0.999, 1.0
KINDS = {"foreach": {"foreach": True}, "fused": {"fused": True}}


def measure(repeats: int, seconds: float, points: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step by point and side; each takes about `seconds` a repeat. Under "parameters", their number."""
    import torch

    from ddm_ray.train import local

    torch.set_num_threads(1)
    by_point: dict[str, dict[str, list[float]]] = {}
    with local.world():
        for point in points:
            size, batch = point.split(":")
            sides = {kind: Plain(size, int(batch), **adamw) for kind, adamw in KINDS.items()}
            sides |= {"engine": Ours(size, int(batch)), "gradients": Gradients(size, int(batch))}
            steps = {name: _steps_in(side, seconds) for name, side in sides.items()}
            # All sides take as many steps, so that none has longer to settle.
            many = max(1, min(steps.values()))
            taken = interleaved({name: _times(side, many) for name, side in sides.items()}, repeats, "cpu")
            by_point[point] = {name: [value / many for value in values] for name, values in taken.items()}
            by_point[point]["parameters"] = [float(sides["engine"].parameters)]
    return by_point


def _steps_in(side: Callable[[], object], seconds: float) -> int:
    side()
    began = time.perf_counter()
    side()
    return int(seconds / (time.perf_counter() - began))


def _times(side: Callable[[], object], many: int) -> Callable[[], None]:
    def steps() -> None:
        for _ in range(many):
            side()

    return steps


class Side:
    """A model of one size, and one batch of noise."""

    def __init__(self, size: str, batch: int):
        import torch

        from ddm_ray.models.dit import DiT
        from ddm_ray.models.flops import num_parameters

        image_size, channels, (patch_size, width, depth, heads) = SIZES[size]
        torch.manual_seed(0)
        sizes = {"image_size": image_size, "channels": channels, "patch_size": patch_size, "width": width}
        self.model = DiT(**sizes, num_classes=10, depth=depth, heads=heads)
        self.parameters = num_parameters(self.model)
        self._x_BCHW = torch.randn(batch, channels, image_size, image_size)
        self._t_B, self._label_B = torch.rand(batch), torch.arange(batch) % 10

    def loss(self, model: Callable[..., "torch.Tensor"]) -> "torch.Tensor":  # noqa: F821
        return (model(self._x_BCHW, self._t_B, self._label_B) - self._x_BCHW).square().mean()


class Gradients(Side):
    """Forward and backward alone."""

    def __call__(self) -> None:
        self.model.zero_grad()
        self.loss(self.model).backward()


class Plain(Side):
    """What one would write by hand: AdamW, clipping, EMA."""

    def __init__(self, size: str, batch: int, **adamw: bool):
        import torch

        super().__init__(size, batch)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0, **adamw)
        self._ema = [value.detach().clone() for value in self.model.parameters()]

    def __call__(self) -> float:
        import torch

        values = list(self.model.parameters())
        self._optimizer.zero_grad()
        self.loss(self.model).backward()
        norm = torch.nn.utils.clip_grad_norm_(values, CLIP)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self._ema, values, 1 - DECAY)
        return float(norm)


class Ours(Side):
    """The engine, as a training worker of one rank has it."""

    def __init__(self, size: str, batch: int):
        from ddm_ray.config import TrainConfig
        from ddm_ray.placement import TrainPlacement
        from ddm_ray.train.engine import Engine

        super().__init__(size, batch)
        train = TrainConfig(steps=1, batch=batch, ema_decay=DECAY, clip_norm=CLIP)
        self._engine = Engine(self.model, train, TrainPlacement())

    def __call__(self) -> float:
        self._engine.backward(self.loss(self._engine.model))
        return self._engine.step(RATE)


def tell(by_point: Mapping[str, Mapping[str, Sequence[float]]], report: Report) -> None:
    """The claims: each point's time by side, and what a step costs more than PyTorch's, as a line in parameters."""
    extra, sizes, weights = [], [], []
    for point, seconds in by_point.items():
        name = f"{point.replace(':', ' parameters, batch ')}"
        add(report, f"{name}: PyTorch's step", [1000 * value for value in seconds["foreach"]], "ms")
        update = [a - b for a, b in zip(seconds["foreach"], seconds["gradients"], strict=True)]
        add(
            report, f"{name}: of it clipping, AdamW, EMA", [100 * v for v in quotients(update, seconds["foreach"])], "%"
        )
        target = MOST_ENGINE if point in CLAIMED else None
        add(report, f"{name}: the engine's step", quotients(seconds["engine"], seconds["foreach"]), "x PyTorch", target)
        fused = quotients(seconds["engine"], seconds["fused"])
        add(report, f"{name}: the engine's step, to fused AdamW", fused, "x PyTorch")
        more = [a - b for a, b in zip(seconds["engine"], seconds["fused"], strict=True)]
        extra.append(median_and_spread(more)[0])
        sizes.append(seconds["parameters"][0])
        weights.append(1 / median_and_spread(seconds["fused"])[0])
    fixed, each = line(sizes, extra, weights)
    report.add(Claim("the engine's step over fused AdamW's: fixed", 1e3 * fixed, "ms"))
    report.add(Claim("the engine's step over fused AdamW's: of a parameter", 1e9 * each, "ns"))


def line(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """(a, b) for which a + b x is nearest to y, differences weighted (least squares)."""
    scale = np.asarray(weights)
    matrix = np.stack([scale, scale * np.asarray(x)], axis=1)
    (fixed, each), *_ = np.linalg.lstsq(matrix, scale * np.asarray(y), rcond=None)
    return float(fixed), float(each)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])))
