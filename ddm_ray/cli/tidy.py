"""The verb for garbage collection: it lists, and deletes, objects of a run that no artifact needs."""

from typing import TYPE_CHECKING

import click

from ddm_ray.cli.command import RUN, main, waiting, warn
from ddm_ray.spelling import amount

if TYPE_CHECKING:
    from ddm_ray.run.garbage import Leftover


@main.command()
@RUN
@click.option("--delete", "delete_them", is_flag=True, help="Delete what is listed. Without it nothing is deleted.")
@click.option("--milestones", is_flag=True, help="Include weights that finished jobs published before their end.")
def tidy(run_url: str, delete_them: bool, milestones: bool) -> None:
    """List objects of RUN that no artifact needs any more, with their sizes. --delete deletes them.

    These are training states of finished jobs, unpublished weights of their other attempts, chunks that nothing names,
    and unfinished files of killed processes after a day. Unfinished jobs and stages are left alone. Milestones are
    kept, unless you ask for them. A finished job can't be continued without its last state: derive the longer run
    first (`ddm init RUN2 --from RUN`), for which the states that it needs are kept until it has finished.

    \b
      ddm tidy runs/digits
      ddm tidy runs/digits --delete
      ddm tidy s3://lab/run7 --milestones --delete
    """
    from ddm_ray.errors import DDMError
    from ddm_ray.run.base import NOTES, derived_from
    from ddm_ray.run.garbage import delete_garbage, leftovers
    from ddm_ray.run.run import Run

    run = Run.open(run_url)
    for url in derived_from(run.store):
        try:
            Run.open(url)
        except DDMError as error:
            warn(f"all states are kept for a run that was derived from this one: {error.message}")
            warn(f"if that run is gone for good, delete its note below {run.url}/{NOTES}")
    with waiting("listing objects"):
        left = leftovers(run, milestones)
    if left:
        _show(left)
        if delete_them:
            with waiting("deleting"):
                delete_garbage(run, left)
            click.echo("deleted")
        else:
            click.echo("nothing was deleted; --delete does it")
    else:
        click.echo("nothing is left over")
    if run.store.local is None:
        click.echo(
            "Incomplete uploads aren't listed, but they cost money: give the bucket a lifecycle rule"
            " AbortIncompleteMultipartUpload of 1 day."
        )


def _show(left: "list[Leftover]") -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for column in ("artifact", "left over", "files", "size"):
        table.add_column(column, justify="right" if column in ("files", "size") else "left")
    for each in left:
        table.add_row(each.artifact or "run", each.what, f"{each.files:,}", amount(each.bytes))
    table.add_row("all", "", f"{sum(each.files for each in left):,}", amount(sum(each.bytes for each in left)))
    Console(width=120).print(table)
