"""Verbs that show the progress of a whole run: status and watch."""

import json
import shutil
import sys
from collections.abc import Callable
from typing import Any

import click

from ddm_ray.cli.command import RUN, Between, main, say, say_derived, waiting, warn
from ddm_ray.cli.derive import changes_in_words
from ddm_ray.cli.fixes import phrase
from ddm_ray.errors import ConfigError

PIPE_COLUMNS = 80
"""Width of a table that isn't for a terminal."""
MAX_SECONDS = 1e6
"""Longest pause of --every and --stalled-after: eleven days."""


@main.command()
@RUN
@click.option("--long", "in_full", is_flag=True, help="Show everything: speeds, places, held-out losses, saved states.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as one JSON object.")
def status(run_url: str, in_full: bool, as_json: bool) -> None:
    """Show how far RUN is: a line for the images, the partition and each model. Only storage is read.

    Below the table the command says what went wrong, and how to continue. It waits until each begun job gives a sign of
    life, usually some seconds, at most a minute. A job is silent, and may be dead, if its heartbeat doesn't change for
    10 seconds and for three of its usual pauses. The command also warns if islands have different versions of
    libraries, and names the runs that were derived from RUN. With --long it names all artifacts, and where each job
    runs (island, host, Ray job).

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
    say_derived(run)
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
    """Name the run that this one was derived from, if there is one, and how its clusters differ."""
    if run.base:
        say(f"  derived from {run.base.url}, and keeps {len(run.kept)} artifacts of it")
    for line in changes_in_words(run.config.changes):
        say(f"  {line}")


def _as_json(run: Any) -> dict[str, Any]:
    """Everything that `status` prints, without remedies."""
    from ddm_ray.jobs.describe import describe
    from ddm_ray.jobs.observer import survey_once
    from ddm_ray.jobs.versions import differences
    from ddm_ray.run.base import derived_from

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
        "changes": run.config.changes.model_dump(mode="json", exclude_defaults=True),
        "derived": derived_from(run.store),
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
        say_derived(run)
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
