"""Modules that every rank comes to import, seconds of each: loaded here, before ranks are forked."""

from importlib import import_module

import torch._dynamo  # noqa: F401

from ddm_ray.train.deepspeed_setup import load_deepspeed

load_deepspeed()
import_module("deepspeed.runtime.zero.muon.muon_optimizer")
