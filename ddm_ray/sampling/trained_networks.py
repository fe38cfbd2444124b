"""One trained network out of whatever holds it: a run, an exported pipeline, a folder of diffusers, a file of tensors.

It has to be the very network that a run asks for, or the field of the configuration that differs is named.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ddm_ray.config import InitFrom, RunConfig
from ddm_ray.config.networks import NETWORKS
from ddm_ray.errors import ConfigError, CorruptArtifact, DDMError, MissingArtifact
from ddm_ray.jobs.published import Weights
from ddm_ray.models import third_party, weights
from ddm_ray.models.foreign_weights import what_else, without_prefix
from ddm_ray.models.router import Router
from ddm_ray.models.spec import spec_of
from ddm_ray.run.graph import ROUTER, Artifact, expert, part_of, trained_of
from ddm_ray.run.manifest import Identity, drift
from ddm_ray.run.run import RUN_FILE, Run
from ddm_ray.sampling import pretrained
from ddm_ray.sampling.export_folder import is_ours
from ddm_ray.sampling.run_models import network_bytes, parse_network
from ddm_ray.spelling import numbers_in_words, printable
from ddm_ray.store.store import is_local

Spec = dict[str, Any]
TRANSFORMER = "transformer"
"""Folder of the network in a pipeline of diffusers; prefix of its tensors in ours."""
_ELSEWHERE = {
    "class": "a network of class",
    "config.image_size": "data.image_size",
    "config.channels": "data.channels",
    "config.num_classes": "data.num_classes",
    "config.text_dim": "data.text.dim",
    "config.num_experts": "partition.num_clusters",
    "flow.path": "flow.path",
    "flow.prediction": "flow.prediction",
}
"""Fields of the configuration that decide a field of a network's spec, where these aren't the network's own."""


def read_trained(config: RunConfig, job: Artifact, init: InitFrom) -> nn.Module:
    """The network that a job of a run begins with, in eval mode, in fp32.

    Raises ConfigError where the source is none, holds another network, or many and none is named; MissingArtifact for
    one that isn't there or has not finished; CorruptArtifact, all of which begin with the field.
    """
    spec, part = weights.base_spec(spec_of(config, job.kind, job.cluster)), part_of(job)
    own = None if job.cluster is None else config.experts.get(job.cluster)
    field = f"experts.{job.cluster}" if own and "init_from" in own.train else part
    try:
        return _read(config, spec, job, init, f"experts.{job.cluster}" if own and own.model else f"{part}")
    except DDMError as error:
        error.message = f"{field}.train.init_from: {error.message}"
        raise


def _read(config: RunConfig, spec: Spec, job: Artifact, init: InitFrom, part: str) -> nn.Module:
    source = Path(init.source).expanduser()
    if source.is_file():
        return weights.from_state(spec, without_prefix(_tensors(source), weights.build(spec, "meta").state_dict()))
    if not is_local(init.source) or (source / RUN_FILE).is_file():
        return _of_run(config, init, job, spec, part)
    if is_ours(source) or is_dense(source):
        return _of_pipeline(source, init, job, spec, part)
    if spec["class"] in NETWORKS and NETWORKS[spec["class"]].of_diffusers:
        return _of_diffusers(init.source, spec, part)
    if source.is_dir():
        raise ConfigError(f"{source}: holds no network of this run's kind, a {spec['class']}")
    raise MissingArtifact(f"{init.source}: no run, folder or file of weights is there")


def _name(init: InitFrom, job: Artifact) -> str:
    """Words for the network that is asked for. Raises ConfigError where none is named."""
    if init.network == "own" or (init.network is None and job.kind == "router"):
        return job.kind if job.cluster is None else f"{job.kind} {job.cluster}"
    if init.network is None:
        raise ConfigError(f"{init.source} holds several networks: set init_from.network to monolith, 'expert 0' or own")
    return init.network


def _of_run(config: RunConfig, init: InitFrom, job: Artifact, spec: Spec, part: str) -> nn.Module:
    run, name = (
        Run.open(str(Path(init.source).expanduser()) if is_local(init.source) else init.source),
        _name(init, job),
    )
    kind, _, number = name.partition(" ")
    artifact = expert(int(number)) if number else Artifact(kind)
    if artifact not in trained_of(run.config):
        known = numbers_in_words(run.config.partition.clusters)
        raise ConfigError(f"{run.url} has no {name}: its experts are {known}")
    where = f"{run.url}/{artifact}"
    if job.kind == "router" and config.changes.of_clusters:
        return _router_of_base(config, run)
    theirs = spec_of(run.config, artifact.kind, artifact.cluster)
    if "adapter" in theirs:
        export = "export that run's monolith, into which its adapter is merged, and name the export"
        raise ConfigError(f"{where} is an adapter, and trainings begin with whole networks: {export}")
    _require_same(theirs, spec, part, where)
    described, tensors = Weights.finished(run, artifact).read(run, network_bytes(spec))
    return parse_network(described, tensors, where, spec)[0]


def _router_of_base(config: RunConfig, base: Run) -> nn.Module:
    """The base's router for the clusters of a run that was derived from it: children have their parents' rows."""
    before, spec, own = list(base.config.partition.clusters), spec_of(base.config, "router"), spec_of(config, "router")
    like_own = {**spec, "config": {**spec["config"], "num_experts": own["config"]["num_experts"]}}
    _require_same(like_own, own, "router", f"{base.url}/{ROUTER}")
    described, tensors = Weights.finished(base, ROUTER).read(base, network_bytes(spec))
    router = parse_network(described, tensors, f"{base.url}/{ROUTER}", spec)[0]
    assert isinstance(router, Router)
    parents = {child: parent for parent, children in config.changes.split.items() for child in children}
    known = [parents.get(cluster, cluster) for cluster in config.partition.clusters]
    return router.with_experts([before.index(each) if each in before else None for each in known])


def _of_pipeline(folder: Path, init: InitFrom, job: Artifact, spec: Spec, part: str) -> nn.Module:
    """Networks of a folder that was exported: a mixture's, or a dense model's, which diffusers opens, too."""
    if (folder / TRANSFORMER).is_dir():
        return _of_dense(folder / TRANSFORMER, spec, part)
    kind, _, number = _name(init, job).partition(" ")
    name = f"{kind}_{int(number):03d}" if number else kind
    described, tensors = pretrained.read_network(folder, name)
    _require_same({**described, "flow": vars(described["flow"])}, spec, part, f"{folder}/{name}")
    return weights.load_model(spec, tensors)


def is_dense(folder: Path) -> bool:
    """True for a pipeline of one of our networks alone, also if others have saved it again."""
    config = folder / TRANSFORMER / third_party.CONFIG
    return config.is_file() and third_party.read_json(config).get("_class_name") == "DenseTransformer"


def _of_dense(folder: Path, spec: Spec, part: str) -> nn.Module:
    config = third_party.read_json(folder / third_party.CONFIG)
    theirs = {"class": config.get("kind"), "config": config.get("network"), "flow": config.get("flow")}
    if not isinstance(theirs["config"], dict) or not isinstance(theirs["flow"], dict):
        raise CorruptArtifact(f"{folder}: its {third_party.CONFIG} isn't that of an exported network")
    _require_same(theirs, spec, part, str(folder))
    tensors = _tensors(folder / pretrained.WEIGHTS)
    prefix = next(p for p in ("field.network.", "field.") if p == "field." or any(n.startswith(p) for n in tensors))
    return weights.from_state(spec, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})


def _of_diffusers(name: str, spec: Spec, part: str) -> nn.Module:
    """A transformer by its folder, that of its pipeline, or its name on the hub."""
    own: Any = weights.build(spec, "meta")  # first: says so where diffusers isn't installed
    import diffusers

    folder, kind = Path(name).expanduser(), spec["config"]["name"]
    if (folder / TRANSFORMER / third_party.CONFIG).is_file():
        folder /= TRANSFORMER
    if folder.is_dir():
        third_party.require_config(str(folder), "init_from")
        named = third_party.read_json(folder / third_party.CONFIG).get("_class_name")
        if named != kind:
            what = f"{folder} is a {printable(str(named), 60)}, and this run's network a {kind}"
            raise ConfigError(f"{what}: set {part}.model.name")
    read = third_party.load_pretrained_model(
        getattr(diffusers, kind), str(folder) if folder.is_dir() else name, "init_from"
    )
    configs = (_plain(each.config) for each in (read, own.transformer))
    theirs, ours = ({**spec, "config": {"name": kind, "arguments": each}} for each in configs)
    _require_same(theirs, ours, part, name)
    return weights.from_state(spec, {f"{TRANSFORMER}.{each}": value for each, value in read.state_dict().items()})


def _plain(config: Mapping[str, Any]) -> Any:
    """The arguments of a network of diffusers, as JSON has them."""
    return json.loads(json.dumps({name: value for name, value in config.items() if not name.startswith("_")}))


def _tensors(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise MissingArtifact(f"{path} is missing: fetch it again")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CorruptArtifact(f"{path}: {what_else(path)} ({third_party.brief(error)})") from None


def _require_same(theirs: Spec, ours: Spec, part: str, where: str) -> None:
    """Raise ConfigError, naming the field of the configuration, for another network than that of a run."""
    lines = drift(Identity(weights.complete_spec(ours)), Identity(weights.complete_spec(theirs)))
    if lines:
        field, _, values = lines[0].partition(": ")
        its, _, asked = values.partition(" -> ")
        own = _ELSEWHERE.get(field) or field.replace("config", f"{part}.model", 1)
        raise ConfigError(
            f"{printable(where, 200)} has {own} {printable(its, 60)}, and this run {printable(asked, 60)}"
        )
