"""Deriving a run from another one, as `ddm init --from` does: what becomes of each artifact, and the new run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ddm_ray.cli.command import progress, say, waiting, warn
from ddm_ray.cli.fixes import command, ddm_line
from ddm_ray.cli.init import begin_with_weights, tell_look
from ddm_ray.errors import ConfigError
from ddm_ray.run.graph import PARTITION, ROUTER, ROWS, Artifact, needed_of, wanted_of
from ddm_ray.spelling import amount, numbered, numbers_in_words, some

if TYPE_CHECKING:
    from ddm_ray.config.changes import Changes
    from ddm_ray.config.derive import ChangeRequest
    from ddm_ray.data.prepare.new_files import NewFiles
    from ddm_ray.jobs.derive import Derivation
    from ddm_ray.run.run import Run

BESIDE = ("beginning", "centroids", "report", "replay", "reference")
"""Kinds of artifacts that follow from others, and that aren't named."""


@dataclass(frozen=True)
class Asked:
    """The options of `ddm init` for a derived run, as click gives them."""

    unseen: bool
    appended: str | None
    added: tuple[str, ...]
    clusters: tuple[int, ...]
    begin_from: "int | Literal['nearest'] | None"
    drop: tuple[int, ...]
    split: tuple[int, ...]
    retrain: tuple[int, ...]
    copied: bool
    dry_run: bool

    def require_sound(self, run_url: str) -> None:
        """Raise ConfigError for options that don't go together."""
        if self.clusters and len(self.clusters) != len(self.added):
            raise ConfigError(f"--clusters is given {len(self.clusters)} times, and --add {len(self.added)} times")
        if self.copied and (self.added or self.split or self.appended is not None):
            raise ConfigError(
                "--copy: images that join, and clusters that split, need RUN1 until they are partitioned; derive the"
                f" run without it, and then copy it whole: {ddm_line('copy', run_url, 'DST')}"
            )

    def request(self, settings: tuple[str, ...], new: "NewFiles | None") -> "ChangeRequest":
        """The changes that are asked for; `new`: files that join the clusters that there are."""
        from ddm_ray.config.derive import ChangeRequest
        from ddm_ray.data.append import appended
        from ddm_ray.data.sources import absolute_name

        return ChangeRequest(
            settings,
            appended(new) if new else None,
            tuple((absolute_name(source), number) for source, number in self.joined),
            self.begin_from,
            self.drop,
            self.split,
            self.retrain,
        )

    @property
    def joined(self) -> list[tuple[str, int]]:
        """Sources of new clusters, each with the number of its clusters."""
        return list(zip(self.added, self.clusters or [1] * len(self.added), strict=True))


def derive(run_url: str, base_url: str, settings: tuple[str, ...], asked: Asked) -> None:
    """Derive a run: show what it keeps, continues and trains again, and create it."""
    from ddm_ray.data.append import look_for_new
    from ddm_ray.jobs.derive import plan_derivation, require_folder
    from ddm_ray.run.run import Run
    from ddm_ray.store.store import Store

    base = Run.open(base_url)
    require_folder(Store(run_url), base)
    asked.require_sound(run_url)
    for source, number in asked.joined if not asked.unseen else ():
        _look_at(base, source, number)
    new = None
    if asked.appended is not None:
        with waiting("looking for new files"):
            new = look_for_new(base, asked.appended or None)
        _tell_of(new)
    with waiting("comparing the runs"):
        planned = plan_derivation(base, asked.request(settings, new))
    show(planned)
    if not asked.dry_run:
        _create(run_url, planned, new, asked.copied)


def _look_at(base: "Run", source: str, clusters: int) -> None:
    """Print what a source of new clusters has. Raises as `look`, and MissingArtifact for a base without its rows."""
    from ddm_ray.data.prepare.new_files import rows_so_far
    from ddm_ray.data.sources import absolute_name

    config, name = base.config, absolute_name(source)
    if not config.partition.given:
        rows_so_far(base)  # raises if they stayed behind
    if name in sources_of(base):
        warn(f"{name}: is a source of {base.url} already, so its images are there twice")
    data = config.data.model_copy(update={"source": name})
    own = config.partition.model_copy(update={"num_clusters": clusters, "numbers": (), "num_fine": clusters})
    tell_look(config.model_copy(update={"data": data, "partition": own}), every_class=False)


def sources_of(run: "Run | None") -> set[str]:
    """The sources of a run's images, also of clusters that have left since."""
    sources = set[str]()
    while run is not None:
        joined = (each.source for each in run.config.changes.joined)
        sources |= {run.config.data.source, *joined} if not run.config.partition.given else {*joined}
        run = run.base
    return sources


def _tell_of(new: "NewFiles") -> None:
    say(f"{len(new.files):,} new files in {new.plan.source}")
    if new.changed:
        warn(f"{len(new.changed):,} files have changed and stay as they were prepared: {some(new.changed)}")
    if new.elsewhere:
        warn(
            f"{len(new.elsewhere):,} files have the paths of earlier ones from another source, are taken for these, and"
            f" left out: {some(new.elsewhere)}; put others into a folder of another name"
        )
    if new.gone:
        say(f"{len(new.gone):,} files are gone, and their rows stay: {some(new.gone)}")


def _create(run_url: str, planned: "Derivation", new: "NewFiles | None", copied: bool) -> None:
    """Create the run, and make at once what only follows from records: the partition when clusters leave."""
    from ddm_ray.data.append import plan_rows
    from ddm_ray.jobs.copying import copy_kept
    from ddm_ray.jobs.derive import begin_derived
    from ddm_ray.run.run import Run
    from ddm_ray.sampling.initial_weights import require_initial_weights
    from ddm_ray.store.store import is_local

    run, noted = begin_derived(run_url, planned, require_initial_weights, begin_with_weights)
    if is_local(planned.base.url) and not is_local(run.url):
        warn(f"{planned.base.url} is on this machine's disk: others can't read what the run keeps there")
    if not noted:
        warn(f"{planned.base.url} can't be written: `ddm tidy` there won't know that this run needs its states")
    if new:
        plan_rows(run, new)
    if planned.config.changes.only_dropped:
        from ddm_ray.data.partition.stage import partition
        from ddm_ray.sampling.kept_router import keep_router

        partition(run)
        keep_router(run)
    if copied:
        with progress(run.url, "copy") as report:
            copy_kept(run, report)
        run = Run.open(run.url)
    say(f"run {run.config.name!r} at {run.url}")
    say(f"next: {_next(run, run_url)}")


def _next(run: "Run", run_url: str) -> str:
    """The first command that makes what is missing; one that samples if nothing is."""
    from ddm_ray.cli.fixes import next_of

    for artifact in (*needed_of(run.config, "rows"), PARTITION):
        if not run.manifest(artifact):
            return ddm_line("prepare" if artifact.kind == "rows" else "partition", run_url)
    missing = [each for each in wanted_of(run.config) if not run.manifest(each)]
    if len(missing) > 1 and not run.config.partition.given:
        return ddm_line("train", run_url, "all")
    return next_of(run, run_url) or command(run_url, missing[0]) if missing else ddm_line("sample", run_url)


def show(planned: "Derivation") -> None:
    """Print what becomes of the base's artifacts, what the clusters are, and what trainings cost."""
    for line in changes_in_words(planned.config.changes):
        say(line)
    needed = {*wanted_of(planned.config)}
    kept = [each for each in planned.of("kept") if each.kind not in BESIDE]
    router = ["router, without the rows of what left"] if planned.keeps_router else []
    say(f"kept       {', '.join(filter(None, [_named(kept), *router])) or 'nothing'}")
    for artifact in planned.of("continued"):
        say(f"continued  {_named([artifact])}, from step {planned.fates[artifact].step:,}")
    made = [each for each in planned.of("new") if not each.trains and each.kind not in BESIDE]
    if made:
        say(f"made       {_named(made)}")
    trained = [each for each in planned.of("new") if each in needed and not (each == ROUTER and planned.keeps_router)]
    if trained:
        say(f"trained    {_named(trained)}")
    others = [each for each in planned.of("new") if each.trains and each not in needed]
    if others:
        say(f"if asked   {_named(others)}")
    flops, all_flops = cost(planned, [*planned.of("continued"), *trained]), cost(planned, list(needed), from_start=True)
    if all_flops:
        say(f"trainings take {amount(flops, 'FLOP')}, {flops / all_flops:.0%} of what all of them take from the start")


def cost(planned: "Derivation", artifacts: list[Artifact], from_start: bool = False) -> int:
    """FLOPs of training these artifacts, from the steps that are done on; `from_start`: as if none were done."""
    from ddm_ray.run.run import Run
    from ddm_ray.store.store import Store
    from ddm_ray.train.job import train_job

    run, flops = Run(Store(planned.base.url), planned.config), 0
    for artifact in artifacts:
        job = train_job(run, artifact)
        done = 0 if from_start else planned.fates[artifact].step
        flops += job.training_flops(job.train.steps) - (job.training_flops(done) if done else 0)
    return flops


def changes_in_words(changes: "Changes") -> list[str]:
    """A line for each change of the clusters."""
    lines = [f"{_clusters(each.clusters, 'join')}: images of {each.source}" for each in changes.joined]
    lines += [
        f"cluster {parent} splits into {numbers_in_words(children)}" for parent, children in changes.split.items()
    ]
    if changes.dropped:
        lines.append(_clusters(changes.dropped, "leave"))
    if changes.appended:
        lines.append(f"{changes.appended.files:,} new files of {changes.appended.source} join the clusters")
    return lines


def _clusters(numbers: tuple[int, ...], verb: str) -> str:
    """Clusters and what they do, with a verb of the plural's form: `cluster 3 leaves`."""
    return f"{numbered('cluster', numbers, 20)} {verb}{'' if len(numbers) > 1 else 's'}"


def _named(artifacts: list[Artifact]) -> str:
    """Artifacts as people name them; those of clusters by ranges of their numbers."""
    words = list[str]()
    for kind in dict.fromkeys(each.kind for each in artifacts):
        members = [each for each in artifacts if each.kind == kind]
        numbers = [each.cluster for each in members if each.cluster is not None]
        words += [numbered(kind, numbers, 20)] if numbers else [str(each) for each in members if each != ROWS]
        words += ["rows"] if ROWS in members else []
    return ", ".join(words)
