"""The `ddm` command: one verb a stage, parse -> Run -> stage. Heavy imports wait until a verb needs them."""

from ddm_ray.cli.command import main
from ddm_ray.cli.making import init, partition, prepare, train
from ddm_ray.cli.using import demo, evaluate, export, sample, serve, status
from ddm_ray.cli.watching import watch

__all__ = [
    "demo",
    "evaluate",
    "export",
    "init",
    "main",
    "partition",
    "prepare",
    "sample",
    "serve",
    "status",
    "train",
    "watch",
]
