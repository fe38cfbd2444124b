"""Files of the islands of this machine: a folder with a record, a token and a log each, and the islands.yaml of all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from ddm_ray.config import StrictModel, invalid_fields, read_yaml
from ddm_ray.errors import ConfigError, RayAway
from ddm_ray.islands.processes import Leader, boot, lives

ISLANDS_FILE = "islands.yaml"
_RECORD, _TOKEN, _LOG = "island.json", "token", "log"
_MOST_RECORD, _MOST_LOG = 10_000, 1 << 20
_HEAD = "# Islands on this machine. Where they are is written anew when they come up; the rest is yours to edit.\n"


class LocalIsland(StrictModel):
    """An island of this machine, recorded before its first process is, so that all can be ended at any time."""

    name: str
    mark: str = Field(min_length=16, description="value of the environment variable that all its processes have")
    cpus: int
    base: int = Field(description="first port of its block")
    temp: str = Field(description="Ray's folder, in one of ours")
    boot: str
    pid: int = 0
    start: int = 0

    @property
    def leader(self) -> Leader:
        """The process it began with; of an earlier boot there is none, and no process has the mark."""
        return Leader(self.mark, self.pid, self.start) if self.boot == boot() else Leader(self.mark)

    @property
    def address(self) -> str:
        """Ray's address."""
        return f"127.0.0.1:{self.base}"

    @property
    def jobs(self) -> str:
        """URL of the Jobs API."""
        return f"http://127.0.0.1:{self.base + 1}"


@dataclass(frozen=True)
class IslandFolder:
    """The folder of the islands of this machine, closed to other users."""

    path: Path

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep others from changing its islands meanwhile. Raises RayAway if one does, ConfigError if it is theirs."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_uid != os.getuid():
            raise ConfigError(f"{self.path} belongs to somebody else, who could read tokens", "choose another folder")
        self.path.chmod(0o700)
        with (self.path / ".lock").open("w") as lock:
            try:
                flock(lock, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                raise RayAway(f"{self.path}: its islands are being brought up or down by another command") from None
            yield

    def home(self, name: str) -> Path:
        """The folder of an island, made if missing."""
        home = self.path / name
        home.mkdir(mode=0o700, exist_ok=True)
        return home

    def token(self, name: str) -> Path:
        """The file of an island's token."""
        return self.path / name / _TOKEN

    def log(self, name: str) -> Path:
        """The file of all that an island's start prints."""
        return self.path / name / _LOG

    def new_token(self, name: str) -> Path:
        """Write a token that nobody else can read, in place of any before; its file."""
        path = self.token(name)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        return path

    def log_lines(self, name: str) -> list[str]:
        """The last lines of its log that aren't empty; none without a log."""
        try:
            with self.log(name).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_LOG))
                text = file.read(_MOST_LOG).decode(errors="replace")
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if line.strip()]

    def islands(self) -> list[LocalIsland]:
        """All that are recorded, by name."""
        names = sorted(path.parent.name for path in self.path.glob(f"*/{_RECORD}"))
        return [island for name in names if (island := self.island(name)) is not None]

    def island(self, name: str) -> LocalIsland | None:
        """The island of this name, None if none is recorded. Raises ConfigError for a record that can't be read."""
        path = self.path / name / _RECORD
        try:
            with path.open("rb") as file:
                return LocalIsland.model_validate_json(file.read(_MOST_RECORD))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            fix = "end that island's processes and delete it"
            raise ConfigError(f"{path}: {invalid_fields(error)}", fix) from None

    def record(self, island: LocalIsland) -> None:
        """Write an island's record."""
        _replace(self.home(island.name) / _RECORD, island.model_dump_json())

    def forget(self, name: str, keep_log: bool) -> None:
        """Remove an island's files, but for those of others."""
        home = self.path / name
        for file in (_RECORD, _TOKEN, *(() if keep_log else (_LOG,))):
            (home / file).unlink(missing_ok=True)
        if not keep_log and not any(home.iterdir()):
            home.rmdir()

    def write_islands(self) -> Path:
        """Write islands.yaml: where the islands are that live, and how each trains, as somebody may have edited it.

        Where none lives it stays as it is.
        """
        path = self.path / ISLANDS_FILE
        edited: Any = read_yaml(path.read_bytes(), str(path)) if path.exists() else None
        before = edited.get("islands") if isinstance(edited, dict) else None
        islands = {}
        for island in self.islands():
            if lives(island.leader):
                kept = before.get(island.name) if isinstance(before, dict) else None
                # Half of its CPUs: there is room beside a training for what another job needs.
                trains = {"workers": 1, "threads": island.cpus, "resources_per_worker": {"CPU": island.cpus / 2}}
                where = {"address": island.address, "jobs": island.jobs, "token_file": str(self.token(island.name))}
                islands[island.name] = (kept if isinstance(kept, dict) else trains) | where
        if islands:
            _replace(path, _HEAD + yaml.safe_dump({"islands": islands}, sort_keys=False))
        return path


def _replace(path: Path, text: str) -> None:
    """Write a file at once, or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)
