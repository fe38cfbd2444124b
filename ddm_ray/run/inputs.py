"""The artifacts that a run of a configuration needs, and those that each of them is made from."""

from collections.abc import Callable

from ddm_ray.config import RunConfig
from ddm_ray.config.parts import train_of
from ddm_ray.run.graph import EXTRAS, KINDS, PARTITION, ROWS, Artifact, needed_of, part_of, trained_of, wanted_of


def artifacts(config: RunConfig) -> tuple[Artifact, ...]:
    """All artifacts that a run needs, in the order in which they are made: that of `KINDS`."""
    return (*beginnings_of(config), *(artifact for kind in KINDS for artifact in needed_of(config, kind)))


def beginnings_of(config: RunConfig) -> tuple[Artifact, ...]:
    """Weights of other runs that training jobs begin with; empty if all begin with random weights."""
    return tuple(dict.fromkeys(each for job in trained_of(config) for each in beginning_of(config, job)))


def beginning_of(config: RunConfig, artifact: Artifact) -> tuple[Artifact, ...]:
    """The weights of another run that a training job begins with, if any: one artifact or none."""
    part = part_of(artifact)
    init = train_of(config, part, artifact.cluster).init_from if part else None
    if init is None or part is None:
        return ()
    alone = init.network == "own" or init != train_of(config, part).init_from
    return (Artifact(f"beginnings/{artifact.replace('/', '-') if alone else part}"),)


def inputs(config: RunConfig, artifact: Artifact) -> tuple[Artifact, ...]:
    """The artifacts that an artifact is made from."""
    return (*KINDS[artifact.kind].inputs(config, artifact), *beginning_of(config, artifact))


def based_on(config: RunConfig, artifact: Artifact) -> tuple[Artifact, ...]:
    """The artifact of the base that rows and parts of the partition of a derived run follow from, if they do."""
    if artifact == ROWS and config.changes.appended:
        return (ROWS,)
    return (PARTITION,) if artifact.stage == "partition" and config.changes.of_clusters else ()


def first_missing(config: RunConfig, artifact: Artifact, lacks: Callable[[Artifact], bool]) -> Artifact:
    """The first missing artifact of those that an artifact is made from; itself if none of them is missing."""
    needed = (each for each in inputs(config, artifact) if each.kind not in EXTRAS and lacks(each))
    return next((first_missing(config, each, lacks) for each in needed), artifact)


def several_missing(config: RunConfig, artifact: Artifact, lacks: Callable[[Artifact], bool]) -> bool:
    """True if an artifact is a model of the mixture, one place trains all of these, and several are missing."""
    models = () if config.partition.given else wanted_of(config)
    return artifact in models and sum(map(lacks, models)) > 1


def committed_by_stage(config: RunConfig, artifact: Artifact) -> Artifact:
    """The artifact that the stage makes to make this one: the partition for its parts, and all rows for some.

    An owner's rows and shard are made alone.
    """
    if config.partition.given and artifact.kind in ("rows", "shard"):
        return artifact
    return {"partition": PARTITION, "prepare": ROWS}.get(artifact.stage, artifact)
