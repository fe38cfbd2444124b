"""A link to some replica of a deployment, kept: asked for through Serve, replaced now and then and where it broke."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ddm_ray.serve.velocities import NoAnswerError, VelocityLink
from ddm_ray.serve.versions import LOG
from ddm_ray.spelling import one_line

RENEW_S, RETRY_S, MOST_RETRY_S = 10.0, 1.0, 60.0
"""Seconds after which another link is asked for: where there is one, where there is none, and after many failures."""
CONNECT_S, ANSWER_S = 5.0, 10.0
"""Seconds to connect, and for an answer, after which Serve is asked."""


class KeptLink:
    """The link to the replica that Serve chose last. Renewed, so that all replicas have work. Of one event loop."""

    def __init__(self, name: str, invited: Callable[[], Any]):
        """`invited`: a response of Serve's that streams an address, and lasts as long as that lets in."""
        self._name, self._invited = name, invited
        self._link: VelocityLink | None = None
        self._lives = dict[VelocityLink, asyncio.Task[None]]()
        self._endings = set[asyncio.Task[None]]()
        self._connecting: asyncio.Task[None] | None = None
        # Where Ray encrypts, nothing crosses beside it.
        self._linked_at = np.inf if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true") else -np.inf
        self._retry_s = RETRY_S

    async def ask(self, packed: bytes) -> bytes:
        """The answer to a packed call. NoAnswerError if there is no link yet, or if none comes over it."""
        pause_s = self._retry_s if self._link is None else RENEW_S
        if time.monotonic() - self._linked_at > pause_s and (self._connecting is None or self._connecting.done()):
            self._connecting = asyncio.ensure_future(self._connect())
        link = self._link
        if link is None:
            raise NoAnswerError("there is no link")
        try:
            return await link.ask(packed, ANSWER_S)
        except NoAnswerError:
            self._drop(link)
            raise

    def _drop(self, link: VelocityLink) -> None:
        """Do without a link, which broke or is replaced."""
        if self._link is link:
            self._link = None
        if (life := self._lives.pop(link, None)) is not None:
            ending = asyncio.ensure_future(_end(link, life))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _connect(self) -> None:
        response, link = self._invited(), None
        try:
            link = VelocityLink(await anext(response))
            await link.connect(CONNECT_S)
        except Exception as error:  # calls through Serve go on, and tell what is wrong
            # Once: a port that can't be reached stays so.
            level = logging.WARNING if link is not None and self._retry_s == RETRY_S else logging.INFO
            reason = one_line(error, 200) or type(error).__name__
            LOG.log(level, "no link to %s, so calls cross by Serve: %s", self._name, reason)
            response.cancel()
            self._retry_s = min(2 * self._retry_s, MOST_RETRY_S)
            if link is not None:
                await link.close()
        else:
            if self._link is not None:
                self._drop(self._link)
            self._link, self._lives[link] = link, asyncio.ensure_future(self._live(response, link))
            self._retry_s = RETRY_S
        self._linked_at = time.monotonic()

    async def _live(self, response: Any, link: VelocityLink) -> None:
        """Drop a link once its replica lets it in no more, or is gone; cancelled, tell the replica."""
        try:
            async for _ in response:
                pass
        except Exception as error:  # also of a machine that is silent, which Ray learns
            LOG.info("the link to %s ends: %s", self._name, one_line(error, 200))
        finally:
            response.cancel()
            self._drop(link)


async def _end(link: VelocityLink, life: "asyncio.Task[None]") -> None:
    """Close a link, and then end its life: its replica lets in none of its calls from there on."""
    await link.close(ANSWER_S)
    life.cancel()
