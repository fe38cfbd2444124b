"""A disk that refuses states: said from the first on, an end after three in a row, nothing left of them, no other try.

What the operating system refuses here is a file as large as a state's, as it would any on a full disk.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddm_ray.jobs.attempts import Attempt, claimed
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.status import status
from ddm_ray.run.run import Run
from ddm_ray.train.state_writer import MAX_REFUSED_STATES
from tests.conftest import ROOT
from tests.random_run import make_data
from tests.train.ranks import EXPERT

pytestmark = pytest.mark.contract

STEPS = ("expert.train.steps=60", "expert.train.batch=6")
LIMIT = """
import json, resource, sys
from ddm_ray.errors import DDMError
from ddm_ray.placement import TrainPlacement
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.run.graph import Artifact
from ddm_ray.train import local

most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
limit, room_again = map(int, sys.argv[2:])
beat, told = Attempt.beat, []

def beat_and_tell(attempt, fields):
    told.append(fields.get("unsaved"))
    beat(attempt, fields)

class Terminal:
    def write(self, text):
        if room_again and "isn't saved" in text:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        return sys.__stderr__.write(text)

    def flush(self):
        sys.__stderr__.flush()

Attempt.beat, sys.stderr = beat_and_tell, Terminal()
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
try:
    local.train_locally(sys.argv[1], [Artifact("experts/001")], TrainPlacement(checkpoint_steps=4))
    error = None
except DDMError as refused:
    error = refused.to_fields()
print(json.dumps({"error": error, "unsaved": told}))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_data(str(tmp_path_factory.mktemp("unsaved") / "run"), settings=STEPS)


def train(run: Run, limit: int, room_again: bool) -> dict:
    """Train where no file may have more than `limit` bytes; only until the first warning of it, with `room_again`."""
    command = [sys.executable, "-c", LIMIT, run.url, str(limit), str(int(room_again))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "isn't saved" in done.stderr, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_states_that_the_disk_refuses_end_a_training_and_say_why(base: Run) -> None:
    outcome = train(base, 8000, room_again=False)
    error, (number,) = outcome["error"], claimed(base.store, EXPERT)
    assert error["kind"] == "StorageError" and not error["passes"], error
    assert "since its states can't be saved: " in error["error"] and "File too large" in error["error"]
    prefix = Path(base.url, Attempt(base.store, EXPERT, number).prefix)
    assert not [path for path in prefix.rglob("*") if path.is_file() and "state" in path.parts]
    failure = Attempt(base.store, EXPERT, number).failure()
    assert failure and failure["final"]
    ended = re.match(r"ends after step (\d+)", error["error"])
    assert ended and 4 * MAX_REFUSED_STATES <= int(ended[1]) < 60
    assert "File too large" in outcome["unsaved"][-1]


@pytest.mark.chaos
def test_once_there_is_room_states_are_saved_and_nothing_is_said_any_more(base: Run) -> None:
    outcome = train(base, 8000, room_again=True)
    assert outcome["error"] is None and base.finished(EXPERT)
    assert not outcome["unsaved"][-1]
    assert "not saved" not in describe(status(base, EXPERT))
