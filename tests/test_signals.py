"""Signals that end a command: SIGTERM, and SIGHUP of a terminal that is closed."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddm_ray.signals import Ended, first_signal_noted, signals_end_it
from tests.conftest import BIN, heed_ctrl_c, wait_for
from tests.random_run import make_data

SIGNALS = [signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """These signals as a shell's foreground leaves them, also where nohup or a background job ignores them."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_an_error_and_its_handler_is_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Ended) as error, signals_end_it():
        os.kill(os.getpid(), number)
    assert error.value.exit_code == 128 + number
    assert signal.getsignal(number) == before


def test_the_first_signal_is_noted_and_the_second_ends() -> None:
    with signals_end_it(), first_signal_noted() as came:
        assert not came.is_set()
        os.kill(os.getpid(), signal.SIGHUP)
        assert came.is_set()
        with pytest.raises(Ended) as error:
            os.kill(os.getpid(), signal.SIGTERM)
    assert error.value.number == signal.SIGTERM


def test_a_server_goes_on_answering_after_the_second() -> None:
    """Also one in the background of a script, whose shell has it ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals_end_it(), first_signal_noted(signal.SIGINT, second_ends=False) as came:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert came.is_set()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_end_it(), first_signal_noted() as came:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not came.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.contract
@pytest.mark.parametrize("number", [*SIGNALS, signal.SIGINT], ids=lambda number: number.name)
def test_a_command_says_that_it_ends_and_has_the_signals_code(tmp_path: Path, number: signal.Signals) -> None:
    run = make_data(str(tmp_path / "run"))
    log = tmp_path / "log"
    with log.open("wb") as sink:
        watching = subprocess.Popen(
            [str(BIN / "ddm"), "watch", run.url],
            stdout=sink,
            stderr=sink,
            preexec_fn=heed_ctrl_c,
        )
    try:
        wait_for(lambda: "rows" in log.read_text(), 60, log.read_text)
        watching.send_signal(number)
        assert watching.wait(60) == 128 + number
    finally:
        watching.kill()
    assert log.read_text().splitlines()[-1].startswith("stopped; what is saved stays: ")
