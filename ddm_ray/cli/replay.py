"""The verb that samples images from experts, for a router that is trained without rows."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import click

from ddm_ray.cli.command import ADDRESS, ISLAND, ISLANDS, RUN, main, make, say
from ddm_ray.cli.fixes import ddm_line
from ddm_ray.errors import ConfigError
from ddm_ray.spelling import numbers_in_words


@main.command()
@RUN
@click.option("--cluster", type=int, metavar="K", help="Sample from the expert of this cluster. Default: all, in turn.")
@ISLANDS
@ISLAND
@ADDRESS
def replay(run_url: str, cluster: int | None, islands: str | None, island: str | None, address: str | None) -> None:
    """Sample images from finished experts, on which the router is trained instead of rows.

    The rows then needn't be where the router is trained: with partition.method=given no row leaves its owner, and the
    run still has a router. router.replay is the total number of images; each expert samples a share as large as its
    share of the rows. The images reveal no more of the rows than the partition's counts by class, unless an expert has
    memorized images. You may kill this command at any moment; the same command continues. `ddm status RUN` shows its
    progress.

    \b
      ddm copy north centre                 what each owner has made: docs/howto/owners.md
      ddm copy south centre
      ddm partition centre
      ddm replay centre
      ddm train centre router
    """
    from ddm_ray.placement import load_island
    from ddm_ray.run.graph import replay as replay_of
    from ddm_ray.run.inventory import require_replay
    from ddm_ray.run.run import Run

    run = Run.open(run_url)
    site = load_island(islands, island)
    clusters = run.config.partition.clusters
    if cluster is not None and cluster not in clusters:
        raise ConfigError(f"--cluster {cluster}: this run has clusters {numbers_in_words(clusters)}")
    require_replay(run)
    numbers = clusters if cluster is None else [cluster]
    missing = [number for number in numbers if not run.finished(replay_of(number))]
    for needed in [needed for number in missing for needed in run.inputs(replay_of(number))]:
        run.require(needed)  # before Ray is started

    from ddm_ray.train.replay import images_of, make_replay

    def stage(run: Any, report: Any, number: int, execute: Any) -> None:
        say(f"{len(images_of(run, number))} images of expert {number}")
        make_replay(run, number, execute, report, "cuda" if site.prepare.use_gpu else "cpu")

    with _ray_data(site, address) if missing else nullcontext() as execute:
        for number in numbers:
            make(run_url, replay_of(number), partial(stage, number=number, execute=execute))
    say(f"next: {ddm_line('train', run_url, 'router')}")


@contextmanager
def _ray_data(site: Any, address: str | None) -> Iterator[Any]:
    """Open one Ray for all clusters."""
    from ddm_ray.data.sharded.ray_data import RayData
    from ddm_ray.ray_session import ray_session

    with ray_session(*site.ray(address)):
        yield RayData(site.prepare)
