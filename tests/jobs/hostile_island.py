"""A run of which one island writes whatever it likes: mutations of what lies below its expert's prefix."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from ddm_ray.jobs.attempts import CLAIM, claim
from ddm_ray.jobs.launches import Launch
from ddm_ray.run.graph import ROUTER, evaluation, expert, replay
from ddm_ray.run.manifest import NAME, FileRecord, sha256
from ddm_ray.run.run import Run
from ddm_ray.store.checksummed import seal
from tests.jobs.attempts import beat, fail
from tests.random_run import make_run
from tests.run.artifacts import save_state, write_and_commit

VICTIM = expert(0)
ISLAND = "islands/north"
HUGE = 6 * 2**30
# All of C0 and C1, and what turns text around or ends a line; a terminal's clipboard, its title, an empty screen.
CODES = (*range(1, 32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)
CONTROLS = "".join(map(chr, CODES))
ODD_TEXTS = (
    CONTROLS,
    "\x1b]52;c;ZXZpbA==\x07\x1b]0;owned\x07\x1b[2J",
    "fine\nexperts/001      damaged     0%  forged",
    "x" * 5000,
    "..",
    "../../run.json",
    "\ud800",
    "a\0b",
    "",
)
ODD_NUMBERS: tuple[Any, ...] = (float("nan"), float("inf"), -1, -(2.5), 2**53, 10**400, 1e308, True, 0)
ODD_VALUES: tuple[Any, ...] = (*ODD_TEXTS, *ODD_NUMBERS, None, [], {}, [1], {"a": 1}, ["x"] * 3)
ODD_NAMES = (
    "9" * 255,
    "x" * 255,
    "step-000001200.bak",
    "step-12",
    "step-" + "9" * 200,
    "0001.bak",
    "٣٣٣٣",
    "a\x1b[2Jb",
    "new\nline",
    "a\u202eb",
    "000000000001",
    "-1",
    "#1",
    " ",
)


def make_hostile_run(path: Path) -> Run:
    """A run with finished artifacts of each kind, but for an expert, with all that its jobs may leave."""
    run = make_run(str(path), num_rows=60)
    for artifact in (evaluation("demo"), replay(1)):
        write_and_commit(run, artifact, {"part": b"x"})
    run.store.delete_one(f"{VICTIM}/{NAME}")
    for number in range(2, 4):
        launch = Launch(VICTIM, id=f"{number:011x}abcdef01", island="north", job="raysubmit_7", after=number - 1)
        run.store.write(launch.begun_key, json.dumps({"host": "n7", "island": "north", "pid": 7}).encode())
        attempt = claim(run.store, VICTIM, launch.claim_fields())
        beat(attempt, 5, 75, versions={"torch": "2.0"}, island="north")
        for step in (50, 75):
            save_state(attempt, step, run.identity(VICTIM), {"rank-0": b"state"}, keep=2)
    fail(attempt, "no rows")
    for key, fields in {
        f"{VICTIM}/takes/0001": {"worker": "north/0001", "launch": launch.id},
        f"{ISLAND}/workers/0001/{CLAIM}": {"host": "n7"},
        f"{ISLAND}/workers/0001/PRESENCE": {"beat": 3, "holds": VICTIM, "speed": 1e9, "host": "n7", "island": "north"},
    }.items():
        run.store.write(key, json.dumps(fields).encode())
    return run


def files_of(run: Run) -> list[Path]:
    """All that the island may write, in order; not what its links lead to."""
    own = [Path(run.url).resolve() / folder for folder in (VICTIM, ISLAND)]
    walked = [path for folder in own if not folder.is_symlink() for path in folder.rglob("*")]
    files = [path for path in walked if path.is_file() and not path.is_symlink()]
    return sorted(path for path in files if any(path.resolve().is_relative_to(folder) for folder in own))


def mutate(run: Run, random: Random) -> str:
    """Change something below the island's prefixes; words on what it was."""
    files = files_of(run)
    if not files or any(path.stat().st_size >= HUGE for path in files):
        return "nothing is left to be changed, or copied"
    path = random.choice(files)
    change = random.choice(CHANGES)
    change(run, path, random)
    return f"{change.__name__} {path.relative_to(run.url)}"


def _other_value(_: Run, path: Path, random: Random) -> None:
    """One field of JSON, at any depth, is something else; rightly signed if it was signed."""

    def change(body: Any) -> None:
        while isinstance(body, dict | list) and body:
            key = random.choice(list(body)) if isinstance(body, dict) else random.randrange(len(body))
            if not isinstance(body[key], dict | list) or not body[key] or random.random() < 0.3:
                how = random.random()
                if how < 0.2:
                    del body[key]
                elif how < 0.4 and isinstance(body, dict):
                    body[random.choice(ODD_TEXTS)] = body.pop(key)
                else:
                    body[key] = random.choice(ODD_VALUES)
                return
            body = body[key]

    rewrite(path, change)


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Replace JSON by what a change makes of it, with a right checksum if it had one; leave other files alone."""
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # by the change before this one
        return
    if not isinstance(body, dict):
        return
    signed = body.pop("checksum", None)
    change(body)
    path.write_bytes(seal(body, 1) if signed else json.dumps(body).encode())


def _deep(_: Run, path: Path, random: Random) -> None:
    brackets = random.choice(((b"[", b"]"), (b'{"a":', b"}")))
    path.write_bytes(brackets[0] * 10**5 + b"1" + brackets[1] * random.choice((0, 10**5)))


def _huge(_: Run, path: Path, random: Random) -> None:
    os.truncate(path, HUGE)


def _truncated(_: Run, path: Path, random: Random) -> None:
    os.truncate(path, random.randrange(path.stat().st_size + 1))


def _flipped(_: Run, path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes() or b"x")
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def _other_bytes(_: Run, path: Path, random: Random) -> None:
    path.write_bytes(random.choice((b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[1]", b'"x"', b"NaN", b"\0" * 100)))


def _pipe(_: Run, path: Path, random: Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(run: Run, path: Path, random: Random) -> None:
    """A link in place of a file or a folder above it: to itself, to nothing, up, to a device or to another artifact."""
    place = random.choice([path, *list(path.parents)[: len(path.relative_to(run.url).parts) - 2]])
    others = ("..", "/", "/dev/zero", "/dev/null", "nowhere", str(Path(run.url) / expert(1)), f"{run.url}/run.json")
    target = random.choice((place.name, *others))
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    place.symlink_to(target)


def _folder(run: Run, path: Path, random: Random) -> None:
    """A folder in place of a file, or a file in place of a folder."""
    if random.random() < 0.5:
        path.unlink()
        path.mkdir()
        return
    folder = random.choice([path.parent, *list(path.parents)[: len(path.relative_to(run.url).parts) - 2]])
    shutil.rmtree(folder)
    folder.write_bytes(b"x")


def _gone(_: Run, path: Path, random: Random) -> None:
    path.unlink()


def _odd_name(_: Run, path: Path, random: Random) -> None:
    """A copy of a file or of its folder under another name, beside it or in its place."""
    source = random.choice((path, path.parent))
    place = source.with_name(random.choice(ODD_NAMES))
    if place.exists():
        return
    if random.random() < 0.3:
        source.rename(place)
    else:
        with suppress(shutil.Error):  # of a socket that an earlier change has left there
            shutil.copytree(source, place, symlinks=True) if source.is_dir() else shutil.copy(source, place)


def _swapped(run: Run, path: Path, random: Random) -> None:
    """Another artifact's file, or another one of its own, in its place."""
    manifests = [Path(run.url) / artifact / NAME for artifact in (expert(1), ROUTER, "partition", "rows")]
    other = random.choice([*manifests, *files_of(run)])
    if other != path:
        path.unlink()
        shutil.copy(other, path)


def _finished(run: Run, path: Path, random: Random) -> None:
    """A final manifest, rightly signed, that says something odd."""
    manifest = Path(run.url) / VICTIM / NAME
    if not manifest.parent.is_dir() or (manifest.is_dir() and not manifest.is_symlink()):
        return
    manifest.unlink(missing_ok=True)
    shutil.copy(Path(run.url) / expert(1) / NAME, manifest)

    def change(body: Any) -> None:
        body["artifact"] = VICTIM
        what = random.randrange(5)
        if what == 0:
            body["info"][random.choice(list(body["info"]))] = random.choice(ODD_VALUES)
        elif what == 1:
            body["files"][random.choice(ODD_TEXTS)] = {"bytes": 1, "sha256": sha256(b"x")}
        elif what == 2:
            body["identity"]["inputs"][random.choice(ODD_TEXTS)] = random.choice(ODD_VALUES)
        elif what == 3:
            body["identity"]["fields"][random.choice(ODD_TEXTS)] = random.choice(ODD_VALUES)
        else:
            body["files"] = {"x": {"bytes": HUGE, "sha256": FileRecord.of(b"x").sha256}}

    rewrite(manifest, change)


CHANGES = (
    *(_other_value,) * 5,
    _deep,
    _huge,
    _truncated,
    _flipped,
    _other_bytes,
    _pipe,
    _link,
    _folder,
    _gone,
    _odd_name,
    _swapped,
    *(_finished,) * 2,
)
