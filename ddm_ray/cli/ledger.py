"""The verb that sums up what each island has moved and worked, as its processes have accounted for it."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ddm_ray.cli.command import ISLANDS, RUN, main, say, warn

if TYPE_CHECKING:
    from ddm_ray.placement import Island
    from ddm_ray.storage.ledger import IslandLedger


@main.command()
@RUN
@ISLANDS
@click.option("--json", "as_json", is_flag=True, help="Print all numbers as one JSON object.")
def ledger(run_url: str, islands: str | None, as_json: bool) -> None:
    """Sum up what each island has read from RUN's storage, written to it, and worked; its price by --islands FILE.

    Each process that trains, and each `ddm work`, leaves an account of its own in RUN/ledger: bytes of objects and
    requests as they pass, and its life; every 5 minutes, and at its end. So what one did before it was killed may lack
    some minutes. `ddm train`, `watch` and the like, listings and what Ray Train notes are left out: some KB.

    \b
      ddm ledger runs/digits
      ddm ledger s3://lab/run7 --islands islands.yaml
    """
    from ddm_ray.placement import load_islands
    from ddm_ray.storage.ledger import read_ledger
    from ddm_ray.storage.run import Run

    sites = load_islands(islands) if islands else {}
    sums, unread = read_ledger(Run.open(run_url).store)
    prices = {each.island: _price(each, sites.get(each.island)) for each in sums}
    if as_json:
        lines = {each.island: {**asdict(each), "price": prices[each.island]} for each in sums}
        click.echo(json.dumps({"islands": lines, "unread": unread}, indent=1))
    elif not sums:
        say("no process has left an account yet")
    else:
        _show(sums, prices)
    if unread:
        warn(f"{unread} accounts can't be read, and are left out")


def _price(each: "IslandLedger", site: "Island | None") -> float | None:
    """The price of its worker-hours; the file's is that of all workers together."""
    if site is None or site.price_per_hour is None:
        return None
    return site.price_per_hour * each.worker_hours / site.train.workers.max


def _show(sums: "list[IslandLedger]", prices: dict[str, float | None]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for column in ("island", "processes", "open", "worker-hours", "read", "written", "requests", "price"):
        table.add_column(column, justify="left" if column == "island" else "right")
    for each in sums:
        counted, price = each.counted, prices[each.island]
        sizes = (f"{size / 1e6:,.3f} MB" for size in (counted.read, counted.written))
        requests = f"{sum(counted.requests.values()):,}"
        shown_price = "-" if price is None else f"{price:,.2f}"
        hours = f"{each.worker_hours:,.3f}"
        table.add_row(each.island, str(each.processes), str(each.open), hours, *sizes, requests, shown_price)
    Console(width=120).print(table)
