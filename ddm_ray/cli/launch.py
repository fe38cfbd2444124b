"""The verb that starts `ddm work` on islands through their Jobs APIs, and keeps it started."""

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddm_ray.cli.command import ISLAND_NAMES, ISLANDS_WITH_JOBS, RUN, main, say, warn, with_extras
from ddm_ray.cli.fixes import by, ddm_line
from ddm_ray.errors import ConfigError, RayAway, RayError, StorageError
from ddm_ray.jobs.status import Status, require_sound
from ddm_ray.placement import Island
from ddm_ray.remedies import Give
from ddm_ray.run.graph import Artifact, wanted_of
from ddm_ray.run.run import Run
from ddm_ray.spelling import shell_line

if TYPE_CHECKING:
    from ddm_ray.islands.supervisor import IslandJob, JobSupervisor

# Longest time for which a detached launch waits for the islands' answers.
DETACHED_SECONDS = 120.0


@main.command()
@RUN
@ISLANDS_WITH_JOBS
@ISLAND_NAMES
@with_extras("Train")
@click.option("--detach", is_flag=True, help="Submit the jobs and exit.")
@click.option("--dry-run", is_flag=True, help="Only print the commands that do the same by hand.")
def launch(run_url: str, file: str, names: tuple[str, ...], extras: list[str], detach: bool, dry_run: bool) -> None:
    """Start `ddm work RUN` on each island of FILE through its Jobs API, and restart it until all is finished.

    Nothing depends on this command. You may kill it, start it again on any machine, or run it twice, since an island
    has one such job at a time. First it starts a job on each island without one. Later it restarts jobs that were lost
    or ended with exit code 75. It doesn't restart a job that ended with exit code 1, where something must be mended, or
    that a person stopped. If no job is left to restart, it ends: with exit code 1 if something must be mended, with 0
    if a person stopped the others. Meanwhile it shows what is trained, and where. If FILE has changed, start the
    command again.

    \b
      ddm launch s3://lab/run7 --islands islands.yaml
      ddm launch s3://lab/run7 --islands islands.yaml --island north --detach
    """
    from ddm_ray.islands.supervisor import JobSupervisor

    run = Run.open(run_url)
    islands, artifacts = chosen_islands(file, names), wanted_of(run.config, extras)
    require_sound(run, artifacts)

    def entrypoint(island: Island) -> str:
        return work_line(run.url, island, extras)

    supervisor = JobSupervisor(run.url, islands, entrypoint)
    for name, island in islands.items():
        if not island.jobs:
            say(f"{name} names no Jobs API; start this on it: {entrypoint(island)}")
    say("by hand:")
    for island in supervisor.islands.values():
        say(f"  {submit_line(run.url, island, extras)}")
    if not dry_run:
        with supervisor:
            if detach:
                jobs, finished = _submitted(supervisor), False
            else:
                jobs, finished = _watched(supervisor, run, artifacts)
        if finished:
            say(f"all that {run.url} trains is finished")
        else:
            _report(jobs)


def work_line(run_url: str, island: Island, extras: Sequence[str] = ()) -> str:
    """The line of shell that works on a run on an island. It has the placement's values, since FILE isn't there."""
    words = ["work", run_url, "--island", island.name, "--placement", island.to_json()]
    return ddm_line(*words, *(f"--{kind}" for kind in extras))


def submit_line(run_url: str, island: Island, extras: Sequence[str] = ()) -> str:
    """The line of shell that submits `work_line` as a job from here, by Ray's own command."""
    token = ""
    if island.token_file:
        token = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={shell_line(str(Path(island.token_file).expanduser()))} "
    address = shell_line(island.jobs or "")
    return f"{token}ray job submit --address {address} --no-wait -- {work_line(run_url, island, extras)}"


def chosen_islands(file: str, names: tuple[str, ...]) -> Mapping[str, Island]:
    """The islands of a file that --island names, or all of them. Raises ConfigError."""
    from ddm_ray.placement import load_islands

    islands = load_islands(file)
    if unknown := [name for name in names if name not in islands]:
        raise ConfigError(f"{file}: no island {unknown[0]!r}", Give("island", f"choose some of {', '.join(islands)}"))
    return {name: island for name, island in islands.items() if not names or name in names}


def _submitted(supervisor: "JobSupervisor") -> "list[IslandJob]":
    """The islands' jobs once all islands have answered, or after DETACHED_SECONDS."""
    deadline = time.monotonic() + DETACHED_SECONDS
    while True:
        jobs = supervisor.look()
        if all(job.state != "away" for job in jobs) or time.monotonic() > deadline:
            return jobs
        time.sleep(0.2)


def _watched(supervisor: "JobSupervisor", run: Run, artifacts: Sequence[Artifact]) -> "tuple[list[IslandJob], bool]":
    """Show the run and the islands' jobs until the run is finished or nothing is left to do.

    Returns the jobs, and whether the run is finished.
    """
    from ddm_ray.islands.supervisor import SETTLED
    from ddm_ray.jobs.observer import Observer
    from ddm_ray.jobs.status import survey
    from ddm_ray.watch.live_view import LiveView
    from ddm_ray.watch.loop import pause_of

    observer, statuses, looked, warned = Observer(run, partial(survey, run)), list[Status](), -math.inf, False
    with LiveView(run.url, [*artifacts, *supervisor.islands], clock=False, phrase=by("an island at work")) as view:
        while True:
            if time.monotonic() - looked >= pause_of(run):
                looked = time.monotonic()
                try:
                    statuses, warned = [each for each in observer.look(looked) if each.artifact in artifacts], False
                except (StorageError, OSError) as error:  # the islands' jobs are supervised all the same
                    if not warned:
                        warn(f"storage can't be asked, trying on: {error}")
                    warned = True
                view.show_statuses(statuses)
            jobs = supervisor.look()
            for job in jobs:
                view.show(job.island, None, _words(job), job.state in ("failed", "away"))
            finished = bool(statuses) and all(each.state == "finished" for each in statuses)
            if finished or all(job.state in SETTLED for job in jobs):
                return jobs, finished
            time.sleep(0.5)


def _words(job: "IslandJob") -> str:
    return " ".join(filter(None, (job.state, job.job))) + (f": {job.text}" if job.text else "")


def _report(jobs: "list[IslandJob]") -> None:
    """Print the islands' jobs. Raises RayError if something must be mended, RayAway if an island didn't answer."""
    for job in jobs:
        if job.state in ("failed", "stopped"):
            warn(f"{job.island}: {_words(job)}")
        else:
            say(f"{job.island}: {_words(job)}")
    if failed := [job.island for job in jobs if job.state == "failed"]:
        raise RayError(f"nothing runs on {', '.join(failed)} until what is said above is mended")
    if away := [job.island for job in jobs if job.state == "away"]:
        raise RayAway(f"no job was submitted to {', '.join(away)}")
