"""Islands of this machine that tests bring up as a user does."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ddm_ray.islands.jobs import JobsAPI
from ddm_ray.islands.local_files import IslandFolder, LocalIsland
from ddm_ray.islands.processes import members, processes
from ddm_ray.placement import Island, load_islands
from tests.conftest import BIN
from tests.processes import command, family
from tests.readme import commands_of

(_, (UP, *THEN, DOWN)) = commands_of("Islands that pull")
"""The README's commands that bring up islands, use them, and end them."""


@dataclass(frozen=True)
class Islands:
    """Islands of this machine, brought up by `ddm islands up`, and what that printed."""

    folder: Path
    printed: str

    @property
    def records(self) -> list[LocalIsland]:
        return IslandFolder(self.folder).islands()

    @property
    def islands(self) -> dict[str, Island]:
        return load_islands(str(self.folder / "islands.yaml"))

    def jobs(self, name: str, token_of: str | None = None) -> JobsAPI:
        island, other = self.islands[name], self.islands[token_of or name]
        return JobsAPI(name, island.jobs or "", other.token_file)

    def named(self, *names: str) -> dict[str, Island]:
        """The first island under several names, each of which is then conducted by itself."""
        first = self.islands["local-0"]
        return {name: first.model_copy(update={"name": name}) for name in names}


def say(line: str, home: Path, **environment: str) -> str:
    """Have a shell run a line of the README's, as a user types it whose home folder that is; what it printed."""
    environment = {**os.environ, "HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}", **environment}
    done = subprocess.run(
        line, shell=True, cwd=home, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def alive(records: list[LocalIsland], temps: list[str]) -> list[str]:
    """Command lines of what still lives of islands: by our rules, and by the folders that their commands name."""
    everything = processes()
    ours = {process.pid for record in records for process in members(everything, record.leader)}
    ours |= {pid for pid in everything if any(temp in command(pid) for temp in temps)}
    return [f"{pid} {command(pid)}" for pid in ours - {os.getpid()}]


def gcs_server(record: LocalIsland) -> int:
    (server,) = [pid for pid in family(record.pid) if command(pid).split(" ")[0].endswith("gcs_server")]
    return server
