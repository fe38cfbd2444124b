"""The client of a Jobs API against servers that are none: strangers, liars, the slow; and where its token goes."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_server

import pytest

from ddm_ray.errors import ConfigError, RayAway, RayError
from ddm_ray.islands.jobs import JobsAPI

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def served(answer: Answer) -> Iterator[tuple[str, list[str | None]]]:
    """A server that answers everything in this way; its URL, and the tokens that it was given."""
    tokens: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers["Authorization"])
            answer(self)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", tokens
        finally:
            server.shutdown()


def says(status: int, text: str, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(text.encode())

    return answer


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text("secret\n")
    return str(path)


@pytest.mark.parametrize(
    ("answer", "kind", "problem"),
    [
        (says(401, "Unauthorized"), RayError, "asks for a token; name the file"),
        (says(500, "No available agent to submit job, please try again later."), RayAway, "takes no job yet"),
        (says(500, "Traceback:\n  x\nValueError: \x1b[31mno\n"), RayAway, r"answers 500: ValueError: \x1b[31mno"),
        (says(404, "nginx"), RayError, "is no Jobs API: it answers 404: nginx; correct jobs"),
        (says(302, "", Location="http://127.0.0.1:1/"), RayError, "is no Jobs API: it answers 302"),
        (says(200, "<html>"), RayError, "gives an answer that no Jobs API does: <html>"),
        (says(200, " " * (2 << 20)), RayError, "answers more than 1 MiB"),
    ],
)
def test_an_odd_answer_is_one_line(answer: Answer, kind: type[RayError], problem: str, token: str) -> None:
    with served(answer) as (url, tokens), pytest.raises(RayError) as failure:
        JobsAPI("north", url, token).job("x")
    assert type(failure.value) is kind
    assert str(failure.value).startswith(f"island north: {url} ") and problem in str(failure.value)
    assert str(failure.value).isprintable() and "secret" not in str(failure.value)
    assert tokens == ["Bearer secret"]


def test_a_job_is_run_to_its_end_by_an_island_that_takes_none_at_first(token: str) -> None:
    status = {"status": "SUCCEEDED", "driver_exit_code": 0}
    answers = [
        says(404, "Job x does not exist"),
        says(500, "No available agent to submit job, please try again later."),
        says(200, "{}"),
        says(200, json.dumps({"status": "RUNNING"})),
        says(502, ""),
        says(200, json.dumps(status)),
        says(200, json.dumps({"logs": "one\n\x1b[31mtwo\n"})),
    ]
    with served(lambda handler: answers.pop(0)(handler)) as (url, _):
        job, lines = JobsAPI("north", url, token).run("true", 60, threading.Event())
    assert (job.status, job.exit_code, lines, answers) == ("SUCCEEDED", 0, ["one", r"\x1b[31mtwo"], [])


def test_a_token_goes_to_its_island_alone(token: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not to where an island redirects, not to a proxy, and not to the cluster that the environment names."""
    other = tmp_path / "other"
    other.write_text("others")
    unknown = says(404, "Job x does not exist")
    with served(unknown) as (stranger, given), served(unknown) as (north, norths), served(unknown) as (south, souths):
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, stranger)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "environments")
        for _ in range(2):
            assert JobsAPI("north", north, token).job("x") is None
            assert JobsAPI("south", south, str(other)).job("x") is None
        with served(says(307, "", Location=stranger)) as (moved, _), pytest.raises(RayError):
            JobsAPI("north", moved, token).submit("true", "x")
    assert (given, norths, souths) == ([], ["Bearer secret"] * 2, ["Bearer others"] * 2)


def test_a_token_of_the_environment_is_for_islands_without_a_file(
    monkeypatch: pytest.MonkeyPatch, token: str, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    with served(says(404, "Job x does not exist")) as (url, tokens):
        jobs = JobsAPI("north", url)
        jobs.job("x")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", token)
        jobs.job("x")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "set")
        jobs.job("x")
    assert tokens == [None, "Bearer secret", "Bearer set"]


def test_a_byte_order_mark_is_no_part_of_a_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("\ufeffsecret\r\n", encoding="utf-8")
    with served(says(404, "Job x does not exist")) as (url, tokens):
        JobsAPI("north", url, str(path)).job("x")
    assert tokens == ["Bearer secret"]


@pytest.mark.parametrize("text", ["", "\n", "two\nlines", "two words", "ü", "x" * 5000, "a\0b"])
def test_a_file_without_a_token_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^island north: token_file {path} has no token"):
        JobsAPI("north", "http://127.0.0.1:1", str(path)).job("x")
    with pytest.raises(ConfigError, match=rf"^island north: token_file {path}\.none: No such file"):
        JobsAPI("north", "http://127.0.0.1:1", f"{path}.none").job("x")


def test_who_answers_in_another_protocol_is_no_jobs_api(token: str) -> None:
    with create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"\0\0\x12\x04 neither\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RayError, match="doesn't speak HTTP; correct jobs") as failure:
            JobsAPI("north", f"http://127.0.0.1:{server.getsockname()[1]}", token).job("x")
    assert type(failure.value) is RayError


@pytest.mark.parametrize("begun", [False, True])
def test_an_island_that_was_cut_off_holds_up_nobody(token: str, begun: bool) -> None:
    """One that never answers, and one whose answer never ends."""
    over = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if begun:
            handler.send_response(200)
            handler.end_headers()
        with suppress(OSError):  # nobody listens any more
            while not over.wait(0.02):
                if begun:
                    handler.wfile.write(b" ")

    with served(answer) as (url, _):
        try:
            with pytest.raises(RayAway, match="can't be reached: timed out"):
                JobsAPI("north", url, token, seconds=0.3).job("x")
        finally:
            over.set()
