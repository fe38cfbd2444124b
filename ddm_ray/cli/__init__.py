"""The `ddm` command: a verb parses, opens the run and calls. Heavy imports wait until a verb needs them.

Each module of this folder registers its verbs when it is imported.
"""

from importlib import import_module
from pkgutil import iter_modules

from ddm_ray.cli.command import main

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["main"]
