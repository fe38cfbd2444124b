"""The verb that accepts what an island has made, for runs with acceptance=by_hand."""

from typing import Any

import click

from ddm_ray.cli.command import INDEX, MODELS, RUN, OneOf, main, say, trained, warn
from ddm_ray.cli.fixes import phrase
from ddm_ray.errors import ConfigError, CorruptArtifact, DriftError
from ddm_ray.run.graph import Artifact, replay
from ddm_ray.spelling import numbers_in_words


@main.command()
@RUN
@click.argument("model", type=OneOf([*MODELS, "replay"]), required=False)
@INDEX
@click.option("--all", "every", is_flag=True, help="Accept everything that is finished and not accepted yet.")
@click.option("--replace", is_flag=True, help="Replace an artifact that was accepted before.")
def accept(run_url: str, model: str | None, index: int | None, every: bool, replace: bool) -> None:
    """Accept what an island has made, in a run that was begun with acceptance=by_hand.

    An artifact is used only after you have accepted it; `ddm status` shows what waits. The command compares each file
    with its checksum, and a network with run.json. It then copies the manifest below RUN/accepted, where islands can't
    write (docs/howto/buckets.md has the rights for a bucket). From then on every command uses exactly these bytes,
    or names the file that was altered. With --all, artifacts that are refused are named and the others are accepted.

    \b
      ddm init s3://lab/run7 --recipe imagenet256-k8 --set acceptance=by_hand
      ddm accept s3://lab/run7 expert 3
      ddm accept s3://lab/run7 --all
    """
    from functools import partial

    from ddm_ray.jobs.describe import describe
    from ddm_ray.jobs.status import status, survey
    from ddm_ray.run.run import Run

    run = Run.open(run_url)
    if run.config.acceptance == "at_once":
        raise ConfigError(f"{run.url} accepts all that is finished at once: its configuration says acceptance=at_once")
    if every == (model is not None):
        raise ConfigError("name what to accept, e.g. expert 3, or say --all" if model is None else "--all: or a model")
    statuses = survey(run) if every else []
    chosen = [each.artifact for each in statuses if each.unaccepted]
    if model is not None:
        chosen = [_named(run, model, index)]
    # These import torch, which takes seconds: after all checks of arguments.
    from ddm_ray.sampling.acceptance import accept_made as accept_artifact
    from ddm_ray.watch.live_view import LiveView

    refused = [each.error.text(phrase) for each in statuses if each.error and run.by_hand(each.artifact)]
    accepted = []
    with LiveView(run.url, [*map(str, chosen)], phrase=phrase) as view:
        for artifact in chosen:
            report = partial(view.stage, artifact)
            report(0.0, "reading")
            try:
                accepted.append((artifact, accept_artifact(run, artifact, replace).digest))
            except (CorruptArtifact, DriftError) as error:
                if not every:
                    raise
                refused.append(error.text(phrase))
            report(1.0)
    for artifact, digest in accepted:
        say(f"{artifact}: accepted as {digest}: {describe(status(run, artifact), phrase)}")
    for text in refused:
        warn(f"not accepted: {text}")
    if refused:
        raise SystemExit(1)
    if not chosen:
        click.echo(f"nothing waits for acceptance in {run.url}")


def _named(run: Any, model: str, index: int | None) -> Artifact:
    if model in MODELS:
        return trained("accept", model, index, run.config.partition.clusters)
    if index is None or index not in run.config.partition.clusters:
        raise ConfigError(f"accept {model}: of which cluster? {numbers_in_words(run.config.partition.clusters)}")
    return replay(index)
