"""Checks before a server starts: of its run, its address, and who may ask. They import neither Ray nor torch."""

from collections.abc import Callable

from ddm_ray.data import OnProgress, no_progress
from ddm_ray.errors import RunError, ServeError
from ddm_ray.remedies import Fix, Give
from ddm_ray.run.graph import PARTITION
from ddm_ray.run.run import Run
from ddm_ray.serve.cluster.addresses import is_loopback, listen_on
from ddm_ray.serve.cluster.args import EVERY, ServeArgs
from ddm_ray.serve.engine.versions import Version, Versions
from ddm_ray.serve.http.authentication.bearer import TOKENS
from ddm_ray.store.store import is_local


def require_servable(
    args: ServeArgs, port: int, host: str = "127.0.0.1", insecure: bool = False, phrase: Callable[[Fix], str] = str
) -> ServeArgs:
    """Return the arguments with which a server may start: `local` where there are no tokens, unless it is `insecure`.

    `phrase` makes words of what refusals advise. Raises ServeError if the port is in use, if others could ask without a
    token and it isn't `insecure`, or if no expert has weights yet; RunError if it isn't a run; ConfigError for tokens
    that can't be read, and for pins that can't be met.
    """
    is_open = args.authenticator() is None and not insecure
    listen_on(host, port).close()  # without this Serve waits long and says little
    every = EVERY in args.allow_origin
    if is_open and (every or not is_loopback(host)):
        who = "any page in a browser" if every else f"any client that reaches {host}"
        raise ServeError(f"{who} could ask for images without a token", f"set ${TOKENS}, {opening_advice(phrase)}")
    servable(args)
    return args.model_copy(update={"local": True}) if is_open else args


def opening_advice(phrase: Callable[[Fix], str]) -> str:
    """Advice to those who want to be asked by more clients than now."""
    insecure, tokens = Give("insecure", "be insecure on purpose"), Give("token_file", "name a file of tokens")
    return f"{phrase(insecure)}, or {phrase(tokens)}"


def servable(args: ServeArgs) -> tuple[Run, list[Version]]:
    """A run and its weights that would be served now: the mixture's, and those of the network that `dense` names.

    Raises as `require_servable` for runs, weights and pins.
    """
    url = args.run
    try:
        run = Run.open(url)
    except RunError as error:
        if is_local(url) and not url.startswith("/"):
            raise RunError(f"{error} (the path is relative; give {url!r} as an absolute path)") from None
        raise
    if run.finished(PARTITION) is None:
        raise ServeError(f"{run.url} has no partition yet", run.make(PARTITION))
    served = (None, args.dense) if args.dense else (None,)
    return run, [Versions(run, args.pin_file, dense).newest() for dense in served]


def sound_version(args: ServeArgs, on_progress: OnProgress = no_progress) -> Version:
    """Return the mixture's weights that would be served now, once every byte of finished weights is read.

    Serve would start a replica that finds them altered again and again. Raises as `servable`, and CorruptArtifact.
    """
    versions = servable(args)[1]
    every = [(version.run, weights) for version in versions for weights in version]
    for number, (run, weights) in enumerate(every):
        on_progress(number / len(every), f"checking {weights.artifact}")
        if weights.final:
            manifest = run.require(weights.artifact)
            for name in manifest.files:
                run.read(weights.artifact, name, manifest)
    return versions[0]
