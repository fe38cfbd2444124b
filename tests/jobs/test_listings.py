"""How often storage is asked for a list of files: once a folder, however many experts and shards lie there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ddm_ray.islands.run_view import RunObserver
from ddm_ray.islands.worker_heartbeat import WorkerHeartbeat, read_workers
from ddm_ray.jobs.status import require_sound, survey
from ddm_ray.run.graph import wanted_of
from ddm_ray.run.run import Run
from tests.random_run import make_run
from tests.store_meter import StoreMeter

pytestmark = pytest.mark.contract
FEW, MANY = 4, 12


def asks_what_is_sound(run: Run) -> None:
    require_sound(run, wanted_of(run.config))


def looks_for_work(run: Run) -> None:
    WorkerHeartbeat(run.store, "here").update(waits="")
    (me,) = read_workers(run.store)
    RunObserver(run, wanted_of(run.config), lambda _: 1.0).look(me)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    def made(folder: Path, experts: int) -> Run:
        settings = (f"partition.num_clusters={experts}", f"expert.train.global_batch={experts}")
        return make_run(str(folder), settings=settings, num_rows=20 * experts)

    return [made(tmp_path_factory.mktemp("run"), experts) for experts in (FEW, MANY)]


@pytest.mark.parametrize("asks", [survey, asks_what_is_sound, looks_for_work])
def test_more_experts_need_no_more_listings(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch, asks: Callable[[Run], object]
) -> None:
    requests = []
    for run in runs:
        with monkeypatch.context() as patch:
            meter = StoreMeter(patch)
            asks(run)
            requests.append(meter.requests)
    few, many = requests
    assert 0 < many["list"] == few["list"] < MANY
    assert many["get"] > few["get"]
