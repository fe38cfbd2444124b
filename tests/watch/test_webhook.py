"""A webhook that is dead, slow or refuses holds nobody up, and what it wasn't told is said."""

import socket
import time

import pytest

from ddm_ray.errors import ConfigError
from ddm_ray.watch.events import Event
from ddm_ray.watch.webhook import Webhook
from tests.conftest import wait_for
from tests.watch.hooks import hook_server

pytestmark = pytest.mark.contract


def event(artifact: str) -> Event:
    return Event("run", artifact, "failed", 1, 7, 300, f"run: {artifact} failed")


def test_events_arrive_in_their_order() -> None:
    warnings: list[str] = []
    with hook_server() as server:
        hook = Webhook(server.url, warnings.append)
        for number in range(20):
            hook.post(event(f"experts/{number:03d}"))
        hook.close()
        assert server.bodies == [event(f"experts/{number:03d}").body() for number in range(20)]
    assert not warnings


def test_one_that_is_refused_is_tried_again_and_then_dropped() -> None:
    warnings: list[str] = []
    with hook_server(refusals=6) as server:
        hook = Webhook(server.url, warnings.append, pauses=(0.01, 0.02, 0.04))
        for artifact in ("first", "second"):
            hook.post(event(artifact))
        wait_for(lambda: server.bodies, 10)
        hook.close()
        assert [body["artifact"] for body in server.bodies] == ["second"]
    again = [f"webhook 127.0.0.1: answered 503; trying again in {pause} s: run: " for pause in ("0.01", "0.02", "0.04")]
    assert warnings == [
        *[f"{line}first failed" for line in again],
        "webhook 127.0.0.1: answered 503; dropped: run: first failed",
        *[f"{line}second failed" for line in again[:2]],
    ]


def test_the_end_does_not_wait_for_further_tries() -> None:
    warnings: list[str] = []
    with hook_server(refusals=100) as server:
        hook = Webhook(server.url, warnings.append, pauses=(30, 30, 30))
        hook.post(event("first"))
        wait_for(lambda: warnings, 10)
        began = time.monotonic()
        hook.close()
        assert time.monotonic() - began < 5
        assert server.refusals == 98
    assert warnings[-1] == "webhook 127.0.0.1: answered 503; dropped: run: first failed"


def test_a_dead_one_holds_nobody_up() -> None:
    warnings: list[str] = []
    with socket.socket() as deaf:  # it takes connections and never answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        began = time.monotonic()
        hook = Webhook(f"http://127.0.0.1:{deaf.getsockname()[1]}/secret", warnings.append)
        for number in range(10):
            hook.post(event(f"{number}"))
        hook.close(seconds=0.3)
        assert time.monotonic() - began < 3
        assert warnings[-1] == "webhook 127.0.0.1 doesn't answer: events that it didn't get yet are dropped"
    assert "secret" not in "".join(warnings)


@pytest.mark.parametrize("url", ["", "file:///etc/passwd", "localhost:80/x", "http://", "http://[", "ftp://x/y"])
def test_what_is_no_address_is_refused_unprinted(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^webhook: not an HTTP address; write http://HOST/PATH"):
        Webhook(url, print)
