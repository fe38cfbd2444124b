"""The verb of an island: `work` takes an unfinished job of a run, trains it, and looks for the next one."""

import os
from typing import Any

import click

from ddm_ray.cli.command import ADDRESS, ISLANDS, RUN, Between, main, say, say_derived, with_extras
from ddm_ray.cli.fixes import by, words
from ddm_ray.cli.train import sharing_idle_cores
from ddm_ray.errors import ConfigError
from ddm_ray.exit_codes import EXIT_AGAIN
from ddm_ray.remedies import Give
from ddm_ray.run.graph import Artifact, trained_of, wanted_of
from ddm_ray.signals import first_signal_noted
from ddm_ray.spelling import some


@main.command()
@RUN
@ISLANDS
@click.option(
    "--island",
    required=True,
    metavar="NAME",
    help="Name of this island: one in --islands FILE, or any name with --placement or on a laptop.",
)
@click.option(
    "--placement",
    metavar="JSON",
    help='Fields of the island instead of a file, for submitted jobs: \'{"workers": 8, "use_gpu": true}\'.',
)
@ADDRESS
@click.option(
    "--only", multiple=True, metavar="MODEL", help="Train only this: expert:3, router. May be given many times."
)
@with_extras("Train")
@click.option(
    "--lease",
    default=60.0,
    show_default=True,
    type=Between(10, 600),
    metavar="SECONDS",
    help="Silence of this island after which others may take its job.",
)
def work(
    run_url: str,
    islands: str | None,
    island: str,
    placement: str | None,
    address: str | None,
    only: tuple[str, ...],
    extras: list[str],
    lease: float,
) -> None:
    """Train the unfinished models of RUN, one after another, until all are finished.

    Start this command on each island, at any time and in any order: as a Ray job, a service, or in a terminal. Islands
    share nothing but the run's storage. Each island takes a free model, trains it, and takes the next one. A model is
    free if no island holds it, or if its island's lease has expired. If nothing is free, a much faster island takes
    over from a slow one, which saves its state first. A waiting island says what it waits for. An island that says its
    memory_gib leaves models that need more to others. If the command runs twice on one island, the second one stands
    by.

    After SIGTERM it saves a state and exits. Exit code 0: all is finished, or the island is drained (`ddm islands
    drain`). 75: the same command may work later. 1: something must be mended first.

    \b
      ddm work runs/digits --island laptop
      ddm work s3://bucket/run7 --islands islands.yaml --island room-2
      ddm work s3://bucket/run7 --island hospital-2 --only expert:2
    """
    from ddm_ray.jobs.stops import island_prefix
    from ddm_ray.placement import Island, load_island
    from ddm_ray.run.run import Run
    from ddm_ray.submitted import submitted_job

    run = Run.open(run_url)
    if islands and placement:
        raise ConfigError("--islands and --placement both say how the island trains: leave one out")
    if placement:
        site = Island.from_json(island, placement)
    else:
        site = load_island(islands, island) if islands else Island(name=island)
    chosen = [_artifact(run, text) for text in only]
    trained = chosen or list(wanted_of(run.config, extras))
    island_prefix(site.name)
    job = submitted_job() or ""
    # These import torch, which takes seconds: after all checks of arguments.
    trained = _with_memory_for(run, trained, site)
    from ddm_ray.islands.run_view import RunObserver, work_of
    from ddm_ray.islands.work import IslandWorker
    from ddm_ray.islands.worker_heartbeat import WorkerHeartbeat, last_speed
    from ddm_ray.ray_session import keep_logs, losses_of_ray, ray_session, require_ray
    from ddm_ray.train.ray.driver import start_fork_server
    from ddm_ray.train.ray.train_all import train_all
    from ddm_ray.watch.live_view import LiveView

    fields: dict[str, Any] = {"job": job, "holds": "", "waits": "", "speed": last_speed(run.store, site.name)}
    with (
        first_signal_noted() as left,
        WorkerHeartbeat(run.store, site.name, lease, **fields) as heartbeat,
        LiveView(
            f"{run.url}, island {heartbeat.id}", [*trained, site.name], clock=False, phrase=by("an island at work")
        ) as view,
    ):

        def train(run: Run, launch: Any, watch: Any) -> None:
            start_fork_server()  # while Ray starts
            where, how = site.ray(address), site.train
            if not (islands or placement or where[0] or os.environ.get("RAY_ADDRESS")):
                how = sharing_idle_cores(how, 1)
            # One session per job, so that a waiting worker holds no Ray.
            with losses_of_ray(), ray_session(*where, how.asked.get("CPU", 0.0)) as private:
                train_all(run, [launch.artifact], how, watch, not private, launch, lost=keep_logs, leaving=left.is_set)

        def require_room() -> None:
            require_ray(site.ray(address)[0])

        done = dict.fromkeys(trained, 0.0)

        def report(statuses: list[Any], doing: str) -> None:
            view.show_statuses(statuses)
            done.update({each.artifact: each.fraction for each in statuses})
            # The island's row shows the whole run's progress. Only committed artifacts count as 100 %.
            view.show(site.name, min(0.99, sum(done.values()) / len(done)), doing)

        observer = RunObserver(run, trained, work_of(run))
        worker = IslandWorker(run, heartbeat, observer, train, report, require_room, left.is_set, job)
        end = worker.run_to_end()
    say(f"{site.name}: {end}")
    say_derived(run)
    if left.is_set():
        click.get_current_context().exit(EXIT_AGAIN)


def _with_memory_for(run: Any, artifacts: list[Artifact], site: Any) -> list[Artifact]:
    """The models that a worker of the island has the memory for. Raises ConfigError if it has it for none."""
    from ddm_ray.islands.needs import too_large

    if not (others := too_large(run, artifacts, site)):
        return artifacts
    if len(others) == len(artifacts):
        raise ConfigError(f"island {site.name}: memory_gib {site.memory_gib:g} is too little for {some(others)}")
    say(f"{site.name} leaves {some(others)} to others: its memory_gib, {site.memory_gib:g}, is too little")
    return [each for each in artifacts if each not in others]


def _artifact(run: Any, text: str) -> Artifact:
    """The artifact for a value of --only, such as `expert:3`."""
    known = {":".join(words(artifact)): artifact for artifact in trained_of(run.config)}
    if text not in known:
        raise ConfigError(f"--only {text!r:.60}", Give("only", f"choose of {', '.join(known)}"))
    return known[text]
