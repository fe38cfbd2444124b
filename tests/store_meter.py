"""What this process asks of its stores, counted where `Store`'s methods are called."""

import os
from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest

from ddm_ray.store.store import Store


class StoreMeter:
    """Counts from when it is made: `requests` by kind (get, head, list, and post for deletions), and bytes `read`.

    A listing is one request, whose names are bytes that came; all names are in `listed`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.requests: Counter[str] = Counter()
        self.read = 0
        self.listed: list[str] = []
        self._lock, self._monkeypatch = Lock(), monkeypatch
        self._wrap("read", lambda _, data: self._add("get", 1, len(data)))
        # In an object store it asks for the size, and then for a part.
        self._wrap("read_end", lambda store, data: self._add("get", 1, len(data)) if store.local else self._add("head"))
        self._wrap("read_parts", lambda _, parts: self._add("get", len(parts), sum(map(len, parts))))
        self._wrap("exists", lambda *_: self._add("head"))
        self._wrap("delete_one", lambda *_: self._add("post"))
        for name in ("sizes", "folders"):
            self._wrap(name, lambda _, names: (self.listed.extend(names), self._add("list", 1, sum(map(len, names)))))
        fetch = Store.fetch

        def fetched(store: Store, key: str, path: Any, at: int = 0) -> str:
            digest = fetch(store, key, path, at)
            self._add("get", 1, os.stat(path).st_size - at)
            return digest

        monkeypatch.setattr(Store, "fetch", fetched)

    def _add(self, kind: str, times: int = 1, size: int = 0) -> None:
        with self._lock:
            self.requests[kind] += times
            self.read += size

    def _wrap(self, name: str, count: Callable[[Store, Any], object]) -> None:
        ask = getattr(Store, name)

        def asked(store: Store, *arguments: Any, **named: Any) -> Any:
            try:
                answer = ask(store, *arguments, **named)
            except FileNotFoundError:
                count(store, b"")
                raise
            count(store, answer)
            return answer

        self._monkeypatch.setattr(Store, name, asked)
