"""Shards: the training data of each cluster's expert, in files with bytes that depend only on the set of rows.

C classes, K clusters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddm_ray.data import OnProgress, phase
from ddm_ray.data.partition.file_plan import ShardFile
from ddm_ray.data.partition.made_files import MadeFile
from ddm_ray.data.partition.passes import Executor, FileWork
from ddm_ray.data.partition.state import ExpectedShard
from ddm_ray.data.partition.tally import Tally
from ddm_ray.data.schema import HELDOUT, TRAIN
from ddm_ray.errors import RayError
from ddm_ray.models.null_text import NULL_TEXT
from ddm_ray.run.graph import shard
from ddm_ray.run.info import RowsInfo, ShardInfo
from ddm_ray.run.manifest import NAME, FileRecord, Manifest


def write_shards(
    work: FileWork, expected: Mapping[int, ExpectedShard], on_progress: OnProgress, execute: Executor
) -> dict[int, Manifest]:
    """Write a plan's shards; returns their manifests by cluster. Files that a killed partition recorded are kept.

    Raises RayError if rows were lost, StorageError.
    """
    written = {cluster: WrittenShard(Tally.none(work.rows.run.config.data)) for cluster in expected}
    missing = {file.place: file for file in work.plan.files}
    for file in work.made.find(work.plan.files):
        written[file.file.cluster].add(file)
        del missing[file.file.place]
    if missing:
        sorting = phase(on_progress, 0.0, 0.9, "sorting")
        for file in execute.write(work, list(missing.values()), sorting):
            written[file.file.cluster].add(file)
    manifests = {}
    for done, (cluster, each) in enumerate(expected.items()):
        on_progress(0.9 + 0.1 * done / len(expected), f"shard {each.cluster}")
        counts = [int(work.plan.rows[split][cluster]) for split in (TRAIN, HELDOUT)]
        manifests[cluster] = each.finished() or commit_shard(each, written[cluster], *counts)
    return manifests


@dataclass
class WrittenShard:
    """The files of a shard, their number of rows, and the tally of the training rows."""

    tally: Tally
    files: dict[ShardFile, FileRecord] = field(default_factory=dict)
    rows: int = 0

    def add(self, made: MadeFile) -> None:
        """Add a written file."""
        self.tally.join(made.tally)
        self.files[made.file] = made.record
        self.rows += made.rows


def commit_shard(expected: ExpectedShard, written: WrittenShard, train: int, heldout: int) -> Manifest:
    """Commit a shard from its written files. If rows are appended, it includes the files of the base run's shard.

    `train` and `heldout`: its numbers of rows. Raises RayError for lost rows.
    """
    run, cluster, changes = expected.run, expected.cluster, expected.run.config.changes
    if written.rows != train + heldout:
        raise RayError(f"{run.url}: lost rows of cluster {cluster}; the same command makes their files again")
    artifact, store = shard(cluster), run.store
    before = run.base.require(artifact) if run.base and changes.appended and cluster not in changes.made else None
    named = {name: each for name, each in before.files.items() if name != NULL_TEXT} if before else {}
    for file in sorted(written.files, key=lambda file: file.place):  # their order of writing is arbitrary
        named[file.name(changes.generation)] = written.files[file]
    of, rows = expected.rows
    if run.config.data.text is not None:
        data = of.read(rows, NULL_TEXT)
        store.write(f"{artifact}/{NULL_TEXT}", data)
        named[NULL_TEXT] = FileRecord.of(data)
    # Deletes only files that this shard doesn't name: a concurrent writer of the same shard names the same files.
    for name in store.sizes(artifact).keys() - named.keys() - {NAME}:
        if not run.inherits(f"{artifact}/{name}"):
            store.delete_one(f"{artifact}/{name}")
    counts_C, std = written.tally.counts_C.tolist(), written.tally.std()
    if before:
        earlier = ShardInfo.of(before)
        train, heldout = train + earlier.rows_train, heldout + earlier.rows_heldout
        counts_C = [sum(both) for both in zip(counts_C, earlier.counts_C, strict=True)]
    info = ShardInfo(
        cluster=cluster,
        rows=train + heldout,
        rows_train=train,
        rows_heldout=heldout,
        counts_C=tuple(counts_C),
        data_std=None if before else std,
        centroids=expected.centroids,
        networks=RowsInfo.of(made).networks if (made := of.manifest(rows)) else {},
    )
    return run.commit_records(artifact, named, info, identity=expected.identity)
