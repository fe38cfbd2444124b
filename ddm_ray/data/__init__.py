"""Images -> rows -> shards -> batches: the stages `prepare` and `partition`, and what training loads."""

from collections.abc import Callable

OnProgress = Callable[[float, str], None]
"""Called by a stage with the share that is done, 0 to 1, and a short note on what comes now."""


def no_progress(fraction: float, note: str) -> None:
    """An `OnProgress` that shows nothing."""


def phase(on_progress: OnProgress, begin: float, end: float, name: str = "") -> OnProgress:
    """Progress of a part of a stage: shares from `begin` to `end` of the whole, notes after its name, if it has one."""
    before = f"{name}: " if name else ""
    return lambda share, note: on_progress(begin + (end - begin) * share, before + note)
