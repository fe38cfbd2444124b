"""A power cut at any moment of what writes to a run on a local disk: `python -m tests.data.power_cuts`.

The disk of the model keeps nothing but what was synced: a file's bytes as they were when it last was, and of a folder
the names that it had then. This process only forks, as that of `disk_faults`.
"""

import os
import random
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ddm_ray.jobs.attempts import SavedState, claim, saved_states
from ddm_ray.run.info import StateInfo
from ddm_ray.run.manifest import NAME, FileRecord, Identity
from ddm_ray.store.disk import is_unfinished
from ddm_ray.store.store import Store
from tests.data.disk_faults import STAGES, begin_decoder, contents, make_rows, read_whole, require
from tests.traced import traced

JOB = "experts/000"
Tree = dict[str, bytes]


class SyncedDisk:
    """What would be left below a folder: updated at each call that a traced process begins."""

    def __init__(self, root: Path):
        self.root, self.states, self.faults = root, list[Tree](), list[str]()
        self.files: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, int]] = {}
        self.held: dict[int, int] = {}  # open, so that no other file gets its number

    def begins(self, name: str, where: str) -> None:
        """Note what a call will have synced; and as a fault a file that gets its name too early."""
        if name == "fsync":
            number = self.number(where)
            if os.path.isdir(where):
                self.folders[number] = {entry.name: self.number(entry.path) for entry in os.scandir(where)}
            else:
                self.files[number] = Path(where).read_bytes()
            if not self.states or self.left() != self.states[-1]:
                self.states.append(self.left())
        elif name in ("rename", "link") and self.files.get(self.number(where)) != Path(where).read_bytes():
            self.faults.append(f"{where} gets a name before its bytes are on the disk")

    def number(self, where: str) -> int:
        number = os.stat(where).st_ino
        if number not in self.held:
            self.held[number] = os.open(where, os.O_RDONLY)
        return number

    def left(self) -> Tree:
        """Bytes by path of the files that a power cut would leave."""
        tree, folders = Tree(), [("", self.number(str(self.root)))]
        while folders:
            above, number = folders.pop()
            for name, entry in self.folders.get(number, {}).items():
                if os.path.isdir(f"/proc/self/fd/{self.held[entry]}"):
                    folders.append((f"{above}{name}/", entry))
                elif not is_unfinished(name):
                    tree[f"{above}{name}"] = self.files.get(entry, b"")
        return tree


def save_states(folder: Path) -> None:
    """An attempt that saves three states and keeps one, as training does; some of the files are replaced."""
    store = Store(str(folder))
    attempt = claim(store, JOB)
    for step in (1, 2, 3):
        attempt.beat({"phase": "training", "step": step})
        prefix, data = attempt.state_prefix(step), bytes([step]) * 100_000
        store.write_stream(f"{prefix}/rank-000/a.safetensors", lambda data=data: [data])  # type: ignore[misc]
        records = {"rank-000/a.safetensors": FileRecord.of(data)}
        attempt.commit_state(step, Identity({}), records, StateInfo(step=step, seconds=1.0, world_size=1))
        attempt.drop_states(1)


def require_sound(folder: Path, artifact: str) -> None:
    """Every committed state is sound."""
    for saved in saved_states(Store(str(folder)), JOB):
        assert isinstance(saved, SavedState), saved


WRITERS: dict[str, tuple[Callable[[Path], None], str, Callable[[Path, str], None]]] = {
    stage: (work, artifact, read_whole) for stage, (work, artifact) in STAGES.items()
} | {"states": (save_states, "experts", require_sound)}


def main(writer: str, root: Path, draws: int) -> None:
    """Cut the power at `draws` moments: what a reader sees then, and that the same command has the same result.

    Prints the number of states of the disk that there are.
    """
    begin_decoder()
    work, artifact, read = WRITERS[writer]
    undisturbed = root / "undisturbed"
    if writer == "partition":
        require(traced(partial(make_rows, undisturbed), str(root)))
    os.makedirs(undisturbed, exist_ok=True)
    disk = SyncedDisk(undisturbed)
    for folder in [undisturbed, *undisturbed.rglob("*")]:  # what was there before is on the disk
        disk.begins("fsync", str(folder))
    disk.states.clear()
    require(traced(partial(work, undisturbed), str(undisturbed), watch=disk.begins))
    assert not disk.faults, disk.faults[0]
    expected, last = contents(undisturbed, artifact), disk.left()
    present = contents(undisturbed, "")
    lost = [name for name, data in present.items() if last.get(name) != data]
    assert not lost, f"done, and not on the disk: {lost}"
    manifests = [place for place, tree in enumerate(disk.states) if f"{artifact}/{NAME}" in tree]
    assert writer == "states" or manifests, "no manifest"
    for tree in random.Random(0).sample(disk.states, min(draws, len(disk.states))):
        folder = root / "left"
        for name, data in tree.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        folder.mkdir(exist_ok=True)
        require(traced(partial(read, folder, artifact), str(root)))
        if writer != "states":
            require(traced(partial(work, folder), str(root)))
            assert contents(folder, artifact) == expected
        shutil.rmtree(folder)
    print(len(disk.states))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
