"""The verb that says beforehand what a run takes: of this machine, or of islands, with days, traffic and price."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ddm_ray.cli.command import ISLANDS, RUN, main, say, warn, with_extras
from ddm_ray.cli.devices import GPU, placed, require_gpu
from ddm_ray.cli.fixes import option
from ddm_ray.cli.train import sharing
from ddm_ray.cores import usable_cores
from ddm_ray.errors import ConfigError, DDMError
from ddm_ray.remedies import Give
from ddm_ray.storage.graph import Artifact, wanted_of

if TYPE_CHECKING:
    from ddm_ray.islands.needs import ModelNeeds
    from ddm_ray.islands.plan import RunPlan
    from ddm_ray.islands.speeds import IslandSpeed
    from ddm_ray.placement import Island
    from ddm_ray.storage.run import Run


@main.command()
@RUN
@ISLANDS
@click.option("--island", metavar="NAME", help="Only this island of FILE. With --calibrate: the one that is here.")
@with_extras("Plan for")
@GPU
@click.option(
    "--flops",
    multiple=True,
    metavar="NAME=1e15",
    help="Peak FLOP/s of one GPU (or CPU worker) of an island. May be given many times. Default: its gpu in FILE.",
)
@click.option("--mfu", metavar="A-B", help="Percent of the peak that training is to reach. Default: 30-50.")
@click.option(
    "--calibrate",
    is_flag=True,
    help="Take some steps of each model on this machine first, without Ray. Default: where no islands are named, and"
    " the steps take less than a minute.",
)
@click.option(
    "--egress-price",
    type=click.FloatRange(min=0),
    metavar="PER_GB",
    help="Price of a GB between island and storage. Warns of islands whose traffic costs a tenth of their workers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all numbers as one JSON object.")
def plan(
    run_url: str,
    islands: str | None,
    island: str | None,
    extras: list[str],
    gpu: bool | None,
    flops: tuple[str, ...],
    mfu: str | None,
    calibrate: bool,
    egress_price: float | None,
    as_json: bool,
) -> None:
    """Say beforehand what training the rest of RUN takes of this machine, or of the islands of FILE.

    Of this machine: rows a cluster, memory, disk and hours, and what it won't hold. Rows are counted in the source
    before they are prepared; hours are by some trial steps, where trainings haven't left their speed. Of islands: days,
    bytes, memory and price. An island's speed is what its trainings have left in the run; else peak times MFU, by its
    `gpu` in FILE or --flops; for this machine what --calibrate measures. A start and the last save come on top.
    Nothing is written to the run.

    \b
      ddm plan runs/digits
      ddm plan s3://lab/run7 --islands islands.yaml --egress-price 0.09
      ddm plan s3://lab/run7 --islands islands.yaml --flops north=9.9e14 --json
    """
    from ddm_ray.storage.run import Run

    run = Run.open(run_url)
    if islands is None:
        for_islands = {"island": island, "flops": flops, "mfu": mfu, "egress_price": egress_price}
        for name, value in for_islands.items():
            if value not in (None, ()):
                raise ConfigError(f"{option(name)} is for islands", Give("islands", "name their file", "FILE"))
        _plan_machine(run, wanted_of(run.config, extras), gpu, calibrate, as_json)
        return
    if gpu is not None:
        raise ConfigError("--gpu and --cpu are for this machine: islands have use_gpu in their file")
    from ddm_ray.cli.plan_tables import tables
    from ddm_ray.islands.needs import needs_of
    from ddm_ray.islands.plan import plan as plan_run
    from ddm_ray.islands.speeds import left_by_trainings
    from ddm_ray.placement import load_islands

    sites = load_islands(islands)
    if island is not None and island not in sites:
        raise ConfigError(f"no island {island!r:.60}", Give("island", f"choose one of {', '.join(sites)}"))
    sites = {name: site for name, site in sites.items() if island in (None, name)}
    if calibrate and len(sites) > 1:
        raise ConfigError("--calibrate measures this machine: which island is it", Give("island", "name it", "NAME"))
    peaks = _peaks(flops, sites)
    trained = wanted_of(run.config, extras)
    needs = needs_of(run, trained)
    speeds, unknown = _speeds(sites, left_by_trainings(run, trained), peaks, _shares(mfu or "30-50"), run.config)
    if calibrate:
        (name,) = sites
        speeds, unknown = {name: _calibrated(needs, sites[name])}, {}
    if not speeds:
        raise ConfigError("; ".join(f"{name}: {why}" for name, why in unknown.items()) + f": {_remedy(unknown)}")
    planned = plan_run(needs, sites, speeds)
    if as_json:
        click.echo(json.dumps(_as_json(planned, unknown, egress_price), indent=1))
        return
    for table in tables(planned, egress_price):
        for text in table.split("\n"):
            say(text)
    for name, why in unknown.items():
        warn(f"{name} is left out: {why}: {_remedy([name])}")
    if needs[0].rows is None:
        warn("the run isn't partitioned yet: the bytes of its rows are left out")
    for line in planned.warnings(egress_price or 0.0):
        warn(line)


def _plan_machine(run: "Run", trained: Sequence[Artifact], gpu: bool | None, calibrate: bool, as_json: bool) -> None:
    from ddm_ray.cli.plan_tables import machine_lines
    from ddm_ray.islands.machine import plan_machine
    from ddm_ray.placement import TrainPlacement

    if gpu:
        require_gpu(None)
    say("taking trial steps, some seconds a model, on a GPU after compiling ...", err=True)
    placement = sharing(placed(TrainPlacement(), gpu), len(trained), usable_cores())
    planned = plan_machine(run, trained, placement, "always" if calibrate else "if quick")
    if as_json:
        click.echo(json.dumps({**asdict(planned), "warnings": planned.warnings}, indent=1))
        return
    for text in machine_lines(planned, run):
        say(text)
    for line in planned.warnings:
        warn(line)


def outlook(run: "Run") -> None:
    """Print in some lines what a run that has just begun takes of this machine, without trial steps."""
    try:
        from ddm_ray.cli.plan_tables import outlook_lines
        from ddm_ray.islands.machine import plan_machine
        from ddm_ray.placement import TrainPlacement

        trained = wanted_of(run.config)
        planned = plan_machine(run, trained, sharing(TrainPlacement(), len(trained), usable_cores()), "never")
    except (DDMError, ModuleNotFoundError) as error:
        warn(f"what it takes isn't known: {error}")  # the run has begun all the same
        return
    for text in outlook_lines(planned):
        say(text)
    for line in planned.warnings:
        warn(line)


def _remedy(names: Mapping[str, str] | list[str]) -> str:
    return f"give --flops {next(iter(names))}=1e15, or gpu in the file; or --calibrate there"


def _peaks(flops: tuple[str, ...], sites: "Mapping[str, Island]") -> dict[str, float]:
    peaks = {}
    for text in flops:
        name, _, number = text.rpartition("=")
        if name not in sites:
            raise ConfigError(f"--flops {text!r:.60}: no island {name!r:.60}; write it as {next(iter(sites))}=1e15")
        try:
            peaks[name] = float(number)
        except ValueError:
            peaks[name] = 0.0
        if not 0 < peaks[name] < 1e30:
            raise ConfigError(f"--flops {text!r:.60}: FLOP/s above 0, as {name}=1e15")
    return peaks


def _shares(mfu: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d{1,3})(?:-(\d{1,3}))?", mfu)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < low <= high <= 100:
        raise ConfigError(f"--mfu {mfu!r:.60}: write percents as 30-50")
    return low / 100, high / 100


def _speeds(
    sites: "Mapping[str, Island]",
    left: "Mapping[str, IslandSpeed]",
    peaks: Mapping[str, float],
    mfu: tuple[float, float],
    config: Any,
) -> "tuple[dict[str, IslandSpeed], dict[str, str]]":
    """Speeds by island, and why that of others isn't known."""
    from ddm_ray.islands.speeds import by_peak

    speeds, unknown = {}, {}
    for name, site in sites.items():
        measured = left.get(name)
        if measured and name not in peaks:
            speeds[name] = measured
            continue
        try:
            speeds[name] = by_peak(site, config.expert.train.precision, peaks.get(name), mfu)
        except LookupError as error:
            unknown[name] = str(error)
    return speeds, unknown


def _calibrated(needs: "list[ModelNeeds]", site: "Island") -> "IslandSpeed":
    from ddm_ray.islands.calibration import SECONDS, calibrate
    from ddm_ray.islands.speeds import IslandSpeed
    from ddm_ray.train import local

    config = needs[0].config
    say(f"calibrating, {SECONDS * len(needs):.0f} s, on a GPU after compiling ...", err=True)
    with local.world():
        jobs = {need.kind: need.job for need in needs}
        speeds = calibrate(jobs, config.data, config.partition.num_clusters, site.train)
    return IslandSpeed({kind: (speed, speed) for kind, speed in speeds.items()}, "calibrated here")


def _as_json(planned: "RunPlan", unknown: Mapping[str, str], egress_price: float | None) -> dict[str, Any]:
    models = {
        need.kind: {
            "number": len(need.left),
            "left": sum(need.left.values()),
            "parameters": need.parameters,
            "flops": need.flops,
            "state_bytes": need.state_bytes,
            "weights_bytes": need.weights_bytes,
            "rows_bytes": need.rows.files if need.rows else None,
        }
        for need in planned.needs
    }
    sites: dict[str, Any] = {}
    for name, island in planned.islands.items():
        sites[name] = {
            "speed": planned.speeds[name].source,
            "workers": island.train.workers.max,
            "room_bytes": planned.room(island),
            "models": {},
        }
        for need in planned.needs:
            sites[name]["models"][need.kind] = {
                "memory_bytes_by_zero_stage": need.memory(
                    island.train.workers.max, island.train.use_gpu, island.train.teachers
                ),
                **{
                    end: {
                        "flops_per_second": planned.speeds[name].of(need.kind)[number],
                        "seconds": outcome.trainings[name][need.kind].seconds,
                        "states": outcome.trainings[name][need.kind].num_states,
                        "bytes_a_day": outcome.trainings[name][need.kind].bytes_a_day,
                        "bytes": asdict(outcome.trainings[name][need.kind].traffic),
                    }
                    for number, (end, outcome) in enumerate((("slow", planned.slow), ("fast", planned.fast)))
                },
            }
        for end, outcome in (("slow", planned.slow), ("fast", planned.fast)):
            if share := outcome.shares.get(name):
                sites[name][end] = {
                    "trains": share.artifacts,
                    "seconds": share.seconds,
                    "price": share.price(island),
                    "traffic_price": None if egress_price is None else share.egress(egress_price),
                    "bytes_written": share.traffic.written,
                    "bytes_read": share.traffic.read,
                }
    return {
        "models": models,
        "islands": sites,
        "unknown": dict(unknown),
        "seconds": {"slow": planned.slow.seconds, "fast": planned.fast.seconds},
        "warnings": planned.warnings(egress_price or 0.0),
    }
