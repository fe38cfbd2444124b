"""The verb that looks on: watch."""

from collections.abc import Callable
from typing import Any

import click

from ddm_ray.cli.command import RUN, main, warn
from ddm_ray.errors import ConfigError


@main.command()
@RUN
@click.option("--once", is_flag=True, help="Look once, print, and end.")
@click.option(
    "--every",
    default=2.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--prometheus", type=click.IntRange(1, 65535), metavar="PORT", help="Gauges at http://HOST:PORT/metrics.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where --prometheus listens.")
@click.option(
    "--webhook",
    envvar="DDM_WEBHOOK",
    metavar="URL",
    help="POST a JSON object when a job stalls, fails, goes on or is finished. Default: $DDM_WEBHOOK, else none.",
)
@click.option(
    "--stalled-after",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="A job has stalled when it gave no sign for so long, and for three of its steps.",
)
def watch(
    run_url: str,
    once: bool,
    every: float,
    prometheus: int | None,
    host: str,
    webhook: str | None,
    stalled_after: float,
) -> None:
    """Show all artifacts of RUN, live, until everything that it trains is finished, or Ctrl-C.

    Reads storage alone, as `ddm status` does: it may run anywhere, many times at once, and die at any moment.

    \b
      ddm watch runs/digits
      ddm watch s3://lab/run7 --prometheus 9400
      ddm watch s3://lab/run7 --webhook https://hooks.slack.com/services/... --stalled-after 300

    The webhook gets {"run", "artifact", "event", "attempt", "step", "steps", "text", "final"}, where the event is
    stalled, failed, damaged, resumed or finished. A job that failed begins its next attempt by itself, unless that is
    final; for one that stays stalled nobody is left who would: run its command again.
    """
    from ddm_ray.storage.run import Run
    from ddm_ray.storage.status import line, survey

    run = Run.open(run_url)
    if once:
        if prometheus is not None:
            raise ConfigError("--once looks once: leave out --prometheus")
        for found in survey(run):
            click.echo(line(found))
        return
    from ddm_ray.watch.events import Event
    from ddm_ray.watch.loop import watch as go
    from ddm_ray.watch.webhook import Webhook

    hook = Webhook(webhook, warn) if webhook else None

    def tell(event: Event) -> None:
        if event.alarm:
            warn(event.text)
        else:
            click.echo(event.text, err=True)
        if hook:
            hook.tell(event)

    try:
        go(run, _gauges(run.url, host, prometheus), tell, warn, every, stalled_after)
    finally:
        if hook:
            hook.close()
    click.echo(f"all that {run.url} trains is finished")


def _gauges(run_url: str, host: str, port: int | None) -> Callable[[list[Any]], None]:
    """What keeps Prometheus' gauges up to date, if a port is given."""
    if port is None:
        return lambda found: None
    from ddm_ray.watch.gauges import Gauges, serve

    gauges = Gauges(run_url)
    serve(gauges, host, port)
    click.echo(f"gauges at http://{host}:{port}/metrics", err=True)
    return gauges.update
