"""The store keeps whole objects under any sensible key, and lets exactly one of many create an object."""

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.errors import RunError, StorageError
from ddm_ray.run.graph import Artifact
from ddm_ray.store.store import Store, is_local
from tests.processes import forked

pytestmark = pytest.mark.contract

NUM_RIVALS, NUM_ROUNDS = 8, 25

# What a file name may hold: all but control characters. A trailing #1 marks the store's unfinished files, and obstore
# takes a last name that ends like a drive ("A:") for one; no file of a run does.
name = st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="/"), min_size=1, max_size=20)
folder_name = name.filter(lambda text: text.strip(".") != "")
file_name = folder_name.filter(
    lambda text: (not text.rpartition("#")[2].isdigit() or "#" not in text) and text[-1] not in ":|"
)
spiced = st.sampled_from(["a b", "cluster=003", "50%", "%20", "a#b", "#", "ü ß", "日本", "e\u0301", "~", "_x", ".y"])
fresh = count()


@pytest.fixture(scope="module", params=["disk", "memory"])
def stores(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Store]:
    """Makes stores: below a folder named as asked, or in memory, through the code that object stores use."""
    if request.param == "memory":
        return lambda _: Store("memory:///")
    root = tmp_path_factory.mktemp("stores")
    return lambda folder: Store(str(root / str(next(fresh)) / folder))


@settings(max_examples=150, deadline=None)
@given(
    root=folder_name | spiced | st.just("run#1"),
    folder=folder_name | spiced,
    file=file_name | spiced,
    content=st.binary(),
    other=st.binary(),
)
def test_objects_round_trip_under_any_key(
    stores: Callable[[str], Store], root: str, folder: str, file: str, content: bytes, other: bytes
) -> None:
    store, key = stores(root), f"top/{folder}/{file}"
    assert not store.exists(key)
    store.write(key, content)
    assert store.read(key) == content
    assert store.exists(key)
    assert not store.create(key, other)
    assert store.read(key) == content
    store.write(key, other)
    assert store.read(key) == other
    assert dict(store.sizes("top")) == {f"{folder}/{file}": len(other)}
    assert dict(store.sizes(f"top/{folder}")) == {file: len(other)}
    assert store.folders("top") == [folder]
    store.delete("top")
    assert not store.exists(key)
    assert store.folders("top") == []
    assert dict(store.sizes("top")) == {}
    assert store.create(key, other)
    assert store.read(key) == other


def test_large_objects_round_trip(stores: Callable[[str], Store]) -> None:
    store, content = stores("large"), os.urandom(20 << 20)
    store.write("state/model.safetensors", content)
    assert store.read("state/model.safetensors") == content
    assert not store.create("state/model.safetensors", b"")
    assert store.create("state/other.safetensors", content)
    assert store.sizes("state") == {"model.safetensors": len(content), "other.safetensors": len(content)}


def test_listings_are_in_order_and_keep_to_their_prefix(stores: Callable[[str], Store]) -> None:
    store = stores("listing")
    for key in ("a/step-10/x", "a/step-2/y/z", "a/step-1/x", "a/loose", "ab/step-3/x"):
        store.write(key, key.encode())
    assert list(store.sizes("a")) == ["loose", "step-1/x", "step-10/x", "step-2/y/z"]
    assert store.folders("a") == ["step-1", "step-10", "step-2"]
    assert list(store.sizes("a/step-1")) == ["x"]
    assert [*store.sizes("")] == [*(f"a/{key}" for key in store.sizes("a")), "ab/step-3/x"]
    store.delete("a/step-1")
    assert store.folders("a") == ["step-10", "step-2"]
    assert store.read("a/step-10/x") == b"a/step-10/x"
    store.delete("a")
    assert store.folders("a") == []
    assert store.read("ab/step-3/x") == b"ab/step-3/x"


def test_what_is_absent(stores: Callable[[str], Store]) -> None:
    store = stores("absent")
    with pytest.raises(FileNotFoundError):
        store.read("rows/part-0.parquet")
    store.write("rows/part-0.parquet", b"")
    with pytest.raises(FileNotFoundError):
        store.read(Artifact("rows"))
    assert not store.exists("rows")
    assert store.exists("rows/part-0.parquet")
    assert store.sizes("partition") == {}
    assert store.folders("partition") == []
    store.delete("partition")


def test_opening_creates_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    assert store.folders("experts") == []
    assert not (tmp_path / "run").exists()


def test_paths_may_be_relative_or_file_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Store("../my runs/a").write("run.json", b"{}")
    spellings = (
        "../my runs/a/",
        "./../my runs/b/../a",
        f"{tmp_path}/my runs/a",
        f"file://{tmp_path}/my%20runs/a",
        f"file://{tmp_path}/my runs/#1?/../a",
    )
    for spelling in spellings:
        store = Store(spelling)
        assert store.read("run.json") == b"{}"
        assert store.url == str(tmp_path / "my runs" / "a")


def test_pyarrow_writes_where_the_store_reads(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "a run #1"))
    filesystem, path = store.filesystem("rows")
    filesystem.create_dir(path)
    with filesystem.open_output_stream(f"{path}/part-0.parquet") as stream:
        stream.write(b"rows")
    assert store.read("rows/part-0.parquet") == b"rows"
    assert store.sizes("rows") == {"part-0.parquet": 4}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nosuch://bucket/run", "no run can lie there; give a folder, s3://BUCKET/..., "),
        ("az://container/run", "no run can lie there; "),
        ("s3a://bucket/run", "no run can lie there; "),
        ("s3://", "not a storage"),
        ("s3:/lab/x", "has too few slashes for a URI; write file:///PATH"),
        ("file://g", "has too few slashes for a URI; write file:///PATH"),
    ],
)
def test_an_unknown_storage_is_refused_in_one_line(url: str, reason: str) -> None:
    with pytest.raises(RunError) as failure:
        Store(url)
    message = str(failure.value)
    assert message.startswith(f"{url}: {reason}")
    assert "\n" not in message
    assert "Debug" not in message


@pytest.mark.parametrize(("url", "local"), [("runs/a", True), ("file", True), ("/a:b", True), ("s3://bucket/a", False)])
def test_is_local(url: str, local: bool) -> None:
    assert is_local(url) is local
    assert (Store(url).local is not None) is local


def race(url: str, rival: int, start: Barrier, wins: "Queue[tuple[int, int]]") -> None:
    """Try to create the object of each round, and tell (round, rival) of each that was won."""
    store = Store(url)
    for number in range(NUM_ROUNDS):
        start.wait(60)
        if store.create(f"attempts/{number:04d}/CLAIM", f"rival {rival}".encode()):
            wins.put((number, rival))
    start.wait(60)


def test_one_of_many_processes_creates_an_object(tmp_path: Path) -> None:
    processes = forked()
    start, queue = processes.Barrier(NUM_RIVALS), processes.Queue()
    rivals = [processes.Process(target=race, args=(str(tmp_path), rival, start, queue)) for rival in range(NUM_RIVALS)]
    for process in rivals:
        process.start()
    wins = sorted(queue.get(timeout=60) for _ in range(NUM_ROUNDS))
    for process in rivals:
        process.join(60)
        assert process.exitcode == 0
    assert queue.empty(), "a round had two winners"
    assert [number for number, _ in wins] == list(range(NUM_ROUNDS))
    for number, rival in wins:
        assert Store(str(tmp_path)).read(f"attempts/{number:04d}/CLAIM") == f"rival {rival}".encode()


def torn_reads(store: Store, write: Callable[[str, bytes], None], size: int) -> Iterator[bool]:
    """For each read beside a writer that replaces an object of one repeated byte: was it a mixture?"""
    done = threading.Event()

    def replace_for_ever() -> None:
        for value in cycle(range(1, 200)):
            if done.is_set():
                return
            write("object", bytes([value]) * (size + value))

    store.write("object", bytes([1]) * (size + 1))
    writer = threading.Thread(target=replace_for_ever)
    writer.start()
    seen = set()
    try:
        until = time.monotonic() + 300  # for a slow disk
        while len(seen) < 20 and time.monotonic() < until:
            content = store.read("object")
            seen.add(content[:1])
            yield len(set(content)) != 1 or len(content) != size + content[0]
    finally:
        done.set()
        writer.join()
    assert len(seen) >= 20, "the writer hardly ran beside the reader"


@pytest.mark.parametrize("size", [100, 6 << 20], ids=["small", "larger than one part"])
def test_a_reader_sees_one_whole_object(tmp_path: Path, size: int) -> None:
    store = Store(str(tmp_path))
    assert not any(torn_reads(store, store.write, size))
    assert os.listdir(tmp_path) == ["object"]


def test_the_reader_would_see_a_mixture(tmp_path: Path) -> None:
    def write_in_place(key: str, content: bytes) -> None:
        with open(tmp_path / key, "r+b" if (tmp_path / key).exists() else "wb") as file:
            file.write(content[:50])
            file.flush()
            time.sleep(0.002)
            file.write(content[50:])

    assert any(torn_reads(Store(str(tmp_path)), write_in_place, 100))


def test_every_refusal_of_storage_is_told_in_one_line(tmp_path: Path) -> None:
    store, too_long = Store(str(tmp_path)), "x" * 300
    for refused in (store.read, store.exists, store.delete_one, store.delete):
        with pytest.raises(StorageError, match=r"^[^\n]*xxx[^\n]*: [^\n]*too long[^\n]*$"):
            refused(too_long)


def test_a_stream_becomes_one_object_or_none(stores: Callable[[str], Store]) -> None:
    store = stores("streams")
    chunks = [b"a" * 7, b"", b"b" * (11 << 20), b"c"]
    store.write_stream("whole", lambda: chunks)
    assert store.read("whole") == b"".join(chunks)

    def broken() -> Iterator[bytes]:
        yield from chunks
        raise ValueError("the source is damaged")

    with pytest.raises(ValueError, match="the source is damaged"):
        store.write_stream("broken", broken)
    assert not store.exists("broken") and store.exists("whole")


def test_a_disk_that_is_full_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    store, data = Store(str(tmp_path)), b"x" * 100_000
    store.write("kept", b"before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        for write in (store.write, store.create, lambda key, data: store.write_stream(key, lambda: [data[:9], data])):
            for key in ("kept", "new"):
                if (write, key) != (store.create, "kept"):
                    with pytest.raises(StorageError, match=f"^{tmp_path}/{key}: File too large; raise .*ulimit -f"):
                        write(key, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["kept"] and store.read("kept") == b"before"


@pytest.mark.parametrize("key", ["../x", "a/../../x", "a/./x", "/x", "a//x", "", ".", "a\0b", "a\nb"])
def test_no_key_leads_out_of_the_store(tmp_path: Path, key: str) -> None:
    (tmp_path / "x").write_bytes(b"secret")
    store = Store(str(tmp_path / "run"))
    writers = (store.write, store.create, lambda key, data: store.write_stream(key, lambda: [data]))
    readers = (store.read, store.exists, store.folders, *([store.sizes] if key else []))  # "" asks for all sizes
    for ask in (*(partial(write, data=b"x") for write in writers), *readers):
        with pytest.raises(StorageError, match=r"^[^\n]* is no key$"):
            ask(key)
    assert [*tmp_path.iterdir()] == [tmp_path / "x"]


@pytest.mark.parametrize("name", ["new#1", "ema.safetensors#20"])
def test_files_that_were_never_finished_are_no_objects(tmp_path: Path, name: str) -> None:
    store = Store(str(tmp_path))
    store.write("a/object", b"x")
    (tmp_path / "a" / name).write_bytes(b"half")
    assert store.sizes("a") == {"object": 1}
    with pytest.raises(StorageError, match=r"is no key$"):
        store.write(f"a/{name}", b"x")
