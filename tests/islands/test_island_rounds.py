"""Islands brought up and down again and again, at rest and beside busy processes: `make soak` asks for it."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.islands.brought_up import Islands
from tests.processes import crowd


@pytest.mark.parametrize("busy", [0, 8])
def test_rounds(request: pytest.FixtureRequest, tmp_path: Path, busy: int) -> None:
    """All come up each time; each second time a head is killed first; nothing is ever left."""
    rounds = request.config.getoption("island_rounds")
    if not rounds:
        pytest.skip("asked for by --island-rounds N")
    islands, failures = Islands.below(tmp_path), []
    for number in range(rounds):
        began = time.monotonic()
        try:
            with crowd(busy):
                islands.up()
                took = time.monotonic() - began
                if number % 2:
                    os.kill(islands.gcs_server(islands.numbers[0]), signal.SIGKILL)
                islands.down()
            print(f"load {busy}: up {took:.0f} s, up and down {time.monotonic() - began:.0f} s")
        except AssertionError as error:
            failures.append((number, str(error)))
            islands.down()
    assert not failures, failures
