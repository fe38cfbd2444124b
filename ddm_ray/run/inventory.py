"""The artifacts of a run: those that it needs, and those that it has without needing them."""

import re
from collections.abc import Iterable
from contextlib import suppress

from ddm_ray.config import RunConfig
from ddm_ray.errors import ConfigError
from ddm_ray.remedies import Begin
from ddm_ray.run.graph import CENTROIDS, KINDS, NAME_PATTERN, REPORT, Artifact, shards_of
from ddm_ray.run.inputs import artifacts
from ddm_ray.run.manifest import NAME, FileRecord, Manifest
from ddm_ray.run.run import Run


def inventory(run: Run, surveyed: bool = False) -> list[Artifact]:
    """All artifacts that a run needs, or has or may have without needing them, in the order in which they are made.

    `surveyed`: only those of kinds that status judges.
    """
    order = list(KINDS)
    kinds = [kind for kind, row in KINDS.items() if row.surveyed or not surveyed]
    every = [*artifacts(run.config), *(artifact for kind in kinds for artifact in optional(run, kind))]
    return sorted(every, key=lambda artifact: order.index(artifact.kind))


def every_artifact(config: RunConfig, others: Iterable[Artifact] = ()) -> list[Artifact]:
    """All artifacts that a run of a configuration may have, and `others`, each after those that it is made from.

    References and evaluations aren't among them, since they have any name.
    """
    order = list(KINDS)
    parts = [REPORT, *shards_of(config), *([CENTROIDS] if config.partition.by_kmeans else [])]
    return sorted({*artifacts(config), *parts, *others}, key=lambda artifact: (order.index(artifact.kind), artifact))


def optional(run: Run, kind: str) -> list[Artifact]:
    """The artifacts of a kind that a run may have without needing them; of a kind with many, those that have begun.

    Folders with an invalid name are skipped.
    """
    row = KINDS[kind]
    if not row.optional:
        return []
    if row.path:
        return [Artifact(row.path)]
    folder = (row.member or "").partition("/")[0]
    names = run.store.folders(folder)
    return [Artifact(f"{folder}/{name}") for name in names if re.fullmatch(NAME_PATTERN, name)]


def evaluations(run: Run) -> list[Artifact]:
    """All evaluations that have begun, by name."""
    return optional(run, "evaluation")


def parts_of(manifest: Manifest) -> dict[Artifact, FileRecord]:
    """The artifacts of which an artifact lists the manifests, as a partition does of its shards, with the records."""
    parts: dict[Artifact, FileRecord] = {}
    for name, record in manifest.files.items():
        folder, _, last = name.rpartition("/")
        with suppress(ValueError):  # a folder that is no artifact's
            if folder and last == NAME:
                parts[Artifact(f"{manifest.artifact}/{folder}")] = record
    return parts


def require_replay(run: Run) -> None:
    """Raise ConfigError if the run's router is trained on rows."""
    if not run.config.router.replay:
        raise ConfigError(
            f"{run.url}: its router is trained on rows (router.replay is 0, not a number of images)",
            Begin(run.url, "router.replay", "N"),
        )
