"""A link to some replica of a deployment, kept: asked for through Serve, replaced now and then and where it broke."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np

from ddm_ray.serve.links import Link
from ddm_ray.serve.versions import LOG
from ddm_ray.spelling import one_line

RENEW_S, RETRY_S, MOST_RETRY_S = 10.0, 1.0, 60.0
"""Seconds after which another link is asked for: where there is one, where there is none, and after many failures."""


class KeptLink:
    """The link to the replica that Serve chose last. Renewed, so that all replicas have work."""

    def __init__(self, name: str, invited: Callable[[], Any]):
        """`invited`: a response of Serve's that streams the address, and lasts as long as the link; for the event loop.

        Make it in that loop.
        """
        self._name, self._invited, self._loop = name, invited, asyncio.get_running_loop()
        self._link: Link | None = None
        self._newer: Link | None = None
        self._linking: Future[None] | None = None
        # Where Ray encrypts, nothing crosses beside it.
        self._linked_at = np.inf if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true") else -np.inf
        self._retry_s = RETRY_S
        self._watching = set[asyncio.Task[None]]()

    def current(self) -> Link | None:
        """The link, if there is one by now; it may break at any time. For one thread, between two calls."""
        if self._newer is not None:
            self.drop()
            self._link, self._newer = self._newer, None
        pause_s = self._retry_s if self._link is None else RENEW_S
        if time.monotonic() - self._linked_at > pause_s and (self._linking is None or self._linking.done()):
            self._linking = asyncio.run_coroutine_threadsafe(self._connect(), self._loop)
        return self._link

    def drop(self) -> None:
        """Do without the link, which broke."""
        if self._link is not None:
            self._link.close()
        self._link = None

    async def _connect(self) -> None:
        response = self._invited()
        try:
            self._newer = link = await asyncio.to_thread(Link, await anext(response))
        except Exception as error:  # calls through Serve go on, and tell what is wrong
            # Once: a port that can't be reached stays so.
            level = logging.WARNING if isinstance(error, OSError) and self._retry_s == RETRY_S else logging.INFO
            LOG.log(level, "no link to %s, so calls cross by Serve: %s", self._name, one_line(error, 200))
            response.cancel()
            self._retry_s = min(2 * self._retry_s, MOST_RETRY_S)
        else:
            watching = asyncio.ensure_future(_hang_up_after(response, link))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
            self._retry_s = RETRY_S
        self._linked_at = time.monotonic()


async def _hang_up_after(response: Any, link: Link) -> None:
    """End a link whose replica is gone: Ray learns of a machine that is silent, and a connection doesn't."""
    with suppress(Exception):
        async for _ in response:
            pass
    link.hang_up()
