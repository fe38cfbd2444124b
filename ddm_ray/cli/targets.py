"""The verb that stores what an expert has to teach, for a student that is trained where no expert is."""

from functools import partial
from typing import Any

import click

from ddm_ray.cli.command import ADDRESS, ISLAND, ISLANDS, RUN, main, make, say
from ddm_ray.errors import ConfigError


@main.command()
@RUN
@click.option("--cluster", type=int, required=True, metavar="K", help="The cluster whose expert predicts.")
@ISLANDS
@ISLAND
@ADDRESS
def targets(run_url: str, cluster: int, islands: str | None, island: str | None, address: str | None) -> None:
    """Store what one expert predicts wherever the student is to learn from it, so that nobody needs all experts.

    Each island does this for its own expert. With `teachers: stored` on the student's island, `ddm train RUN student`
    reads these targets and loads no expert; its weights are those of a student beside its teachers, within rounding.
    Kill this command at any moment; the same command goes on. `ddm status RUN` shows how much is made.

    \b
      ddm targets s3://lab/run7 --cluster 3
      ddm targets s3://lab/run7 --cluster 3 --islands islands.yaml --island room-2
    """
    from ddm_ray.placement import load_island
    from ddm_ray.storage.graph import targets as targets_of
    from ddm_ray.storage.run import Run
    from ddm_ray.train.targets import make_targets, require_labelled, targets_bytes

    run = Run.open(run_url)
    site = load_island(islands, island)
    site.require_run(run.url)
    if not 0 <= cluster < len(run.experts):
        raise ConfigError(f"--cluster {cluster}: this run has clusters 0 to {len(run.experts) - 1}")
    require_labelled(run)
    size = targets_bytes(run) / len(run.experts)
    say(f"about {size / 2**20:.3g} MiB of targets, in fp32; half of that where a GPU makes them")

    def stage(run: Any, report: Any) -> None:
        from ddm_ray.data.sharded.ray_data import RayData
        from ddm_ray.ray_session import ray_session

        ray_data = RayData(site.prepare, partial(ray_session, *site.ray(address)))
        make_targets(run, cluster, ray_data, report, "cuda" if site.prepare.use_gpu else "cpu")

    make(run_url, targets_of(cluster), stage)
