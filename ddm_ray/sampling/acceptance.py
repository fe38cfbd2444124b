"""Acceptance of what islands have trained: looked at byte by byte, then it counts for whoever builds on it."""

from ddm_ray.errors import CorruptArtifact
from ddm_ray.models.spec import spec_of
from ddm_ray.sampling.run_models import NETWORK, network_bytes, parse_network
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.info import TrainedInfo
from ddm_ray.storage.manifest import Manifest
from ddm_ray.storage.published import Weights
from ddm_ray.storage.run import Run


def accept(run: Run, artifact: Artifact, replace: bool = False) -> Manifest:
    """Accept a finished training job by content: all its files as its manifest says, and a network of finite weights.

    From then on the run's readers take these very bytes or none, whatever its island writes. `replace`: also in place
    of another one that was accepted before. Raises MissingArtifact, CorruptArtifact, DriftError.
    """
    manifest = run.finished(artifact) or run.require(artifact)
    folder = TrainedInfo.of(manifest).weights
    spec = spec_of(run.config, artifact.kind)
    published = Weights(artifact, folder, TrainedInfo.of(manifest).step, final=True)
    named = {name: manifest.files.get(f"{folder}/{name}") for name in NETWORK}
    if None in named.values():
        raise CorruptArtifact(f"{run.url}/{artifact}: its manifest lists no network", run.remake(artifact))
    published.require_small(run, named, network_bytes(spec))
    read = {name: run.read(artifact, name, manifest) for name in manifest.files}
    described, tensors = (read[f"{folder}/{name}"] for name in NETWORK)
    parse_network(described, tensors, f"{run.url}/{artifact}/{folder}", spec)
    run.accept(manifest, replace)
    return manifest
