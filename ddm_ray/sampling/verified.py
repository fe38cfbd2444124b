"""A folder with files of known sizes and checksums: only files that are as they were written are used."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddm_ray.errors import CorruptArtifact, MissingArtifact, StorageError
from ddm_ray.run.manifest import FileRecord, verify
from ddm_ray.store import local_disk

REMEDY = "save or fetch the pipeline again"


@dataclass(frozen=True)
class VerifiedFolder:
    """The files of `root` that `files` records, by their paths in it."""

    root: Path
    files: Mapping[str, FileRecord]

    def read(self, name: str, most: int = sys.maxsize) -> bytes:
        """A file's bytes, `most` of them. MissingArtifact; CorruptArtifact for safetensors that end early;
        CorruptArtifact.
        """
        path = self.root / name
        if name not in self.files:
            raise CorruptArtifact(f"{self.root}: its index says nothing of {name}", REMEDY)
        try:
            if self.files[name].bytes > most:
                raise CorruptArtifact(f"{path}: has {self.files[name].bytes} bytes, {most} are allowed", REMEDY)
            data = local_disk.read(path, lambda size: range(min(size, self.files[name].bytes + 1)))
        except (FileNotFoundError, StorageError):
            raise MissingArtifact(f"{path} is missing or can't be read", REMEDY) from None
        if len(data) < self.files[name].bytes and path.suffix == ".safetensors":
            raise CorruptArtifact(f"{path}: {len(data)} bytes of {self.files[name].bytes}", REMEDY)
        return verify(data, self.files[name], str(path))

    def check(self, folder: str) -> None:
        """All recorded files of a folder, for another library to read: maybe too large to be read at once for this."""
        for name in self.files:
            path = self.root / name
            if not name.startswith(f"{folder}/"):
                continue
            if not path.is_file():
                raise MissingArtifact(f"{path} is missing", REMEDY)
            if path.suffix == ".safetensors" and (num_bytes := path.stat().st_size) < self.files[name].bytes:
                raise CorruptArtifact(f"{path}: {num_bytes} bytes of {self.files[name].bytes}", REMEDY)
            if FileRecord.of_file(path) != self.files[name]:
                raise CorruptArtifact(f"{path}: size or checksum differs", REMEDY)
