"""A module of tests/train at work in a process of its own: begun early, joined late."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

from tests.conftest import ROOT
from tests.processes import family


class Background:
    """`python -m tests.train.MODULE ARGUMENTS`."""

    def __init__(self, module: str, *arguments: str):
        command = [sys.executable, "-m", f"tests.train.{module}", *arguments]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._output: str | None = None

    def finish(self) -> str:
        """Wait until it has ended well; the last line that it printed."""
        if self._output is None:
            output, errors = self._process.communicate(timeout=20_000)
            assert self._process.returncode == 0, errors[-3000:]
            self._output = output.splitlines()[-1]
        return self._output

    def kill(self) -> None:
        """End it and all below it, unless it has ended."""
        if self._process.poll() is not None:
            return
        for pid in reversed(family(self._process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
