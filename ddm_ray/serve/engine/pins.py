"""Pins: what a file says is to be served in place of the newest weights of the server's own run. No Ray, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import PositiveInt, TypeAdapter, ValidationError

from ddm_ray.config import read_yaml
from ddm_ray.errors import ConfigError
from ddm_ray.run.graph import PARTITION
from ddm_ray.run.info import PartitionInfo
from ddm_ray.run.run import Run
from ddm_ray.spelling import one_line, printable
from ddm_ray.store.store import Store, is_local

PIN_BYTES = 2**16
RUN = "run"
"""Name of the line that has the URL of a run; all others have a step."""
IMAGES = ("image_size", "channels", "class_names", "text", "latents")
"""Fields of `data` on which requests and their answers depend."""
CODECS = ("text encoder", "autoencoder")
_STEPS = TypeAdapter(dict[str, PositiveInt])


@dataclass(frozen=True)
class Pins:
    """Steps by network (expert-002: 400), and the URL of the run to serve; None: the server's own."""

    steps: Mapping[str, int] = field(default_factory=dict)
    run: str | None = None


def read_pins(url: str) -> Pins:
    """The pins of a YAML file at a path or URI; none if there is no file. Raises ConfigError for any other content.

    A file that is being written isn't mistaken for a shorter one: an empty one is refused, and so is a URL of a run
    without a line break at the end of the file.
    """
    where = f"pin_file {url}"
    folder, slash, name = url.rpartition("/")
    try:
        text = Store(folder or slash or ".").read(name, PIN_BYTES + 1)
    except FileNotFoundError:
        return Pins()
    if len(text) > PIN_BYTES:
        raise ConfigError(f"{where}: has more than {PIN_BYTES} bytes")
    if not text.strip():
        raise ConfigError(f"{where}: is empty: delete it to serve the newest weights")
    try:
        lines = read_yaml(text, where, dict[str, int]) or {}
        named = isinstance(lines, dict) and RUN in lines
        run = lines.pop(RUN) if named else None
        steps = _STEPS.validate_python(lines)
    except (ConfigError, ValueError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else one_line(error, 100)
        raise ConfigError(f"{where}: write lines such as `expert-002: 400`, a step each: {what}") from None
    if not named:
        return Pins(steps)
    if not isinstance(run, str) or (is_local(run) and not run.startswith("/")):
        raise ConfigError(f"{where}: {RUN}: {printable(run, 100)} is no absolute path or URI of a run")
    if not text.endswith(b"\n"):
        raise ConfigError(f"{where}: ends within a line: end it with a line break")
    return Pins(steps, run)


def require_fits(own: Run, other: Run) -> None:
    """Raise ConfigError unless a server of a run can serve another one: for the same requests, images of one form."""
    mine, theirs, refused = own.config.data, other.config.data, f"{other.url} can't be served in place of {own.url}"
    for name in IMAGES:
        if getattr(mine, name) != getattr(theirs, name):
            actual, expected = (printable(getattr(each, name), 60) for each in (theirs, mine))
            raise ConfigError(f"{refused}: its data.{name} is {actual}, not {expected}")
    networks = [PartitionInfo.of(run.require(PARTITION)).networks for run in (own, other)]
    for name in CODECS:
        if len({each[name] for each in networks if name in each}) > 1:
            raise ConfigError(f"{refused}: another {name} made its rows")
