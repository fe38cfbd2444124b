"""Training whose storage misbehaves ends well, in one attempt, with the bits of an undisturbed one.

benchmarks/storage_faults.py does it a hundred times, and at each PUT; storage_cuts.py has owners cut off.
"""

from collections.abc import Iterator

import pytest

from tests.data.s3 import s3_server
from tests.s3_wire import Fault
from tests.train.s3_faults import MOMENTS, TROUBLES, OnePut, Outcome, Schedule, Trainer, trainer

pytestmark = pytest.mark.contract

SCALE = 100
SCHEDULES = (Schedule.of(49), OnePut(1, Fault.BELIED), OnePut(20, Fault.LOST))
MORE = (Schedule.of(0), Schedule.of(2), Schedule.of(4))
MOST_A_SECOND = 10


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trainer, Outcome]]:
    """A trainer, and what becomes of an undisturbed training."""
    folder = tmp_path_factory.mktemp("trainer")
    with s3_server(folder / "s3.log") as server, trainer(server, folder, SCALE) as started:
        yield started, started.train()


@pytest.mark.parametrize(
    "schedule", [*SCHEDULES, *(pytest.param(each, marks=pytest.mark.chaos) for each in MORE)], ids=str
)
def test_training_outlives_its_storage(training: tuple[Trainer, Outcome], schedule: Schedule | OnePut) -> None:
    trainer, undisturbed = training
    outcome = trainer.train(schedule)
    assert (outcome.status, outcome.attempts) == (0, 1), trainer.log.read_text()[-3000:]
    assert outcome.files == undisturbed.files
    assert outcome.files
    assert outcome.refused
    assert outcome.rate is None or outcome.rate < MOST_A_SECOND


def test_seeds_in_a_row_meet_all_troubles_at_all_moments() -> None:
    schedules = [Schedule.of(seed) for seed in range(len(TROUBLES) * len(MOMENTS))]
    met = {(schedule.fault, schedule.share, schedule.moment) for schedule in schedules}
    assert len(met) == len(schedules)
