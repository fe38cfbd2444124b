"""The artifacts of a run as data: their kinds, where each lies, its inputs, and the stage that makes it.

To add a kind, add a row to `KINDS`, its record to `run/info.py`, its configuration, and the stage that makes it. A kind
that is trained has the stage `train` (attempts, states, status and launches follow from that) and its derivation in
`train/job.py`. To add a stage, add its name to `Stage` and a verb to the command line.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, Self

from ddm_ray.config import RunConfig
from ddm_ray.config.parts import Part
from ddm_ray.run import fields
from ddm_ray.run.fields import Reads
from ddm_ray.run.info import (
    BeginningInfo,
    CentroidsInfo,
    EvaluationInfo,
    Info,
    PartitionInfo,
    ReferenceInfo,
    ReportInfo,
    RowsInfo,
    ShardInfo,
    TrainedInfo,
)

Stage = Literal["begin", "prepare", "partition", "train", "replay", "evaluate"]
_NUMBER = re.compile(r"[0-9]{3,9}")
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
"""Pattern of the names of evaluations and references."""
_NAME = re.compile(NAME_PATTERN)


class Artifact(str):
    """One artifact of a run, as its path in the run: `Artifact("experts/003")`. Raises ValueError for other paths.

    `kind` names its row of `KINDS`. If a kind has many artifacts, `cluster` or `name` says which one it is.
    """

    kind: str
    cluster: int | None
    name: str | None

    def __new__(cls, path: str) -> Self:
        """Parse a path."""
        for kind, row in KINDS.items():
            prefix, _, suffix = (row.member or "").partition("{")
            member = path.removeprefix(prefix) if prefix and path.startswith(prefix) else None
            if path == row.path:
                return cls._build(path, kind)
            if member and suffix == "}" and _NAME.fullmatch(member):
                return cls._build(path, kind, name=member)
            if member and _NUMBER.fullmatch(member) and row.member and path == row.member.format(int(member)):
                return cls._build(path, kind, cluster=int(member))
        raise ValueError(f"{path!r:.200} is no artifact of a run")

    @classmethod
    def _build(cls, path: str, kind: str, cluster: int | None = None, name: str | None = None) -> Self:
        artifact = super().__new__(cls, path)
        artifact.kind, artifact.cluster, artifact.name = kind, cluster, name
        return artifact

    @property
    def stage(self) -> Stage:
        """The stage that makes the artifact."""
        return KINDS[self.kind].stage

    @property
    def info(self) -> type[Info]:
        """The class of the record in the artifact's manifest."""
        return KINDS[self.kind].info

    @property
    def units(self) -> str:
        """Name of the units that its stage makes chunk by chunk; empty for other stages."""
        return KINDS[self.kind].units

    @property
    def trains(self) -> bool:
        """True if a training job makes the artifact, attempt by attempt."""
        return self.stage == "train"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Properties of all artifacts of a kind.

    `path`: path of the only artifact. `member`: path of one of many, by its cluster or name. `needed`: True if a run of
    this configuration needs the only artifact, or one for each cluster. `optional`: a run may have such artifacts
    without needing them. `surveyed`: a survey judges such artifacts. It can't judge references, since a comparison may
    have made one by other settings than the run's. `reads`: the fields of the configuration that the stage reads.
    `inputs`: the artifacts that it is made from. `part`: the part of the configuration with its training schedule, if
    it is trained. `extra`: a mixture doesn't need it. `units`: name of the units that the stage makes chunk by chunk,
    if it does.
    """

    path: str | None = None
    member: str | None = None
    stage: Stage
    info: type[Info]
    reads: Reads
    inputs: Callable[[RunConfig, Artifact], tuple[Artifact, ...]]
    needed: Callable[[RunConfig], bool] = lambda config: False
    optional: bool = False
    surveyed: bool = True
    part: Part | None = None
    extra: bool = False
    units: str = ""


def needed_of(config: RunConfig, kind: str) -> tuple[Artifact, ...]:
    """The artifacts of a kind that a run needs."""
    row = KINDS[kind]
    if not row.needed(config):
        return ()
    return rows_of(config) if kind == "rows" else (Artifact(row.path),) if row.path else _by_cluster(config, kind)


def rows_of(config: RunConfig) -> tuple[Artifact, ...]:
    """The rows of a run: all in one, or one for each owner of a given shard, and those of clusters that joined."""
    if config.partition.given:
        return _by_cluster(config, "rows")
    joined = (owner_rows(each.clusters[0]) for each in config.changes.joined)
    return (*_pooled_rows(config), *joined)


def _pooled_rows(config: RunConfig) -> tuple[Artifact, ...]:
    return (ROWS,) if config.changes.pooled or config.changes.appended else ()


def shards_of(config: RunConfig) -> tuple[Artifact, ...]:
    """The shards by cluster."""
    return _by_cluster(config, "shard")


def experts_of(config: RunConfig) -> tuple[Artifact, ...]:
    """The experts by cluster."""
    return _by_cluster(config, "expert")


def replays_of(config: RunConfig) -> tuple[Artifact, ...]:
    """Replays by cluster: the images that a router is trained on instead of rows. Empty if it is trained on rows."""
    return needed_of(config, "replay")


def part_of(artifact: Artifact) -> Part | None:
    """The part of the configuration with a training job's schedule; None for artifacts that aren't trained."""
    return KINDS[artifact.kind].part


def trained_of(config: RunConfig) -> tuple[Artifact, ...]:
    """Everything that training jobs make. If owners give their shards, nothing that needs all rows in one place."""
    return tuple(each for kind, row in KINDS.items() if row.stage == "train" for each in needed_of(config, kind))


def wanted_of(config: RunConfig, extras: Collection[str] = ()) -> tuple[Artifact, ...]:
    """The trained artifacts that a mixture needs, and those of the kinds `extras`."""
    return tuple(each for each in trained_of(config) if each.kind not in EXTRAS or each.kind in extras)


def _by_cluster(config: RunConfig, kind: str) -> tuple[Artifact, ...]:
    return tuple(_member(kind, cluster) for cluster in config.partition.clusters)


def _always(config: RunConfig) -> bool:
    return True


def _if_pooled(config: RunConfig) -> bool:
    return not config.partition.given


def _if_replayed(config: RunConfig) -> bool:
    return bool(config.router.replay)


def rows_of_shard(config: RunConfig, artifact: Artifact) -> tuple[Artifact, ...]:
    """The rows that a shard is made from; none for a child of a cluster: its rows are the base's."""
    assert artifact.cluster is not None
    if config.partition.given:
        return (owner_rows(artifact.cluster),)
    if joined := config.changes.joined_with(artifact.cluster):
        return (owner_rows(joined.clusters[0]),)
    children = [child for children in config.changes.split.values() for child in children]
    return () if artifact.cluster in children else _pooled_rows(config)


def _rows_of_partition(config: RunConfig, artifact: Artifact) -> tuple[Artifact, ...]:
    # Manifests of shards are files of the partition: from owners, and of clusters that change, it has nothing else.
    collected = config.partition.given or (config.changes.of_clusters and not config.changes.appended)
    return () if collected else _pooled_rows(config)


def _shard_of_expert(config: RunConfig, artifact: Artifact) -> tuple[Artifact, ...]:
    assert artifact.cluster is not None
    return (shard(artifact.cluster),)


def _teachers_of_student(config: RunConfig, artifact: Artifact) -> tuple[Artifact, ...]:
    router = () if config.student.teacher == "label" else (ROUTER,)
    return (PARTITION, *experts_of(config), *router)


def _examples_of_router(config: RunConfig, artifact: Artifact) -> tuple[Artifact, ...]:
    return (PARTITION, *replays_of(config))


def _expert_of(config: RunConfig, artifact: Artifact) -> tuple[Artifact, ...]:
    assert artifact.cluster is not None
    return (PARTITION, expert(artifact.cluster))


def _partitioned(**others: Any) -> Kind:
    return Kind(stage="partition", reads=fields.reading("partition"), **others)


def _trained(**others: Any) -> Kind:
    return Kind(stage="train", info=TrainedInfo, **others)


KINDS = {
    "beginning": Kind(
        member="beginnings/{}",
        stage="begin",
        info=BeginningInfo,
        reads=fields.reading("data", "flow"),
        inputs=lambda *_: (),
    ),
    "rows": Kind(
        path="rows",
        member="rows/cluster={:03d}",  # one owner's
        stage="prepare",
        info=RowsInfo,
        needed=_always,
        reads=fields.of_rows,
        inputs=lambda *_: (),
        units="units of the source",
    ),
    "centroids": _partitioned(path="partition/centroids", info=CentroidsInfo, inputs=_rows_of_partition),
    "shard": _partitioned(
        member="partition/shards/cluster={:03d}",
        info=ShardInfo,
        inputs=rows_of_shard,
        needed=lambda config: config.partition.given,
    ),
    "partition": _partitioned(path="partition", info=PartitionInfo, inputs=_rows_of_partition, needed=_always),
    "report": _partitioned(path="partition/report", info=ReportInfo, inputs=lambda *_: (PARTITION,), optional=True),
    "expert": _trained(
        member="experts/{:03d}", reads=fields.of_denoiser, part="expert", inputs=_shard_of_expert, needed=_always
    ),
    "replay": Kind(
        member="replay/cluster={:03d}",
        stage="replay",
        info=ShardInfo,
        reads=fields.of_replay,
        inputs=_expert_of,
        needed=_if_replayed,
        units="portions of images",
    ),
    "router": _trained(
        path="router",
        reads=fields.reading("data", "flow", "partition.num_clusters", "router"),
        part="router",
        inputs=_examples_of_router,
        needed=lambda config: _if_pooled(config) or _if_replayed(config),
    ),
    "monolith": _trained(
        path="monolith",
        reads=fields.of_denoiser,
        part="expert",
        inputs=lambda *_: (PARTITION,),
        needed=_if_pooled,
        extra=True,
    ),
    "student": _trained(
        path="student",
        reads=fields.of_student,
        part="student",
        inputs=_teachers_of_student,
        needed=_if_pooled,
        extra=True,
    ),
    "evaluation": Kind(
        member="eval/{}",
        stage="evaluate",
        info=EvaluationInfo,
        reads=fields.reading("evaluate", "sample"),
        inputs=lambda config, _: trained_of(config),
        optional=True,
        units="portions of images",
    ),
    "reference": Kind(
        member="references/{}",
        stage="evaluate",
        info=ReferenceInfo,
        reads=fields.reading("data", "evaluate.features", "evaluate.real_rows", "evaluate.seed"),
        inputs=lambda *_: (PARTITION,),
        optional=True,
        surveyed=False,
    ),
}

ROWS: Artifact = Artifact("rows")
PARTITION: Artifact = Artifact("partition")
CENTROIDS: Artifact = Artifact("partition/centroids")
REPORT: Artifact = Artifact("partition/report")
ROUTER: Artifact = Artifact("router")
MONOLITH: Artifact = Artifact("monolith")
STUDENT: Artifact = Artifact("student")
EXTRAS = tuple(kind for kind, row in KINDS.items() if row.extra)
"""Kinds of networks that a mixture doesn't need."""


def owner_rows(cluster: int) -> Artifact:
    """The rows of one owner, if owners give their shards. They are never in one place with another owner's rows."""
    return _member("rows", cluster)


def shard(cluster: int) -> Artifact:
    """The rows of one cluster, on which its expert trains."""
    return _member("shard", cluster)


def expert(cluster: int) -> Artifact:
    """The expert of one cluster."""
    return _member("expert", cluster)


def replay(cluster: int) -> Artifact:
    """Images that one cluster's expert samples, on which the router is trained."""
    return _member("replay", cluster)


def evaluation(name: str) -> Artifact:
    """One evaluation."""
    return _member("evaluation", name)


def reference(name: str) -> Artifact:
    """Features of real rows, with which evaluations compare samples."""
    return _member("reference", name)


def _member(kind: str, which: int | str) -> Artifact:
    member = KINDS[kind].member
    assert member
    return Artifact(member.format(which))
