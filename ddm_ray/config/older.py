"""Names and meanings that fields had in older versions, read as today's."""

from typing import Any

JOBS = ("expert", "router", "student")


def with_own_batches(fields: Any) -> Any:
    """The fields of a run's configuration with `batch` in place of the older `global_batch`.

    That of the experts was the sum over all of them. Raises ValueError if they can't share it equally, or if both are
    given.
    """
    if not isinstance(fields, dict):
        return fields
    partition = fields.get("partition")
    clusters = partition.get("num_clusters") if isinstance(partition, dict) else None
    sharing = {name: clusters if name == "expert" else 1 for name in JOBS}
    renamed = {name: own_batch(fields[name], sharing[name], name) for name in JOBS if name in fields}
    return {**fields, **renamed}


def own_batch(job: Any, sharing: Any, name: str) -> Any:
    """The fields of one job, with a batch that so many experts share. `name`: of its part, for errors. ValueError."""
    train = job.get("train") if isinstance(job, dict) else None
    if not isinstance(train, dict) or "global_batch" not in train or type(sharing) is not int or sharing < 1:
        return job
    others = {field: value for field, value in train.items() if field != "global_batch"}
    together = train["global_batch"]
    if "batch" in train:
        raise ValueError(f"{name}.train.global_batch is the older name of {name}.train.batch: give one of the two")
    if type(together) is int and together % sharing:
        raise ValueError(
            f"{name}.train.global_batch ({together}) can't be shared by {sharing} experts: set {name}.train.batch, the"
            " rows a step of each"
        )
    return {**job, "train": {"batch": together // sharing if type(together) is int else together, **others}}
