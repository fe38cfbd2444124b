"""InheritingStore: the store of a run that extends another one, in which a part of its objects lies."""

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeVar, cast

from ddm_ray.storage.patience import PROMPT, Patience
from ddm_ray.storage.store import Store

F = TypeVar("F", bound=Callable[..., Any])


def _routed(method: F) -> F:
    """The method, asked of the other store for a key that lies in it."""

    @wraps(method)
    def ask(self: "InheritingStore", key: str, *args: Any, **options: Any) -> Any:
        if not self.inherits(key):
            return method(self, key, *args, **options)
        return getattr(self.base, method.__name__)(key, *args, **options)

    return cast(F, ask)


class InheritingStore(Store):
    """Objects below a folder or URI, but for those in the folders `names`, and in `prefix/NAME`: these are the base's.

    Who asks needn't know which are which.
    """

    def __init__(self, url: str, base: Store, names: Collection[str], prefix: str, patience: Patience = PROMPT):
        super().__init__(url, patience)
        self.base, self._names, self._prefix_of_copies = base, frozenset(names), f"{prefix}/"

    def inherits(self, key: str) -> bool:
        """True for what lies in the base."""
        return key.removeprefix(self._prefix_of_copies).partition("/")[0] in self._names

    read = _routed(Store.read)
    read_end = _routed(Store.read_end)
    fetch = _routed(Store.fetch)
    read_back = _routed(Store.read_back)
    write = _routed(Store.write)
    write_stream = _routed(Store.write_stream)
    create = _routed(Store.create)
    exists = _routed(Store.exists)
    is_folder = _routed(Store.is_folder)
    sizes = _routed(Store.sizes)
    folders = _routed(Store.folders)
    delete = _routed(Store.delete)
    delete_one = _routed(Store.delete_one)
    delete_unfinished = _routed(Store.delete_unfinished)
    filesystem = _routed(Store.filesystem)
