"""Splits that others made of a data set, by the names of folders and files: a run is of one of them, or of all."""

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ddm_ray.errors import DataError
from ddm_ray.remedies import Begin

ALL = "all"
NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Splits by the names that folders and files give them, which are those that Hugging Face's `datasets` knows."""
_WORD = re.compile(rf"(?:^|(?<=[-._ \d]))({'|'.join(NAMES)})(?=$|[-._ \d]|(?-i:(?<=[a-z])[A-Z]))", re.IGNORECASE)
_COMMON = re.compile(r"data|sets?|images?|imgs?|[\W_]+", re.IGNORECASE)
"""Words in the name of a split's folder, and of those above it, that aren't a class's."""


@dataclass(frozen=True)
class SplitName:
    """The part of a path that names a split: its place, its text, the split, and a class's words above and in it."""

    place: int
    above: str
    part: str
    split: str
    rest: str


@lru_cache(maxsize=2**12)
def _named(path: str) -> SplitName | None:
    """The part of a path that names a split: one that is nothing else, or the first one with a word, as `train2017`."""
    matches = [(place, match) for place, part in enumerate(path.split("/")) if (match := _WORD.search(part))]
    if not matches:
        return None
    place, match = min(matches, key=lambda each: each[1][0] != each[1].string)
    part = match.string.casefold()
    rest = _COMMON.sub("", re.sub(r"\d", "", part.replace(match[0].casefold(), "", 1)))
    above = path[: len(path) - len(path.split("/", place)[-1])]
    return SplitName(place, above if _COMMON.sub("", above) else "", part, NAMES[match[0].casefold()], rest)


def split_of(path: str, by_folder: bool) -> SplitName | None:
    """The split of a file, by its path below the source; None if that names none.

    `by_folder`: only its folders count, since files are images, which may have any name.
    """
    return _named(path.rpartition("/")[0] if by_folder else path)


def class_folder(path: str, split: str | None) -> str | None:
    """The name of the folder that tells an image's class: the first one, within its split's if that has folders.

    `split`: see `data.split`. None if there is no such folder.
    """
    folders = path.split("/")[:-1]
    named = None if split is None else split_of(path, by_folder=True)
    if named and (split != ALL or not (named.above or named.rest)):
        folders = folders[named.place + 1 :] or folders[: None if split == ALL else named.place]
    return folders[0] if folders else None


def _asks(named: Collection[SplitName], alone: bool, classes: Collection[str] | None) -> bool:
    """True if folders are splits, rather than those of classes that are called so.

    Two that differ in the split alone are, as `a_train` and `a_test`, and so is `train` if nothing else is there.
    """
    kinds, rests = {(each.rest, each.split) for each in named}, {each.rest for each in named}
    if {each.part for each in named} & {name.casefold() for name in classes or ()}:
        return False
    return len(rests) < len(kinds) or (alone and classes is not None and rests == {""})


def of_split(
    sizes: Mapping[str, int],
    split: str | None,
    by_folder: bool,
    classes: Collection[str] | None,
    url: str,
    known: Collection[str] = (),
) -> dict[str, int]:
    """The files of the split that a run is of; all of them if there are no splits, or `known` ones are of several.

    `classes`: names of classes, which folders may have; None: folders tell no class. Raises DataError if it has to be
    asked which split is meant, and for a split that isn't there.
    """
    named = {path: each for path in sizes if (each := split_of(path, by_folder))}
    counts = Counter(each.split for each in named.values())
    listed = ", ".join(f"{count:,} of {name}" for name, count in counts.items())
    problem = f"data.source {url!r}: its files are of splits: {listed}"
    fix = Begin(field="data.split", value="train" if "train" in counts else next(iter(counts), ALL))
    top = f"{os.path.commonpath([*sizes] or [''])}/"  # below others, only a class's last folder is a split
    above = next((each.above for each in named.values() if top.startswith(each.above)), "")
    if split == ALL and classes is not None and above:
        raise DataError(f"{problem}, all in {above!r}; give that folder as data.source, or choose a split")
    if split is None:
        alone = len(named) == sum("/" in path for path in sizes)
        own = {each for path, each in named.items() if top.startswith(each.above) or path.count("/") == each.place + 1}
        asks = _asks(own, alone, classes) if by_folder else len(counts) > 1
        if asks and len({named[path].split for path in known if path in named}) < 2:
            problem += "" if alone or classes is None else ", unless data.class_names names classes that are called so"
            raise DataError(f"{problem}; data.split chooses one of them, or {ALL}", fix)
    if split in (None, ALL):
        return dict(sizes)
    name = NAMES.get(split.casefold(), split)
    if name not in counts:
        problem = problem if counts else f"data.source {url!r}: no file is of a split"
        raise DataError(f"{problem}; data.split {split!r} isn't there", fix)
    return {path: size for path, size in sizes.items() if path in named and named[path].split == name}
