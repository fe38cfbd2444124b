"""Archives taken apart, changed and put together again: as packing writes them, or as others could."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddm_ray.storage.archive import END, header
from ddm_ray.storage.manifest import NAME, sha256
from ddm_ray.storage.sealed import canonical, seal
from tests.data.damage import damages

Members = dict[str, bytes]
Change = Callable[[dict[str, Any]], object]
CONTENTS, RUN = "ddm-archive.json", "run.json"
HOSTILE_NAMES = (
    "../x", "/tmp/x", "..", ".", "", "a//b", "a/../x", "./a", "a/", "-rf", ".hidden", "_MANIFEST.json",
    "x/_MANIFEST.json", "shards/cluster=009/_MANIFEST.json", "x\0y", "\x1b[2J", "ü", "a b", "a\nb", "a\\b", "C:x",
    "l" * 200, "\ud800", "attempts/0001/CLAIM",
)  # fmt: skip
JUNK = (b"", b"{}", b"[]", b"null", b"\xff" * 9, b"[" * 10**5, b'{"a":' * 10**5, b"9" * 5000, bytes(600))
KINDS = (b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"L", b"K", b"x", b"g", b"\0")
PAX: tuple[dict[str, str], ...] = (
    {"path": "/tmp/x"},
    {"size": "7"},
    {"GNU.sparse.major": "1", "GNU.sparse.name": "/tmp/x"},
    {"linkpath": "x"},
)


@dataclass(frozen=True)
class Mutant:
    """What became of an archive."""

    kind: str
    data: bytes

    def __str__(self) -> str:
        return self.kind


def take_apart(data: bytes) -> Members:
    """The members of a sound archive, in order, as any tar program reads them."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]


def put_together(members: list[tuple[str, bytes]] | Members) -> bytes:
    """An archive of these members, as packing would write it."""
    listed = list(members.items()) if isinstance(members, dict) else members
    return b"".join(header(name, len(data)) + data + bytes(-len(data) % 512) for name, data in listed) + END


def reseal(data: bytes, change: Change, indent: int | None = 1) -> bytes:
    """A sealed object after a change, with the checksum that it has to have then."""
    body = json.loads(data)
    del body["checksum"]
    change(body)
    return seal(body, indent)


def mutants(data: bytes, seed: int) -> Iterator[Mutant]:
    """All that may come in place of an archive: damage, other tars, and manifests that say something else."""
    members, generator = take_apart(data), np.random.default_rng(seed)
    for damage in damages("archive", {"archive": data}, generator, flips=40, cuts=10, swaps=0):
        if damage.data is not None:
            yield Mutant(damage.kind, damage.data)
    for place in range(0, len(data), 512):
        if data[place + 257 : place + 262] == b"ustar":  # each header is hit, however large the files are
            bit = int(generator.integers(8 * 512))
            hit = bytearray(data[place : place + 512])
            hit[bit // 8] ^= 1 << bit % 8
            yield Mutant(f"bit {bit} of the header at {place}", data[:place] + bytes(hit) + data[place + 512 :])
            yield Mutant(f"cut at the header at {place}", data[:place])
    yield Mutant("padded as tar does", data + bytes(-len(data) % tarfile.RECORDSIZE or tarfile.RECORDSIZE))
    yield Mutant("without its end", data[: -len(END)])
    for kind, compress in {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}.items():
        yield Mutant(kind, compress(data))
    yield from _other_tars(members, generator)
    yield from _other_manifests(members)


def _other_tars(members: Members, generator: np.random.Generator) -> Iterator[Mutant]:
    """Archives with sound contents whose members are others, or in another form."""
    names, listed = list(members), list(members.items())
    fields: list[dict[str, Any]] = [{"mode": 0o4777}, {"uid": 1000}, {"uname": "root"}, {"mtime": 1}, {"size": 2**40}]
    fields += [{"linkname": "/etc"}, *({"type": kind, "linkname": "/etc/passwd"} for kind in KINDS)]
    for at, (name, content) in enumerate(listed):
        before, after = listed[:at], listed[at + 1 :]
        yield Mutant(f"without {name}", put_together([*before, *after]))
        yield Mutant(f"{name} twice", put_together([*listed[: at + 1], *listed[at:]]))
        yield Mutant(f"{name} again at the end", put_together([*listed, listed[at]]))
        if after:
            yield Mutant(f"{name} last", put_together([*before, *after, listed[at]]))
        yield Mutant(f"a bomb before {name}", put_together([*before, ("bomb", bytes(2**16)), *listed[at:]]))
        yield Mutant(f"{name} longer", put_together([*before, (name, content + b"\n"), *after]))
        for path in ("/etc/passwd", "../../x", f"./{name}", f"{name}/", f"x/../{name}", "experts/000/CLAIM"):
            yield Mutant(f"{name} called {path}", _rewritten(members, name, {"name": path}))
        for changed in (*fields, *({"size": len(content) + step} for step in (-1, 1, 512))):
            yield Mutant(f"{name} with {changed}", _rewritten(members, name, changed))
    for pax in PAX:
        name = names[int(generator.integers(len(names)))]
        yield Mutant(f"{name} with pax {pax}", _rewritten(members, name, {"pax_headers": pax}, tarfile.PAX_FORMAT))
    yield Mutant("as ustar", _rewritten(members, names[0], {}, tarfile.USTAR_FORMAT))
    yield Mutant("a long name", put_together([*list(members.items())[:-1], ("l" * 300, members[names[-1]])]))


def _rewritten(members: Members, name: str, fields: dict[str, Any], form: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive whose member `name` has these fields in its header, and its own content."""
    data = b""
    for each, content in members.items():
        entry = tarfile.TarInfo(each)
        entry.size = len(content)
        for field, value in fields.items() if each == name else ():
            setattr(entry, field, value)
        data += entry.tobuf(form) + content + bytes(-len(content) % 512)
    return data + END


def _other_manifests(members: Members) -> Iterator[Mutant]:
    """Archives in sound form whose JSON says something else, under a checksum that is right."""
    for key in members:
        if key == CONTENTS or key.endswith(NAME):
            for about, change in _changes(key, json.loads(members[key])):
                data = reseal(members[key], change, None if key == CONTENTS else 1)
                yield Mutant(f"{key}: {about}", put_together({**members, key: data}))
            for junk in JUNK:
                yield Mutant(f"{key}: {junk[:9]!r}", put_together({**members, key: junk}))
    for key in (key for key in members if key.endswith((NAME, RUN))):
        spaced = members[key].replace(b": ", b":  ", 1)
        yield Mutant(f"{key}: spelled otherwise", put_together({**members, key: spaced}))


def _changes(key: str, body: dict[str, Any]) -> Iterator[tuple[str, Change]]:
    """Changes of a JSON object of an archive, with words about each."""

    def setting(*path: str, to: Any) -> tuple[str, Change]:
        def change(changed: dict[str, Any]) -> None:
            for name in path[:-1]:
                changed = changed[name]
            changed[path[-1]] = to

        return f"{'.'.join(path)} {str(to)[:40]}", change

    for field in sorted(body.keys() - {"checksum"}):
        yield setting(field, to=7)
        yield setting(field, to=["x"])
        yield f"no {field}", lambda changed, field=field: changed.pop(field)
    if key == CONTENTS:
        for artifact in ("experts/000", "experts/009", "rows", "eval/x", "../x", "partition", "\ud800"):
            yield setting("artifact", to=artifact)
        return
    first, record = next(iter(body["files"].items()))
    yield setting("artifact", to="experts/000")
    yield setting("identity", to={"fields": {}, "inputs": {}})
    yield setting("identity", "inputs", to=["x"])
    yield setting("identity", "fields", to="x")
    deep: dict[str, Any] = {}
    for _ in range(600):
        deep = {"x": deep}
    for value in (77, deep):
        yield setting("identity", "fields", "num_clusters", to=value)
    for name in HOSTILE_NAMES:
        yield setting("files", name, to=record)
        yield (
            f"renames {name!r}",
            lambda changed, name=name: changed["files"].update({name: changed["files"].pop(first)}),
        )
    yield setting("files", f"{first}/x", to=record)
    for size in (-1, 0, 1.5, "3", None, True, 10**30, 2**63 - 1, record["bytes"] + 1, record["bytes"] - 1):
        yield setting("files", first, "bytes", to=size)
    for digest in ("", "x", 7, None, ["a"], record["sha256"].upper(), "0" * 64):
        yield setting("files", first, "sha256", to=digest)
    yield setting("files", first, "mode", to=7)
    yield setting("files", to={})


def another_result(members: Members, change: Callable[[bytes], bytes], added: Members | None = None) -> bytes:
    """An archive of a result that is as sound, of a training that gave other weights, or more files by their names."""
    (key,) = (key for key in members if key.endswith(NAME))
    body = json.loads(members[key])
    artifact, old = body["artifact"], body["info"]["weights"]
    contents = {name.removeprefix(f"{old}/"): change(members[f"{artifact}/{name}"]) for name in body["files"]}
    contents = dict(sorted({**contents, **(added or {})}.items()))
    folder = f"unpacked/{sha256(canonical({name: sha256(data) for name, data in contents.items()}))[:16]}"
    files = {f"{folder}/{name}": {"bytes": len(data), "sha256": sha256(data)} for name, data in contents.items()}
    info = {**body["info"], "weights": folder}
    manifest = reseal(members[key], lambda body: body.update(files=files, info=info))
    kept = [(name, members[name]) for name in (CONTENTS, RUN)]
    return put_together(
        [*kept, (key, manifest), *((f"{artifact}/{folder}/{name}", contents[name]) for name in contents)]
    )


def smuggled(members: Members) -> Iterator[Mutant]:
    """Archives of one artifact that are sound but for the name of a file, which they have, and its record too."""
    (key,) = (key for key in members if key.endswith(NAME))
    first = next(iter(json.loads(members[key])["files"])).rpartition("/")[2]
    # The last one would be a folder `attempts` of the artifact's own, which harms nobody.
    for name in (*HOSTILE_NAMES[:-1], f"{first}/x"):
        if not name.isascii():
            continue  # no header has it
        data = b"smuggled"
        if "unpacked" in "".join(members):
            yield Mutant(f"smuggles {name!r}", another_result(members, bytes, {name: data}))
            continue
        record = {"bytes": len(data), "sha256": sha256(data)}
        manifest = reseal(members[key], lambda body, name=name, record=record: body["files"].update({name: record}))
        path = f"{key.removesuffix(NAME)}{name}"
        yield Mutant(f"smuggles {name!r}", put_together([*{**members, key: manifest}.items(), (path, data)]))


def listing(folder: Path) -> dict[str, bytes | None]:
    """All that is below a folder: the bytes of its files, None for a folder."""
    paths = sorted(folder.rglob("*")) if folder.exists() else []
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in paths}
