"""The verb that plans the training of a run on this machine, or on an island with such machines."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ddm_ray.cli.command import ISLAND, ISLANDS, RUN, main, progress, say, warn, with_extras
from ddm_ray.cli.devices import GPU, placed, require_gpu
from ddm_ray.cli.fixes import ddm_line
from ddm_ray.cli.train import sharing
from ddm_ray.data import OnProgress, no_progress
from ddm_ray.errors import DDMError
from ddm_ray.spelling import amount

if TYPE_CHECKING:
    from ddm_ray.islands.plan import RunPlan
    from ddm_ray.run.run import Run


@main.command()
@RUN
@ISLANDS
@ISLAND
@with_extras("Plan for")
@GPU
@click.option("--json", "as_json", is_flag=True, help="Print all numbers as one JSON object.")
def plan(
    run_url: str, islands: str | None, island: str | None, extras: list[str], gpu: bool | None, as_json: bool
) -> None:
    """Show what the rest of RUN's training needs, as a table: rows, memory, disk and time.

    Times come from trial steps of each model on this machine, with random rows. The start and the last save take more
    time. Memory with a `>` wasn't measured, and lacks activations. With --island this machine stands for an island:
    its workers train one model at a time, and its price_per_hour gives prices. Nothing is written to the run.

    With --islands alone, before anything is trained, it proposes for each island the largest expert that its
    memory_gib allows, as a setting for `ddm init`.

    \b
      ddm plan runs/digits
      ddm plan s3://lab/run7 --islands islands.yaml                      how large each expert may be
      ddm plan s3://lab/run7 --islands islands.yaml --island north       on a machine of north
    """
    from ddm_ray.jobs.status import require_sound
    from ddm_ray.placement import load_island, load_islands
    from ddm_ray.run.graph import wanted_of
    from ddm_ray.run.run import Run

    run, sites = Run.open(run_url), load_islands(islands) if islands and not (island or as_json) else {}
    if sites and _propose(run, list(sites.values())) and len(sites) > 1:
        return
    site = load_island(islands, island)
    require_sound(run, wanted_of(run.config, extras))
    site = site.model_copy(update={"train": placed(site.train, gpu)})
    if site.train.use_gpu:
        require_gpu(None)
    with progress(run.url, "plan", "trial steps, some seconds a model") as report:
        planned = _planned(run, site, extras, report)
    if as_json:
        click.echo(json.dumps(asdict(planned), indent=1))
    else:
        _show(planned)


def _propose(run: "Run", sites: list[Any]) -> bool:
    """Print for each island how large an expert it could train, and a setting of that; False if there is none."""
    from ddm_ray.islands.plan import largest_sizes

    for each in (plans := largest_sizes(run, sites)):
        if each.free is None:
            say(f"{each.island}: its memory isn't known: set memory_gib in the islands' file, what one worker has")
        elif each.size is None:
            say(f"{each.island}: {amount(each.free)} of memory are too little for any named size")
        else:
            what = f"{amount(each.parameters, '')} parameters, {amount(each.memory)} of {amount(each.free)} of memory"
            say(f"{each.island}: an expert of size {each.size} at most: {what}, without activations")
    if not (able := [each for each in plans if each.size]):
        return bool(plans)
    clusters = enumerate(run.config.partition.clusters)
    sizes = [f"{cluster}: {{model: {{size: {able[place % len(able)].size}}}}}" for place, cluster in clusters]
    say(f"a run of such experts begins with: --set 'experts={{{', '.join(sizes)}}}'")
    return True


def outlook(run: "Run", run_url: str) -> None:
    """Print what a new run needs on this machine, without trial steps. `run_url`: its name on the command line."""
    from ddm_ray.placement import Island

    try:
        _show(_planned(run, Island(), [], None))
        say(f"how long it takes is measured by: {ddm_line('plan', run_url)}")
    except (DDMError, ModuleNotFoundError) as error:
        warn(f"what it takes isn't known: {error}")  # the run has begun nevertheless


def _planned(run: "Run", site: Any, extras: list[str], report: OnProgress | None) -> "RunPlan":
    """The plan, with trial steps on which `report` is called; None: without."""
    from ddm_ray.cores import usable_cores
    from ddm_ray.islands.plan import plan as plan_run
    from ddm_ray.run.graph import wanted_of

    trained = wanted_of(run.config, extras)
    if not site.name:
        site = site.model_copy(update={"train": sharing(site.train, len(trained), usable_cores())})
    return plan_run(run, trained, site, report is not None, report or no_progress)


def _show(plan: "RunPlan") -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from ddm_ray.islands.plan import NOT_MEASURED
    from ddm_ray.spelling import duration

    def priced(seconds: float | None) -> str:
        price = "" if plan.price_per_hour is None else f", {(seconds or 0) / 3600 * plan.price_per_hour:,.2f}"
        return "?" if seconds is None else f"{duration(seconds)}{price}"

    table = Table("training", box=SIMPLE, pad_edge=False)
    time = "time" if plan.price_per_hour is None else "time and price"
    for column in ("number", "parameters", "rows", "bytes", "memory", "disk", time):
        table.add_column(column, justify="right")
    for each in plan.trainings:
        left = f"{each.left:.3g} of {each.number}" if each.left < each.number else str(each.number)
        memory = ("" if each.measured else "> ") + amount(each.memory)
        rows = _span(each.rows), _span(each.rows_bytes, amount)
        last = memory, amount(each.disk), priced(each.seconds)
        table.add_row(each.kind, left, amount(each.parameters, ""), *rows, *last)
        if each.left and each.memory > plan.memory_free:
            warn(f"{each.kind}: training takes {amount(each.memory)} of memory, {amount(plan.memory_free)} are free")
    rows = _span(plan.rows), _span(plan.rows_bytes, amount)
    last = f"{amount(plan.memory_free)} free", amount(plan.disk), priced(plan.seconds)
    table.add_row("all", f"{plan.at_once} at once", "", *rows, *last)
    Console(width=160).print(table, end="")
    for each in plan.trainings:
        if each.seconds is None and each.unknown != NOT_MEASURED:
            say(f"{each.kind}: no time: {each.unknown}")
    if plan.disk_free is not None and plan.disk > plan.disk_free:
        warn(f"rows, states and weights take up to {amount(plan.disk)} of disk, {amount(plan.disk_free)} are free")


def _span(numbers: tuple[int, ...] | int | None, shown: Callable[[int], str] = "{:,}".format) -> str:
    listed = numbers if isinstance(numbers, tuple) else (numbers,)
    return " to ".join(dict.fromkeys("?" if each is None else shown(each) for each in listed))
