"""The verb that continues a run with new files."""

import click

from ddm_ray.cli.command import RUN, main, say, waiting, warn
from ddm_ray.cli.fixes import ddm_line
from ddm_ray.spelling import some


@main.command()
@RUN
@click.argument("settings", nargs=-1, metavar="[PART.train.steps=N]...")
@click.option("--source", metavar="URI", help="Where the new files are. Default: data.source of RUN, listed again.")
def append(run_url: str, settings: tuple[str, ...], source: str | None) -> None:
    """Continue RUN with new files of its source. RUN itself isn't changed, and nothing of it is prepared again.

    The command makes a new run, RUN/extended/0001 (0002, ...), and prints its name. Prepare, partition and train that
    run. Its rows are those of the new files, which join RUN's clusters; its shards are RUN's files, which are read in
    RUN, and new ones. `ddm partition` says how well the new rows fit. If they don't fit, begin a new run of all images.
    Experts and router begin with RUN's trained weights. They train for as many steps as in RUN, or for
    PART.train.steps, from step 0, since the rows come in another order.

    A file is new if RUN has no file of its path below the source. Files of another size than before keep their old
    rows and are named, and so are files that are gone. An image that couldn't be used is tried again if its size
    has changed. Add new parquet files and tars beside the old ones. Append to the newest run: if you append to RUN
    again, the result has nothing of what 0001 has learnt. The same command again names the same run, unless there
    are more new files.

    \b
      ddm append runs/mine expert.train.steps=2000
      ddm append runs/mine --source ~/photos-2027 expert.train.steps=2000 router.train.steps=1000
      ddm prepare runs/mine/extended/0001
      ddm partition runs/mine/extended/0001
      ddm train runs/mine/extended/0001 all
    """
    from ddm_ray.config.longer import parse_steps
    from ddm_ray.run.run import Run

    before, steps = Run.open(run_url), parse_steps(settings)
    from ddm_ray.data.append import append as begin

    with waiting("looking for new files"):
        appending = begin(before, steps, source)
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
    say(f"run {run.config.name!r} at {run.url}; next: {ddm_line('prepare', run.url)}")
