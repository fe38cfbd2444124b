"""Stop requests on storage: training saves its state and ends. Any process with access to the storage may make one.

A request for an artifact (`ARTIFACT/STOP`) lasts until it is taken back; the artifact isn't trained meanwhile. A
request for a launch (`ARTIFACT/launches/ID/STOP`) ends that launch; others may continue. A request for an island
(`islands/NAME/DRAIN`) is read by the island's workers, each of which stops its own launch.
"""

import getpass
import json
import os
import re
import socket
from contextlib import suppress

from ddm_ray.errors import ConfigError, CorruptArtifact, Left, Stopped
from ddm_ray.jobs.job_files import STOP
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.notes import Request, read_note
from ddm_ray.remedies import Allow
from ddm_ray.run.graph import Artifact
from ddm_ray.spelling import printable
from ddm_ray.store.store import Store

_ISLAND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def is_island(name: str) -> bool:
    """True if an island may have this name."""
    return _ISLAND.fullmatch(name) is not None


def island_prefix(island: str) -> str:
    """Key prefix of the heartbeats of an island's workers. Raises ConfigError for an invalid name."""
    if not is_island(island):
        raise ConfigError(f"island {island!r:.80}: use letters, digits, dots, dashes and underscores, 63 at most")
    return f"islands/{island}"


def drain_key(island: str) -> str:
    """Key of the request that an island's workers end and take no job."""
    return f"{island_prefix(island)}/DRAIN"


def stop_key(artifact: Artifact) -> str:
    """Key of the request that the artifact isn't trained."""
    return f"{artifact}/{STOP}"


def launch_stop_key(launch: Launch) -> str:
    """Key of the request that this launch ends."""
    return f"{launch.prefix}/{STOP}"


def ask(store: Store, key: str, why: str = "") -> bool:
    """Create a request with this key, which says who makes it and why; return False if there is one already."""
    request = {"user": _user(), "host": socket.gethostname(), "pid": os.getpid(), "why": why}
    return store.create(key, json.dumps(request).encode())


def take_back(store: Store, key: str) -> bool:
    """Take a request back; return False if there is none."""
    asked = store.exists(key)
    store.delete_one(key)
    return asked


def asked(store: Store, key: str) -> str | None:
    """Words on who made the request with this key, and why; None if there is no request."""
    try:
        known = read_note(store, key, Request)
    except CorruptArtifact:
        known = {}
    if known is None:
        return None
    if known.get("why"):
        return printable(known["why"], 200)
    return f"asked by {printable(known.get('user', '?'), 60)} on {printable(known.get('host', '?'), 100)}"


class StopRequests:
    """Requests that concern one launch of an artifact, for an attempt that reads them repeatedly."""

    def __init__(self, store: Store, artifact: Artifact, launch: Launch | None):
        self._store, self._artifact, self._launch = store, artifact, launch

    def require_none(self) -> None:
        """Raise Stopped if there is a request."""
        if stopped := self.look():
            raise stopped

    def look(self) -> Stopped | None:
        """Why the launch is to end; None if there is no request. Costs two HEADs."""
        if self._store.exists(key := stop_key(self._artifact)):
            why, fix = asked(self._store, key), Allow(self._store.url, self._artifact)
            return Stopped(f"{self._artifact} is stopped, {why}", fix) if why else None
        if self._launch and self._store.exists(key := launch_stop_key(self._launch)):
            return Left(f"{self._artifact} is left, {asked(self._store, key) or 'as was asked'}")
        return None


def _user() -> str:
    with suppress(KeyError, OSError):  # users in containers may have no name
        return getpass.getuser()
    return str(os.getuid())
