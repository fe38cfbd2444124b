"""InheritingStore: the store of an extension, which reads some objects from the run that it extends."""

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from ddm_ray.errors import StorageError
from ddm_ray.run.extension import generation_of
from ddm_ray.store.retries import SHORT_RETRIES, RetryPolicy
from ddm_ray.store.store import Store

F = TypeVar("F", bound=Callable[..., Any])


SHARDS = "partition/shards/"


def _routed(method: F, changes: bool = False) -> F:
    """The method, called on the base's store for a key that lies there. If it `changes` a file there, it is refused."""

    @wraps(method)
    def ask(self: "InheritingStore", key: str, *args: Any, **options: Any) -> Any:
        if not self.inherits(key):
            return method(self, key, *args, **options)
        if changes and self._generation and generation_of(key) is not None:
            raise StorageError(f"{self.url}/{key}: lies in {self.base.url}, which must not be changed", passes=False)
        return getattr(self.base, method.__name__)(key, *args, **options)

    return cast(F, ask)


class InheritingStore(Store):
    """A store in which the folders `names`, and `prefix/NAME`, are those of the `base`.

    Files of shards of an earlier `generation` than this run's are the base's, too; they are never written or deleted.
    Callers needn't know where an object lies.
    """

    def __init__(
        self,
        url: str,
        base: Store,
        names: Collection[str],
        prefix: str,
        retry_policy: RetryPolicy = SHORT_RETRIES,
        generation: int = 0,
    ):
        super().__init__(url, retry_policy)
        self._generation = generation
        self.base, self._names, self._prefix_of_copies = base, frozenset(names), f"{prefix}/"

    def inherits(self, key: str) -> bool:
        """True if the key's object lies in the base."""
        if key.removeprefix(self._prefix_of_copies).partition("/")[0] in self._names:
            return True
        generation = generation_of(key) if self._generation else None
        return generation is not None and generation < self._generation

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """See Store. A shard also lists its files of earlier generations."""
        if self.inherits(prefix):
            return self.base.sizes(prefix)
        own = super().sizes(prefix)
        if not self._generation or not f"{prefix}/".startswith(SHARDS):
            return own
        earlier = self.base.sizes(prefix)
        both = {**own, **{name: size for name, size in earlier.items() if self.inherits(f"{prefix}/{name}")}}
        return dict(sorted(both.items()))

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
    folders = _routed(Store.folders)
    delete = _routed(Store.delete)
    delete_one = _routed(Store.delete_one, changes=True)
    delete_unfinished = _routed(Store.delete_unfinished, changes=True)
    filesystem = _routed(Store.filesystem)
