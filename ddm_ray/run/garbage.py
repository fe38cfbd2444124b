"""Garbage collection: objects of a run that no artifact needs any more. Unfinished jobs and stages are left alone."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ddm_ray.errors import CorruptArtifact, DDMError, DriftError
from ddm_ray.run import graph
from ddm_ray.run.base import derived_from
from ddm_ray.run.chunk_records import PLAN, RECORDS, stem_of_file
from ddm_ray.run.graph import Artifact
from ddm_ray.run.inventory import inventory
from ddm_ray.run.listing import with_all_files
from ddm_ray.run.manifest import NAME, Manifest
from ddm_ray.run.run import Run
from ddm_ray.store.disk import unfinished_below

UNFINISHED_SECONDS = 86400.0
"""Age from which an unfinished file counts as abandoned."""
STATES, MILESTONES, WEIGHTS = "states", "milestones", "weights without a manifest"
CHUNKS, UNFINISHED = "chunk files without a record", "unfinished files"


@dataclass(frozen=True)
class Leftover:
    """Garbage below one artifact, or below the run (""). `what` says what the objects are; `places` are their keys.

    A place that ends in "/" stands for everything below it. `files` is the number of objects, `bytes` their size.
    """

    artifact: str
    what: str
    places: tuple[str, ...]
    files: int
    bytes: int


def leftovers(run: Run, milestones: bool = False) -> list[Leftover]:
    """Garbage of a run, artifact by artifact. `milestones`: include weights that were published before the end.

    Milestones are kept while an evaluation that may measure them is under way. States are kept while a run that was
    derived from this one still has to continue from them. Artifacts that this run inherits belong to its base.
    Incomplete multipart uploads in a bucket are not found, since no listing shows them. Raises StorageError.
    """
    artifacts = [artifact for artifact in inventory(run) if not run.inherits(artifact)]
    finished = {artifact: manifest for artifact in artifacts if (manifest := _finished(run, artifact))}
    underway = {artifact for artifact in artifacts if artifact not in finished}
    awaited = _awaited(run)
    measured = any(each.kind == "evaluation" and run.store.exists(f"{each}/{PLAN}") for each in underway)
    left = list[Leftover]()
    for artifact, manifest in finished.items():
        sizes = run.store.sizes(artifact)
        if artifact.trains:
            accepted = run.manifest(artifact, accepted=True)
            named = [*manifest.files, *(accepted.files if accepted else ())]
            of_job = _of_job(artifact, named, sizes, milestones and not measured)
            left += [each for each in of_job if each.what != STATES or artifact not in awaited]
        else:
            strays = [name for name in sizes if _is_stray(run, artifact, manifest, name)]
            places = tuple(f"{artifact}/{name}" for name in strays)
            left += [Leftover(artifact, CHUNKS, places, len(strays), sum(sizes[name] for name in strays))]
    return [each for each in (*left, _unfinished(run, underway)) if each.files]


def delete_garbage(run: Run, left: Iterable[Leftover]) -> None:
    """Delete garbage. Objects that are already gone are skipped. Raises StorageError."""
    for each in left:
        for place in each.places:
            if place.endswith("/"):
                run.store.delete_one(f"{place}{NAME}")  # first, since it makes the rest an artifact
                run.store.delete(place.rstrip("/"))
            elif each.what == UNFINISHED:
                run.store.delete_unfinished(place)
            else:
                run.store.delete_one(place)


def _awaited(run: Run) -> set[Artifact]:
    """Jobs that a run derived from this one still has to continue; all jobs if such a run can't be read.

    It may be on a disk that isn't mounted now.
    """
    jobs = graph.trained_of(run.config)
    awaited = set[Artifact]()
    for url in derived_from(run.store):
        try:
            later = Run.open(url)
            trained = [job for job in jobs if job in graph.trained_of(later.config)]
            before = {job: [each.url for each in later.predecessors(job)] for job in trained}
            awaited |= {job for job in trained if run.url in before[job] and not later.manifest(job)}
            awaited |= _awaited(later) & {*jobs}
        except DDMError:
            return set(jobs)
    return awaited


def _finished(run: Run, artifact: Artifact) -> Manifest | None:
    """The manifest of a finished artifact; None if the artifact isn't finished, drifted, or has a damaged manifest."""
    with suppress(DriftError, CorruptArtifact):
        manifest = run.finished(artifact)
        return manifest and with_all_files(run, manifest)
    return None


def _of_job(artifact: Artifact, named: Iterable[str], sizes: Mapping[str, int], milestones: bool) -> list[Leftover]:
    """Garbage below the attempts of a finished job: all folders but those of the files that a manifest has `named`."""
    folders: dict[str, list[str]] = defaultdict(list)
    for key in sizes:
        words = key.split("/")
        if words[0] == "attempts" and len(words) > 4 and words[2] in ("state", "weights"):
            folders["/".join(words[:4])].append(key)
    for name in named:
        folders.pop("/".join(name.split("/")[:4]), None)
    places: dict[str, list[str]] = {STATES: [], WEIGHTS: [], MILESTONES: []}
    for folder in folders:
        published = f"{folder}/{NAME}" in sizes
        places[STATES if folder.split("/")[2] == "state" else MILESTONES if published else WEIGHTS].append(folder)
    if not milestones:
        places[MILESTONES].clear()
    return [
        Leftover(
            artifact,
            what,
            tuple(f"{artifact}/{folder}/" for folder in members),
            sum(len(folders[folder]) for folder in members),
            sum(sizes[key] for folder in members for key in folders[folder]),
        )
        for what, members in places.items()
    ]


def _is_stray(run: Run, artifact: Artifact, manifest: Manifest, name: str) -> bool:
    """True if neither the manifest nor the chunk's record names this file of a chunk."""
    stem = stem_of_file(name)
    if stem is None or name in manifest.files:
        return False
    for record in (f"{stem}.json", f"{stem}-last.json"):
        with suppress(FileNotFoundError):
            if f'"{name}"'.encode() in run.store.read(f"{artifact}/{RECORDS}/{record}"):
                return False
    return True


def _unfinished(run: Run, underway: Iterable[Artifact]) -> Leftover:
    """Unfinished files of killed processes on a local disk, without those of unfinished artifacts."""
    root = run.store.local
    files = unfinished_below(root, UNFINISHED_SECONDS) if root else []
    sizes = {path.relative_to(root).as_posix(): size for path, size in files if root}
    kept = tuple(f"{artifact}/" for artifact in underway)
    places = tuple(key for key in sizes if not key.startswith(kept))
    return Leftover("", UNFINISHED, places, len(places), sum(sizes[key] for key in places))
