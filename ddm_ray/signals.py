"""SIGTERM and SIGHUP (a closed terminal): they end a command as Ctrl-C does, or once it has saved."""

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
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

    with _handled_by(end, ENDING):
        yield


@contextmanager
def first_signal_noted(*others: signal.Signals, second_ends: bool = True) -> Iterator[threading.Event]:
    """Yield an event that is set once such a signal, or one of the `others`, has come. The second one raises Ended.

    `second_ends` false: later signals do nothing.
    """
    came = threading.Event()

    def note(number: int, frame: object) -> None:
        if came.is_set() and second_ends:
            raise Ended(number)
        came.set()

    with _handled_by(note, ENDING, others):
        yield came


@contextmanager
def _handled_by(
    handler: Callable[[int, object], None],
    unless_ignored: Iterable[signal.Signals],
    always: Iterable[signal.Signals] = (),  # a shell has commands in its background ignore SIGINT
) -> Iterator[None]:
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: kept for number in unless_ignored if (kept := signal.getsignal(number)) != signal.SIG_IGN}
        before |= {number: signal.getsignal(number) for number in always}
        before = {number: kept for number, kept in before.items() if kept is not None}

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        handler(number, frame)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)


def _leave_terminal() -> None:
    """Print no more to a terminal: once it is closed each line would be an error, which ends what is to be saved."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # it is closed, or isn't a file
            if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
                with open(os.devnull, "w") as nothing:
                    os.dup2(nothing.fileno(), stream.fileno())
