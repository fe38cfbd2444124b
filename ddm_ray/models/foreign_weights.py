"""Files of weights that others wrote: what else than safetensors they may be, and how their tensors may be called."""

from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

from ddm_ray.plain_text import LFS_POINTER, NOT_FETCHED

_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of files that torch.save writes."""
T = TypeVar("T")


def what_else(path: Path) -> str:
    """Words for a file that is no whole safetensors, with a remedy."""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(LFS_POINTER):
        return NOT_FETCHED
    if head.startswith(_PICKLES):
        convert = "save_file(torch.load(FILE, weights_only=True), 'FILE.safetensors')"
        return f"a pickle, which may run code when it is opened; convert it with safetensors.torch: {convert}"
    return "not whole safetensors"


def without_prefix(tensors: dict[str, T], expected: Collection[str]) -> dict[str, T]:
    """The tensors by the expected names, if all of theirs begin alike: with `module.`, `_orig_mod.`, `model.`, `ema.`.

    Wrappers of PyTorch put such a prefix before each name. Tensors of other names are returned as they are.
    """
    if not tensors.keys().isdisjoint(expected):
        return tensors
    known = next(iter(expected))
    for name in tensors:
        prefix = name.removesuffix(known)
        if prefix != name and prefix.endswith(".") and all(each.startswith(prefix) for each in tensors):
            return {each.removeprefix(prefix): tensor for each, tensor in tensors.items()}
    return tensors
