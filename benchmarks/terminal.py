"""The `ddm` command as a newcomer has it: in a home of his own, each command by itself; and what it printed judged."""

import os
import random
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.processes import command, family, with_variable

MARK = "DDM_FIRST_WEEK"
"""Environment variable that all processes of a terminal have, with a word of this one alone."""
NOT_A_USERS = ("OMP_NUM_THREADS", "PYTHONPATH", "RAY_", "DDM_", "XDG_")
SURPRISES = {
    "a traceback": re.compile(r"Traceback \(most recent call last\)|^\s+File \".*\", line \d+"),
    "a line of Ray's C++ log": re.compile(r"\b\w+\.cc:\d+|^\[[\d -]+[\d:,.]+ [A-Z] \d+ \d+\]|^\*\*\* SIG"),
    "a line of Ray's workers": re.compile(r"^\x1b?\[?\d*m?\((raylet|pid=|autoscaler|\w+ pid=)"),
    "a library's warning": re.compile(r"\b(User|Future|Deprecation|Runtime|Resource|Syntax)Warning\b|^WARNING\b"),
}
"""What no user should have to read, by what it is."""


@dataclass(frozen=True)
class Typed:
    """A command that was run: its words, its exit code (negative: the signal), all that it printed, and its seconds."""

    words: tuple[str, ...]
    status: int
    text: str
    seconds: float

    def surprises(self) -> list[str]:
        """Lines that no user should have to read, and a failure that is none or several errors."""
        lines = [
            f"{name}: {line}" for line in self.text.splitlines() for name, at in SURPRISES.items() if at.search(line)
        ]
        errors = [line for line in self.text.splitlines() if line.startswith("error: ")]
        if self.status > 0 and len(errors) != 1:
            lines.append(f"exit code {self.status} with {len(errors)} errors: {self.text[-300:]!r}")
        if not self.status and errors:
            lines.append(f"an error of a command that succeeded: {errors[0]}")
        return lines


@dataclass
class Terminal:
    """A new user's shell, standing in the folder, whose home that is; `bin` has the command."""

    folder: Path
    bin: Path
    root: Path
    note: Callable[[str], None]
    typed: list[Typed] = field(default_factory=list)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    def environment(self) -> dict[str, str]:
        """This process's environment, less what only a developer sets, with the package that lies beside us."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_A_USERS)}
        path = f"{self.bin}:{kept.get('PATH', '')}"
        return {**kept, "HOME": str(self.folder), "PATH": path, "PYTHONPATH": str(self.root), MARK: self.mark}

    def start(self, *words: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start `ddm` with these words, in a session of its own; the file that has what it prints."""
        log = self.folder / f"typed-{secrets.token_hex(4)}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [str(self.bin / "ddm"), *words],
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env=self.environment(),
                start_new_session=True,
            )
        return process, log

    def ddm(
        self, *words: str, meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None, seconds: float = 3600
    ) -> Typed:
        """Run `ddm` to its end. `meanwhile` is called once it has started, and may harm it."""
        began = time.monotonic()
        process, log = self.start(*words)
        try:
            if meanwhile:
                meanwhile(process)
            process.wait(seconds)
        finally:
            process.kill()
            process.wait()
        return self.record(words, process.returncode, log, time.monotonic() - began)

    def record(self, words: tuple[str, ...], status: int, log: Path, seconds: float) -> Typed:
        """Keep what a command printed that has ended, and tell of it."""
        done = Typed(words, status, log.read_text(errors="replace"), seconds)
        self.typed.append(done)
        self.note(f"ddm {' '.join(words)[:100]}: exit {status}, {seconds:.0f} s")
        for line in done.surprises():
            self.note(f"  {line[:300]}")
        return done

    def succeed(self, *words: str) -> Typed:
        """Run a command that has to succeed: what follows needs what it makes."""
        done = self.ddm(*words)
        if done.status:
            raise SystemExit(f"ddm {' '.join(words)}: exit {done.status}\n{done.text[-3000:]}")
        return done

    def left(self) -> list[int]:
        """Processes that commands of this terminal have started and that live."""
        return with_variable(MARK, self.mark)

    def left_after(self, seconds: float) -> list[int]:
        """Such processes once they have had so many seconds to end."""
        deadline = time.monotonic() + seconds
        while (alive := self.left()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return alive


def killed_after(seconds: float) -> Callable[[subprocess.Popen[bytes]], None]:
    """SIGKILL to a command itself so many seconds after its start, unless it ends before."""

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.kill()

    return meanwhile


def trainers(process: subprocess.Popen[bytes]) -> list[int]:
    """The training workers of a command on a Ray of its own."""
    return [pid for pid in family(process.pid) if command(pid).startswith("ray::RayTrainWorker")]


def with_a_trainer(
    harm: Callable[[int], None], seconds: float, chance: random.Random
) -> Callable[[subprocess.Popen[bytes]], None]:
    """Harm one of a command's training workers, so many seconds after the first one is there."""

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not trainers(process):
            time.sleep(0.1)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        if able := trainers(process):
            harm(chance.choice(able))

    return meanwhile


def one_by_one(harms: list[Callable[[subprocess.Popen[bytes]], None]]) -> Callable[[subprocess.Popen[bytes]], None]:
    """All of these harms to a command, each after the one before."""

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        for harm in harms:
            harm(process)

    return meanwhile


def kill(pid: int) -> None:
    """SIGKILL."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def by_name(typed: list[Typed], surprises: Mapping[str, re.Pattern[str]] = SURPRISES) -> dict[str, int]:
    """Lines of each kind of surprise in all that was printed."""
    lines = [line for done in typed for line in done.text.splitlines()]
    return {name: sum(bool(at.search(line)) for line in lines) for name, at in surprises.items()}
