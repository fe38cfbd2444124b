"""Curves come back from event files as they were recorded, and no storage holds up or ends a training."""

import struct
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event

from ddm_ray.errors import StorageError
from ddm_ray.storage.store import Store
from ddm_ray.train import telemetry
from ddm_ray.train.telemetry import EventFiles, Telemetry
from tests.conftest import wait_for
from tests.data.s3 import BUCKET, s3_server

PREFIX = "experts/003/attempts/0007"
Curves = dict[str, list[tuple[int, float]]]


def masked(data: bytes) -> int:
    """TensorBoard's checksum."""
    crc = crc32c(data) & 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events_of(data: bytes) -> list[Event]:
    """The events of one file, as TensorBoard's own reader takes them: length, checksum, bytes, checksum."""
    events, at = [], 0
    while at < len(data):
        (length, crc), at = struct.unpack_from("<QI", data, at), at + 12
        assert crc == masked(data[at - 12 : at - 4])
        body = data[at : at + length]
        assert struct.unpack_from("<I", data, at + length) == (masked(body),)
        events.append(Event.FromString(body))
        at += length + 4
    if not events:
        return []  # a file that has just been begun
    assert events[0].file_version == "brain.Event:2"
    return events[1:]


def curves(store: Store, prefix: str = PREFIX) -> Curves:
    """(step, value) by the curve's name, in the order in which TensorBoard reads the files."""
    points: Curves = defaultdict(list)
    for name in sorted(store.sizes(f"{prefix}/tensorboard")):
        assert name.startswith("events.out.tfevents.")
        for event in events_of(store.read(f"{prefix}/tensorboard/{name}")):
            assert abs(event.wall_time - time.time()) < 3600
            for value in event.summary.value:
                points[value.tag].append((event.step, value.simple_value))
    return dict(points)


def test_curves_on_a_local_disk(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    recorder = Telemetry(store, PREFIX)
    recorder.record(1, {"loss": 0.5, "mfu": None, "grad_norm": float("inf")})
    wait_for(lambda: curves(store), 10)
    recorder.record(5, {"loss": 0.25, "learning_rate": 0.125})
    recorder.close()
    expected = {"loss": [(1, 0.5), (5, 0.25)], "grad_norm": [(1, float("inf"))], "learning_rate": [(5, 0.125)]}
    assert curves(store) == expected
    recorder.close()
    other = Telemetry(store, "experts/003/attempts/0008")
    other.record(3, {"loss": 2.0})
    other.close()
    assert curves(store) == expected
    assert curves(store, "experts/003/attempts/0008") == {"loss": [(3, 2.0)]}


def test_an_attempt_that_recorded_nothing_leaves_nothing(tmp_path: Path) -> None:
    Telemetry(Store(str(tmp_path / "run")), PREFIX).close()
    assert list(tmp_path.iterdir()) == []


def test_curves_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    with s3_server(tmp_path / "log"):
        store = Store(f"s3://{BUCKET}/run")
        recorder = Telemetry(store, PREFIX, upload_seconds=0.1)
        recorder.record(1, {"loss": 0.5})
        wait_for(lambda: curves(store) == {"loss": [(1, 0.5)]}, 20)
        recorder.record(2, {"loss": 0.25})
        wait_for(lambda: curves(store) == {"loss": [(1, 0.5), (2, 0.25)]}, 20)
        late = Telemetry(store, "router/attempts/0001")
        late.record(9, {"loss": 1.0})
        late.close()
        recorder.close()
        assert curves(store, "router/attempts/0001") == {"loss": [(9, 1.0)]}
    assert list(scratch.iterdir()) == []


def test_large_files_end_and_only_what_changed_is_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Store):
        uploads: defaultdict[str, list[int]]

        def write(self, key: str, data: bytes | Path) -> None:
            assert isinstance(data, Path)
            self.uploads[data.name].append(data.stat().st_size)
            super().write(key, data)

    monkeypatch.setattr(telemetry, "FILE_BYTES", 2000)
    monkeypatch.setattr(telemetry, "FLUSH_SECONDS", 0.01)
    store = Counting("memory:///")
    store.uploads = defaultdict(list)
    recorder = Telemetry(store, PREFIX, upload_seconds=0.02)
    expected = [(step, step / 4) for step in range(300)]
    for step, loss in expected:
        recorder.record(step, {"loss": loss})
        time.sleep(0.002)
    time.sleep(0.3)  # some uploads with nothing new
    recorder.close()
    assert curves(store) == {"loss": expected}
    assert len(store.uploads) > 3
    for sizes in store.uploads.values():
        assert sizes == sorted(set(sizes))  # never again as it was
        assert sizes[-1] < 20_000 * telemetry.JOINED**telemetry.MOST_JOINS


class Watched(Store):
    """Compares what readers see, after each request, with what was uploaded; may refuse writes or deletions."""

    refuse_writes, refuse_deletions = 0, False

    def __init__(self, url: str):
        super().__init__(url)
        self.seen = set[tuple[int, float]]()
        self.written = self.most_keys = 0

    def write(self, key: str, data: bytes | Path) -> None:
        assert isinstance(data, Path)
        if self.refuse_writes:
            self.refuse_writes -= 1
            raise StorageError(f"{key}: no network")
        super().write(key, data)
        self.written += data.stat().st_size
        self._look()

    def delete_one(self, key: str) -> None:
        if self.refuse_deletions:
            raise StorageError(f"{key}: denied")
        super().delete_one(key)
        self._look()

    def _look(self) -> None:
        points = curves(self)["loss"]
        assert self.seen <= set(points)
        self.seen = set(points)
        self.most_keys = max(self.most_keys, len(self.sizes(f"{PREFIX}/tensorboard")))


def upload_files(store: Store, folder: Path, count: int, file_bytes: int = 300) -> list[tuple[int, float]]:
    """The points of so many files that end, of which each is uploaded as it ends, and of one that doesn't."""
    files, points = EventFiles(folder, file_bytes), list[tuple[int, float]]()
    uploading = Telemetry.__new__(Telemetry)
    uploading._store, uploading._key, uploading._warned = store, f"{PREFIX}/tensorboard", True
    while len(points) < count * 4 + 2:
        points.append((len(points), len(points) / 4))
        files.add((points[-1][0], time.time(), {"loss": points[-1][1]}))
        if len(points) % 4 == 0:
            files.add((0, time.time(), {"x" * file_bytes: 0.0}))
        files.flush()
        uploading._upload(files)
    uploading._upload(files)
    files.end_file()
    return points


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 15, 16, 17, 64, 70])
def test_files_that_have_ended_are_joined(tmp_path: Path, count: int) -> None:
    """No point is lost to a reader at any moment, or comes twice in the end, and a bucket has few files."""
    store = Watched("memory:///")
    points = upload_files(store, tmp_path / "events", count)
    assert curves(store)["loss"] == points
    largest = telemetry.JOINED**telemetry.MOST_JOINS
    left = [count // largest, *(count % (4 * size) // size for size in (16, 4, 1))]
    assert len(store.sizes(f"{PREFIX}/tensorboard")) == sum(left) + 1
    assert store.most_keys <= count // largest + telemetry.JOINED * telemetry.MOST_JOINS + 1
    kept = sum(path.stat().st_size for path in (tmp_path / "events").iterdir())
    assert kept <= 2 * largest * 600, "a disk keeps what may still be joined"


def test_a_bucket_that_refuses_now_and_then_gets_joined_files_whole(tmp_path: Path) -> None:
    for refused in range(1, 12):
        store = Watched("memory:///")
        store.refuse_writes = refused
        assert curves(store) == {}
        assert upload_files(store, tmp_path / str(refused), 21) == curves(store)["loss"]


def test_where_nothing_may_be_deleted_points_come_twice_and_none_is_lost(tmp_path: Path) -> None:
    store = Watched("memory:///")
    store.refuse_deletions = True
    assert set(upload_files(store, tmp_path / "events", 21)) == set(curves(store)["loss"])


def test_a_torn_file_is_joined_to_none(tmp_path: Path) -> None:
    """Nobody reads on behind a record that isn't whole."""
    files = EventFiles(tmp_path, 300)
    for number in range(9):
        files.add((number, time.time(), {"x" * 300: 0.0}))
        if number == 2:
            files.give_up_file()
        else:
            files.flush()
    names = sorted(path.name.rpartition(".")[2] for path in tmp_path.iterdir())
    assert names == ["000001", "000002", "000003", "000004", "000008", "000009"]


def test_a_local_disk_has_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "FILE_BYTES", 100)
    monkeypatch.setattr(telemetry, "FLUSH_SECONDS", 0.01)
    store = Store(str(tmp_path))
    recorder = Telemetry(store, PREFIX)
    for step in range(50):
        recorder.record(step, {"loss": step / 4})
        wait_for(lambda step=step: len(curves(store).get("loss", [])) > step, 10)
    recorder.close()
    assert len(store.sizes(PREFIX)) == 1


def test_what_is_uploaded_in_a_day_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is recorded: a file is written whole again as it grows, and each byte pays for a pause."""

    class Timed(Store):
        bytes_written = 0

        def write(self, key: str, data: bytes | Path) -> None:
            assert isinstance(data, Path)
            self.bytes_written += data.stat().st_size

    now = 0.0

    class Closing:
        """An event that is waited for in no time, on whose waits the clock moves."""

        def wait(self, seconds: float) -> bool:
            nonlocal now
            now += seconds
            recorder.record(int(now), {f"curve-{number:02d}": now for number in range(20)})
            return now >= 3600

    class Thread:
        """A thread that doesn't begin by itself."""

        def __init__(self, **_: Any):
            pass

        def start(self) -> None:
            pass

    monkeypatch.setattr(telemetry.threading, "Thread", Thread)
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: now)
    store = Timed("memory:///")
    recorder = Telemetry(store, PREFIX)
    monkeypatch.setattr(recorder, "_closing", Closing())
    recorder._work()
    assert 0.5e9 * 3600 / 86400 > store.bytes_written > 3600 * 20 * 10


class Failing(Store):
    """Refuses the first `refusals` writes."""

    refusals = 3

    def write(self, key: str, data: bytes | Path) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StorageError(f"{key}: no network")
        super().write(key, data)


def test_a_bucket_that_refuses_is_asked_again_and_warned_of_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "FLUSH_SECONDS", 0.01)
    store = Failing("memory:///")
    recorder = Telemetry(store, PREFIX, upload_seconds=0.0)
    recorder.record(1, {"loss": 0.5})
    wait_for(lambda: curves(store), 10)
    recorder.record(2, {"loss": 0.25})
    recorder.close()
    assert curves(store) == {"loss": [(1, 0.5), (2, 0.25)]}
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: curves can't be uploaded, trying on: ")
    store.refusals = 10**9
    dead = Telemetry(store, "router/attempts/0001")
    dead.record(1, {"loss": 0.5})
    dead.close()
    assert curves(store, "router/attempts/0001") == {}


def test_storage_that_hangs_holds_up_neither_training_nor_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Store):
        def write(self, key: str, data: Any) -> None:
            reached.set()
            release.wait(60)

    monkeypatch.setattr(telemetry, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(telemetry, "CLOSE_SECONDS", 0.2)
    reached, release = threading.Event(), threading.Event()
    recorder = Telemetry(Hanging("memory:///"), PREFIX, upload_seconds=0.0)
    recorder.record(0, {"loss": 1.0})
    assert reached.wait(10)
    began = time.monotonic()
    for step in range(3 * telemetry.MOST_WAITING):
        recorder.record(step, {"loss": 1.0, "grad_norm": 2.0})
    assert time.monotonic() - began < 2
    recorder.close()
    assert time.monotonic() - began < 3
    release.set()


def test_a_folder_that_is_deleted_or_in_the_way_costs_curves_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telemetry, "FLUSH_SECONDS", 0.01)
    store = Store(str(tmp_path / "run"))
    recorder = Telemetry(store, PREFIX)
    recorder.record(1, {"loss": 0.5})
    wait_for(lambda: curves(store), 10)
    store.delete(f"{PREFIX}/tensorboard")
    recorder.record(2, {"loss": 0.25})
    recorder.record(3, {"loss": 0.125})
    wait_for(lambda: capsys.readouterr().err.count("trying on"), 10)
    recorder.record(4, {"loss": 0.5})
    wait_for(lambda: curves(store), 10)
    recorder.close()
    assert curves(store)["loss"][-1] == (4, 0.5)
    (tmp_path / "run/router").write_bytes(b"a file where a folder should be")
    blocked = Telemetry(store, "router/attempts/0001")
    blocked.record(1, {"loss": 0.5})
    wait_for(lambda: capsys.readouterr().err.count("warning: ") == 1, 10)
    (tmp_path / "run/router").unlink()
    blocked.close()
    assert curves(store, "router/attempts/0001") == {"loss": [(1, 0.5)]}
