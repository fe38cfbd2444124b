"""Two owners of one expert: whoever comes too late ends well, and changes nothing.

benchmarks/storage_cuts.py has owners cut off for longer, at more moments.
"""

from collections.abc import Iterator

import pytest

from ddm_ray.jobs.attempts import claimed
from tests.data.s3 import s3_server
from tests.train.cut_off import Cut, Rivals, rivals
from tests.train.ranks import EXPERT
from tests.train.s3_faults import files_of

pytestmark = pytest.mark.contract

SCALE = 20


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rivals]:
    folder = tmp_path_factory.mktemp("rivals")
    with s3_server(folder / "s3.log") as server, rivals(server, folder, SCALE) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(both: Rivals) -> dict[str, bytes]:
    """The files of an expert that one owner has trained alone."""
    files = both.owner.train().files
    assert files
    return files


@pytest.mark.chaos
def test_who_is_cut_off_while_it_commits_leaves_it_to_the_other(both: Rivals, undisturbed: dict[str, bytes]) -> None:
    outcome = both.train(Cut(0, "commit", 120.0))
    assert (outcome.statuses, outcome.manifests, outcome.writers) == ((0, 0), 1, 1), both.owner.log.read_text()[-3000:]
    assert outcome.attempts == 2 and outcome.files == undisturbed


@pytest.mark.chaos
def test_whose_last_state_was_dropped_by_who_has_finished_ends_well(
    both: Rivals, undisturbed: dict[str, bytes]
) -> None:
    """It was about to publish that very state."""
    statuses, run = both.train_within(r"^GET .*/0001/state/step-000000012/_MANIFEST.json")
    assert statuses == (0, 0), both.owner.log.read_text()[-3000:]
    assert "experts/001: another attempt has finished it" in both.owner.log.read_text()
    assert claimed(run.store, EXPERT) == [1, 2] and files_of(run) == undisturbed
