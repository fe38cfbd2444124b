"""The verb that serves a mixture over HTTP."""

import os
from typing import Any

import click

from ddm_ray.cli.command import ADDRESS, RUN, main
from ddm_ray.cli.devices import DEVICE, served_device
from ddm_ray.cli.field_options import FieldsCommand
from ddm_ray.cli.fixes import phrase
from ddm_ray.errors import ConfigError

START = "serve"


@main.command(
    cls=FieldsCommand, model="ddm_ray.serve.cluster.args:ServeArgs", but=("run", "device", "local"), with_defaults=True
)
@RUN
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on.")
@DEVICE
@click.option(
    "--insecure",
    is_flag=True,
    help="Serve other machines without a token. On this machine only: also answer requests to host names other than"
    " localhost, for use behind a proxy.",
)
@ADDRESS
def serve(run_url: str, host: str, port: int, address: str | None, insecure: bool, device: str, **others: Any) -> None:
    """Serve the mixture over HTTP until Ctrl-C: OpenAI's POST /v1/images/generations, and a page at /.

    Experts that still train are served with their newest published weights, which are replaced as newer ones appear.
    An expert without weights is left out, and answers say so.

    \b
      ddm serve runs/digits --port 8000
      curl -s localhost:8000/v1/images/generations -H 'content-type: application/json' \\
           -d '{"prompt": "7", "seed": 1, "response_format": "png"}' -o seven.png

    To serve users of other machines, make a token for each and name the file:

    \b
      (umask 077; openssl rand -hex 32 >> tokens)
      ddm serve runs/digits --host 0.0.0.0 --token-file tokens
    """
    from pydantic import ValidationError

    from ddm_ray.config import invalid_fields
    from ddm_ray.environment import prepare_serve
    from ddm_ray.run.run import Run
    from ddm_ray.serve.cluster.args import ServeArgs
    from ddm_ray.serve.cluster.haproxy import find_haproxy
    from ddm_ray.serve.cluster.servable import require_servable
    from ddm_ray.watch.live_view import LiveView

    for name in ("token_file", "pin_file"):
        path = others[name]
        others[name] = path if path is None or "://" in path else os.path.abspath(path)
    try:
        args = ServeArgs(run=Run.open(run_url).url, **others)
    except ValidationError as error:
        raise ConfigError(invalid_fields(error)) from None
    require_servable(args, port, host, insecure, phrase)
    args = args.model_copy(update={"device": served_device(device, address)})
    prepare_serve(direct_ingress=find_haproxy() is not None)
    from ddm_ray.serve.cluster.server import serve_run  # torch and Ray

    with LiveView(args.run, [START], phrase=phrase) as view:

        def on_progress(share: float, note: str) -> None:
            view.show(START, share, note)
            if share >= 1:
                view.close()

        serve_run(args, port, host, address, insecure, on_progress, phrase)
