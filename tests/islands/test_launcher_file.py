"""`ddm launch` heeds what its file of islands becomes while it runs; nobody answers at the addresses in it."""

import os
import re
import subprocess
from pathlib import Path

from ddm_ray.run.graph import ROUTER
from tests.conftest import BIN, ROOT, wait_for
from tests.jobs.attempts import finish
from tests.random_run import make_data

AWAY = "{jobs: 'http://127.0.0.1:1'}"


def test_islands_come_and_go_with_the_file(tmp_path: Path) -> None:
    run, file, log = make_data(f"{tmp_path}/run", num_rows=60), tmp_path / "islands.yaml", tmp_path / "log"

    def says(text: str) -> None:
        """Put it in place at once, as editors do."""
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", file)

    def seen(pattern: str) -> None:
        wait_for(lambda: re.search(pattern, log.read_text(), re.MULTILINE), 60, log.read_text)

    says(f"islands: {{east: {AWAY}, west: {AWAY}}}")
    with log.open("wb") as sink:
        command = [str(BIN / "ddm"), "launch", run.url, "--islands", str(file)]
        launching = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=sink)
    try:
        seen("^east +0%  away: island east: .* can't be reached")
        says("islands: {east: {jbs: x}}")
        seen("^warning: .*islands.yaml: .*jbs.*; until then the islands stay as they were$")
        says(f"islands: {{west: {AWAY}, south: {AWAY}, behind: {{}}}}")
        seen("^behind names no Jobs API; start this on it: ddm work .* --island behind ")
        seen("^south +0%  away: island south: .* can't be reached")
        seen("^east +0%  kept no more: the file has it no longer; its job goes on$")
        file.unlink()
        seen("^warning: .*islands.yaml: No such file or directory; until then the islands stay as they were$")
        for artifact in (*run.experts, ROUTER):
            finish(run, artifact)
        assert launching.wait(60) == 0
    finally:
        launching.kill()
        launching.wait()
    printed = log.read_text()
    assert printed.count("; until then") == 2 and "Traceback" not in printed
    assert f"all that {run.url} trains is finished" in printed
