"""When workers of an elastic job leave so that there may be more of them."""

from pathlib import Path

from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.launches import Launch
from ddm_ray.run.graph import Artifact
from ddm_ray.store.store import Store
from ddm_ray.train.ray.leaving import MAX_DOUBLINGS, starts_of_size

JOB = Artifact("experts/000")


def test_starts_that_gave_no_worker_more_are_counted(tmp_path: Path) -> None:
    store, launch, other = Store(str(tmp_path)), Launch(JOB), Launch(JOB)
    assert starts_of_size(store, launch, 1) == 0, "the first attempt"
    for by, size in ((launch, 1), (other, 2), (launch, 2), (launch, 1), (launch, 1)):
        claim(store, JOB, {"world_size": size, **by.claim_fields()})
    assert [starts_of_size(store, launch, size) for size in (1, 2)] == [2, 0]
    assert starts_of_size(store, other, 1) == 0
    for _ in range(9):
        claim(store, JOB, {"world_size": 1, **launch.claim_fields()})
    assert starts_of_size(store, launch, 1) == MAX_DOUBLINGS
