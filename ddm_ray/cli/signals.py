"""SIGTERM and SIGHUP (a closed terminal): they end a command as Ctrl-C does, or once it has saved."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """Signal `number` ends this command."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code of a process that the signal ends, as shells show it."""
        return 128 + self.number


@contextmanager
def signals_end_it() -> Iterator[None]:
    """Raise Ended in the main thread when such a signal comes. One that is ignored, as by nohup, stays ignored."""

    def end(number: int, frame: object) -> None:
        raise Ended(number)

    with _handled_by(end):
        yield


@contextmanager
def first_signal_noted() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether such a signal has come. The second one raises Ended."""
    came = threading.Event()

    def note(number: int, frame: object) -> None:
        if came.is_set():
            raise Ended(number)
        came.set()

    with _handled_by(note):
        yield came.is_set


@contextmanager
def _handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: kept for number in ENDING if (kept := signal.getsignal(number)) not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)
