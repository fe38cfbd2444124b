"""What every scheme of authentication promises, and where its name comes up. No Ray."""

import pickle
import re
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from ddm_ray.cli import main
from ddm_ray.errors import ConfigError
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.http.authentication import AUTHENTICATION
from ddm_ray.serve.http.guard import Guard, Limits
from tests.conftest import ROOT
from tests.serve.http.test_http_app import GENERATIONS, Served, error_of, served

__all__ = ["served"]


def issue_token() -> tuple[str, dict[str, str]]:
    token = secrets.token_hex(32)
    return token, {"Authorization": f"Bearer {token}"}


ISSUE: dict[str, Callable[[], tuple[str, dict[str, str]]]] = {"bearer": issue_token}
"""A new credential of each scheme: its line in the server's file, and the headers of a client that has it."""


@pytest.fixture(params=AUTHENTICATION)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_only_a_client_with_a_credential_of_the_file_is_let_in(served: Served, tmp_path: Path, scheme: str) -> None:
    lines, clients = zip(*(ISSUE[scheme]() for _ in range(3)), strict=True)
    path = tmp_path / "credentials"
    path.write_text("".join(f"{line}\n" for line in lines[:2]))
    authenticator = ServeArgs(run="/run", authentication=scheme, token_file=str(path)).authenticator()
    # As it comes to each replica of the ingress.
    guard = Guard(served.app, pickle.loads(pickle.dumps(authenticator)), Limits(per_minute=2), clock=lambda: 0.0)
    for headers in ({}, {"authorization": "nonsense"}, clients[2]):
        answer = served.ask("GET", "/v1/models", guard, headers=headers)
        assert answer.status_code == 401 and error_of(answer)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == AUTHENTICATION[scheme].challenge
        assert AUTHENTICATION[scheme].header in error_of(answer)["message"]
    assert served.ask("GET", "/healthz", guard).status_code == 200
    body = {"prompt": "1", "steps": 1}
    for headers in clients[:2]:  # each at a rate of its own
        asked = [served.ask("POST", GENERATIONS, guard, json=body, headers=headers) for _ in range(3)]
        assert [answer.status_code for answer in asked] == [200, 200, 429]


def test_what_is_kept_is_the_same_in_each_process_and_no_secret(tmp_path: Path, scheme: str) -> None:
    lines = [ISSUE[scheme]()[0] for _ in range(8)]
    path, authenticators = tmp_path / "credentials", []
    for each in (lines, lines[::-1]):
        path.write_text("".join(f"{line}\n" for line in each))
        authenticators.append(AUTHENTICATION[scheme].read(str(path)))
    assert pickle.dumps(authenticators[0]) == pickle.dumps(authenticators[1])
    assert not any(line.encode() in pickle.dumps(authenticators[0]) for line in lines)


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), ("", "is empty"), ("x", "less than 16")])
def test_a_file_that_protects_nothing_is_refused(tmp_path: Path, content: str | None, words: str, scheme: str) -> None:
    path = tmp_path / "credentials"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"token_file {re.escape(str(path))}.*{words}"):
        AUTHENTICATION[scheme].read(str(path))


def test_configuration_help_and_docs_name_it(scheme: str) -> None:
    assert ServeArgs(run="/run", authentication=scheme).authentication == scheme
    about = f"{scheme}: {AUTHENTICATION[scheme].about}"
    assert about in (ROOT / "docs/reference/configuration.md").read_text()
    assert about in " ".join(CliRunner().invoke(main, ["serve", "--help"]).output.split())


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValidationError, match="authentication"):
        ServeArgs(run="/run", authentication="password")
