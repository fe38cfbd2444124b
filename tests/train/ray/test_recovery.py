"""Which losses of workers count as failures, and whose error is told."""

import json
from pathlib import Path

from ray.exceptions import RayActorError

from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.launches import FailureBudget, Launch
from ddm_ray.storage.store import Store
from ddm_ray.train.ray.fit import FailureBudgetCallback, WorkerDrained
from ddm_ray.train.ray.recovery import innermost

JOB = Artifact("experts/000")


def test_losses_that_were_announced_do_not_count(tmp_path: Path) -> None:
    store, launch = Store(str(tmp_path)), Launch(JOB)
    callback = FailureBudgetCallback(FailureBudget(store.url, launch, max_failures=1))
    announced = RayActorError(error_msg="its node was taken away", preempted=True)
    lost = RuntimeError("Connection closed by peer")
    for errors in ([WorkerDrained(JOB), lost], [lost, announced], [lost], [announced]):
        callback.after_exception(None, dict(enumerate(errors)))
        assert not store.exists(launch.given_up_key)
    callback.after_exception(None, {0: lost, 1: RayActorError(error_msg="the process was\nkilled")})
    assert json.loads(store.read(launch.given_up_key))["error"] == "the process was killed"


def test_the_innermost_error_is_told() -> None:
    outer, inner = RuntimeError("outer"), ValueError("inner")
    outer.__cause__ = inner
    group = RuntimeError("group")
    group.worker_failures = {3: outer}  # type: ignore[attr-defined]
    assert innermost(group) is innermost(inner) is inner
