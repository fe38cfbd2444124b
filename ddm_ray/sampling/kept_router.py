"""The router of a run from which clusters have left: the base's without their rows of its head, untrained.

Its softmax over the rows that remain is the base's posterior given that no cluster that left is meant, which is exact.
"""

from ddm_ray.config.derive import router_stays
from ddm_ray.run.graph import PARTITION, ROUTER, Artifact
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.inputs import beginning_of
from ddm_ray.run.manifest import FileRecord
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import NETWORK
from ddm_ray.store.checksummed import sha256

FOLDER = "kept"
"""Folder below the router with the weights."""


def keep_router(run: Run) -> bool:
    """Commit the router of a derived run as it begins, if clusters have left and nothing else has changed of it.

    Returns False if its router has to be trained, or its base lies elsewhere. A no-op if the router is finished. Raises
    MissingArtifact without a partition.
    """
    if run.base is None or not router_stays(run.base.config, run.config):
        return False
    beginnings = [each for each in beginning_of(run.config, ROUTER) if run.manifest(each)]
    before = run.base.manifest(ROUTER, accepted=True)
    if not beginnings or before is None:
        return False
    if run.finished(ROUTER):
        return True
    run.require(PARTITION)
    _commit(run, beginnings[0], TrainedInfo.of(before))
    return True


def _commit(run: Run, beginning: Artifact, info: TrainedInfo) -> None:
    files = {name: run.read(beginning, name) for name in NETWORK}
    folder = f"{FOLDER}/{sha256(b''.join(files.values()))[:16]}"
    for name, data in files.items():
        run.store.write(f"{ROUTER}/{folder}/{name}", data)
    records = {f"{folder}/{name}": FileRecord.of(data) for name, data in files.items()}
    # The held-out loss is that of the base's clusters.
    run.commit_records(ROUTER, records, info.model_copy(update={"weights": folder, "heldout": None}))
