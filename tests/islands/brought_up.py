"""Islands of this machine that tests bring up as a user does."""

import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ddm_ray.islands.jobs import JobsAPI
from ddm_ray.placement import Island, load_islands
from tests.conftest import BIN, ROOT, free_island, wait_for
from tests.page_blocks import commands_of
from tests.processes import command, family

(UP, *THEN) = commands_of("howto/machines.md", "cluster_configs/local/islands.sh up")
(LAUNCH, _, DOWN) = commands_of("howto/machines.md", "ddm launch runs/three")
"""The commands of a page that bring up islands, use them, and end them."""
_NUMBERS = "0 1 2"


@dataclass(frozen=True)
class Islands:
    """Islands of this machine below a home folder, by the numbers of their ports."""

    home: Path
    numbers: tuple[int, ...]

    @classmethod
    def below(cls, home: Path) -> "Islands":
        """Three islands of numbers that are free, not brought up yet."""
        (home / "cluster_configs").symlink_to(ROOT / "cluster_configs")
        return cls(home, tuple(free_island() for _ in _NUMBERS.split()))

    def up(self) -> str:
        """Bring up what doesn't run; what that printed."""
        assert _NUMBERS in UP
        return say(UP.replace(_NUMBERS, " ".join(map(str, self.numbers))), self.home)

    def down(self) -> str:
        """End all of them; what that printed. Nothing of them is left."""
        pids = [pid for number in self.numbers if self.file(number).exists() for pid in family(self.pid(number))]
        temps = [self.temp(number) for number in self.numbers if self.file(number).exists()]
        printed = say(DOWN, self.home)
        commands = [command(pid) for pid in pids]
        wait_for(lambda: not any(command(pid) and command(pid) in commands for pid in pids), 10, lambda: str(commands))
        assert not [temp for temp in temps if temp.exists()]
        assert not [port for number in self.numbers for port in self.used(number)]
        return printed

    @property
    def folder(self) -> Path:
        return self.home / ".ddm/islands"

    def file(self, number: int) -> Path:
        """The file that has the process id of an island."""
        return self.folder / f"{number}.pid"

    def pid(self, number: int) -> int:
        return int(self.file(number).read_text())

    def temp(self, number: int) -> Path:
        """The folder that Ray's is in."""
        return (self.home / f".ddm/island-{number}/ray").readlink().parent

    def used(self, number: int) -> list[int]:
        """Its ports that somebody listens to, but the one by which `free_island` holds it."""
        base = 20000 + 100 * number
        return [port for port in range(base, base + 100) if port != base + 9 and not _free(port)]

    @property
    def islands(self) -> dict[str, Island]:
        return load_islands(str(self.folder / "islands.yaml"))

    @property
    def names(self) -> list[str]:
        return [f"local-{number}" for number in self.numbers]

    def jobs(self, name: str, token_of: str | None = None) -> JobsAPI:
        island, other = self.islands[name], self.islands[token_of or name]
        return JobsAPI(name, island.jobs or "", other.token_file)

    def named(self, *names: str) -> dict[str, Island]:
        """The first island under several names, each of which is then conducted by itself."""
        first = self.islands[self.names[0]]
        return {name: first.model_copy(update={"name": name}) for name in names}

    def gcs_server(self, number: int) -> int:
        """The process of an island's head without which it is lost."""
        (server,) = [pid for pid in family(self.pid(number)) if command(pid).split(" ")[0].endswith("gcs_server")]
        return server


def say(line: str, home: Path, **environment: str) -> str:
    """Have a shell run a line of a page, as a user types it whose home folder that is; what it printed."""
    environment = {**os.environ, "HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}", **environment}
    done = subprocess.run(
        line, shell=True, cwd=home, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def _free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: what waits for the last packets of an ended connection is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
