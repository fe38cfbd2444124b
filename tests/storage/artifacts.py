"""Stand-ins for what stages write, and the damage that storage does to it."""

from pathlib import Path

from ddm_ray.storage.run import Run


def write_and_commit(run: Run, artifact: str, files: dict[str, bytes]) -> None:
    """Finish an artifact of `run` that holds these files."""
    for name, content in files.items():
        run.store.write(f"{artifact}/{name}", content)
    run.commit(artifact, list(files), {"rows": 3})


def flip_bit(path: Path, position: int = -1) -> None:
    """Alter one bit of the byte at `position` of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
