"""Sizes and speeds that are known before a training are those that it then has."""

from pathlib import Path

import pytest

from ddm_ray.islands.calibration import calibrate
from ddm_ray.islands.needs import needs_of
from ddm_ray.islands.traffic import foresee
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.graph import ROUTER, STUDENT, expert
from ddm_ray.storage.info import TrainedInfo
from ddm_ray.storage.ledger import read_ledger
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import Store
from ddm_ray.train import worker
from tests.data.s3 import s3_server, upload
from tests.random_run import make_data
from tests.s3_wire import leading_through
from tests.train.conftest import SHORT

PLACEMENT = TrainPlacement(checkpoint_steps=5, milestone_steps=10)


@pytest.mark.usefixtures("world_of_one")
def test_a_training_writes_what_was_foreseen_and_accounts_for_it(tmp_path: Path) -> None:
    """File by file, and by the bytes on the wire: a plan's within 5 %, a ledger's within 1 %."""
    made = make_data(str(tmp_path / "run"), settings=SHORT)
    (need,) = needs_of(made, [expert(0)])
    with s3_server(tmp_path / "log") as server, leading_through(server) as wire:
        url = upload(Path(made.url), "sizes")  # meters are by URL, and of the whole process
        since = len(wire.requests)
        worker.train(url, expert(0), PLACEMENT)
        asked, store = wire.requests[since:], Store(url)
        info = TrainedInfo.of(Run.open(url).require(expert(0)))
        (island,), unread = read_ledger(store)
        state = store.sizes(f"{expert(0)}/attempts/0001/state/step-{info.step:09d}")
        weights = store.sizes(f"{expert(0)}/{info.weights}")
    sent, answered = sum(one.sent for one in asked), sum(one.answered for one in asked)

    sizes = need.sizes(PLACEMENT)
    rounded = {name: size for name, size in state.items() if not name.endswith(".json")}
    assert rounded == {name: size for name, size in sizes.state(12).items() if name in rounded}
    assert sum(state.values()) == pytest.approx(sum(sizes.state(12).values()), abs=20), (
        "digits of fingerprints, seconds"
    )
    del weights["grid.png"]
    assert weights == sizes.published(12)
    traffic, states = foresee(made.config, expert(0), sizes, 12, info.seconds, PLACEMENT, need.rows)
    assert states == 3
    assert traffic.written == pytest.approx(sent, rel=0.05)
    assert traffic.written + traffic.read == pytest.approx(sent + answered, rel=0.05)

    assert (island.island, island.processes, island.open, unread) == ("unnamed", 1, 0, 0)
    assert island.counted.written == pytest.approx(sent, rel=0.01)
    read = [(one.method, one.path, one.answered) for one in asked if one.answered]
    assert island.counted.written + island.counted.read == pytest.approx(sent + answered, rel=0.01), read
    assert sum(island.counted.requests.values()) == pytest.approx(len(asked), abs=2), "its own last one"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_more_ranks_write_little_more(tmp_path: Path, stage: int) -> None:
    made = make_data(str(tmp_path / "run"), num_rows=60)
    (need,) = needs_of(made, [expert(0)])
    three = need.sizes(TrainPlacement(workers=3, zero_stage=stage)).state(300)
    assert sum(name.endswith("/INDEX.json") for name in three) == 3
    values = sum(size for name, size in three.items() if "/value-" in name)
    assert 4 * need.parameters < values < 4.3 * need.parameters
    assert sum(three.values()) == pytest.approx(need.state_bytes, rel=0.05)


def files(run: Run) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path(run.url).rglob("*")}


@pytest.mark.usefixtures("world_of_one")
def test_a_calibration_takes_real_steps_and_writes_nothing(tmp_path: Path) -> None:
    made = make_data(str(tmp_path / "run"), settings=SHORT)
    before = files(made)
    jobs = {need.kind: need.job for need in needs_of(made, [expert(0), ROUTER, STUDENT])}
    for placement in (TrainPlacement(), TrainPlacement(workers=2)):
        speeds = calibrate(jobs, made.config.data, 2, placement, seconds=0.01)
        assert speeds.keys() == {"expert", "router", "student"}
        assert all(1e4 < speed < 1e12 for speed in speeds.values())
    assert files(made) == before
