"""The `ddm` command: a verb parses, opens the run and calls. Heavy imports wait until a verb needs them."""

from ddm_ray.cli.accept import accept
from ddm_ray.cli.append import append
from ddm_ray.cli.check import check
from ddm_ray.cli.command import main
from ddm_ray.cli.compare import compare
from ddm_ray.cli.copy import copy
from ddm_ray.cli.data import partition, prepare
from ddm_ray.cli.demo import demo
from ddm_ray.cli.doctor import doctor
from ddm_ray.cli.evaluate import evaluate
from ddm_ray.cli.extend import extend
from ddm_ray.cli.gateway import gateway
from ddm_ray.cli.inference import export, sample, serve
from ddm_ray.cli.islands import drain, list_workers, resume, stop
from ddm_ray.cli.launch import launch
from ddm_ray.cli.plan import plan
from ddm_ray.cli.recipes import fields, recipes
from ddm_ray.cli.replay import replay
from ddm_ray.cli.run import init, status, watch
from ddm_ray.cli.tidy import tidy
from ddm_ray.cli.train import train
from ddm_ray.cli.work import work

__all__ = [
    "accept",
    "append",
    "check",
    "compare",
    "copy",
    "demo",
    "doctor",
    "drain",
    "evaluate",
    "export",
    "extend",
    "fields",
    "gateway",
    "init",
    "launch",
    "list_workers",
    "main",
    "partition",
    "plan",
    "prepare",
    "recipes",
    "replay",
    "resume",
    "sample",
    "serve",
    "status",
    "stop",
    "tidy",
    "train",
    "watch",
    "work",
]
