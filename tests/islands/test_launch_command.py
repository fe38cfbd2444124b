"""`ddm launch`, where no island answers and the run is finished."""

import re
from pathlib import Path

from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.run.graph import ROUTER
from tests.jobs.attempts import finish
from tests.random_run import make_data


def test_islands_without_an_answer_are_shown_and_a_finished_run_ends_it(tmp_path: Path) -> None:
    run, file = make_data(f"{tmp_path}/run", num_rows=60), tmp_path / "islands.yaml"
    for artifact in (*run.experts, ROUTER):
        finish(run, artifact)
    file.write_text("islands: {east: {jobs: 'http://127.0.0.1:1'}, behind: {}}")
    done = CliRunner().invoke(main, ["launch", run.url, "--islands", str(file)])
    assert done.exit_code == 0, done.output
    for pattern in (
        "^behind names no Jobs API; start this on it: ddm work .* --island behind ",
        "^east +away: island east: .* can't be reached",
        f"^all that {run.url} trains is finished$",
    ):
        assert re.search(pattern, done.output, re.MULTILINE), done.output
