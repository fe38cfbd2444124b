"""The live view: one row per stage or training job. A terminal is redrawn; a log gets a line now and then."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.status import Status
from ddm_ray.remedies import Fix
from ddm_ray.spelling import escape_unprintable

LOG_SECONDS = 10.0


class LiveView:
    """A context that shows rows by name, each with a finished fraction and a note. `clock`: also show times."""

    def __init__(self, title: str, names: list[str], clock: bool = True, phrase: Callable[[Fix], str] = str):
        self._console = Console(stderr=True)
        self._title, self._clock, self._phrase = title, clock, phrase
        self._rows: dict[str, tuple[float, str]] = dict.fromkeys(names, (0.0, "waiting"))
        self._alarms: set[str] = set()
        self._began: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._logged: dict[str, tuple[float, bool, str]] = {}
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, name: str, fraction: float, note: str, alarm: bool = False) -> None:
        """Set a row's state. `fraction` is in [0, 1], and 1 means finished. An `alarm` is red."""
        now = time.monotonic()
        note = escape_unprintable(note)
        self._rows[name] = (fraction, note)
        (self._alarms.add if alarm else self._alarms.discard)(name)
        if note != "waiting":
            self._began.setdefault(name, now)
        if fraction >= 1:
            self._took.setdefault(name, now - self._began[name])
        if not self._console.is_terminal:
            self._log(name, now)

    def stage(self, name: str, fraction: float = 0.0, note: str = "") -> None:
        """Show a row, in the form of a stage's progress callback bound to a name."""
        self.show(name, fraction, note or ("done" if fraction >= 1 else "running"))

    def jobs(self, statuses: list[Status]) -> None:
        """Set the rows of training jobs. Finished rows, and rows of jobs that wait, stay as they are."""
        fractions = {artifact: fraction for artifact, (fraction, _) in self._rows.items()}
        self.show_statuses([each for each in statuses if each.state != "waiting" and fractions.get(each.artifact) != 1])

    def show_statuses(self, statuses: list[Status]) -> None:
        """Set the rows of artifacts by their statuses."""
        for observed in statuses:
            alarm = observed.state in ("failed", "damaged") or observed.silent
            self.show(observed.artifact, observed.fraction, describe(observed, self._phrase), alarm)

    def _table(self) -> Table:
        table = Table(title=self._title, title_justify="left", box=None, pad_edge=False)
        for column in ("stage", "", "", *(["time"] if self._clock else [])):
            table.add_column(column, no_wrap=True)
        # Only a column that may wrap is narrowed by rich. Its text doesn't wrap, nevertheless.
        table.add_column("what")
        for name, (fraction, note) in self._rows.copy().items():
            style = "green" if fraction >= 1 else ("dim" if note == "waiting" else "")
            style = "red" if name in self._alarms else style
            bar = ProgressBar(total=1.0, completed=fraction, width=24)
            clock = [""] if self._clock else []
            if self._clock and name in self._began:
                clock = [f"{self._took.get(name, time.monotonic() - self._began[name]):4.0f} s"]
            table.add_row(
                Text(name, style), bar, f"{fraction:4.0%}", *clock, Text(note, style, no_wrap=True, overflow="ellipsis")
            )
        return table

    def _log(self, name: str, now: float) -> None:
        fraction, note = self._rows[name]
        last, finished, before = self._logged.get(name, (-LOG_SECONDS, False, ""))
        if note == "waiting" or finished or (fraction < 1 and now - last < LOG_SECONDS):
            return
        if name in self._alarms and note == before:
            return
        self._logged[name] = (now, fraction >= 1, note)
        took = f" ({self._took[name]:.0f} s)" if self._clock and name in self._took else ""
        self._console.print(f"{name:<12} {fraction:4.0%}  {note}{took}", highlight=False, markup=False, soft_wrap=True)
