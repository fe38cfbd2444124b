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
from ddm_ray.store.store import Store
from ddm_ray.train import telemetry
from ddm_ray.train.telemetry import Telemetry
from tests.conftest import wait_for
from tests.data.s3 import BUCKET, s3_server
from tests.s3_wire import leading_through

pytestmark = pytest.mark.contract

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
    assert curves(store) == expected and len(store.sizes(PREFIX)) == 1
    recorder.close()


def test_an_attempt_that_recorded_nothing_leaves_nothing(tmp_path: Path) -> None:
    Telemetry(Store(str(tmp_path / "run")), PREFIX).close()
    assert list(tmp_path.iterdir()) == []


def test_curves_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written whole where it has grown, and not again as it was."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    with s3_server(tmp_path / "log") as server, leading_through(server) as wire:
        store = Store(f"s3://{BUCKET}/run")
        recorder = Telemetry(store, PREFIX)
        recorder.upload()  # of nothing
        recorder.record(1, {"loss": 0.5})
        recorder.upload()
        wait_for(lambda: curves(store) == {"loss": [(1, 0.5)]}, 20)
        recorder.record(2, {"loss": 0.25})
        recorder.upload()
        recorder.close()
        assert curves(store) == {"loss": [(1, 0.5), (2, 0.25)]}
        assert sum(one.kind == "PUT" for one in wire.requests) == 2
    assert list(scratch.iterdir()) == []


class Failing(Store):
    """Refuses the first `refusals` writes."""

    refusals = 3

    def write(self, key: str, data: bytes | Path) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StorageError(f"{key}: no network")
        super().write(key, data)


def test_a_bucket_that_refuses_is_asked_again_and_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    store = Failing("memory:///")
    recorder = Telemetry(store, PREFIX)
    recorder.record(1, {"loss": 0.5})
    for _ in range(4):
        recorder.upload()
    wait_for(lambda: curves(store), 10)
    recorder.record(2, {"loss": 0.25})
    recorder.close()
    assert curves(store) == {"loss": [(1, 0.5), (2, 0.25)]}
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: ") and "curves can't be written, trying on: " in warnings[0]


def test_storage_that_hangs_holds_up_neither_training_nor_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Store):
        def write(self, key: str, data: Any) -> None:
            reached.set()
            release.wait(60)

    monkeypatch.setattr(telemetry, "CLOSE_SECONDS", 0.2)
    reached, release = threading.Event(), threading.Event()
    recorder = Telemetry(Hanging("memory:///"), PREFIX)
    recorder.record(0, {"loss": 1.0})
    recorder.upload()
    assert reached.wait(10)
    began = time.monotonic()
    for step in range(30_000):
        recorder.record(step, {"loss": 1.0, "grad_norm": 2.0})
    assert time.monotonic() - began < 2
    recorder.close()
    assert time.monotonic() - began < 3
    release.set()


def test_a_disk_that_refuses_ends_the_curves_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(str(tmp_path / "run"))
    recorder = Telemetry(store, PREFIX)
    recorder.record(1, {"loss": 0.5})
    wait_for(lambda: curves(store), 10)
    full = OSError("no space left on device")
    monkeypatch.setattr(telemetry.EventsWriter, "flush", lambda writer: (_ for _ in ()).throw(full))
    for step in range(2, 5):
        recorder.record(step, {"loss": 0.25})
    recorder.close()
    assert capsys.readouterr().err.count("the curves end here: no space left on device") == 1
    assert curves(store)["loss"][0] == (1, 0.5)
