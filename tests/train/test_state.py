"""States on storage: any layout of fragments is read back by any other, and what is wrong is named."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Lock, Thread
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from ddm_ray.errors import CorruptArtifact, StorageError
from ddm_ray.models.dit import DiT
from ddm_ray.run.manifest import Identity, Manifest
from ddm_ray.store.store import Store
from ddm_ray.train import state
from ddm_ray.train.adamw import AdamW
from ddm_ray.train.snapshot import Snapshot
from ddm_ray.train.state import Piece, SavedParts, fingerprint, fingerprints, written_records
from ddm_ray.train.zero_shards import EMA, VALUE, Fragment, Shards
from tests.pretend_streams import pretended

pytestmark = pytest.mark.contract

SHAPES = {"trunk.in.weight": (7, 5), "trunk.in.bias": (7,), "head": (1,)}
RECORDS = (VALUE, *AdamW.moments, EMA)
SIZES = {"trunk.in.weight": 35, "trunk.in.bias": 7, "head": 1}
PREFIX = "experts/000/attempts/0001/state/step-000000009"


def values(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Whole flattened parameters by record and name."""
    numbers = torch.Generator().manual_seed(seed)
    return {record: {name: torch.randn(size, generator=numbers) for name, size in SIZES.items()} for record in RECORDS}


def fragments(cuts: dict[str, list[int]], rank: int, uncut: dict[str, dict[str, torch.Tensor]]) -> list[Fragment]:
    """What a rank holds where parameters are cut at these places."""
    held = []
    for name, tensor in uncut["ema"].items():
        ends = [0, *sorted(cuts[name]), len(tensor)]
        start, stop = ends[rank], ends[rank + 1]
        if stop > start:
            records = {record: uncut[record][name][start:stop].clone() for record in RECORDS}
            held.append(Fragment(name, start, stop - start, records))
    return held


def layouts(world: int) -> st.SearchStrategy[dict[str, list[int]]]:
    """Ways to share every parameter among `world` ranks, empty shares among them."""
    cuts = {name: st.lists(st.integers(0, n), min_size=world - 1, max_size=world - 1) for name, n in SIZES.items()}
    return st.fixed_dictionaries(cuts)


def save(store: Store, ranks: list[list[Fragment]]) -> Manifest:
    """Write what the ranks hold as one state."""
    for rank, held in enumerate(ranks):
        snapshot = Snapshot(held)
        snapshot.take()
        snapshot.write(store, f"{PREFIX}/{state.RANK.format(rank)}")
    records = written_records(store, PREFIX, len(ranks))
    with pytest.raises(StorageError, match=r"INDEX\.json is gone"):
        written_records(store, PREFIX, len(ranks) + 1)
    return Manifest(PREFIX, Identity({}), records, {})


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_layout_is_read_by_any_other(data: st.DataObject) -> None:
    store, uncut = Store("memory:///run"), values()
    world, other_world = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    part_bytes = data.draw(st.sampled_from([16, 40, 64 * 2**20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "PART_BYTES", part_bytes)
        layout = data.draw(layouts(world))
        manifest = save(store, [fragments(layout, rank, uncut) for rank in range(world)])
    saved = SavedParts(store, PREFIX, manifest)
    other = data.draw(layouts(other_world))
    total = dict.fromkeys(RECORDS, 0)
    for rank in range(other_world):
        held = fragments(other, rank, values(seed=1))
        saved.fill(held)
        for mine, right in zip(held, fragments(other, rank, uncut), strict=True):
            assert all(torch.equal(mine.records[record], right.records[record]) for record in RECORDS)
        total = {record: (value + fingerprints(held)[record]) % 2**64 for record, value in total.items()}
    assert total == saved.fingerprints
    for record in RECORDS:
        tensors = load(b"".join(saved.consolidated(record, SHAPES)))
        assert tensors.keys() == SHAPES.keys()
        for name, shape in SHAPES.items():
            assert torch.equal(tensors[name], uncut[record][name].reshape(shape))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_published(number: float) -> None:
    store, uncut = Store("memory:///run"), values()
    uncut["ema"]["trunk.in.bias"][3] = number
    saved = SavedParts(store, PREFIX, save(store, [fragments({name: [] for name in SIZES}, 0, uncut)]))
    with pytest.raises(CorruptArtifact, match=r"ema of trunk\.in\.bias has numbers that aren't finite"):
        b"".join(saved.consolidated("ema", SHAPES))


def test_a_rank_reads_only_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a state that two ranks wrote in small parts, one of four reads about a quarter."""
    uncut = {record: {"w": torch.randn(4096)} for record in RECORDS}
    monkeypatch.setattr(state, "PART_BYTES", 2048)
    store = Store(str(tmp_path))
    manifest = save(store, [fragments({"w": [2048]}, rank, uncut) for rank in range(2)])
    saved = SavedParts(store, PREFIX, manifest)
    seen: list[str] = []
    read = Store.read
    monkeypatch.setattr(
        Store, "read", lambda self, key, *how, **cut: (seen.append(key), read(self, key, *how, **cut))[1]
    )
    saved.fill(fragments({"w": [1000, 2024, 3048]}, 1, uncut))
    sizes = [manifest.files[key.removeprefix(f"{PREFIX}/")].bytes for key in seen]
    assert len(set(seen)) == len(seen)
    assert 0.25 <= sum(sizes) / sum(record.bytes for record in manifest.files.values()) < 0.4


@pytest.mark.parametrize("damage", ["bit", "gone", "index", "another model", "a hole"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    store, uncut = Store(str(tmp_path)), values()
    held = fragments({name: [] for name in SIZES}, 0, uncut)
    if damage == "a hole":
        manifest = save(store, [[one.part(0, max(1, one.numel - 1)) for one in held]])
    else:
        manifest = save(store, [held])
    named = "exp_avg_sq-0000.safetensors" if damage != "index" else "INDEX.json"
    path = tmp_path / PREFIX / "rank-000" / named
    if damage in ("bit", "index"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "gone":
        path.unlink()
    elif damage == "another model":
        held.append(Fragment("trunk.out", 0, 3, {record: torch.zeros(3) for record in RECORDS}))
    message = {
        "bit": f"rank-000/{named}: checksum differs",
        "index": f"rank-000/{named}: checksum differs",
        "gone": f"rank-000/{named}: gone",
        "another model": "not a state of this model, see value of trunk.out",
        "a hole": "not a state of this model, see value of trunk.in.weight",
    }[damage]
    with pytest.raises(CorruptArtifact, match=f"^{store.url}/{PREFIX}.*{message}"):
        SavedParts(store, PREFIX, manifest).fill(held)
    if damage == "a hole":
        with pytest.raises(CorruptArtifact, match=r"see ema of trunk\.in\.weight"):
            list(SavedParts(store, PREFIX, manifest).consolidated("ema", SHAPES))


@given(st.integers(0, 2**32), st.data())
def test_fingerprints_add_up_and_notice_any_change(seed: int, data: st.DataObject) -> None:
    tensor = torch.randn(23, generator=torch.Generator().manual_seed(seed))
    cut = data.draw(st.integers(0, 23))
    parts = [("w", 0, tensor[:cut]), ("w", cut, tensor[cut:])]
    total = fingerprint(Piece("w", 0, 23), tensor)
    bits = tensor.view(torch.int32).tolist()
    assert (
        int(total) % 2**64 == sum((2 * ((crc32(b"w") << 28) + at) + 1) * each for at, each in enumerate(bits)) % 2**64
    )
    assert sum(fingerprint(Piece(name, start, len(part)), part) for name, start, part in parts) == total
    i, j = data.draw(st.lists(st.integers(0, 22), min_size=2, max_size=2, unique=True))
    swapped, flipped = tensor.clone(), tensor.clone()
    swapped[i], swapped[j] = tensor[j], tensor[i]
    flipped.view(torch.int32)[i] ^= 1 << data.draw(st.integers(0, 31))
    assert fingerprint(Piece("w", 0, 23), swapped) != total or tensor[i] == tensor[j]
    assert fingerprint(Piece("w", 0, 23), flipped) != total
    assert fingerprint(Piece("v", 0, 23), tensor) != total


def test_the_snapshot_is_a_copy(tmp_path: Path) -> None:
    uncut, store = values(), Store(str(tmp_path))
    held = fragments({name: [] for name in SIZES}, 0, uncut)
    snapshot = Snapshot(held)
    snapshot.take()
    before = held[0].records["ema"].clone()
    held[0].records["ema"].zero_()
    snapshot.write(store, f"{PREFIX}/rank-000")
    index = json.loads(store.read(f"{PREFIX}/rank-000/{state.INDEX}"))
    assert {part["record"] for part in index["parts"].values()} == set(RECORDS)
    assert torch.equal(load(store.read(f"{PREFIX}/rank-000/ema-0000.safetensors"))["trunk.in.weight@0"], before)


def on_gpu(held: list[Fragment]) -> list[Fragment]:
    return [replace(one, records={name: values.to("meta") for name, values in one.records.items()}) for one in held]


@pytest.mark.parametrize("settled", [True, False])
def test_on_a_gpu_training_goes_on_while_a_stream_copies(tmp_path: Path, settled: bool) -> None:
    """The host waits for nothing, the device before it changes what is copied; the state is a CPU's, to the bit."""
    uncut, plain, ours = values(), Store(str(tmp_path / "plain")), Store(str(tmp_path / "ours"))
    held = fragments({name: [] for name in SIZES}, 0, uncut)
    save(plain, [held])
    with pretended() as gpu:
        held = on_gpu(held)
        snapshot = Snapshot(held)
        gpu.waits.clear()
        snapshot.take()
        assert not gpu.waits, "training would stand still"
        # By a thread of its own in training, where this mode of torch's isn't.
        snapshot.write(ours, f"{PREFIX}/{state.RANK.format(0)}")
        assert [place.partition(":")[0] for place in gpu.waits] == ["event, train/snapshot.py"], "the writer's"
        wrapped: Any = SimpleNamespace(zero_optimization_stage=lambda: 1)
        shards = Shards(wrapped, torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
        shards.being_copied = snapshot
        if settled:
            shards.settle()
        held[0].records["ema"].mul_(2.0)
        assert bool(gpu.races) is not settled
        assert gpu.waits.total() == 1
    assert {name: ours.read(f"{PREFIX}/{name}") for name in ours.sizes(PREFIX)} == {
        name: plain.read(f"{PREFIX}/{name}") for name in plain.sizes(PREFIX)
    }


def test_a_gpu_is_waited_for_once_a_piece_to_be_filled_and_once_to_be_checked(tmp_path: Path) -> None:
    """What is read lies where it is to be, to the bit, and is one copy for each piece of a record."""
    uncut, store = values(), Store(str(tmp_path))
    uncut_ranks: dict[str, list[int]] = {name: [] for name in SIZES}
    manifest = save(store, [fragments(uncut_ranks, 0, uncut)])
    with pretended() as gpu:
        held = on_gpu(fragments(uncut_ranks, 0, values(1)))
        gpu.waits.clear()
        saved = SavedParts(store, PREFIX, manifest)
        saved.fill(held)
        assert gpu.waits.total() == len(RECORDS) * len(SIZES)
        gpu.waits.clear()
        assert fingerprints(held) == saved.fingerprints
        assert gpu.waits.total() == 1, gpu.waits
        filled = [{record: one.records[record].to("cpu") for record in RECORDS} for one in held]
    for one, records in zip(held, filled, strict=True):
        assert all(torch.equal(records[record], uncut[record][one.name]) for record in RECORDS)


@pytest.mark.parametrize("gpu", [True, False])
def test_beside_a_gpu_parts_are_written_at_once(tmp_path: Path, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a CPU one by one: its cores are training's."""
    store, write, writing, most, one_by_one = Store(str(tmp_path)), Store.write, [0], [0], Lock()
    together = Barrier(len(RECORDS) if gpu else 1)

    def counted(self: Store, key: str, data: bytes) -> None:
        with one_by_one:
            writing[0] += 1
            most[0] = max(most[0], writing[0])
        if not key.endswith(state.INDEX):
            together.wait(60)
        write(self, key, data)
        with one_by_one:
            writing[0] -= 1

    monkeypatch.setattr(Store, "write", counted)
    held = fragments({name: [] for name in SIZES}, 0, values())
    with pretended() if gpu else nullcontext():
        snapshot = Snapshot(on_gpu(held) if gpu else held)
        snapshot.take()
        snapshot.write(store, PREFIX)
    assert most == [len(RECORDS) if gpu else 1]


def test_what_was_taken_is_written_once(tmp_path: Path) -> None:
    snapshot = Snapshot(fragments({name: [] for name in SIZES}, 0, values()))
    for _ in range(2):
        with pytest.raises(AssertionError, match="another step's name"):
            snapshot.write(Store(str(tmp_path)), PREFIX)
        snapshot.take()
        snapshot.write(Store(str(tmp_path)), PREFIX)


def test_whoever_changes_what_is_copied_waits_until_the_device_was_told(tmp_path: Path) -> None:
    """Else it would be told to wait for a copy that isn't begun."""
    with pretended() as gpu:
        snapshot = Snapshot(on_gpu(fragments({name: [] for name in SIZES}, 0, values())))
        snapshot.take()
        changer = Thread(target=snapshot.settle)
        changer.start()
        changer.join(0.2)
        assert changer.is_alive()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "_foreach_copy_", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                snapshot.write(Store(str(tmp_path)), PREFIX)
        changer.join(30)
        assert not changer.is_alive(), "also where it can't be copied"
        assert not gpu.races


@pytest.mark.parametrize("size", [{"width": 1152, "depth": 28, "heads": 16}, {"width": 2048, "depth": 40, "heads": 32}])
def test_pinned_memory_is_hardly_more_than_the_state(size: dict[str, int]) -> None:
    """It is given in powers of two: for DiT-XL/2, and for a network of 3B parameters."""
    with torch.device("meta"):
        model = DiT(image_size=32, channels=4, num_classes=1000, patch_size=2, **size)
    held = [
        Fragment(name, 0, parameter.numel(), {record: parameter.detach().view(-1) for record in RECORDS})
        for name, parameter in model.named_parameters()
    ]
    groups = [[Piece(one.name, one.start, one.numel) for one in group] for group in state.cut(held)]
    files = [len(state.part_header(group)) + 4 * sum(piece.numel for piece in group) for group in groups]
    assert max(files) <= state.PART_BYTES
    assert sum(1 << (size - 1).bit_length() for size in files) <= 1.05 * sum(files)
