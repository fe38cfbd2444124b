"""Expert and router as Ray Serve deployments; every call carries its state, so any replica can repeat it.

Shapes: B rows, CHW image, K experts. Arrays are float32, labels int64.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from ddm_ray.sampling.driver import Field
from ddm_ray.sampling.request import SampleRequest, SampleResult
from ddm_ray.sampling.run_models import Models, load_model, mixture_info
from ddm_ray.storage.graph import ROUTER, Artifact
from ddm_ray.storage.run import Run

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


class _Network:
    """A network of the run on one device, called with arrays; `evaluate` may run in many threads at once."""

    def __init__(self, run: Run, artifact: Artifact, device: str):
        torch.set_num_threads(1)
        self.device = device
        self.module = load_model(run, artifact, device)

    def evaluate(self, x_BCHW: Floats, t_B: Floats, label_B: Labels) -> Floats:
        """The network's output at these rows. The arrays may be read-only views of shared memory: copied."""
        with torch.inference_mode():
            inputs = (torch.tensor(part, device=self.device) for part in (x_BCHW, t_B, label_B))
            return self.module(*inputs).cpu().numpy()


class ExpertReplica:
    """One expert of a run: velocities for strategies that mix, whole trajectories where an image has one expert."""

    def __init__(self, run_url: str, cluster: int, device: str):
        """Loads the expert's verified weights. Raises MissingArtifact, CorruptArtifact, DriftError."""
        run = Run.open(run_url)
        self._network = _Network(run, run.experts[cluster], device)
        experts: list[Field | None] = [None] * run.config.partition.num_clusters
        experts[cluster] = self._network.module
        self._models = Models(mixture_info(run), experts, None, device)

    def velocity(self, x_BCHW: Floats, t_B: Floats, label_B: Labels) -> Floats:
        """Velocity (B, C, H, W) of this expert alone at x_BCHW, t_B in [0, 1]; label num_classes: no condition."""
        return self._network.evaluate(x_BCHW, t_B, label_B)

    def sample(self, request: SampleRequest) -> SampleResult:
        """Whole trajectories with this expert: one call instead of one per step.

        SamplingError unless the strategy is `oracle` and every image's cluster is this expert's.
        """
        return self._models.sample(request)


class RouterReplica:
    """The router of a run."""

    def __init__(self, run_url: str, device: str):
        """Loads the router's verified weights. Raises MissingArtifact, CorruptArtifact, DriftError."""
        self._network = _Network(Run.open(run_url), ROUTER, device)

    def logits(self, x_BCHW: Floats, t_B: Floats, label_B: Labels) -> Floats:
        """Logits (B, K) of p(k | x, t, label) at x_BCHW, t_B in [0, 1]; label num_classes: no condition."""
        return self._network.evaluate(x_BCHW, t_B, label_B)
