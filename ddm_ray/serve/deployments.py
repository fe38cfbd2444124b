"""The mixture's parts for Ray Serve; every call carries its state, so any replica can repeat it.

Shapes: B rows, CHW image, K experts. Arrays are float32, labels and seeds plain integers.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddm_ray.sampling.checkpoint import load_model, monolith_info
from ddm_ray.sampling.driver import sample
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.storage.run import ROUTER, Run

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


class _Field:
    """A model of the run on one device, called with arrays; `evaluate` may run in many threads at once."""

    def __init__(self, run: Run, artifact: str, device: str):
        torch.set_num_threads(1)
        self.device = device
        self.model = load_model(run, artifact, device)

    def evaluate(self, x_BCHW: Floats, t_B: Floats, label_B: Labels) -> Floats:
        """The model's output at these rows. The arrays may be read-only views of shared memory: copied."""
        with torch.inference_mode():
            inputs = (torch.tensor(part, device=self.device) for part in (x_BCHW, t_B, label_B))
            return self.model(*inputs).cpu().numpy()


class Expert:
    """One expert of a run: velocities for strategies that mix, whole trajectories for `once`."""

    def __init__(self, run_url: str, cluster: int, device: str):
        """Loads the expert's verified weights. Raises MissingArtifact, CorruptArtifact, DriftError."""
        run = Run.open(run_url)
        self._field = _Field(run, run.experts[cluster], device)
        self._info = monolith_info(run)

    def velocity(self, x_BCHW: Floats, t_B: Floats, label_B: Labels) -> Floats:
        """Velocity (B, C, H, W) of this expert alone at x_BCHW, t_B in [0, 1]; label num_classes: none."""
        return self._field.evaluate(x_BCHW, t_B, label_B)

    def advance(self, request: dict[str, Any]) -> Floats:
        """Images (B, C, H, W) of whole trajectories with this expert: one call instead of one per step.

        `request`: the fields of a SampleRequest, labels as a list, without a strategy.
        """
        wanted = SampleRequest(**request | {"condition": torch.tensor(request["condition"])})
        return sample(wanted, self._info, [self._field.model], device=self._field.device).images_BCHW.numpy()


class Router:
    """The router of a run."""

    def __init__(self, run_url: str, device: str):
        """Loads the router's verified weights. Raises MissingArtifact, CorruptArtifact, DriftError."""
        self._field = _Field(Run.open(run_url), ROUTER, device)

    def logits(self, x_BCHW: Floats, t_B: Floats, label_B: Labels) -> Floats:
        """Logits (B, K) of p(k | x, t, label) at x_BCHW, t_B in [0, 1]; label num_classes: no condition."""
        return self._field.evaluate(x_BCHW, t_B, label_B)
