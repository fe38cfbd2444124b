"""Images -> rows -> shards -> batches: the stages `prepare` and `partition`, and what training loads."""

from collections.abc import Callable

REPORT = "report"
"""Folder of the partition's report, below its artifact."""

Progress = Callable[[float, str], None]
"""Called by a stage with the share that is done, 0 to 1, and a short note on what comes now."""
