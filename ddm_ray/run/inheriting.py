"""InheritingStore: the store of a derived run, which reads some objects from its base."""

import re
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from ddm_ray.errors import StorageError
from ddm_ray.run.base import holder_of
from ddm_ray.store.retries import SHORT_RETRIES, RetryPolicy
from ddm_ray.store.store import Store

F = TypeVar("F", bound=Callable[..., Any])

SHARDS = "partition/shards/"
_LATER = "appended"
_SHARD_FILE = re.compile(
    rf"partition/shards/[^/]+/(train|heldout)-({_LATER}(?P<generation>[0-9]{{3}})-)?[0-9]+\.parquet"
)


def shard_file(split: str, number: int, generation: int) -> str:
    """Name of a shard's file of one split. It sorts after the files of earlier generations of appended rows."""
    return f"{split}-{f'{_LATER}{generation:03d}-' if generation else ''}{number:05d}.parquet"


def generation_of(key: str) -> int | None:
    """Count of appends before a shard's file was made; None for keys of other objects."""
    match = _SHARD_FILE.fullmatch(key)
    return int(match["generation"] or 0) if match else None


def _routed(method: F, changes: bool = False) -> F:
    """The method, called on the base's store for a key that lies there. If it `changes` an object, it is refused."""

    @wraps(method)
    def ask(self: "InheritingStore", key: str, *args: Any, **options: Any) -> Any:
        if not self.inherits(key):
            return method(self, key, *args, **options)
        if changes:
            where = f"{self.url}/{key}: lies in {self.base.url}, which must not be changed by this run"
            raise StorageError(where, "work on that run instead", passes=False)
        return getattr(self.base, method.__name__)(key, *args, **options)

    return cast(F, ask)


class InheritingStore(Store):
    """A store in which all objects of the artifacts `kept`, and of `prefix/ARTIFACT`, are those of the `base`.

    So are the files of shards of an earlier `generation` than this run's, if it appends files. They are never written
    or deleted here. Callers needn't know where an object lies.
    """

    def __init__(
        self,
        url: str,
        base: Store,
        kept: Collection[str],
        prefix: str,
        retry_policy: RetryPolicy = SHORT_RETRIES,
        generation: int = 0,
    ):
        super().__init__(url, retry_policy)
        self.base, self._generation, self._prefix_of_copies = base, generation, f"{prefix}/"
        self._kept = frozenset(map(str, kept))

    def inherits(self, key: str) -> bool:
        """True if the key's object lies in the base."""
        if holder_of(key.removeprefix(self._prefix_of_copies)) in self._kept:
            return True
        generation = generation_of(key) if self._generation else None
        return generation is not None and generation < self._generation

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """See Store. Objects of both stores, each where it counts."""
        if prefix and self.inherits(prefix) and not self._divided(prefix):
            return self.base.sizes(prefix)
        own = super().sizes(prefix)
        if not self._divided(prefix):
            return own
        below = f"{prefix}/" if prefix else ""
        theirs = {name: size for name, size in self.base.sizes(prefix).items() if self.inherits(below + name)}
        return dict(sorted(({name: own[name] for name in own if not self.inherits(below + name)} | theirs).items()))

    def folders(self, prefix: str) -> list[str]:
        """See Store."""
        if self.inherits(prefix) and not self._divided(prefix):
            return self.base.folders(prefix)
        theirs = [name for name in self.base.folders(prefix) if self.inherits(f"{prefix}/{name}")]
        return sorted({*super().folders(prefix), *theirs})

    def _divided(self, prefix: str) -> bool:
        """True if a prefix may hold objects of both stores."""
        if not prefix:
            return True
        artifacts = f"{prefix.removeprefix(self._prefix_of_copies)}/"
        return any(kept.startswith(artifacts) for kept in self._kept) or (
            self._generation > 0 and f"{prefix}/".startswith(SHARDS)
        )

    read = _routed(Store.read)
    read_end = _routed(Store.read_end)
    read_parts = _routed(Store.read_parts)
    fetch = _routed(Store.fetch)
    read_back = _routed(Store.read_back)
    write = _routed(Store.write, changes=True)
    write_stream = _routed(Store.write_stream, changes=True)
    create = _routed(Store.create, changes=True)
    exists = _routed(Store.exists)
    is_folder = _routed(Store.is_folder)
    delete = _routed(Store.delete, changes=True)
    delete_one = _routed(Store.delete_one, changes=True)
    delete_unfinished = _routed(Store.delete_unfinished, changes=True)
    filesystem = _routed(Store.filesystem)
