"""What comes in place of an archive, by damage or by intent, is refused by name, and nothing is written."""

import json
from itertools import cycle, islice
from pathlib import Path

import pytest

from ddm_ray.errors import ArchiveError, DDMError, DriftError
from ddm_ray.storage.courier import Holds, pack, unpack
from ddm_ray.storage.graph import PARTITION, ROUTER, Artifact, expert
from ddm_ray.storage.manifest import NAME
from ddm_ray.storage.run import Run
from ddm_ray.storage.sealed import seal
from tests.data.damage import is_line
from tests.infos import commit_written, info_of
from tests.storage.archives import RUN, another_result, listing, mutants, put_together, reseal, smuggled, take_apart
from tests.storage.test_courier import train

Archives = dict[tuple[Artifact, Holds], bytes]


@pytest.fixture
def packed(partitioned: Run, tmp_path: Path) -> Archives:
    """Archives of both kinds, and all that an empty store needs for a router."""
    train(partitioned, expert(1))
    partitioned.store.delete_one(f"{PARTITION}/{NAME}")
    shards = [f"shards/cluster={cluster:03d}/{NAME}" for cluster in (0, 1)]
    commit_written(partitioned, PARTITION, shards, info_of(PARTITION))
    kinds: list[tuple[Artifact, Holds]] = [(expert(1), "inputs"), (expert(1), "result"), (ROUTER, "inputs")]
    path, archives = tmp_path / "sound.tar", {}
    for artifact, holds in kinds:
        pack(partitioned, artifact, path, holds)
        archives[artifact, holds] = path.read_bytes()
    return archives


def refused(path: Path, url: Path) -> str:
    """Why an archive is refused, in a line that names it; nothing is written."""
    before = listing(url)
    with pytest.raises(DDMError) as failure:
        unpack(path, str(url))
    assert is_line(str(failure.value)), repr(str(failure.value))
    assert str(failure.value).startswith(f"{path}: ")
    assert listing(url) == before
    return str(failure.value)


@pytest.mark.parametrize("kind", [(expert(1), "inputs"), (expert(1), "result"), (ROUTER, "inputs")])
def test_mutants_are_refused_and_leave_nothing(packed: Archives, tmp_path: Path, kind: tuple[Artifact, Holds]) -> None:
    """In a folder without a run, and in one that has half of what came."""
    sound, path = packed[kind], tmp_path / "x.tar"
    begun = tmp_path / "begun"
    path.write_bytes(sound)
    unpack(path, str(begun))
    for key in listing(begun):
        if key.endswith(NAME):
            (begun / key).unlink()
    urls, wrong, number = cycle((tmp_path / "none", begun)), [], 0
    # The router's archive has three artifacts, so three times as many.
    for mutant in islice(mutants(sound, seed=len(sound)), None, None, 3 if kind[0] == ROUTER else 1):
        assert mutant.data != sound, str(mutant)
        path.write_bytes(mutant.data)
        number += 1
        url = next(urls)
        try:
            refused(path, url)
        except BaseException as error:
            wrong.append(f"{mutant} into {url.name}: {type(error).__name__} {str(error)[:200]}")
    assert not wrong, "\n".join([f"{len(wrong)} in all", *wrong[:40]])
    assert number >= 200
    path.write_bytes(sound)
    unpack(path, str(begun))
    unpack(path, str(tmp_path / "none"))
    assert listing(begun) == listing(tmp_path / "none"), "the sound one is taken by both"


@pytest.mark.parametrize("holds", ["inputs", "result"])
def test_files_under_hostile_names_are_not_smuggled(packed: Archives, tmp_path: Path, holds: Holds) -> None:
    path, sent = tmp_path / "x.tar", list(smuggled(take_apart(packed[expert(1), holds])))
    assert len(sent) >= 20
    for mutant in sent:
        path.write_bytes(mutant.data)
        why = refused(path, tmp_path / "none")
        assert f"/{NAME}: " in why or "which is a file" in why, f"{mutant}: {why}"
        assert {one.name for one in tmp_path.iterdir()} == {"run", "sound.tar", "x.tar"}


@pytest.mark.parametrize("folder", ["attempts/0001/weights/step-000000003", "unpacked/0123456789abcdef"])
def test_a_result_may_not_lie_where_another_may_write(packed: Archives, tmp_path: Path, folder: str) -> None:
    """Its folder is that of its checksums, else it could be an attempt's."""
    members, path = take_apart(packed[expert(1), "result"]), tmp_path / "x.tar"
    key = f"{expert(1)}/{NAME}"
    place = json.loads(members[key])["info"]["weights"]
    text = json.dumps({name: value for name, value in json.loads(members[key]).items() if name != "checksum"})
    moved = {name.replace(place, folder): data for name, data in members.items()}
    path.write_bytes(put_together({**moved, key: seal(json.loads(text.replace(place, folder)), indent=1)}))
    assert f"{key}: names files elsewhere than in unpacked" in refused(path, tmp_path / "none")


def test_a_file_that_two_manifests_name_is_refused(packed: Archives, tmp_path: Path) -> None:
    """Else a partition could say what is in a shard."""
    members, path = take_apart(packed[ROUTER, "inputs"]), tmp_path / "x.tar"
    record = {"bytes": 4, "sha256": "0" * 64}
    key = f"{PARTITION}/{NAME}"
    name = "shards/cluster=000/part-0.parquet"
    manifest = reseal(members[key], lambda body: body["files"].update({name: record}))
    path.write_bytes(put_together({**members, key: manifest}))
    assert f"names {PARTITION}/{name}, which another manifest names, too" in refused(path, tmp_path / "none")


def test_a_second_result_is_refused(packed: Archives, partitioned: Run, tmp_path: Path) -> None:
    """Another training's, as sound as the first; the store that has none takes it."""
    members, path, home = take_apart(packed[expert(1), "result"]), tmp_path / "x.tar", Path(partitioned.url)
    for number in range(10):
        other = another_result(members, lambda data, number=number: data + bytes([number]))
        path.write_bytes(other)
        assert f"{expert(1)}/{NAME}: another training has finished it already" in refused(path, home)
    empty = tmp_path / "empty"
    assert unpack(path, str(empty)).written == 2
    path.write_bytes(packed[expert(1), "result"])
    refused(path, empty)


def test_another_run_is_named_by_its_first_difference(packed: Archives, partitioned: Run, tmp_path: Path) -> None:
    members, path = take_apart(packed[expert(1), "inputs"]), tmp_path / "x.tar"
    other = reseal(members[RUN], lambda body: body["config"]["data"].update(heldout=0.3))
    path.write_bytes(put_together({**members, RUN: other}))
    why = refused(path, Path(partitioned.url))
    assert why == f"{path}: run.json: {partitioned.url} is another run: data.heldout: 0.1 -> 0.3"
    wrong = reseal(members[RUN], lambda body: body["config"].update(color="red"))
    path.write_bytes(put_together({**members, RUN: wrong}))
    assert "run.json: color: " in refused(path, tmp_path / "none")


def test_a_shard_of_another_partition_is_refused(packed: Archives, partitioned: Run, tmp_path: Path) -> None:
    path, home = tmp_path / "x.tar", Path(partitioned.url)
    path.write_bytes(packed[expert(1), "inputs"])
    shard_manifest = home / f"{PARTITION}/shards/cluster=001/{NAME}"
    shard_manifest.write_bytes(
        reseal(shard_manifest.read_bytes(), lambda body: body["info"].update(rows=4, rows_heldout=1))
    )
    with pytest.raises(ArchiveError, match=r"cluster=001/_MANIFEST.json: is there already, and another"):
        unpack(path, str(home))
    shard_manifest.unlink()
    listed = home / f"{PARTITION}/{NAME}"
    key = f"shards/cluster=001/{NAME}"
    record = {"bytes": 1, "sha256": "0" * 64}
    listed.write_bytes(reseal(listed.read_bytes(), lambda body: body["files"].update({key: record})))
    with pytest.raises(DriftError, match=f"isn't the one that {partitioned.url}/partition lists"):
        unpack(path, str(home))
