"""The `ddm` command: a verb parses, opens the run and calls. Heavy imports wait until a verb needs them."""

from ddm_ray.cli.command import main
from ddm_ray.cli.inference import export, sample, serve
from ddm_ray.cli.run import init, status, watch
from ddm_ray.cli.stages import demo, evaluate, partition, prepare, train

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
