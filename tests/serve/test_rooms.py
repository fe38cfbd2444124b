"""The rooms of ddm_ray/serve: http and cluster import engine, cluster imports http, and nothing the other way."""

import pytest

from tests.test_layers import imports, modules

ROOMS = {"engine": set[str](), "http": {"engine"}, "cluster": {"engine", "http"}}
"""Rooms, and the others that each may import."""


def wrong_imports(room: str, source: str) -> list[str]:
    """Imports of a module of this room that lead to a room above it."""
    names = [name.removeprefix("ddm_ray.serve.") for name in imports(source, f"ddm_ray.serve.{room}")]
    return [name for name in names if name.partition(".")[0] in ROOMS.keys() - {room} - ROOMS[room]]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_those_below_it(room: str) -> None:
    files = {name: file for name, file in modules().items() if name.startswith(f"serve.{room}.")}
    assert files
    assert {name: wrong for name, file in files.items() if (wrong := wrong_imports(room, file.read_text()))} == {}


def test_every_module_is_in_a_room() -> None:
    names = [name.split(".") for name in modules() if name.startswith("serve.")]
    assert [name for name in names if name[1] not in {*ROOMS, "__init__"}] == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("engine", "from ddm_ray.serve.http.generation import Generation"),
        ("engine", "from ..cluster import codec"),
        ("http", "from ddm_ray.serve.cluster.args import ServeArgs"),
    ],
)
def test_an_import_of_a_room_above_would_be_found(room: str, source: str) -> None:
    assert len(wrong_imports(room, source)) == 1
