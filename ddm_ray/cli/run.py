"""Verbs on a whole run: init begins it; status and watch show its progress."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ddm_ray.cli.command import NEW_RUN, RECIPE_HELP, RUN, SET_HELP, Between, main, say, say_extensions, waiting, warn
from ddm_ray.cli.fixes import ddm_line, phrase
from ddm_ray.cli.sources import SourcesCommand
from ddm_ray.errors import ConfigError
from ddm_ray.spelling import some

PIPE_COLUMNS = 80
"""Width of a table that isn't for a terminal."""
MAX_SECONDS = 1e6
"""Longest pause of --every and --stalled-after: eleven days."""


@main.command(cls=SourcesCommand)
@NEW_RUN
@click.option("--recipe", required=True, metavar="NAME", help=RECIPE_HELP)
@click.option("--set", "settings", multiple=True, metavar="A.B=C", help=SET_HELP)
@click.option(
    "--unseen",
    is_flag=True,
    help="Don't look at images and networks, because they are on another machine or come later.",
)
def init(run_url: str, recipe: str, settings: tuple[str, ...], unseen: bool) -> None:
    """Begin a run: write its configuration to RUN/run.json.

    If the images are on this disk, the command looks at them and prints what it finds: files, classes, sizes, and what
    can't be read. It also compares the sizes of text encoder and autoencoder, if this machine has them. Repeat it with
    other settings until the result is right. From `ddm prepare` on, the configuration can't be changed.

    \b
      ddm init runs/mine --recipe photos-cpu --set data.source=~/photos
      ddm init runs/digits --recipe digits
      ddm init s3://bucket/run7 --recipe my.yaml --set partition.num_clusters=8
      ddm init runs/finer --recipe digits --set 'expert.train.init_from={source: runs/digits, network: own}'

    The last example begins each training job with trained weights instead of random ones. They are those of the model
    with the same name, or of one network for all experts (network: monolith, or 'expert 3'). The source is another run,
    an exported pipeline, a transformer of diffusers, or a .safetensors file with the network's tensors. The weights are
    copied into RUN.
    """
    from ddm_ray.cli.plan import outlook
    from ddm_ray.config import load_recipe
    from ddm_ray.data.prepare.stage import require_known_sizes
    from ddm_ray.data.sources import absolute_name, open_source
    from ddm_ray.run.inputs import beginnings_of
    from ddm_ray.run.run import Run
    from ddm_ray.store.store import Store

    config = load_recipe(recipe, settings)
    source = absolute_name(config.data.source)
    # Absolute, since other processes have other current folders.
    config = config.model_copy(update={"data": config.data.model_copy(update={"source": source})})
    if os.path.isabs(source) and Path(source).resolve() == Store(run_url).local:
        raise ConfigError(f"RUN {run_url} is the folder of its images; give it one of its own, as {run_url}/run")
    if not unseen:
        require_known_sizes(config.data)
        open_source(config.data)  # reads nothing, but refuses an unknown source or format
        _look(config)

    def on_replaced(differences: str) -> None:
        say(f"replaces the earlier configuration, from which nothing is made yet: {differences}")

    start = _begin_with_weights if beginnings_of(config) else Run.create
    run = start(run_url, config, on_replaced=on_replaced)
    say(f"run {run.config.name!r} at {run.url}")
    outlook(run, run_url)
    say(f"next: {ddm_line('prepare', run_url)}")


def _look(config: Any) -> None:
    """Print what a source on this disk has. Raises DataError, with the remedy, if no run can be made from it."""
    from ddm_ray.data.sources import is_here

    # If shards are given, owners name their images in `ddm prepare`.
    if not is_here(config.data.source) or config.partition.given:
        return
    from ddm_ray.data.sources.look import look

    with waiting("looking at the images"):
        seen = look(config)
    for line in seen.lines:
        say(line)
    for warning in seen.warnings:
        warn(warning)
    if config.data.num_classes == 1 and len(seen.folders) > 1:
        names, each = some(seen.folders), f"--set data.num_classes={len(seen.folders)}"
        say(f"its folders ({names}) are one class; each is its own with {each}")


def _begin_with_weights(run_url: str, config: Any, on_replaced: Callable[[str], None]) -> Any:
    """Begin a run that starts from other runs' weights, after a check that these fit."""
    from ddm_ray.sampling.initial_weights import create_run

    run, lacking = create_run(run_url, config, on_replaced)
    for artifact in lacking:
        warn(f"{artifact}: there are no such weights, so that nothing that begins with them can be trained")
    return run


@main.command()
@RUN
@click.option("--long", "in_full", is_flag=True, help="Show everything: speeds, places, held-out losses, saved states.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as one JSON object.")
def status(run_url: str, in_full: bool, as_json: bool) -> None:
    """Show how far RUN is: a line for the images, the partition and each model. Only storage is read.

    Below the table the command says what went wrong, and how to continue. It waits until each begun job gives a sign of
    life, usually some seconds, at most a minute. A job is silent, and may be dead, if its heartbeat doesn't change for
    10 seconds and for three of its usual pauses. The command also warns if islands have different versions of
    libraries, and names the runs that extend RUN. With --long it names all artifacts, and where each job runs (island,
    host, Ray job).

    \b
      ddm status runs/digits
      ddm status runs/digits --long
      ddm status runs/digits --json
    """
    from ddm_ray.jobs.launches import last_loss
    from ddm_ray.jobs.observer import survey_once
    from ddm_ray.jobs.status import with_newest_picture
    from ddm_ray.jobs.versions import differences
    from ddm_ray.run.run import Run

    run = Run.open(run_url)
    if as_json:
        click.echo(json.dumps(_as_json(run), indent=1))
        return
    with waiting("looking for signs of life"):
        statuses = survey_once(run)
    (_show_all if in_full else _show_short)(run, statuses)
    if painted := with_newest_picture(statuses):
        what, where = painted.picture_lines
        say(what)
        say(f"  {where}")
    say_extensions(run)
    for each in statuses:
        if each.state == "begun" and each.job and each.job.files and (why := last_loss(run.store, each.job.files)):
            warn(f"{each.artifact}: an attempt was lost: {why}")
    for difference in differences(statuses):
        warn(f"jobs have different versions of {difference}")


def _show_all(run: Any, statuses: list[Any]) -> None:
    from ddm_ray.jobs.describe import line

    say(f"run {run.config.name!r} at {run.url}, configuration {run.fingerprint}")
    _say_base(run)
    for each in statuses:
        say(f"  {line(each, phrase)}")


def _show_short(run: Any, statuses: list[Any]) -> None:
    from ddm_ray.cli.short_status import notes, table

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else PIPE_COLUMNS
    say(f"run {run.config.name!r}, configuration {run.fingerprint}")
    say(f"  at {run.url}")
    _say_base(run)
    for line, text in table(statuses, width):
        colour = "red" if line.alarm else "green" if line.word == "finished" else None
        click.secho(text, fg=colour, dim=line.word == "waiting")
    for text in notes(statuses, width if terminal else None):
        say(text)


def _say_base(run: Any) -> None:
    """Name the run that this one continues, if there is one."""
    if run.base and run.appends:
        say(f"  appends {run.appends.files:,} files to {run.base.url}, and continues with its clusters and weights")
    elif run.base:
        say(f"  continues {run.base.url}, and shares its rows and partition")


def _as_json(run: Any) -> dict[str, Any]:
    """Everything that `status` prints, without remedies."""
    from ddm_ray.jobs.describe import describe
    from ddm_ray.jobs.extend import extensions
    from ddm_ray.jobs.observer import survey_once
    from ddm_ray.jobs.versions import differences

    statuses = survey_once(run)
    artifacts = [
        {
            "artifact": str(each.artifact),
            "state": each.state,
            "done": each.fraction,
            "step": each.job.step if each.job else None,
            "steps": each.job.steps if each.job else None,
            "may_be_dead": each.may_be_dead,
            "text": describe(each, phrase),
        }
        for each in statuses
    ]
    return {
        "run": run.url,
        "name": run.config.name,
        "configuration": run.fingerprint,
        "base": run.base.url if run.base else None,
        "appends": run.appends.files if run.appends else 0,
        "extensions": [{"url": url} for url in extensions(run)],
        "artifacts": artifacts,
        "versions_differ": differences(statuses),
    }


@main.command()
@RUN
@click.option("--once", is_flag=True, help="Print the state once and end.")
@click.option(
    "--every",
    type=Between(0, MAX_SECONDS, min_open=True),
    metavar="SECONDS",
    help="Time between two looks at storage. Default: 2 on a disk, 15 in a bucket, where each look costs money.",
)
@click.option(
    "--prometheus", type=click.IntRange(1, 65535), metavar="PORT", help="Serve gauges at http://HOST:PORT/metrics."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that --prometheus listens on.")
@click.option(
    "--webhook",
    envvar="DDM_WEBHOOK",
    metavar="URL",
    help="POST a JSON object when a job stalls, fails, can't save its states, resumes or finishes. Default:"
    " $DDM_WEBHOOK, else none.",
)
@click.option(
    "--stalled-after",
    default=60.0,
    show_default=True,
    type=Between(0, MAX_SECONDS, min_open=True),
    metavar="SECONDS",
    help="A job has stalled after this time, and the time of three steps, without a sign of life. A launch without an"
    " attempt stalls after 10 minutes at the earliest.",
)
def watch(
    run_url: str,
    once: bool,
    every: float | None,
    prometheus: int | None,
    host: str,
    webhook: str | None,
    stalled_after: float,
) -> None:
    """Show a live table of RUN's artifacts and of islands at work, until all is trained, or Ctrl-C.

    The command reads only storage, as `ddm status` does. You may run it anywhere, several times at once, and kill it at
    any moment.

    \b
      ddm watch runs/digits
      ddm watch s3://lab/run7 --prometheus 9400
      ddm watch s3://lab/run7 --webhook https://hooks.slack.com/services/... --stalled-after 300

    The webhook gets {"run", "artifact", "event", "attempt", "step", "steps", "text", "final"}. The event is stalled,
    failed, damaged, unsaved (states can't be saved), resumed or finished. After a failure that isn't final the next
    attempt begins by itself. A job that stays stalled has no process left to begin one: run its command again.
    """
    from ddm_ray.islands.list_workers import WorkerTable
    from ddm_ray.jobs.describe import line
    from ddm_ray.jobs.observer import LIST_SECONDS, survey_once
    from ddm_ray.run.run import Run

    run = Run.open(run_url)
    if once:
        if prometheus is not None:
            raise ConfigError("--once looks once: leave out --prometheus")
        with waiting("looking for signs of life"):
            statuses = survey_once(run)
        for each in statuses:
            say(line(each, phrase))
        say_extensions(run)
        return
    from ddm_ray.watch import loop
    from ddm_ray.watch.events import Event
    from ddm_ray.watch.webhook import Webhook

    every = every or loop.pause_of(run)
    hook = Webhook(webhook, warn) if webhook else None

    def on_event(event: Event) -> None:
        if event.alarm:
            warn(event.text)
        else:
            say(event.text, err=True)
        if hook:
            hook.post(event)

    # Requests cost nothing on a disk.
    calls = WorkerTable(run.store, 0.0 if run.store.local else LIST_SECONDS)
    try:
        loop.watch(run, _gauges(run.url, host, prometheus), on_event, warn, every, stalled_after, phrase, calls.rows)
    finally:
        if hook:
            hook.close()
    say(f"all that {run.url} trains is finished")


def _gauges(run_url: str, host: str, port: int | None) -> Callable[[list[Any]], None]:
    """A callback that updates Prometheus gauges, if a port is given."""
    if port is None:
        return lambda survey: None
    from ddm_ray.serve.cluster.addresses import url_at
    from ddm_ray.watch.gauges import Gauges, serve_gauges

    gauges = Gauges(run_url)
    serve_gauges(gauges, host, port)
    say(f"gauges at {url_at(host, port)}/metrics", err=True)
    return gauges.update
