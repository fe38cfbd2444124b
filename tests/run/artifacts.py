"""Stand-ins for what stages write, and the damage that storage does to it."""

from pathlib import Path

from ddm_ray.jobs.attempts import Attempt
from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import StateInfo
from ddm_ray.run.manifest import FileRecord, Identity
from ddm_ray.run.run import Run
from tests.infos import commit_written, info_of


def write_and_commit(run: Run, artifact: Artifact, files: dict[str, bytes]) -> None:
    """Finish an artifact of `run` that holds these files."""
    for name, content in files.items():
        run.store.write(f"{artifact}/{name}", content)
    commit_written(run, artifact, list(files), info_of(artifact))


def save_state(attempt: Attempt, step: int, identity: Identity, files: dict[str, bytes], keep: int) -> None:
    """A training state of these files, after which the `keep` newest are kept."""
    for name, content in files.items():
        attempt.store.write(f"{attempt.state_prefix(step)}/{name}", content)
    records = {name: FileRecord.of(content) for name, content in files.items()}
    attempt.commit_state(step, identity, records, StateInfo(step=step, seconds=1.5, world_size=1))
    attempt.drop_states(keep)


def flip_bit(path: Path, position: int = -1) -> None:
    """Alter one bit of the byte at `position` of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
