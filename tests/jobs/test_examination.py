"""`ddm doctor`: storage that breaks its word and artifacts that were altered are named; a sound run is told so."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.config import load_recipe
from ddm_ray.islands.checks import CHECKS
from ddm_ray.run.graph import PARTITION, ROWS, shard
from ddm_ray.run.run import Run
from tests.data.s3 import BUCKET, s3_server
from tests.run.artifacts import flip_bit
from tests.s3_wire import Fault, Request, Wire, leading_through

pytestmark = pytest.mark.contract

NAMES = [each.__name__ for each in CHECKS]


def doctor(url: str, *options: str) -> tuple[int, dict[str, str]]:
    """Exit code, and what is told of each thing by its name."""
    ended = CliRunner().invoke(main, ["doctor", url, *options])
    words = [line.split(maxsplit=1) for line in ended.output.splitlines()[1:]]
    return ended.exit_code, {name: text.strip() for name, text in words}


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server, leading_through(server) as through:
        yield through


def test_a_sound_run_and_its_probe_leaves_nothing(partitioned: Run) -> None:
    before = sorted(Path(partitioned.url).rglob("*"))
    code, findings = doctor(partitioned.url, "--deep")
    assert code == 0
    assert findings == dict.fromkeys((*NAMES, ROWS, PARTITION), "sound")
    assert sorted(Path(partitioned.url).rglob("*")) == before


def test_an_altered_byte_is_found_by_reading_and_a_lost_file_at_once(partitioned: Run) -> None:
    flip_bit(Path(partitioned.url) / ROWS / "part-0.parquet")
    assert doctor(partitioned.url)[0] == 0
    code, findings = doctor(partitioned.url, "--deep")
    assert (code, findings["storage"]) == (1, "sound")
    assert findings[ROWS].startswith("wrong: part-0.parquet: checksum differs; --mend deletes")
    assert f"ddm prepare {partitioned.url}" in findings[ROWS]
    (Path(partitioned.url) / PARTITION / "centroids.safetensors").unlink()
    assert doctor(partitioned.url)[1][PARTITION].startswith("wrong: centroids.safetensors: gone or cut short")
    assert shard(0) not in findings


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda request: None, ""),
        (lambda request: Fault.UNCONDITIONAL, "it creates an object twice (it ignores If-None-Match)"),
        (lambda request: Fault.DENIED if request.method == "PUT" else None, "storage denies it"),
    ],
)
def test_a_bucket_is_asked_whether_it_keeps_its_word(
    wire: Wire, rule: Callable[[Request], Fault | None], words: str
) -> None:
    wire.rule = lambda _: None
    url = f"s3://{BUCKET}/examined"
    Run.create(url, load_recipe("tiny"))
    wire.rule = rule
    code, findings = doctor(url)
    assert code == bool(words)
    assert words in findings["storage"] if words else findings["storage"] == "sound"
