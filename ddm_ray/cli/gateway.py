"""The verb that runs a gateway in front of Serve's proxies on several machines."""

import click

from ddm_ray.cli.command import main
from ddm_ray.errors import ConfigError


@main.command()
@click.argument("proxies", metavar="HOST:PORT...", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on.")
@click.option("--insecure", is_flag=True, help="Listen on other addresses though a proxy answers without a token.")
def gateway(proxies: tuple[str, ...], host: str, port: int, insecure: bool) -> None:
    """Forward requests to Ray Serve's proxies, HOST:PORT each, until Ctrl-C. Repeat a request if a proxy is lost.

    `ddm serve` has its own gateway. This one is for a server that `serve deploy` runs on several machines. If an
    ingress, a proxy or a machine dies, its requests are sent again to another proxy. An answer that has begun, such as
    a stream, is not repeated. If the gateway dies, its requests are lost. If all proxies are away, the answer is 503.

    \b
      ddm gateway node-1:8000 node-2:8000 --host 0.0.0.0 --port 8080
    """
    from ddm_ray.serve.cluster.gateway import run_gateway

    run_gateway([_address(proxy) for proxy in proxies], host, port, insecure)


def _address(proxy: str) -> tuple[str, int]:
    host, _, port = proxy.removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{proxy!r} names no proxy: give its host and port, such as node-1:8000")
    return host.strip("[]"), int(port)
