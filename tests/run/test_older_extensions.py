"""Extensions, as versions before `ddm init --from` made them, open whole, and runs can be derived from them.

The archive has a run of 200 digits, an extension of more steps (0001) and one of 60 more images (0002).
"""

import tarfile
from pathlib import Path

import pytest

from ddm_ray.errors import CorruptArtifact
from ddm_ray.jobs.examination import examine
from ddm_ray.jobs.status import survey
from ddm_ray.run.base import derived_from
from ddm_ray.run.graph import PARTITION, ROUTER, ROWS, expert, shard
from ddm_ray.run.info import PartitionInfo
from ddm_ray.run.link import OLDER
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import load_models
from ddm_ray.store.checksummed import seal
from ddm_ray.store.store import Store
from tests.derived import derive

pytestmark = pytest.mark.contract

ARCHIVE = Path(__file__).parent / "old_runs/extended/0.1.0.tar.xz"


@pytest.fixture
def base(tmp_path: Path) -> Run:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return Run.open(str(tmp_path / "run"))


def test_more_steps_go_on_from_the_base(base: Run) -> None:
    assert derived_from(base.store) == [f"{base.url}/extended/{number:04d}" for number in (1, 2)]
    run = Run.open(f"{base.url}/extended/0001")
    assert run.base and run.base.url == base.url and run.config.expert.train.steps == 400
    assert run.require(ROUTER).digest == base.require(ROUTER).digest and run.inherits(shard(0))
    assert [each.url for each in run.predecessors(expert(0))] == [base.url]
    states = {each.artifact: each.state for each in survey(run)}
    assert states[ROWS] == states[PARTITION] == "finished" and states[expert(1)] == "waiting"
    later = derive(run, "expert.train.steps=500")
    assert [each.url for each in later.predecessors(expert(0))] == [run.url, base.url]


def test_more_images_are_beside_those_of_the_base(base: Run) -> None:
    run = Run.open(f"{base.url}/extended/0002")
    assert not [finding for finding in examine(run, deep=True) if finding.error]
    assert sum(PartitionInfo.of(run.require(PARTITION)).rows_K) > sum(PartitionInfo.of(base.require(PARTITION)).rows_K)
    assert load_models(run).info.num_experts == 2
    less = derive(run, drop=(0,))
    assert less.require(expert(1)).digest == run.require(expert(1)).digest and load_models(less).info.num_experts == 1


def test_an_altered_record_is_refused(base: Run) -> None:
    url = f"{base.url}/extended/0001"
    Store(url).write(OLDER, seal({"schema": 1, "steps": {}, "inherits": 5}))
    with pytest.raises(CorruptArtifact, match="not the record of an extension"):
        Run.open(url)
