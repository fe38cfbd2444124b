"""The stage `prepare`: source -> decoded chunks -> embedded parts -> the artifact of rows."""

from collections.abc import Collection
from functools import partial

from ddm_ray.config import DataConfig, RunConfig
from ddm_ray.data import OnProgress, no_progress
from ddm_ray.data.prepare.decoding import read_decoded
from ddm_ray.data.prepare.finalize import check_rejected, commit
from ddm_ray.data.prepare.fit_embedder import fit_embedder
from ddm_ray.data.prepare.make_rows import MakeRows
from ddm_ray.data.prepare.new_files import list_joined, list_new, rows_so_far, take_networks
from ddm_ray.data.prepare.records import RowsRecord, RowsStore, SourcePlan, rows_store
from ddm_ray.data.sharded.stage import ShareRead, make_chunks
from ddm_ray.data.sharded.work import Executor
from ddm_ray.data.sources import Source, absolute_name, open_source
from ddm_ray.data.sources import chunk_rows as rows_per_chunk
from ddm_ray.errors import ConfigError, DataError, DriftError
from ddm_ray.placement import PreparePlacement
from ddm_ray.remedies import Give
from ddm_ray.run.graph import ROWS, Artifact, owner_rows
from ddm_ray.run.info import RowsInfo
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import Run
from ddm_ray.spelling import numbers_in_words

MAX_REJECTED = 0.05
MIN_READ = 1000
"""Rows to read before the rejected share is judged."""


def prepare(
    run: Run,
    progress: OnProgress | None = None,
    placement: PreparePlacement | None = None,
    source: str | None = None,
    cluster: int | None = None,
    max_rejected: float = MAX_REJECTED,
    chunk_rows: int | None = None,
    execute: Executor[RowsRecord] | None = None,
) -> Manifest:
    """Make the artifact `rows` from the run's source. A no-op if it is finished.

    `source`, `cluster`: one owner's, if shards are given. `chunk_rows`: rows of a part; None: as many as fill 64 MiB.
    `execute`: `sharded.serial.serial`, or None for Ray Data on the initialised Ray. A killed call is resumed by calling
    again; concurrent calls on the same rows are harmless. Raises DataError if no row can be used, more than the share
    `max_rejected` can't, an id occurs twice or a network doesn't fit; ConfigError, DriftError, CorruptArtifact,
    StorageError, RayError.
    """
    artifact = rows_artifact(run, cluster)
    on_progress, placement = progress or no_progress, placement or PreparePlacement()
    chunks = rows_store(run, artifact)
    finished = run.finished(artifact)
    plan = None if finished else chunks.begun()
    begun_from = RowsInfo.of(finished).source if finished else plan.source if plan else None
    name = source_of(run, artifact, begun_from, source, cluster)
    if finished:
        return finished
    require_known_sizes(run.config.data)
    opened = open_source(run.config.data, name, chunk_rows)
    earlier = rows_so_far(run)[:-1] if artifact == ROWS and run.config.changes.appended else []
    beside = _rows_beside(run, artifact)
    if plan is None:
        on_progress(0.0, "listing the source")
        rows = chunk_rows or rows_per_chunk(run.config.data)
        if beside:
            plan = chunks.plan(partial(list_joined, beside, opened, name, rows))
        elif earlier:
            plan = chunks.plan(partial(_list_appended, run, earlier, name, rows))
        else:
            plan = chunks.plan(partial(list_source, run.config, name, opened, rows))
        if plan.source != name:  # a concurrent command has begun the rows
            raise _other_source(run, artifact, plan.source, name)
    if not plan.bounded:
        older = "was begun by an older version, which cut chunks and decoded images otherwise"
        raise DriftError(f"{chunks.url} {older}", run.remake(artifact))
    opened = opened.planned(plan.chunk_rows, plan.classes, plan.numbered)
    if networks := beside or (earlier[-1] if earlier else None):
        take_networks(chunks, networks)
    else:
        on_progress(0.0, "fitting the embedder")
        fit_embedder(chunks, plan, opened, on_progress)
    if execute is None:
        from ddm_ray.data.sharded.ray_data import RayData

        execute = RayData(placement)
    read = partial(read_decoded, source=opened, config=run.config.data)
    maker = MakeRows(chunks, "cuda" if placement.use_gpu else "cpu")
    observer = _Observer(chunks, plan, on_progress, max_rejected)
    records = make_chunks(chunks, plan, execute, read, maker, observer)
    on_progress(0.99, "checking")
    check_rejected(chunks, plan, records, max_rejected)
    manifest = commit(chunks, plan, records, earlier)
    info = RowsInfo.of(manifest)
    on_progress(1.0, f"{info.rows} rows, {info.rejected} rejected")
    return manifest


def _rows_beside(run: Run, artifact: Artifact) -> RowsStore | None:
    """The rows of the base that those of new clusters are to be like; None for other rows, and for given shards.

    Raises MissingArtifact if they stayed behind.
    """
    if artifact == ROWS or run.config.partition.given:
        return None
    return rows_so_far(run.base or run)[-1]


def _list_appended(run: Run, earlier: list[RowsStore], name: str, rows: int) -> SourcePlan:
    """The plan of new files, if the process was killed between writing run.json and the plan."""
    new, appended = list_new(earlier, name, rows), run.config.changes.appended
    assert appended
    if new.listing != appended.listing:
        raise DriftError(
            f"{run.url}: was begun with {appended.files:,} new files, and {name} has {len(new.files):,} others by now;"
            " delete it, and derive it again"
        )
    return new.plan


def require_known_sizes(config: DataConfig) -> None:
    """Raise ConfigError, with the field to set, for networks that would encode rows to other shapes than the run's.

    Reads the networks' own configurations from folders and this machine's cache. Other networks are checked when they
    are loaded.
    """
    if config.text is not None:
        from ddm_ray.models import text  # imports torch, which rows of pixels and labels don't need

        text.require_known_encoders(config.text)
    if config.latents is not None:
        from ddm_ray.models import latents

        latents.require_known_autoencoder(config.latents, config.channels)


def rows_artifact(run: Run, cluster: int | None) -> Artifact:
    """The artifact that `prepare` makes: that of owner `cluster` if shards are given, or of a cluster that joined.

    Raises ConfigError.
    """
    config = run.config
    if not config.partition.given:
        if cluster is None:
            return ROWS
        if joined := config.changes.joined_with(cluster):
            return owner_rows(joined.clusters[0])
        raise ConfigError(f"{run.url}: cluster is for shards that are given (partition.method given); leave it out")
    known = numbers_in_words(config.partition.clusters)
    if cluster is None:
        raise ConfigError(f"{run.url}: shards are given", Give("cluster", "name the owner of these rows", known))
    if cluster not in config.partition.clusters:
        raise ConfigError(f"cluster {cluster}: this run has clusters {known}")
    return owner_rows(cluster)


def source_of(run: Run, artifact: Artifact, begun_from: str | None, source: str | None, cluster: int | None) -> str:
    """The source of the rows: the one they were begun from, else an owner's `source`, else the configured one.

    Raises DriftError if they were begun from another one than `source`, ConfigError if it is missing or not allowed.
    """
    if cluster is None and source is not None:
        raise ConfigError(
            f"{run.url}: source is for shards that are given; otherwise set data.source when the run begins"
        )
    # Made absolute, since Ray's workers have other current folders.
    joined = None if cluster is None else run.config.changes.joined_with(cluster)
    source = absolute_name(source) if source is not None else joined.source if joined else None
    if begun_from is not None and source not in (None, begun_from):
        raise _other_source(run, artifact, begun_from, source)
    if cluster is not None and not (begun_from or source):
        raise ConfigError(f"{run.url}: has no source yet", Give("source", f"name the images of owner {cluster}", "URI"))
    return begun_from or source or absolute_name(run.config.data.source)


def _other_source(run: Run, artifact: Artifact, begun_from: str, source: str) -> DriftError:
    return DriftError(f"{run.url}/{artifact} was begun from {begun_from}, not from {source}", run.remake(artifact))


def list_source(config: RunConfig, name: str, source: Source, chunk_rows: int) -> SourcePlan:
    """The plan for rows of a source called `name`.

    Raises DataError if folders would name the classes though shards are given; and as `Source.list`.
    """
    listing = source.list()
    classes, numbered = listing.classes, listing.numbered
    if config.partition.given and classes is not None:
        if numbered is None:
            raise DataError(
                f"source {name}: data.num_classes only counts the classes, and owners' folders would mean other"
                " classes at each; begin a new run, and name them with data.class_names"
            )
        classes = numbered = None  # all owners have agreed on the meaning of numbers: they are labels
    rows = min(chunk_rows, listing.chunk_rows or chunk_rows)
    return SourcePlan(name, rows, classes, listing.units, listing.ignored, True, numbered)


class _Observer:
    """Shows the share of the source's bytes that is read and the rate, and judges the rejected rows."""

    def __init__(self, chunks: RowsStore, plan: SourcePlan, on_progress: OnProgress, max_rejected: float):
        self._chunks, self._plan = chunks, plan
        self._on_progress, self._max_rejected = on_progress, max_rejected
        self._share = ShareRead[RowsRecord](plan.units)
        self._records: Collection[RowsRecord] = ()
        self._rows, self._rejected = 0, 0

    def begin(self, records: Collection[RowsRecord]) -> None:
        """See ChunkObserver."""
        self._records = records
        self._share.begin(records)
        for record in records:
            self._count(record)
        self._on_progress(self._share.fraction, "loading networks, then decoding and embedding")

    def add(self, record: RowsRecord, until: float) -> None:
        """See ChunkObserver. Raises DataError once more rows are rejected than all expected rows allow."""
        self._share.advance(record.key.unit, until)
        self._count(record)
        self._show()
        num_read = self._rows + self._rejected
        if num_read >= MIN_READ:
            expected = self._share.expected(num_read)
            if self._rejected > self._max_rejected * expected:
                check_rejected(self._chunks, self._plan, self._records, self._max_rejected, expected)

    def _count(self, record: RowsRecord) -> None:
        self._rows += record.rows
        self._rejected += record.rejected

    def _show(self) -> None:
        note = f"{self._rows} rows, {self._rejected} rejected{self._share.rate(self._rows)}"
        self._on_progress(self._share.fraction, note)
