"""Images -> rows -> shards -> batches: the stages `prepare` and `partition`, and the loading of rows for training."""

from collections.abc import Callable

OnProgress = Callable[[float, str], None]
"""A stage calls it with the share that is done, 0 to 1, and a short note on the next step."""


def no_progress(fraction: float, note: str) -> None:
    """An `OnProgress` that shows nothing."""


def phase(on_progress: OnProgress, begin: float, end: float, name: str = "") -> OnProgress:
    """Progress of a part of a stage: maps its shares to `begin` to `end` of the whole, prefixes notes by `name`."""
    before = f"{name}: " if name else ""
    return lambda share, note: on_progress(begin + (end - begin) * share, before + note)
