"""Files that a user keeps in a folder that a command writes to, and whether they are as they were."""

from pathlib import Path

FILES = ("notes.txt", ".git/config", ".git/objects/ab/cdef", "drafts/one.json", ".hidden", "samples-old.png")


def plant(folder: Path) -> None:
    """Write the user's files, an empty folder and a link to a file elsewhere."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{folder}/{name}")
    (folder / "empty").mkdir()
    (folder / "link").symlink_to(folder / "notes.txt")


def require_kept(folder: Path) -> None:
    """Assert that all of it is there, unchanged."""
    for name in FILES:
        assert (folder / name).read_text() == f"{folder}/{name}", name
    assert (folder / "empty").is_dir() and (folder / "link").is_symlink()


def content(folder: Path) -> dict[str, bytes | str]:
    """All that is below a folder: the bytes of files, where links lead, and "folder" for folders."""
    return {
        path.relative_to(folder).as_posix(): f"to {path.readlink()}"
        if path.is_symlink()
        else "folder"
        if path.is_dir()
        else path.read_bytes()
        for path in folder.rglob("*")
    }
