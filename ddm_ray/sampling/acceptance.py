"""Acceptance of what islands have made: checked byte by byte, before anything builds on it."""

from ddm_ray.errors import CorruptArtifact
from ddm_ray.jobs.published import Weights
from ddm_ray.models.spec import spec_of
from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import NETWORK, load_base, network_bytes, parse_network


def accept_made(run: Run, artifact: Artifact, replace: bool = False) -> Manifest:
    """Accept what an island made by content: all files as the manifest says, and of a job a network of finite weights.

    From then on the run's readers take these very bytes or none, whatever its island writes. `replace`: also in place
    of another one that was accepted before. Raises MissingArtifact, CorruptArtifact, DriftError.
    """
    manifest = run.finished(artifact) or run.require(artifact)
    if artifact.trains:
        _require_network(run, artifact, manifest)
    for name in manifest.files:
        run.check(manifest, name)
    run.accept(manifest, replace)
    return manifest


def _require_network(run: Run, artifact: Artifact, manifest: Manifest) -> None:
    info, spec = TrainedInfo.of(manifest), spec_of(run.config, artifact.kind, artifact.cluster)
    named = {name: manifest.files.get(f"{info.weights}/{name}") for name in NETWORK}
    if None in named.values():
        raise CorruptArtifact(f"{run.url}/{artifact}: its manifest lists no network", run.mend(artifact))
    Weights(artifact, info.weights, info.step, final=True).require_small(run, named, network_bytes(spec))
    described, tensors = (run.read(artifact, f"{info.weights}/{name}", manifest) for name in NETWORK)
    parse_network(described, tensors, f"{run.url}/{artifact}/{info.weights}", spec, load_base(run, artifact))
