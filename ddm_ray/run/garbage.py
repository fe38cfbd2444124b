"""Tidying: what of a run no artifact needs any more. Of a job, or a stage, that has only begun, all is left alone."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ddm_ray.errors import CorruptArtifact, DDMError, DriftError
from ddm_ray.run import graph
from ddm_ray.run.chunk_records import PLAN, RECORDS, stem_of_file
from ddm_ray.run.extension import EXTENDED
from ddm_ray.run.graph import NAME_PATTERN, REFERENCES, REPORT, Artifact
from ddm_ray.run.listing import with_all_files
from ddm_ray.run.manifest import NAME, Manifest
from ddm_ray.run.run import Run
from ddm_ray.store.disk import unfinished_below

UNFINISHED_SECONDS = 86400.0
"""Age from which on a file that has no name yet is one that nobody will finish."""
STATES, MILESTONES, WEIGHTS = "states", "milestones", "weights without a manifest"
CHUNKS, UNFINISHED = "chunk files without a record", "unfinished files"


@dataclass(frozen=True)
class Leftover:
    """Objects below one artifact, or below the run (""), of which `what` says what they are; `places`: their keys.

    A place that ends in "/" is all below it. `files` is the number of objects, `bytes` their size.
    """

    artifact: str
    what: str
    places: tuple[str, ...]
    files: int
    bytes: int


def leftovers(run: Run, milestones: bool = False) -> list[Leftover]:
    """Leftovers of a run, artifact by artifact; `milestones`: weights that were published on the way are some, too.

    They aren't while an evaluation is under way, which may measure them. Nor are states from which a run that extends
    this one is still to go on; what such a run inherits is its base's. Uploads in parts that a kill left in a bucket
    aren't listed: no listing shows them. Raises StorageError.
    """
    artifacts = [artifact for artifact in possible_artifacts(run) if not run.inherits(artifact)]
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


def delete(run: Run, left: Iterable[Leftover]) -> None:
    """Delete leftovers. Raises StorageError; what is gone already is passed over."""
    for each in left:
        for place in each.places:
            if place.endswith("/"):
                run.store.delete_one(f"{place}{NAME}")  # first: without it the rest is none
                run.store.delete(place.rstrip("/"))
            elif each.what == UNFINISHED:
                run.store.delete_unfinished(place)
            else:
                run.store.delete_one(place)


def possible_artifacts(run: Run) -> list[Artifact]:
    """All that a run has, or may have, in the order in which they are made."""
    artifacts = [*graph.artifacts(run.config), REPORT]
    artifacts += run.evaluations()
    names = run.store.folders(REFERENCES)
    artifacts += [graph.reference(name) for name in names if re.fullmatch(NAME_PATTERN, name)]
    return artifacts


def _awaited(run: Run) -> set[Artifact]:
    """Jobs that a run which extends this one is still to go on with. All of them, where that can't be read."""
    jobs = graph.trained_of(run.config)
    awaited = set[Artifact]()
    for name in run.store.folders(EXTENDED):
        try:
            longer = Run.open(f"{run.url}/{EXTENDED}/{name}")
            if longer.appends:  # begins with copies of weights
                continue
            awaited |= {job for job in jobs if not longer.inherits(job) and not longer.manifest(job)} | _awaited(longer)
        except DDMError:
            return set(jobs)
    return awaited


def _finished(run: Run, artifact: Artifact) -> Manifest | None:
    """The manifest of an artifact that is finished, and undamaged as far as that tells."""
    with suppress(DriftError, CorruptArtifact):
        manifest = run.finished(artifact)
        return manifest and with_all_files(run, manifest)
    return None


def _of_job(artifact: Artifact, named: Iterable[str], sizes: Mapping[str, int], milestones: bool) -> list[Leftover]:
    """Leftovers below the attempts of a finished job; what a manifest has `named` isn't one, nor what lies beside."""
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
    """True for a chunk's file that neither the manifest nor the chunk's record names."""
    stem = stem_of_file(name)
    if stem is None or name in manifest.files:
        return False
    for record in (f"{stem}.json", f"{stem}-last.json"):
        with suppress(FileNotFoundError):
            if f'"{name}"'.encode() in run.store.read(f"{artifact}/{RECORDS}/{record}"):
                return False
    return True


def _unfinished(run: Run, underway: Iterable[Artifact]) -> Leftover:
    """Files that kills left on a local disk, but for those of what is under way, and of runs that extend this one."""
    root = run.store.local
    files = unfinished_below(root, UNFINISHED_SECONDS) if root else []
    sizes = {path.relative_to(root).as_posix(): size for path, size in files if root}
    kept = (f"{EXTENDED}/", *(f"{artifact}/" for artifact in underway))
    places = tuple(key for key in sizes if not key.startswith(kept))
    return Leftover("", UNFINISHED, places, len(places), sum(sizes[key] for key in places))
