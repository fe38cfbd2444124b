import fcntl
from pathlib import Path

import pytest

from ddm_ray.data.scratch import PREFIX, scratch_folder
from ddm_ray.errors import StorageError
from ddm_ray.store.disk import locked


def test_a_folder_in_use_is_nobodys_leftover(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with scratch_folder(str(tmp_path)) as first:
        (first / "large").write_bytes(b"x")
        with scratch_folder(str(tmp_path)) as second:
            assert (first / "large").exists()
            assert first != second
            assert second.parent == tmp_path
        assert not second.exists()
        assert (first / "large").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_what_nobody_holds_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / "large").write_bytes(b"x")
    (tmp_path / f"{left.name}.lock").touch()
    with scratch_folder(str(tmp_path)) as own:
        assert not left.exists()
        assert sorted(tmp_path.iterdir()) == [own, tmp_path / f"{own.name}.lock"]


def test_it_is_removed_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), scratch_folder(str(tmp_path)) as folder:
        (folder / "nothing").read_bytes()
    assert not list(tmp_path.iterdir())


def test_where_none_can_be_made_it_is_told_in_one_line(tmp_path: Path) -> None:
    refusal = pytest.raises(
        StorageError, match=r"missing: No such file or directory: .*; choose another folder \(scratch\)$"
    )
    with refusal, scratch_folder(str(tmp_path / "missing")):
        pass


def test_a_lock_that_its_holder_removed_is_made_again(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with locked(lock, fcntl.LOCK_EX):
        with pytest.raises(BlockingIOError), locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            pass
        lock.unlink()
    with locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
        assert lock.exists()
