"""The verb that has what an island trained count: for runs whose islands aren't trusted with more than their own."""

import click

from ddm_ray.cli.command import INDEX, MODELS, RUN, main, trained
from ddm_ray.cli.fixes import phrase
from ddm_ray.errors import ConfigError


@main.command()
@RUN
@click.argument("model", type=click.Choice(MODELS), required=False)
@INDEX
@click.option("--all", "every", is_flag=True, help="Accept all that is finished and hasn't been accepted.")
@click.option("--replace", is_flag=True, help="Accept it also in place of another one that was accepted before.")
def accept(run_url: str, model: str | None, index: int | None, every: bool, replace: bool) -> None:
    """Accept what an island has trained, by content, in a run that was begun with acceptance=by_hand.

    Its manifest is copied below RUN/accepted, where islands can't write (cluster_configs/README.md has the rights for a
    bucket). What samples, serves, evaluates or learns from it takes these very bytes from then on, or names what was
    altered; until then it waits. Before, each file is compared with its checksum, and the network with run.json.
    `ddm status` shows what waits.

    \b
      ddm init s3://lab/run7 --recipe imagenet256-k8 --set acceptance=by_hand
      ddm accept s3://lab/run7 expert 3
      ddm accept s3://lab/run7 --all
    """
    from functools import partial

    from ddm_ray.sampling.acceptance import accept as accept_artifact
    from ddm_ray.storage.graph import trained_of
    from ddm_ray.storage.run import Run
    from ddm_ray.storage.status import describe, status
    from ddm_ray.watch.live_view import LiveView

    run = Run.open(run_url)
    if run.config.acceptance == "at_once":
        raise ConfigError(f"{run.url} accepts all that is finished at once: its configuration says acceptance=at_once")
    if every == (model is not None):
        raise ConfigError("name what to accept, e.g. expert 3, or say --all" if model is None else "--all: or a model")
    if model is not None:
        chosen = [trained("accept", model, index, len(run.experts))]
    else:
        chosen = [each for each in trained_of(run.config) if status(run, each).unaccepted]
    with LiveView(run.url, [*map(str, chosen)], phrase=phrase) as view:
        for artifact in chosen:
            report = partial(view.stage, artifact)
            report(0.0, "reading")
            accept_artifact(run, artifact, replace)
            report(1.0)
    for artifact in chosen:
        digest = run.require(artifact).digest
        click.echo(f"{artifact}: accepted as {digest}: {describe(status(run, artifact), phrase)}")
    if not chosen:
        click.echo(f"nothing waits for acceptance in {run.url}")
