"""The verb that copies artifacts of a run from one store to another, for islands without common storage."""

import click

from ddm_ray.cli.command import RunUrl, main, progress, say, warn
from ddm_ray.errors import ConfigError
from ddm_ray.spelling import amount


@main.command()
@click.argument("source", metavar="SRC", type=RunUrl())
@click.argument("destination", metavar="DST", type=RunUrl())
@click.argument("artifact", required=False)
def copy(source: str, destination: str, artifact: str | None) -> None:
    """Copy finished artifacts of the run at SRC into the run at DST, which is created if it doesn't exist.

    ARTIFACT is a name that `ddm status --long` shows; by default all finished artifacts are copied. Each file is
    verified by its manifest, and an artifact counts at DST once all its files are there. Nothing at DST is replaced.
    The same command again continues where it was interrupted. States of unfinished training jobs aren't copied.
    Artifacts that were accepted by hand have to be accepted at DST again.

    \b
      ddm copy s3://lab/run7 /media/disk/run7 partition/shards/cluster=003    what expert 3 is trained from
      ddm train /media/disk/run7 expert 3                                     on an island
      ddm copy /media/disk/run7 s3://lab/run7 experts/003                     its weights

    With partition.method=given no row leaves its owner. Only the manifests of shards are copied, and other artifacts
    that are made of rows aren't.
    """
    from ddm_ray.jobs import copying
    from ddm_ray.run.graph import Artifact
    from ddm_ray.run.run import Run

    run = Run.open(source)
    try:
        chosen = Artifact(artifact) if artifact is not None else None
    except ValueError as error:
        named = "write it as experts/003, router, partition or partition/shards/cluster=003"
        raise ConfigError(str(error), named) from None
    with progress(f"{run.url} to {destination}", "copy") as report:
        copied = copying.copy(run, destination, chosen, report)
    for each in copied:
        written = f"{each.written} of {each.files} files written" if each.written else "nothing to write"
        say(f"{each.artifact}: {amount(each.bytes)}, {written}")
    if not copied:
        say(f"{run.url} has nothing finished that could be copied")
    if run.base:
        warn(f"states of {run.base.url} aren't copied: what is trained at {destination} begins at step 0")
