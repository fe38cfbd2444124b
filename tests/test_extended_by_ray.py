"""By the commands, on a real Ray: an extension ends with the bits of a run that was begun with more steps."""

from hashlib import sha256
from pathlib import Path

import pytest

from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from tests.conftest import ddm
from tests.random_run import make_data
from tests.train.conftest import SHORT


def test_an_extension_on_ray(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if not request.config.getoption("every_call"):
        pytest.skip("asked for by --every-call: three Rays, and a minute")
    short = make_data(str(tmp_path / "run"), settings=SHORT)
    longer = make_data(str(tmp_path / "longer"), settings=(*SHORT, "expert.train.steps=20"))

    def trained(url: str) -> Run:
        done = ddm("train", url, "expert", "1")
        assert done.returncode == 0, done.stderr[-3000:]
        return Run.open(url)

    def files() -> dict[Path, str]:
        paths = [path for path in Path(short.url).rglob("*") if path.is_file() and "extended" not in path.parts]
        return {path: sha256(path.read_bytes()).hexdigest() for path in paths}

    trained(short.url)
    before, begun = files(), ddm("extend", short.url, "expert.train.steps=20")
    assert begun.returncode == 0 and f"next: ddm train {short.url}/extended/0001 expert 1" in begun.stdout
    artifact = Artifact("experts/001")
    extended = trained(f"{short.url}/extended/0001").require(artifact)
    assert extended.info["step"] == 20 and extended.files == trained(longer.url).require(artifact).files
    assert files() == before
    assert "extended by" in ddm("work", short.url, "--island", "here", "--only", "expert:1").stdout
