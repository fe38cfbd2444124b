"""Ray's private names that are built upon: a new Ray that has moved one is told of by that name."""

import re
from pathlib import Path

import pytest

from ddm_ray.errors import RayError
from ddm_ray.ray_internals import INTERNALS, Internal
from ddm_ray.train.ray.fit import ElasticResizeCallback

PACKAGE = Path(__file__).parent.parent / "ddm_ray"


@pytest.mark.parametrize("name", INTERNALS)
def test_it_is_where_it_was(name: str) -> None:
    internal = INTERNALS[name]
    assert internal.lacks() == [], f"{internal.module}.{internal.name} stands for {internal.stands_for}"


def test_one_that_has_moved_is_named() -> None:
    with pytest.raises(RayError, match=r"has no ray\._raylet\.Gone; install the version in constraints\.txt"):
        Internal("ray._raylet", "Gone", "nothing").get()
    with pytest.raises(RayError, match=r"has no ray\.gone\.Config"):
        Internal("ray.gone", "Config", "nothing").lacks()
    callback = INTERNALS["CONTROLLER_CALLBACK"]
    assert Internal(callback.module, callback.name, "nothing", ("after_the_end",)).lacks() == ["after_the_end"]


def test_a_resize_is_heard_of_by_hooks_that_ray_calls() -> None:
    hooks = {name for name in vars(ElasticResizeCallback) if not name.startswith("_")}
    assert hooks == {*INTERNALS["CONTROLLER_CALLBACK"].uses, *INTERNALS["WORKER_GROUP_CALLBACK"].uses}


def test_no_other_file_has_any() -> None:
    private = re.compile(r"\bray\.(\w+\.)*_(?!_)\w+|__internal_head__|AutoscalingCoordinator\b")
    files = [path for path in PACKAGE.rglob("*.py") if private.search(path.read_text())]
    assert [path.name for path in files] == ["ray_internals.py"]
