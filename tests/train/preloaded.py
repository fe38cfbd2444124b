"""Modules that every rank comes to import, seconds of each: loaded here, before ranks are forked."""

import torch._dynamo  # noqa: F401
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401
