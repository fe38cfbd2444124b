"""The bar of a pipeline's call as a row of the live view, in place of tqdm's."""

from types import TracebackType
from typing import Any, Self

from ddm_ray.data import OnProgress


class StepBar:
    """A context that counts `total` steps, `n` of which are done, and reports them. It takes tqdm's arguments."""

    def __init__(self, on_progress: OnProgress, iterable: None = None, total: int | None = None, **config: Any):
        self.n, self.total, self._on_progress = 0, total or 1, on_progress

    def __enter__(self) -> Self:
        self.update(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""

    def update(self, steps: int) -> None:
        """Count more steps."""
        self.n += steps
        self._on_progress(self.n / self.total, f"step {self.n} of {self.total}")
