"""Acceptance of what islands have trained: looked at byte by byte, then it counts for whoever builds on it."""

from ddm_ray.sampling.run_models import NETWORK, parse_network
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.info import TrainedInfo
from ddm_ray.storage.manifest import Manifest
from ddm_ray.storage.run import Run


def accept(run: Run, artifact: Artifact, replace: bool = False) -> Manifest:
    """Accept a finished training job by content: all its files as its manifest says, and a network of finite weights.

    From then on the run's readers take these very bytes or none, whatever its island writes. `replace`: also in place
    of another one that was accepted before. Raises MissingArtifact, CorruptArtifact, DriftError.
    """
    manifest = run.finished(artifact) or run.require(artifact)
    folder = TrainedInfo.of(manifest).weights
    read = {name: run.read(artifact, name, manifest) for name in manifest.files}
    described, tensors = (read.get(f"{folder}/{name}", b"") for name in NETWORK)
    parse_network(described, tensors, f"{run.url}/{artifact}/{folder}")
    run.accept(manifest, replace)
    return manifest
