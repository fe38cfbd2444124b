"""The verb that begins a run on another one's rows and on those of new files."""

import click

from ddm_ray.cli.command import RUN, main, say, warn
from ddm_ray.spelling import some


@main.command()
@RUN
@click.argument("settings", nargs=-1, metavar="[PART.train.steps=N]...")
@click.option("--source", metavar="URI", help="Where the new files are. Default: data.source of RUN, listed again.")
def append(run_url: str, settings: tuple[str, ...], source: str | None) -> None:
    """Go on from RUN with files that its source has since: nothing of RUN is prepared, clustered or written again.

    Makes a run of its own, RUN/extended/0001 (0002, ...), and names it: prepare, partition and train that one. Its rows
    are those of the new files alone; these go to RUN's clusters, and its shards are RUN's files, which are read where
    they lie, and new ones. Look at how well the new rows fit, which `ddm partition` says: where they don't, a new run
    of all images is better. Experts and router begin with RUN's trained weights, and train for as many steps as RUN
    did, or as PART.train.steps says: a schedule of its own, from step 0, since rows come in another order.

    New is a file of a path, below its source, that RUN doesn't have. One that has changed stays as it was prepared, and
    is named, as are files that are gone; an image that couldn't be used and has another size by now is taken. Of
    parquet files and tars put new ones beside the others. Append to the newest run: what begins from RUN again has
    nothing of what 0001 has learnt. The same command again names the same run; once there are more new files, another.

    \b
      ddm append runs/mine expert.train.steps=2000
      ddm append runs/mine --source ~/photos-2027 expert.train.steps=2000 router.train.steps=1000
      ddm prepare runs/mine/extended/0001
      ddm partition runs/mine/extended/0001
      ddm train runs/mine/extended/0001 all
    """
    from ddm_ray.config.longer import parse_steps
    from ddm_ray.data.append import append as begin
    from ddm_ray.run.run import Run

    appending = begin(Run.open(run_url), parse_steps(settings), source)
    new = appending.new
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
    run = appending.run
    say(f"run {run.config.name!r} at {run.url}; next: ddm prepare {run.url}")
