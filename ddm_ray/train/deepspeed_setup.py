"""DeepSpeed, imported and set up once per process when it is first needed. Imports of our modules change nothing."""

import logging
import os
from functools import cache
from importlib import import_module
from typing import Any

import torch

from ddm_ray.ray_internals import COMPILE, MUON

LAUNCHERS = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL", "PMI_", "PMIX_", "CROSS_")
"""Beginnings of names of variables by which launchers tell a process its rank; torchrun's are set for each world."""


def forget_launchers() -> None:
    """Remove what `mpirun` and its like have left in the environment: DeepSpeed would take it for this world's."""
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]


@cache
def load_deepspeed() -> Any:
    """Import and return DeepSpeed, without two of its compilations that aren't used here.

    Entry points of training call it first, since the import takes seconds.
    """
    forget_launchers()
    if not torch.cuda.is_available():
        # DeepSpeed chooses its device while it is imported.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # DeepSpeed asks here whether it may compile an optional CPU communicator, for a minute at the first use; gloo does
    # without. To find out by itself it would compile and link, and ld would complain of libraries that aren't there.
    deepspeed.ops.__compatible_ops__ = {}
    # DeepSpeed asks of each optimizer whether it is Muon, and compiles that one's kernels when it imports them: that
    # would load all of torch's compiler, 2 s of every start.
    compiler: Any = import_module(COMPILE.module)
    original = COMPILE.get()
    compiler.compile = lambda: lambda function: function
    try:
        import_module(MUON.module)
    finally:
        compiler.compile = original
    return deepspeed
