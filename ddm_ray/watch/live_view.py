"""The live view: one row per stage or training job, with the time left.

A terminal is redrawn. A log gets a line now and then.
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.status import Status
from ddm_ray.remedies import Fix
from ddm_ray.spelling import duration, escape_unprintable
from ddm_ray.watch.time_left import TimeLeft

LOG_SECONDS = 10.0
WIDE_COLUMNS, WIDE_BAR, NARROW_BAR = 100, 24, 12
"""Columns of a terminal from which on bars are wide, and the columns of a wide and of a narrow bar."""


class LiveView:
    """A context that shows rows by name, each with a finished fraction and a note.

    `clock`: also show how long a row has taken, and how long the rest will take by the fractions so far.
    """

    def __init__(self, title: str, names: list[str], clock: bool = True, phrase: Callable[[Fix], str] = str):
        self._console = Console(stderr=True)
        self._title, self._clock, self._phrase = title, clock, phrase
        self._rows: dict[str, tuple[float | None, str]] = dict.fromkeys(names, (0.0, "waiting"))
        self._alarms: set[str] = set()
        self._began: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._estimates: dict[str, TimeLeft] = {}
        self._known_left: dict[str, float | None] = {}
        self._pictures: dict[str, tuple[int, str]] = {}
        self._newest_picture = ""
        self._logged: dict[str, tuple[float, bool, str]] = {}
        self._live = Live(
            console=self._console,
            get_renderable=self._renderable,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),  # what a command prints into a file isn't for the terminal
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the view before its context ends, for a command that goes on without one."""
        if self._console.is_terminal:
            self._live.stop()

    def show(self, name: str, fraction: float | None, note: str, alarm: bool = False) -> None:
        """Set a row's state. `fraction` is in [0, 1], and 1 means finished; None: it has none. An `alarm` is red."""
        now = time.monotonic()
        note = escape_unprintable(note)
        self._rows[name] = (fraction, note)
        fraction = fraction or 0.0
        if self._clock and name not in self._known_left:
            self._estimates.setdefault(name, TimeLeft()).add(now, fraction)
        (self._alarms.add if alarm else self._alarms.discard)(name)
        begins = note != "waiting" and name not in self._began
        if begins:
            self._began[name] = now
        if fraction >= 1:
            self._took.setdefault(name, now - self._began[name])
        if not self._console.is_terminal:
            self._log(name, now)
        elif begins:  # rather than a quarter of a second later
            self._live.refresh()

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
            # A log's line has the time left in the description; a table has a column for it.
            note = describe(observed, self._phrase, with_time_left=not self._console.is_terminal)
            self._known_left[observed.artifact] = observed.seconds_left
            self.show(observed.artifact, observed.fraction, note, alarm)
            if observed.picture and observed.picture > self._pictures.get(observed.artifact, (0, "")):
                self._pictures[observed.artifact] = observed.picture
                self._newest_picture = " ".join(observed.picture_lines)
                if not self._console.is_terminal:
                    self._console.print(self._newest_picture, highlight=False, markup=False, soft_wrap=True)

    def _renderable(self) -> Group:
        # Paths are folded, since half of one is of no use. A table's own title would be folded to the table's width.
        newest = [Text(self._newest_picture, "dim", overflow="fold")] if self._newest_picture else []
        return Group(Text(self._title, "italic", overflow="fold"), self._table(), *newest)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        now, columns, rows = time.monotonic(), self._console.width, self._rows.copy()
        left = {name: self._left(name, now) for name in rows}
        shows_left = any(left.values())
        for column in ("stage", "", "", *(["time"] if self._clock else []), *(["left"] if shows_left else [])):
            table.add_column(column, no_wrap=True, justify="right" if column in ("time", "left") else "left")
        # Only a column that may wrap is narrowed by rich. Its text doesn't wrap, nevertheless.
        table.add_column("what")
        for name, (fraction, note) in rows.items():
            style = "green" if fraction == 1 else ("dim" if note == "waiting" else "")
            style = "red" if name in self._alarms else style
            width = WIDE_BAR if columns >= WIDE_COLUMNS else NARROW_BAR
            bar = "" if fraction is None else ProgressBar(total=1.0, completed=fraction, width=width)
            share = "" if fraction is None else f"{fraction:4.0%}"
            clock = [""] if self._clock else []
            if self._clock and name in self._began:
                clock = [duration(self._took.get(name, now - self._began[name]))]
            clock += [left.get(name, "")] if shows_left else []
            table.add_row(Text(name, style), bar, share, *clock, Text(note, style, no_wrap=True, overflow="ellipsis"))
        return table

    def _log(self, name: str, now: float) -> None:
        known, note = self._rows[name]
        fraction, share = known or 0.0, "    " if known is None else f"{known:4.0%}"
        last, finished, before = self._logged.get(name, (-LOG_SECONDS, False, ""))
        if note == "waiting" or finished or (fraction < 1 and now - last < LOG_SECONDS):
            return
        if name in self._alarms and note == before:
            return
        self._logged[name] = (now, fraction >= 1, note)
        left = "" if name in self._known_left else self._left(name, now)
        after = f", {left} left" if left else ""
        if self._clock and name in self._took:
            after = f" ({duration(self._took[name])})"
        self._console.print(f"{name:<12} {share}  {note}{after}", highlight=False, markup=False, soft_wrap=True)

    def _left(self, name: str, now: float) -> str:
        """Words for the time left of a row; empty if that isn't known."""
        if self._rows[name][0] == 1:
            return ""
        seconds = self._known_left.get(name)
        if name not in self._known_left and name in self._estimates:
            seconds = self._estimates[name].seconds(now)
        return "" if seconds is None else duration(seconds)
