"""The verb that lists, and deletes, what of a run no artifact needs."""

from typing import TYPE_CHECKING

import click

from ddm_ray.cli.command import RUN, main
from ddm_ray.spelling import amount

if TYPE_CHECKING:
    from ddm_ray.run.garbage import Leftover


@main.command()
@RUN
@click.option("--delete", "delete_them", is_flag=True, help="Delete what is listed. Without it nothing is.")
@click.option("--milestones", is_flag=True, help="Also weights of finished jobs that were published on the way.")
def tidy(run_url: str, delete_them: bool, milestones: bool) -> None:
    """List what of RUN no artifact needs any more, with its bytes; --delete deletes it.

    These are training states of what is finished, weights of its other attempts that weren't published, chunks that
    nothing names, and files that a killed process didn't finish, a day later. What is under way is left alone, whatever
    lies there; so are milestones, unless asked for. Without the states that trainings ended with they can't be trained
    for longer: begin `ddm extend` first, whose states are left alone until it has ended.

    \b
      ddm tidy runs/digits
      ddm tidy runs/digits --delete
      ddm tidy s3://lab/run7 --milestones --delete
    """
    from ddm_ray.run.garbage import delete_garbage, leftovers
    from ddm_ray.run.run import Run

    run = Run.open(run_url)
    left = leftovers(run, milestones)
    if left:
        _show(left)
        if delete_them:
            delete_garbage(run, left)
            click.echo("deleted")
        else:
            click.echo("nothing was deleted; --delete does it")
    else:
        click.echo("nothing is left over")
    if run.store.local is None:
        click.echo(
            "Uploads that were cut off are in no list, and are paid for: give the bucket a lifecycle rule"
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
