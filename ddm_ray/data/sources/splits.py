"""Splits that others made of a data set, by the names of folders and files: a run is of one of them, or of all."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from ddm_ray.errors import DataError
from ddm_ray.remedies import Begin

ALL = "all"
NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Splits by the names that folders and files give them, which are those that Hugging Face's `datasets` knows."""
_WORD = re.compile(rf"(?:^|[-._ /\d])({'|'.join(NAMES)})(?=$|[-._ /\d])")


def split_of(path: str, by_folder: bool) -> str | None:
    """The split of a file, by its path below the source; None if that names none.

    `by_folder`: only the first folder counts, since files are images, which may have any name.
    """
    if by_folder:
        return NAMES.get(path.partition("/")[0].casefold()) if "/" in path else None
    match = _WORD.search(path.casefold())
    return NAMES[match[1]] if match else None


def class_folder(path: str, split: str | None) -> str | None:
    """The name of the folder that tells an image's class: the first one, or the first one within its split's.

    `split`: see `data.split`. None if there is no such folder.
    """
    folders = path.split("/")[:-1]
    if split is not None and split_of(path, by_folder=True):
        folders = folders[1:]
    return folders[0] if folders else None


def of_split(
    sizes: Mapping[str, int], split: str | None, by_folder: bool, classes: Iterable[str] | None, url: str
) -> dict[str, int]:
    """The files of the split that a run is of; all of them if there are no splits.

    `classes`: names of classes, which folders may have; None: folders tell no class. Raises DataError if it has to be
    asked which split is meant, and for a split that isn't there.
    """
    split_by_path = {path: split_of(path, by_folder) for path in sizes}
    counts = Counter(name for name in split_by_path.values() if name)
    listed = ", ".join(f"{count:,} of {name}" for name, count in counts.items())
    problem = f"data.source {url!r}: its files are of splits: {listed}"
    fix = Begin(field="data.split", value="train" if "train" in counts else next(iter(counts), ALL))
    if split is None:
        named = {name.casefold() for name in classes or ()} & NAMES.keys()
        alone = by_folder and classes is not None and sum(counts.values()) == sum("/" in path for path in sizes)
        if counts and not named and (len(counts) > 1 or alone):
            raise DataError(f"{problem}; data.split chooses one of them, or {ALL}", fix)
        return dict(sizes)
    if split == ALL:
        return dict(sizes)
    name = NAMES.get(split.casefold(), split)
    if name not in counts:
        problem = problem if counts else f"data.source {url!r}: no file is of a split"
        raise DataError(f"{problem}; data.split {split!r} isn't there", fix)
    return {path: size for path, size in sizes.items() if split_by_path[path] == name}
