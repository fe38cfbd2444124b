"""What is asked of a run, an address and tokens before a server starts."""

import socket
from pathlib import Path

import pytest

from ddm_ray.cli.fixes import phrase
from ddm_ray.errors import ServeError
from ddm_ray.run.run import Run
from ddm_ray.serve.cluster.addresses import is_loopback
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.cluster.servable import require_servable
from tests.serve.conftest import free_port


def test_a_port_in_use_is_told(tiny_run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port} on 127.0.0.1 is in use; choose another"):
            require_servable(ServeArgs(run=tiny_run.url), port)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("no.such.host.invalid", 8000, "can't listen on no.such.host.invalid port 8000"),
        ("127.0.0.1", 70000, "can't listen on 127.0.0.1 port 70000"),
        ("", 8000, "the host is empty; name an address"),
    ],
)
def test_an_impossible_address_is_told(tiny_run: Run, host: str, port: int, words: str) -> None:
    with pytest.raises(ServeError, match=words):
        require_servable(ServeArgs(run=tiny_run.url), port, host, insecure=True)


@pytest.mark.parametrize("host", ["127.1.2.3", "::1", "localhost"])
def test_what_only_this_machine_reaches_needs_no_token(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    ("host", "origins", "who"),
    [("0.0.0.0", (), "any client that reaches 0.0.0.0"), ("127.0.0.1", ("*",), "any page in a browser")],
)
def test_others_may_ask_only_with_a_token_or_on_purpose(
    tiny_run: Run, tmp_path: Path, host: str, origins: tuple[str, ...], who: str
) -> None:
    args, port = ServeArgs(run=tiny_run.url, allow_origin=origins), free_port()
    with pytest.raises(ServeError) as error:
        require_servable(args, port, host, phrase=phrase)
    assert error.value.text() == (
        f"{who} could ask for images without a token; set $DDM_SERVE_TOKENS,"
        " be insecure on purpose with --insecure, or name a file of tokens with --token-file"
    )
    assert require_servable(args, port, host, insecure=True) == args
    (tmp_path / "tokens").write_text("0123456789abcdef")
    with_tokens = args.model_copy(update={"token_file": str(tmp_path / "tokens")})
    assert require_servable(with_tokens, port, host) == with_tokens


def test_without_tokens_it_answers_by_the_names_of_this_machine_alone(tiny_run: Run) -> None:
    args = ServeArgs(run=tiny_run.url)
    assert require_servable(args, free_port()) == args.model_copy(update={"local": True})
