"""A writer commits what all ranks have written, gives up what one was refused, and ends what can't be saved."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddm_ray.errors import StorageError, Superseded
from ddm_ray.jobs.attempts import Attempt, SavedState, saved_states
from ddm_ray.run.manifest import Identity
from ddm_ray.store.store import Store
from ddm_ray.train.adamw import AdamW
from ddm_ray.train.state import TrainProgress
from ddm_ray.train.state_writer import MAX_REFUSED_STATES, StateWriter
from ddm_ray.train.step_sync import Agreed, Flags
from ddm_ray.train.zero_shards import EMA, VALUE, Fragment
from tests.conftest import wait_for

JOB = "experts/000"

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.contract]


def engine() -> Any:
    """All of an engine that a writer meets: the fragments of one parameter."""
    fragment = Fragment("weight", 0, 6, {record: torch.arange(6.0) for record in (VALUE, *AdamW.moments, EMA)})
    return SimpleNamespace(shards=SimpleNamespace(owned=lambda: [fragment], being_copied=None))


def progress(step: int) -> TrainProgress:
    return TrainProgress(step, 1.0, {"loss": [0.5] * step, "grad_norm": [1.0] * step})


def steps_of(store: Store) -> list[int]:
    """Steps of the committed states, the newest first."""
    return [state.step for state in saved_states(store, JOB) if isinstance(state, SavedState)]


def follow(writer: StateWriter, done: int) -> None:
    """What the loop does after a step, in a world of one."""
    writer.after(done, Agreed((), Flags(writing=writer.writing, refused=writer.refused, unsavable=writer.unsavable)))


def test_a_state_is_committed_after_a_step_in_which_no_rank_writes(tmp_path: Path) -> None:
    store, committed = Store(str(tmp_path)), list[str]()
    with StateWriter(Attempt(store, JOB, 1), Identity({}), keep=2) as writer:
        writer.save(engine(), progress(3), lambda: committed.append("3"))
        assert writer.busy
        writer.after(4, Agreed((), Flags(writing=True)))
        assert steps_of(store) == [], "another rank may still write"
        wait_for(lambda: not writer.writing, 60)
        follow(writer, 5)
        wait_for(lambda: not writer.busy, 60)
        assert steps_of(store) == [3] and committed == ["3"]
        for step in (6, 7):
            writer.save_now(engine(), progress(step))
    assert steps_of(store) == [7, 6], "the newest two are kept"


def test_a_state_of_which_a_rank_was_refused_is_deleted(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with StateWriter(Attempt(store, JOB, 1), Identity({}), keep=2) as writer:
        writer.save(engine(), progress(3))
        wait_for(lambda: not writer.writing, 60)
        writer.after(4, Agreed((), Flags(refused=True)))
        wait_for(lambda: not writer.busy, 60)
        assert writer.unsaved == "another worker's part is refused"
        assert not store.sizes(f"{JOB}/attempts/0001/state")
        writer.save_now(engine(), progress(5))
        assert writer.unsaved == "" and steps_of(store) == [5]


def test_training_ends_once_states_were_refused_for_good_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(store: Store, key: str, data: object) -> None:
        raise StorageError("no space left", passes=False)

    monkeypatch.setattr(Store, "write", refuse)
    writer = StateWriter(Attempt(Store(str(tmp_path)), JOB, 1), Identity({}), keep=2)
    for step in range(1, MAX_REFUSED_STATES + 1):
        follow(writer, step)
        writer.save(engine(), progress(step))
        wait_for(lambda: not writer.writing, 60)
    with pytest.raises(
        StorageError, match="ends after step 4, since its states can't be saved: no space left"
    ) as ended:
        follow(writer, 4)
    assert not ended.value.passes
    writer.close(wait=True)
    assert capsys.readouterr().err.count("isn't saved") == MAX_REFUSED_STATES


@pytest.mark.parametrize(("error", "waits"), [(None, True), (ValueError(), True), (Superseded("by 2"), False)])
def test_it_waits_for_the_last_state_unless_that_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, waits: bool
) -> None:
    writer, waited = StateWriter(Attempt(Store(str(tmp_path)), JOB, 1), Identity({}), keep=2), list[bool]()
    close = StateWriter.close
    monkeypatch.setattr(StateWriter, "close", lambda self, wait: (waited.append(wait), close(self, True)))
    writer.__exit__(type(error), error, None)
    assert waited == [waits]
