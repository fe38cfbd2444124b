"""What Ray would write to the terminal is in its logs; what a command writes is in the terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Island

WARNED = """
import click

from ddm_ray import ray_session
from ddm_ray.cli.command import main


@main.command("warned")
def warned():
    with ray_session.ray_session():
        import ray

        @ray.remote(max_restarts=-1)
        class Actor:
            def __init__(self, values):
                self.values = values

            def first(self):
                return self.values[0]

        # Ray writes a line on this to descriptor 2: it can't know that the values stay.
        assert ray.get(Actor.remote(ray.put([7])).first.remote()) == 7
        click.echo("of the command", err=True)
        ray_session.keep_logs()


main(["warned"])
"""


@pytest.mark.contract
def test_a_line_of_rays_core_is_in_the_logs_and_not_in_the_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WARNED],
        cwd=ROOT,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Those of others that ended abruptly come first.
    *_, first, last = done.stderr.splitlines()
    words, place = "the logs of Ray are kept in ", Path(last.rpartition(" ")[2])
    assert first == "of the command" and last.startswith(words) and place.is_relative_to(tmp_path)
    kept = place / "driver-stderr.log"
    assert "core_worker.cc" in kept.read_text() and "constructor arguments" in kept.read_text()


LOST = """
import sys
import threading

import ray
import ray._private.worker as worker
from ray._private.utils import publish_error_to_driver

from ddm_ray.ray_session import ray_session

printed, write = threading.Event(), worker.print_to_stdstream


def noted(data, **options):
    write(data, **options)
    if "the raylet's log" in str(data):
        printed.set()


worker.print_to_stdstream = noted
address = sys.argv[2]
with ray_session(address) if sys.argv[1] == "session" else ray.init(address, log_to_driver=False):
    while not printed.wait(1):
        publish_error_to_driver("lost", "the raylet's log", worker.global_worker.gcs_client)
"""


@pytest.mark.integration
@pytest.mark.parametrize("joined_by", ["session", "ray.init"])
def test_what_a_lost_node_of_a_joined_ray_has_logged_is_not_printed(island: Island, joined_by: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST, joined_by, island.ray],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ("the raylet's log" in done.stdout) == (joined_by == "ray.init")
