"""The folder of an export: filled whole or not at all; filled again, what no export wrote into it stays as it is."""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ddm_ray import __version__
from ddm_ray.errors import CorruptArtifact, SamplingError
from ddm_ray.models.third_party import read_json, require_size
from ddm_ray.run.manifest import FileName, FileRecord
from ddm_ray.spelling import shell_line
from ddm_ray.store.checksummed import seal
from ddm_ray.store.refusals import as_storage_error

INDEX = "model_index.json"
"""The file by which diffusers knows a pipeline's folder."""
CARD = "README.md"
"""The one file of an export that people go on writing: changed since, it is theirs."""
LISTED = ("files", "_ddm_ray_files")
"""Fields of an index that list an export's other files: of a mixture, and of a dense model."""
UNFINISHED = "unfinished"
"""Field of the index of a folder that is being filled again, which lists the files of both exports."""
_FILES = TypeAdapter(dict[FileName, FileRecord])


def write_folder(folder: str | os.PathLike[str], overwrite: bool, write: Callable[[Path], None]) -> None:
    """Have `write` fill a folder beside `folder`, to the disk itself, and put that in its place.

    `write` leaves an index that lists its files (`records_below`). Where an export is there and `overwrite` is given,
    its files make way and all others stay: `_replace`. SamplingError for a folder that holds anything else, and for a
    file of somebody else's that has the name of a new one; StorageError if it can't be written, and the old one stays.
    """
    target = Path(folder).absolute()
    require_free(target, overwrite)
    being, old = (target.with_name(f".{target.name}.{secrets.token_hex(4)}.{word}") for word in ("being", "old"))
    try:
        with as_storage_error(f"{target}: can't be saved", "choose another folder"):
            being.mkdir(parents=True)
            write(being)
            for path in [*being.rglob("*"), being]:
                _sync(path)
            if target.exists() and any(target.iterdir()):
                _replace(target, being, old)
            else:
                being.rename(target)
            _sync(target.parent)
    finally:
        shutil.rmtree(being, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def require_free(folder: str | os.PathLike[str], overwrite: bool = False, remedy: str = "overwrite=True") -> None:
    """SamplingError for a folder that holds anything, but an export that may be overwritten and lists its files."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not is_ours(target):
            raise SamplingError(f"{target} is there and no pipeline of ours: save to another folder")
        if not overwrite:
            raise SamplingError(f"{target} is a pipeline already: use {remedy}, or another folder")
        _own_files(target)


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """True for a folder that an export wrote, sound or not. CorruptArtifact for an index too large for one."""
    try:
        require_size(Path(folder) / INDEX)
        return b'"_ddm_ray_version"' in (Path(folder) / INDEX).read_bytes()
    except OSError:
        return False


def records_below(folder: Path) -> dict[str, Any]:
    """Size and checksum of each file of a folder but its index, by path, as an index lists them."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name: asdict(FileRecord.of_file(folder / name)) for name in names if name != INDEX}


def _replace(target: Path, being: Path, old: Path) -> None:
    """Move the files of an export to `old` and those of `being` to their places; others aren't touched.

    Meanwhile the index says that it is unfinished, so that after a kill it isn't taken for whole, and another export
    goes on from there. After an OSError all is as it was.
    """
    (listed, _), (new, _), own = _listed(target), _listed(being), _own_files(target)
    if in_the_way := [name for name in new if not _is_free(target, name, own)]:
        raise SamplingError(
            f"{target / min(in_the_way)} isn't as an export wrote it: move it away, or use another folder"
        )
    old.mkdir()
    shutil.copy2(target / INDEX, old / INDEX)
    both = {name: asdict(record) for name, record in {**listed, **new}.items()}
    marked = being / f"{INDEX}.{UNFINISHED}"
    marked.write_bytes(seal({"_ddm_ray_version": __version__, UNFINISHED: True, "files": both}))
    _sync(marked)
    marked.replace(target / INDEX)
    moves = [(target / name, old / name) for name in own] + [(being / name, target / name) for name in new]
    done = list[tuple[Path, Path]]()
    try:
        for source, place in moves:
            place.parent.mkdir(parents=True, exist_ok=True)
            source.rename(place)
            done.append((source, place))
        (being / INDEX).replace(target / INDEX)
    except OSError:
        for source, place in reversed(done):
            place.rename(source)
        (old / INDEX).replace(target / INDEX)
        raise
    for parent in sorted({parent for name in listed for parent in (target / name).parents}, reverse=True):
        if parent != target and parent.is_relative_to(target):
            with suppress(OSError):  # there is something in it
                parent.rmdir()
    _sync(target)


def _own_files(target: Path) -> dict[str, FileRecord]:
    """Files in a folder that its export wrote, by its index: those below it, and a card that is unchanged.

    SamplingError if the index doesn't list them.
    """
    records, unfinished = _listed(target)
    return {
        name: record
        for name, record in records.items()
        if _is_below(target, name)
        and (target / name).is_file()
        and (name != CARD or unfinished or FileRecord.of_file(target / name) == record)
    }


def _listed(folder: Path) -> tuple[Mapping[str, FileRecord], bool]:
    """The files that the index of an export lists, and whether it is unfinished."""
    try:
        index = read_json(folder / INDEX)
        records = _FILES.validate_python(next((index[field] for field in LISTED if field in index), None))
    except (ValidationError, CorruptArtifact):
        raise SamplingError(
            f"{folder / INDEX} doesn't list the files of its export: delete {shell_line(str(folder))}, or use another"
        ) from None
    return records, UNFINISHED in index


def _is_free(target: Path, name: str, own: Mapping[str, FileRecord]) -> bool:
    """True if a file of this name can be put there once the `own` ones are gone."""
    if name in own:
        return True
    folders = [parent for parent in Path(name).parents if parent != Path()]
    if any(_is_there(target / folder) and not _is_folder(target / folder) for folder in folders):
        return any(folder.as_posix() in own for folder in folders)
    return not _is_there(target / name)


def _is_below(target: Path, name: str) -> bool:
    """True if no folder on the way to a file is a link, which would lead out of the folder."""
    return all(_is_folder(target / parent) for parent in Path(name).parents)


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
