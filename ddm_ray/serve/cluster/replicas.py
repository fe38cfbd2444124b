"""States of deployments by Serve's controller: which have a replica that can answer."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from ray import serve
from ray.serve.schema import DeploymentStatus, DeploymentStatusOverview, DeploymentStatusTrigger, ServeStatus

STATUS_S = 0.5
AWAY_S = 10.0

ALIVE = frozenset({"RUNNING", "PENDING_MIGRATION", "UPDATING", "RECOVERING"})
"""States in which a replica has its weights: also while its node is drained, while it takes new settings, and while a
controller that has started again hasn't looked at it yet. A replica that starts or stops can't answer."""
ASLEEP = frozenset({"HEALTHY", "UPSCALING", "DOWNSCALING"})
"""States of a deployment that is healthy or being scaled: without a replica alive it is at zero or starting."""

REMOVED = DeploymentStatusOverview(
    status=DeploymentStatus.UNHEALTHY,
    status_trigger=DeploymentStatusTrigger.UNSPECIFIED,
    replica_states={},
    message="not in the application",
)
"""The state of a deployment that an update of the application removed: calls of it would wait for ever."""


def is_alive(overview: DeploymentStatusOverview) -> bool:
    """True if a replica can answer, now or as soon as the controller has looked at it."""
    states: Mapping[Any, int] = overview.replica_states  # by their names, in truth
    return any(states.get(state, 0) for state in ALIVE)


def is_lacking(overview: DeploymentStatusOverview) -> bool:
    """True if no replica can answer, though one should: the deployment neither sleeps nor is being woken."""
    # After the death of its last replica a deployment is UNHEALTHY until the next one is ready. A controller that has
    # just started reports UPDATING without replicas until it has read how many there should be.
    unknown = overview.status == "UPDATING" and not overview.replica_states
    return not is_alive(overview) and overview.status not in ASLEEP and not unknown


def is_starting(overview: DeploymentStatusOverview) -> bool:
    """True if the first replica is on its way."""
    return overview.status == "UPSCALING" and not is_alive(overview)


class Replicas:
    """States of an application's deployments; Serve is asked at most once in STATUS_S. For one event loop."""

    def __init__(self, application: str):
        self._application, self._asked_at = application, -np.inf
        self._asking: asyncio.Future[ServeStatus] | None = None
        self._away_since: dict[str, float] = {}
        self._unable = set[str]()
        self._watching: asyncio.Task[None] | None = None

    async def overview(self, deployment: str) -> DeploymentStatusOverview:
        """Return Serve's state of a deployment. Waits, and may raise any error, while Serve's controller is away."""
        if self._asking is None or (self._asking.done() and time.monotonic() - self._asked_at > STATUS_S):
            self._asked_at = time.monotonic()
            self._asking = asyncio.ensure_future(asyncio.to_thread(serve.status))
        # Shielded: if one caller is cancelled, the others still wait for this answer.
        status = await asyncio.shield(self._asking)
        deployments = status.applications[self._application].deployments
        # While an application is built, none is listed.
        return REMOVED if deployments and deployment not in deployments else deployments[deployment]

    async def lacking(self, deployment: str) -> bool:
        """Return `is_lacking`; waits and raises as `overview`."""
        return is_lacking(await self.overview(deployment))

    async def running(self, deployment: str) -> bool:
        """True if a replica is known to be alive."""
        try:
            return is_alive(await self.overview(deployment))
        except Exception:  # the controller may be away
            return False

    def mark_away(self, deployment: str) -> None:
        """Note that no replica answered; `is_away` for AWAY_S, or until a replica is alive again."""
        self._away_since[deployment] = time.monotonic()
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())

    def mark(self, deployment: str, able: bool) -> None:
        """Note whether its replicas could load the weights of a call."""
        if able:
            self._unable.discard(deployment)
        else:
            self._unable.add(deployment)
            self.mark_away(deployment)

    def is_unable(self, deployment: str) -> bool:
        """True if its replicas couldn't load the weights of the last call."""
        return deployment in self._unable

    def is_away(self, deployment: str) -> bool:
        """True if no replica answered a short time ago."""
        since = self._away_since.get(deployment)
        return since is not None and time.monotonic() - since < AWAY_S

    async def _watch(self) -> None:
        while self._away_since:
            await asyncio.sleep(STATUS_S)
            for deployment in list(self._away_since):
                lacking = self.is_unable(deployment) or await self._still_lacking(deployment)
                if not lacking or not self.is_away(deployment):
                    del self._away_since[deployment]

    async def _still_lacking(self, deployment: str) -> bool:
        try:
            return await self.lacking(deployment)
        except Exception:  # the controller may be away, too: AWAY_S ends it then
            return True
