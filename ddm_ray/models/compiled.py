"""Networks compiled block by block: their blocks are alike, so that one compilation does for all of a network's."""

import os
import shutil
from collections.abc import Iterator

from torch import nn

from ddm_ray.errors import ConfigError

# Triton builds its launchers by the one (CC, else gcc or clang), and torch its code for a CPU by the other.
COMPILERS = (("CC", ("gcc", "clang")), ("CXX", ("g++", "clang++")))


def require_compiler() -> None:
    """Raise ConfigError where code couldn't be made, since there is no compiler."""
    for variable, usual in COMPILERS:
        names = (chosen,) if (chosen := os.environ.get(variable)) else usual
        if not any(shutil.which(name) for name in names):
            fix = "install g++ (in Debian: apt-get install g++), or set compile to false"
            raise ConfigError(f"compile: there is no {' or '.join(names)} here", fix)


def compile_blocks(model: nn.Module) -> None:
    """Compile each block of a network in place; names of parameters stay, and so does what it computes.

    Code is made at the first call, and again for each other shape. Networks of one size share it, and it is made in
    seconds however deep they are.
    """
    for blocks in lists_of_blocks(model):
        for block in blocks:
            block.compile(dynamic=False)


def call_uncompiled(model: nn.Module) -> None:
    """Have a network's blocks called as they are again, in place."""
    for module in model.modules():
        module._compiled_call_impl = None


def lists_of_blocks(model: nn.Module) -> Iterator[nn.ModuleList]:
    """Lists that are outermost in it, which is where our networks and diffusers' keep their blocks."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from lists_of_blocks(child)
