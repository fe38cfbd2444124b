"""A manifest reads back as it was written or is refused by name; drift is told as a diff of fields."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.errors import CorruptArtifact, DataError
from ddm_ray.jobs.attempts import claim
from ddm_ray.run.graph import evaluation
from ddm_ray.run.info import EvaluationInfo, StateInfo, WeightsInfo
from ddm_ray.run.manifest import (
    NAME,
    SCHEMA,
    FileRecord,
    Identity,
    Manifest,
    canonical,
    drift,
    read_manifest,
    sha256,
    verify,
)
from ddm_ray.run.run import Run
from ddm_ray.store import checksummed
from ddm_ray.store.store import Store

pytestmark = pytest.mark.contract

WHERE = "/runs/a/experts/003/_MANIFEST.json"
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalar = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
value = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=8
)
fields = st.dictionaries(text, value, max_size=4)
part = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/"), min_size=1, max_size=8)
name = st.lists(part.filter(lambda text: text not in (".", "..")), min_size=1, max_size=3).map("/".join)
record = st.builds(FileRecord, bytes=st.integers(0, 2**60), sha256=st.binary(max_size=4).map(sha256))
manifests = st.builds(
    Manifest,
    artifact=name,
    identity=st.builds(Identity, fields=fields, inputs=st.dictionaries(text, text, max_size=3)),
    files=st.dictionaries(name, record, max_size=3),
    info=fields,
)
EXPERT = Manifest(
    artifact="experts/003",
    identity=Identity({"expert": {"train": {"steps": 300, "learning_rate": 1e-05}}}, {"rows": "0f1e2d3c4b5a6978"}),
    files={"attempts/0001/ema é.safetensors": FileRecord(9, sha256(b"2 weights"))},
    info={"loss": 0.25, "alive": True, "student": None},
)


def parsed(data: bytes) -> Manifest | str:
    """The manifest, or the line it is refused with."""
    try:
        return Manifest.from_json(data, WHERE)
    except CorruptArtifact as error:
        return str(error)


@settings(deadline=None)
@given(manifests)
def test_manifests_round_trip(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json(), WHERE) == manifest


# Values, also ones that no manifest may have.
hostile_names = st.sampled_from(["", "..", "../x", "/a", "a//b", "a\x1b[2J", "x" * 256, "y/" * 600 + "y"])
hostile_records = st.builds(
    FileRecord, bytes=st.integers(-2, 2**64) | st.just(True), sha256=st.text(max_size=64) | st.just("0" * 64)
)
deep: Any = {}
for _ in range(100):
    deep = {"deeper": deep}
hostile_fields = st.dictionaries(
    text, value | st.sampled_from([deep, {1, 2}, float("nan"), b"bytes", "\ud800"]), max_size=3
)
hostile_manifests = st.builds(
    Manifest,
    artifact=name | hostile_names,
    identity=st.builds(Identity, fields=hostile_fields, inputs=st.dictionaries(text, text | st.just(5), max_size=2)),
    files=st.dictionaries(name | hostile_names, record | hostile_records, max_size=3),
    info=hostile_fields,
    content=st.none() | text | st.just("x" * 129),
)


@settings(max_examples=300, deadline=None)
@given(manifest=manifests | hostile_manifests, most=st.integers(300, 1500))
def test_a_manifest_is_written_just_if_it_can_be_read(
    manifest: Manifest, most: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The writer refuses what a reader of what it would have written does, be it for its form or its size."""
    store = Store(str(tmp_path_factory.mktemp("store")))
    try:
        store.write(f"rows/{NAME}", manifest.to_json())
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(checksummed, "RECORD_BYTES", most)
            read_manifest(store, "rows")
        readable = True
    except (CorruptArtifact, ValueError, TypeError):  # one that isn't even JSON
        readable = False
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checksummed, "RECORD_BYTES", most)
        if readable:
            assert manifest.to_write(WHERE) == store.read(f"rows/{NAME}")
        else:
            with pytest.raises(DataError, match=f"^{WHERE}: can't be written, with {len(manifest.files)} files: "):
                manifest.to_write(WHERE)


def test_too_many_files_are_refused_before_a_manifest_names_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all ways in which something is finished."""
    assert 440_000 * 149 < checksummed.RECORD_BYTES < 460_000 * 149
    monkeypatch.setattr(checksummed, "RECORD_BYTES", 2000 * 149)
    files = {f"part-000000-{number:06d}-01234567.parquet": FileRecord(2**21, "0" * 64) for number in range(2100)}
    refused = r"_MANIFEST.json: can't be written, with 2,100 files: a record would have 31., *"
    with pytest.raises(DataError, match=f"/eval/demo/{refused}"):
        run.commit_records(evaluation("demo"), files, EvaluationInfo(num_samples=1, frechet={}, best_strategy="once"))
    attempt = claim(run.store, "experts/000")
    with pytest.raises(DataError, match=f"/state/step-000000007/{refused}"):
        attempt.commit_state(7, Identity({}), files, StateInfo(step=7, seconds=1.0, world_size=1))
    with pytest.raises(DataError, match=f"/weights/step-000000007/{refused}"):
        attempt.commit_weights(7, Identity({}), files, WeightsInfo(step=7, training_flops=1.0))
    with pytest.raises(DataError, match=f"/accepted/experts/000/{refused}"):
        run.accept(Manifest("experts/000", Identity({}), files, {}))
    assert not [key for key in run.store.sizes("") if key.endswith(NAME)]


def test_info_may_be_counted_by_number() -> None:
    manifest = Manifest("partition", Identity({}), {}, {"rows_K": dict.fromkeys(range(12), 10)})
    assert Manifest.from_json(manifest.to_json(), WHERE).info["rows_K"]["11"] == 10


def test_a_flipped_bit_anywhere_is_noticed() -> None:
    manifest_json = EXPERT.to_json()
    harmless = 0
    for position in range(len(manifest_json)):
        for bit in range(8):
            altered = bytearray(manifest_json)
            altered[position] ^= 1 << bit
            outcome = parsed(bytes(altered))
            assert outcome == EXPERT or str(outcome).startswith(WHERE), (position, bit)
            harmless += outcome == EXPERT
    assert harmless <= 3  # 1e-05 as 1E-05 and \u00e9 as \u00E9 say the same


def test_a_manifest_cut_off_anywhere_is_refused() -> None:
    manifest_json = EXPERT.to_json().rstrip()
    for length in range(len(manifest_json)):
        with pytest.raises(CorruptArtifact, match=WHERE):
            Manifest.from_json(manifest_json[:length], WHERE)


@settings(max_examples=200, deadline=None)
@given(manifest=manifests, cut=st.integers(0, 10_000), junk=st.binary(max_size=12), end=st.integers(0, 10_000))
def test_an_overwritten_stretch_is_noticed(manifest: Manifest, cut: int, junk: bytes, end: int) -> None:
    manifest_json = manifest.to_json()
    altered = manifest_json[: cut % len(manifest_json)] + junk + manifest_json[end % len(manifest_json) :]
    outcome = parsed(altered)
    assert outcome == manifest or str(outcome).startswith(WHERE)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("schema"),
        lambda body: body.pop("identity"),
        lambda body: body.pop("files"),
        lambda body: body.pop("info"),
        lambda body: body["identity"].pop("fields"),
        lambda body: body.update(identity=[1]),
        lambda body: body["identity"].update(owner="someone"),
        lambda body: body.update(files=["ema.safetensors"]),
        lambda body: body["files"].update({"model.json": {"bytes": 3}}),
        lambda body: body["files"].update({"model.json": None}),
        lambda body: body["files"].update({"model.json": {"bytes": -1, "sha256": "0" * 64}}),
        lambda body: body["files"].update({"model.json": {"bytes": True, "sha256": "0" * 64}}),
        lambda body: body["files"].update({"model.json": {"bytes": "3", "sha256": "0" * 64}}),
        lambda body: body["files"].update({"model.json": {"bytes": 3, "sha256": "0" * 64 + "\n"}}),
        *(
            lambda body, name=name: body["files"].update({name: {"bytes": 3, "sha256": "0" * 64}})
            for name in ("", "a/../b", "/a", "a//b", "./a", "a\u202eb", "x" * 256)
        ),
        lambda body: body.update(artifact=7),
        lambda body: body.update(artifact="../run"),
        lambda body: body.update(info=[]),
        lambda body: body.update(content=["x"]),
        lambda body: body["identity"].update(fields=[]),
        lambda body: body["identity"].update(inputs={"rows": 5}),
    ],
)
def test_a_rightly_signed_manifest_of_another_form_is_refused(
    change: Callable[[dict[str, Any]], Any],
) -> None:
    body = json.loads(EXPERT.to_json())
    del body["checksum"]
    change(body)
    signed = json.dumps({**body, "checksum": sha256(canonical(body))}).encode()
    with pytest.raises(CorruptArtifact, match=f"{WHERE}: not whole, [^\n]*; delete it"):
        Manifest.from_json(signed, WHERE)


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"7", b'"checksum"', b"{}", b"\xff\xfe", b"\0" * 40])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptArtifact, match="not whole"):
        Manifest.from_json(data, WHERE)


def test_another_schema_is_named() -> None:
    body = json.loads(EXPERT.to_json())
    del body["checksum"]
    body["schema"] = 1
    signed = json.dumps({**body, "checksum": sha256(canonical(body))}).encode()
    with pytest.raises(CorruptArtifact, match=f"{WHERE}: schema 1, this version reads {SCHEMA}"):
        Manifest.from_json(signed, WHERE)


def test_verify_names_the_file() -> None:
    kept = FileRecord(4, sha256(b"rows"))
    assert verify(b"rows", kept, "shard/part-0.parquet") == b"rows"
    with pytest.raises(CorruptArtifact, match=r"^shard/part-0.parquet: 3 bytes, its manifest says 4$"):
        verify(b"row", kept, "shard/part-0.parquet")
    with pytest.raises(CorruptArtifact, match=r"^shard/part-0.parquet: checksum differs from its manifest's"):
        verify(b"rowz", kept, "shard/part-0.parquet")
    with pytest.raises(CorruptArtifact, match="3 bytes, its manifest says 4"):
        verify(b"row", kept, "weights/ema.safetensors")


def test_the_digest_follows_the_files_and_what_they_were_made_from() -> None:
    def digest(files: dict[str, FileRecord], inputs: dict[str, str], **more: Any) -> str:
        return Manifest("partition", Identity(more.get("fields", {}), inputs), files, more.get("info", {})).digest

    one, other = FileRecord(1, sha256(b"a")), FileRecord(1, sha256(b"b"))
    same = digest({"x": one, "y": other}, {"rows": "1"})
    assert same == digest({"y": other, "x": one}, {"rows": "1"}, fields={"dim": 8}, info={"seconds": 3.5})
    different = [
        same,
        digest({"x": other, "y": other}, {"rows": "1"}),
        digest({"x": one}, {"rows": "1"}),
        digest({"x": one, "z": other}, {"rows": "1"}),
        digest({"x": one, "y": other}, {"rows": "2"}),
        digest({"x": one, "y": other}, {}),
    ]
    assert len(set(different)) == len(different)


@settings(deadline=None)
@given(fields, fields)
def test_fingerprints_are_equal_just_when_the_fields_are(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (Identity(one).fingerprint == Identity(other).fingerprint) == (canonical(one) == canonical(other))
    assert not drift(Identity(one), Identity(json.loads(json.dumps(one))))


def test_drift_is_a_diff_of_fields() -> None:
    actual = Identity(
        {"expert": {"train": {"steps": 200, "seed": 0}, "model": {"width": 64}}, "data": {"channels": 1}},
        {"rows": "aaaa", "partition": "bbbb", "elsewhere": "cccc"},
    )
    expected = Identity(
        {"expert": {"train": {"steps": 400, "seed": 0}, "model": {"width": 64, "skip": 0.5}}, "data": None},
        {"rows": "aaaa", "partition": "dddd", "absent there": "eeee"},
    )
    assert drift(expected, actual) == [
        'data: {"channels": 1} -> null',
        "expert.model.skip: null -> 0.5",
        "expert.train.steps: 200 -> 400",
        "input partition: bbbb -> dddd",
    ]
