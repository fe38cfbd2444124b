"""Weights of others that trainings of a run begin with (`train.init_from`): looked at, then copied into the run.

A copy is an artifact, known by its network's content: a training made from it doesn't ask its source again, on any
island, and runs that begin with the same weights know them for the same, wherever these were read.
"""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from torch import nn

from ddm_ray.config import InitFrom, RunConfig
from ddm_ray.config.derive import NEAREST
from ddm_ray.config.parts import train_of
from ddm_ray.errors import MissingArtifact
from ddm_ray.models import weights
from ddm_ray.models.adapters import layers_of
from ddm_ray.models.fingerprints import fingerprint_of
from ddm_ray.models.flops import num_parameters
from ddm_ray.models.spec import spec_of
from ddm_ray.run.base import Base
from ddm_ray.run.graph import EXTRAS, Artifact, part_of, trained_of
from ddm_ray.run.info import BeginningInfo
from ddm_ray.run.inputs import beginning_of
from ddm_ray.run.manifest import FileRecord
from ddm_ray.run.run import RUN_FILE, Run
from ddm_ray.sampling.run_models import NETWORK, parse_network
from ddm_ray.sampling.trained_networks import read_trained
from ddm_ray.store.store import Store


@dataclass(frozen=True)
class _Copy:
    """A copy of weights, the first job that begins with it, and where it is read."""

    artifact: Artifact
    job: Artifact
    init: InitFrom

    def read(self, config: RunConfig) -> nn.Module | None:
        """The network, of a shape that fits; None for a namesake that its source lacks and a mixture does without."""
        try:
            network = read_trained(config, self.job, self.init)
            if "adapter" in (spec := spec_of(config, self.job.kind, self.job.cluster)):
                layers_of(network, spec["adapter"]["targets"])  # raises if it has no layer of a target
            return network
        except MissingArtifact:
            if self.init.network == "own" and self.job.kind in EXTRAS:
                return None
            raise

    def commit(self, run: Run, network: nn.Module) -> None:
        """Write the copy."""
        spec = weights.base_spec(spec_of(run.config, self.job.kind, self.job.cluster))
        tensors, described = weights.weights_as_bytes(network, spec)
        files = dict(zip(NETWORK, (described.encode(), tensors), strict=True))
        for name, data in files.items():
            run.store.write(f"{self.artifact}/{name}", data)
        records = {name: FileRecord.of(data) for name, data in files.items()}
        source = " ".join(filter(None, (self.init.source, self.init.network)))
        info = BeginningInfo(source=source, parameters=num_parameters(network))
        content = fingerprint_of(network, weights.complete_spec(json.loads(described)))
        run.commit_records(self.artifact, records, info, content)


def create_run(
    url: str, config: RunConfig, on_replaced: Callable[[str], None] | None = None
) -> tuple[Run, list[Artifact]]:
    """Begin a run with copies of the weights that its trainings begin with; also the copies that their source lacks.

    Nothing is written before all of them are seen to fit. What is there already isn't read again, so that a killed
    command is finished by the same one. `on_replaced`: see `Run.create`. Raises ConfigError, which names field and
    tensor, and as `Run.create`.
    """
    copies, store = list(_copies(config)), Store(url)
    if copies and not store.exists(RUN_FILE):
        base = Base.read(store)
        require_initial_weights(config, base.kept if base else ())
    Run.create(url, config, on_replaced=on_replaced)
    run, lacking = Run.open(url), list[Artifact]()
    for copy in copies:
        if run.finished(copy.artifact):
            continue
        network = copy.read(config)  # again: all at once may fill the memory
        if network is None:
            lacking.append(copy.artifact)
        else:
            copy.commit(run, network)
    return run, lacking


def require_initial_weights(config: RunConfig, kept: Collection[str] = ()) -> None:
    """Raise as `create_run` for weights that aren't there, or don't fit; nothing is written.

    `kept`: artifacts that the run has from its base.
    """
    for copy in _copies(config):
        if copy.artifact not in kept:
            copy.read(config)


def unfinished_nearest(run: Run) -> list[Artifact]:
    """The experts that are to begin as the nearest one, and have no copy of its weights yet."""
    begins = {copy.job: copy for copy in _copies(run.config, nearest=True)}
    return [job for job, copy in begins.items() if not run.finished(copy.artifact)]


def copy_nearest(run: Run, job: Artifact, cluster: int) -> None:
    """Copy the weights of the expert of a `cluster` of the base, with which another expert begins.

    Raises ConfigError if that is another network, and as `create_run`.
    """
    [copy] = [each for each in _copies(run.config, nearest=True) if each.job == job]
    own = replace(copy, init=copy.init.model_copy(update={"network": f"expert {cluster}"}))
    network = own.read(run.config)
    assert network is not None
    own.commit(run, network)


def load_initial_weights(run: Run, artifact: Artifact, spec: dict[str, object]) -> nn.Module:
    """The network of a copy, in eval mode. Raises MissingArtifact, CorruptArtifact if a byte was altered."""
    manifest = run.require(artifact)
    described, tensors = (run.read(artifact, name, manifest) for name in NETWORK)
    return parse_network(described, tensors, f"{run.url}/{artifact}", spec)[0]


def _copies(config: RunConfig, nearest: bool = False) -> Iterator[_Copy]:
    """The copies of weights that are known from the start, or those of the nearest expert."""
    copied = set[Artifact]()
    for job in trained_of(config):
        part = part_of(job)
        init = train_of(config, part, job.cluster).init_from if part else None
        for artifact in beginning_of(config, job):
            if init and artifact not in copied and nearest == (init.network == NEAREST):
                copied.add(artifact)
                yield _Copy(artifact, job, init)
