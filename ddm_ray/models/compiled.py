"""Networks compiled block by block: their blocks are alike, so that one compilation does for all of a network's."""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import nn

from ddm_ray.errors import ConfigError

# Triton builds its launchers by the one (CC, else gcc or clang), and torch its code for a CPU by the other.
COMPILERS = (("CC", ("gcc", "clang")), ("CXX", ("g++", "clang++")))


def compiles(asked: bool | None, device: torch.device, zero_stage: int) -> bool:
    """True if a training's network is to be compiled: as asked; where nobody has said, on a GPU that has all it takes.

    Raises ConfigError where it is asked for and there is no compiler.
    """
    lacking = _lacking()
    if asked and lacking:
        fix = "install g++ (in Debian: apt-get install g++), or set compile to false"
        raise ConfigError(f"compile: there is no {lacking} here", fix)
    able = device.type == "cuda" and zero_stage < 3 and not lacking and find_spec("triton") is not None
    return able if asked is None else asked


def run_what_cannot_be_compiled() -> None:
    """From now on, have this process compute as it is written what torch.compile fails at, with a warning."""
    torch._dynamo.config.suppress_errors = True


def _lacking() -> str | None:
    """Names of a compiler of which none is here; None: code can be made."""
    for variable, usual in COMPILERS:
        names = (chosen,) if (chosen := os.environ.get(variable)) else usual
        if not any(shutil.which(name) for name in names):
            return " or ".join(names)
    return None


def compile_blocks(model: nn.Module) -> None:
    """Compile each block of a network in place; names of parameters stay, and so does what it computes.

    Code is made at the first call, and again for each other shape. Networks of one size share it, and it is made in
    seconds however deep they are.
    """
    for block in _blocks(model):
        block.compile(dynamic=False)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The members of its outermost lists, which is where our networks and diffusers' keep their blocks."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)
