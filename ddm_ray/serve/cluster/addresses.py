"""Addresses at which a server listens. No Ray."""

import errno
import ipaddress
import socket

from ddm_ray.errors import ServeError
from ddm_ray.remedies import Give
from ddm_ray.spelling import one_line

Address = tuple[str, int]
"""Host and port."""


def format_address(address: Address) -> str:
    """HOST:PORT."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_at(host: str, port: int) -> str:
    """The URL of a server on this machine; a host that stands for all addresses is none."""
    return f"http://{format_address(('localhost' if host in ('0.0.0.0', '::') else host, port))}"


def loopback_of(host: str) -> str:
    """The loopback address for a bind address: 127.0.0.1 for 0.0.0.0."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def listen_on(host: str, port: int) -> socket.socket:
    """A socket that listens at this address. Raises ServeError if it can't."""
    if not host:  # to the system it is any address, which others reach
        raise ServeError("the host is empty", Give("host", "name an address"))
    own = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((host, port))
        own.listen(1024)
    except (OSError, OverflowError) as error:
        own.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ServeError(f"port {port} on {host} is in use", Give("port", "choose another")) from None
        fix = Give("host", "choose another port, or another host")
        raise ServeError(f"can't listen on {host} port {port}: {one_line(error)}", fix) from None
    return own


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
