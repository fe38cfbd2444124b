"""Client of an island's Jobs API, over the HTTP that Ray documents: submit a job, read its status, stop it.

Ray's own client isn't used. If $RAY_ADDRESS is set, it sends requests, with this island's token, to that cluster. It
also waits for ever for an island that was cut off. This client sends a token to its island's host and port only.
"""

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from http.client import BadStatusLine, HTTPConnection, HTTPException, HTTPSConnection, RemoteDisconnected
from pathlib import Path
from threading import Event
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, ValidationError

from ddm_ray.errors import ConfigError, RayAway, RayError
from ddm_ray.plain_text import stripped
from ddm_ray.spelling import printable
from ddm_ray.store.refusals import refusal

SECONDS, SUBMIT_SECONDS = 20.0, 60.0
"""Longest time for an answer; a submission waits for the island's job agent."""
LOOK_SECONDS = 0.5
MAX_BYTES, MAX_LOG_BYTES = 1 << 20, 16 << 20
"""Largest size of an answer and of a log that are read."""
_MAX_TOKEN = 4096
_TOKEN_FIX = "name the file that has its token as token_file in the islands' file"


@dataclass(frozen=True)
class SubmittedJob:
    """A job as its island reports it."""

    id: str
    status: Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
    message: str = ""
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        """True once the job has ended for any reason."""
        return self.status not in ("PENDING", "RUNNING")


class _Details(BaseModel):
    """The fields of Ray's answer about a job that are used here."""

    status: Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
    message: str | None = None
    driver_exit_code: int | None = None


class _Logs(BaseModel):
    logs: str


class _Stopped(BaseModel):
    stopped: bool


AnswerT = TypeVar("AnswerT", bound=BaseModel)


class JobsAPI:
    """The Jobs API at a URL. Requests raise RayAway if there is no answer, and RayError for errors that won't pass."""

    def __init__(self, island: str, url: str, token_file: str | None = None, seconds: float = SECONDS):
        """`token_file` has the island's token and is read at each request. The default token is the environment's."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"island {island}: jobs is a URL, as http://HEAD:8265, got {url!r:.60}")
        self._island, self._url, self._token_file, self._seconds = island, url.rstrip("/"), token_file, seconds
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection

    def submit(self, entrypoint: str, submission_id: str, metadata: dict[str, str] | None = None) -> bool:
        """Submit a job, a line of shell, without waiting for its start; return False if its id exists already."""
        body = {"entrypoint": entrypoint, "submission_id": submission_id, "metadata": metadata or {}}
        status, text = self._ask("POST", "/api/jobs/", body, max(self._seconds, SUBMIT_SECONDS))
        if status == 200:
            return True
        if f"{submission_id} already exists" in text:
            return False
        raise self._refused(status, text)

    def job(self, submission_id: str) -> SubmittedJob | None:
        """The job of this id; None if the island doesn't know it, for instance after the loss of its head."""
        status, text = self._ask("GET", f"/api/jobs/{quote(submission_id)}")
        if status == 404 and "does not exist" in text:
            return None
        known = self._parse(_Details, status, text)
        return SubmittedJob(submission_id, known.status, known.message or "", known.driver_exit_code)

    def run(self, entrypoint: str, seconds: float, interrupted: Event) -> tuple[SubmittedJob, list[str]]:
        """Submit a job, a line of shell, wait for its end, and return it with the last lines of its log.

        After so many `seconds`, or once `interrupted`, the job is stopped and RayAway is raised.
        """
        name, deadline = f"ddm-{secrets.token_hex(8)}", time.monotonic() + seconds
        job = self.job(name)  # raises at once if there is no answer
        submitted = False
        while True:
            trouble = RayAway(f"{self._where}: the job is {job.status if job else 'lost'} after {seconds:.0f} s")
            try:
                if not submitted:
                    self.submit(entrypoint, name)
                    submitted = True
                job = self.job(name)
                if job is not None and job.ended:
                    return job, self.log_tail(name, 200, 2000)
            except RayAway as error:
                trouble = error  # a new cluster answers some seconds before it takes jobs
            if interrupted.wait(LOOK_SECONDS) or time.monotonic() > deadline:
                with suppress(RayError, ConfigError):
                    self.stop(name)
                raise trouble

    def log_tail(self, submission_id: str, lines: int = 20, length: int = 1000) -> list[str]:
        """The last lines that a job printed, each made printable and cut to `length` characters."""
        status, text = self._ask("GET", f"/api/jobs/{quote(submission_id)}/logs", most=MAX_LOG_BYTES)
        printed = self._parse(_Logs, status, text).logs.splitlines()[-lines:]
        return [printable(line, length) for line in printed]

    def stop(self, submission_id: str) -> bool:
        """Stop a job by SIGTERM, with some seconds to end; return False if it has ended or isn't known."""
        status, text = self._ask("POST", f"/api/jobs/{quote(submission_id)}/stop")
        if status == 404 and "does not exist" in text:
            return False
        return self._parse(_Stopped, status, text).stopped

    def _parse(self, kind: type[AnswerT], status: int, text: str) -> AnswerT:
        if status != 200:
            raise self._refused(status, text)
        try:
            return kind.model_validate_json(text)
        except ValidationError:
            raise RayError(f"{self._where} gives an answer that no Jobs API does: {printable(text, 100)}") from None

    @property
    def _where(self) -> str:
        return f"island {self._island}: {self._url}"

    def _refused(self, status: int, text: str) -> RayError:
        if status in (401, 403):
            problem = "asks for a token" if status == 401 else "refuses this token"
            return RayError(f"{self._where} {problem}", _TOKEN_FIX)
        if "No available agent" in text:
            return RayAway(f"{self._where} takes no job yet")
        reason = _last_line(text)
        if status >= 500:
            return RayAway(f"{self._where} answers {status}: {reason}")
        return RayError(f"{self._where} is no Jobs API: it answers {status}: {reason}", "correct jobs of that island")

    def _ask(
        self,
        verb: str,
        path: str,
        body: Any = None,
        seconds: float | None = None,
        most: int = MAX_BYTES,
    ) -> tuple[int, str]:
        """Status and text of an answer. Redirects and proxies aren't followed, since they would receive the token."""
        seconds = seconds or self._seconds
        deadline = time.monotonic() + seconds
        headers = {"Content-Type": "application/json"}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        connection = self._kind(self._host, self._port, timeout=seconds)
        try:
            connection.request(verb, self._path + path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            data = b""
            # The timeout applies to each read, and a slow answer has many reads.
            while part := answer.read1(1 << 16):
                data += part
                if len(data) > most:
                    raise RayError(f"{self._where} answers more than {most >> 20} MiB")
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out")
            return answer.status, data.decode(errors="replace")
        except BadStatusLine as error:
            if isinstance(error, RemoteDisconnected):
                raise self._away(error) from None
            raise RayError(f"{self._where} doesn't speak HTTP", "correct jobs of that island") from None
        except (OSError, HTTPException) as error:
            raise self._away(error) from None
        finally:
            connection.close()

    def _away(self, error: Exception) -> RayAway:
        return RayAway(f"{self._where} can't be reached: {refusal(error)}")

    def _token(self) -> str:
        """The token to send; empty for none. Raises ConfigError for a file without a valid token."""
        named = self._token_file
        if named is None:
            if token := os.environ.get("RAY_AUTH_TOKEN"):
                return self._printable_token(token, "RAY_AUTH_TOKEN")
            named = os.environ.get("RAY_AUTH_TOKEN_PATH")
        if named is None:
            return ""
        try:
            with Path(named).expanduser().open("rb") as file:
                data = file.read(_MAX_TOKEN + 1)
        except OSError as error:
            raise ConfigError(f"island {self._island}: token_file {named}: {error.strerror}") from None
        return self._printable_token(data.decode(errors="replace"), f"token_file {named}")

    def _printable_token(self, text: str, source: str) -> str:
        token = stripped(text)
        # Other characters could end the header in which the token is sent.
        if not token or len(token) > _MAX_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(f"island {self._island}: {source} has no token: one line of letters and digits")
        return token


def _last_line(text: str) -> str:
    """The last line of a text that isn't blank, made printable. In a traceback it has the reason."""
    return printable(next((line for line in reversed(text.splitlines()) if line.strip()), ""), 200)
