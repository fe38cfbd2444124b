"""Sides of a comparison that run in turns of a second, so that all meet alike whatever else the machine does."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression

sys.path.insert(0, str(Path(__file__).parents[1]))

from train_sides import READY, Beat, finish

from tests.processes import family

TURN_SECONDS = 1.0
LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Side:
    """The beats of a side's jobs, and from when to when it ran."""

    beats: Mapping[str, Sequence[Beat]]
    turns: Sequence[tuple[float, float]]

    def ran(self, until: float) -> float:
        """How many seconds it had run by then."""
        return sum(max(0.0, min(until, end) - begin) for begin, end in self.turns)


@dataclass(frozen=True)
class Speed:
    """Seconds of a step of all jobs of a side together, of those that it ran, and CPU seconds of a job's step."""

    seconds: float
    cpu: float


def speed(side: Side, begin: float, end: float) -> Speed:
    """That of a side from `begin` to `end`; ValueError where a job has fewer than two beats."""
    each, cpu = [], []
    for job_beats in side.beats.values():
        inside = [beat for beat in job_beats if begin <= beat[0] <= end]
        if len(inside) < 2:
            raise ValueError(f"{len(inside)} heartbeats from {begin:.1f} to {end:.1f}: train for more steps")
        seen, steps, took = zip(*inside, strict=True)
        each.append(linear_regression(steps, [side.ran(at) for at in seen]).slope)
        cpu.append(linear_regression(steps, took).slope)
    return Speed(1 / sum(1 / seconds for seconds in each), sum(cpu) / len(cpu))


def both(above: Side, below: Side, settle: float) -> tuple[Speed, Speed]:
    """Two sides' speeds while all jobs of both train, but for the first `settle` seconds that each of them ran."""
    side_beats = [(side, beats) for side in (above, below) for beats in side.beats.values()]
    settled = [[at for at, *_ in beats if side.ran(at) >= side.ran(beats[0][0]) + settle] for side, beats in side_beats]
    begin = max(each[0] if each else math.inf for each in settled)
    end = min(beats[-1][0] for _, beats in side_beats)
    return speed(above, begin, end), speed(below, begin, end)


def in_turns(sides: Mapping[str, Callable[[], Sequence["subprocess.Popen[str]"]]]) -> dict[str, Side]:
    """Start a side's processes, each of which prints READY once it trains; then give each side turns until it ends.

    While one runs, all processes of the others are stopped.
    """
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    started: dict[str, Sequence[subprocess.Popen[str]]] = {}
    with ExitStack() as stack:
        for name, start in sides.items():
            began = time.monotonic()
            started[name] = start()
            stack.callback(send, signal.SIGKILL, started[name])
            for process in started[name]:
                assert process.stdout
                while (line := process.stdout.readline()) and line.strip() != READY:
                    pass
            send(signal.SIGSTOP, started[name])
            turns[name].append((began, time.monotonic()))
        left = dict(started)
        while left:
            for name, processes in list(left.items()):
                began = time.monotonic()
                send(signal.SIGCONT, processes)
                while time.monotonic() < began + TURN_SECONDS and any(one.poll() is None for one in processes):
                    time.sleep(LOOK_SECONDS)
                if all(one.poll() is not None for one in processes):
                    del left[name]
                send(signal.SIGSTOP, processes)
                turns[name].append((began, time.monotonic()))
        printed = {name: [finish(process) for process in processes] for name, processes in started.items()}
        return {
            name: Side({job: beats for one in outputs for job, beats in one["beats"].items()}, turns[name])
            for name, outputs in printed.items()
        }


def send(what: signal.Signals, processes: Sequence["subprocess.Popen[str]"]) -> None:
    """A signal to processes, and to all below them, that haven't ended."""
    for process in processes:
        if process.poll() is None:
            for pid in family(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, what)
