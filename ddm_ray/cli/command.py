"""The `ddm` command, and what its verbs share: RUN, one-line errors, the live view of a stage."""

import math
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial, wraps
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from ddm_ray import __version__
from ddm_ray.cli.fixes import ddm_line, phrase
from ddm_ray.environment import prepare_ray, quiet_pillow
from ddm_ray.errors import ConfigError, DDMError, Superseded
from ddm_ray.exit_codes import EXIT_AGAIN, exit_code
from ddm_ray.run.graph import EXTRAS, KINDS, Artifact, expert
from ddm_ray.signals import Ended, signals_end_it
from ddm_ray.spelling import escape_unprintable, meant, numbers_in_words

RECIPE_HELP = "A shipped recipe (`ddm recipes` lists them), or the path of a .yaml file."
SET_HELP = "Change a field (`ddm fields` lists them), e.g. --set expert.train.steps=500. May be given many times."


STDERR = 2
"""The descriptor to which libraries write."""
MAIN_LIBRARIES = ("torch", "numpy", "ray", "deepspeed", "timm", "transformers", "diffusers", "pyarrow", "obstore")
"""Packages on which results and faults depend most, as `--version` lists them."""


class OneLineErrors(click.Group):
    """Prints an error as one line on stderr, without a traceback, and exits with its code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """See click. Python's stderr gets a descriptor of its own, so that descriptor 2 can be redirected."""
        if sys.stdout is None:  # closed by the caller
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        with suppress(AttributeError, OSError, ValueError):  # stderr is closed or isn't a file
            if sys.stderr.fileno() == STDERR:
                own = os.fdopen(os.dup(STDERR), "w", 1, sys.stderr.encoding, sys.stderr.errors)
                sys.stderr = own
        return super().main(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with signals_end_it():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click ends quietly if the reader has ended, as in `| head`
        except (DDMError, OSError, ModuleNotFoundError) as error:
            code = exit_code(error)
            say(f"error: {_text(error)}{_again(error, code)}", err=True)
            ctx.exit(code)
        except KeyboardInterrupt as error:
            with suppress(OSError):  # the terminal may be closed
                click.echo("\nstopped; what is saved stays: run the same command again", err=True)
            ctx.exit(error.exit_code if isinstance(error, Ended) else 128 + signal.SIGINT)


def _again(error: Exception, code: int) -> str:
    """Words on a retry, if it may succeed or would do harm."""
    if code == EXIT_AGAIN:
        return f" (exit code {code}: the same command may work later)"
    return f" (exit code {code}: the same command would take it back)" if isinstance(error, Superseded) else ""


def _text(error: DDMError | OSError | ModuleNotFoundError) -> str:
    from ddm_ray.store.refusals import in_words

    match error:
        case DDMError():
            return error.text(phrase)
        case OSError():
            return in_words(error)
    return f"this needs {error.name}; install it with: pip install 'ddm-ray[all]'"


class RunUrl(click.ParamType):
    """A run's folder or URI. A submitted job needs an absolute one, since its current folder is another."""

    name = "run"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from ddm_ray.submitted import submitted_job

        if not value:
            raise ConfigError("RUN is empty; name a folder or a URI")
        value = os.path.expanduser(value)
        if value.startswith("-"):
            value = f"./{value}"  # in the commands that we print it would be an option
        if submitted_job() is not None and "://" not in value and not Path(value).is_absolute():
            raise ConfigError(f"RUN {value!r} is relative; a submitted job needs an absolute path or a URI")
        return value


NEW_RUN = click.argument("run_url", metavar="RUN", type=RunUrl())


def _with_run(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument RUN. A folder that is none is refused before the command imports PyTorch, which takes seconds.

    A pipeline's folder, which some commands take too, passes.
    """

    @wraps(command)
    def opened(run_url: str, **options: Any) -> None:
        from ddm_ray.run.run import RUN_FILE, Run
        from ddm_ray.store.store import is_local

        # Storage elsewhere is asked once, by the command.
        if is_local(run_url) and not any(Path(run_url, name).exists() for name in (RUN_FILE, "model_index.json")):
            Run.open(run_url)
        command(run_url=run_url, **options)

    return NEW_RUN(opened)


RUN = _with_run


class Between(click.FloatRange):
    """A number of a range; nan, which click lets pass, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click."""
        number = super().convert(value, param, ctx)
        return self.fail(f"{value} is no number.", param, ctx) if math.isnan(number) else float(number)


class OneOf(click.Choice[str]):
    """One of some words. The error for a mistyped word names the most similar one."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """See click."""
        return super().get_invalid_choice_message(value, ctx).rstrip(".") + meant(str(value), self.choices)


MODELS = [kind for kind, row in KINDS.items() if row.stage == "train"]
MODEL = click.argument("model", type=OneOf(MODELS))
INDEX = click.argument("index", type=int, required=False)
ISLANDS = click.option(
    "--islands",
    metavar="FILE",
    help="YAML file that says where and how to run (docs/howto/machines.md). Default: one worker on one CPU.",
)
ISLAND = click.option("--island", metavar="NAME", help="Name of this island in that file.")
ISLANDS_WITH_JOBS = click.option(
    "--islands", "file", required=True, metavar="FILE", help="YAML file that names islands with their `jobs`."
)
ISLAND_NAMES = click.option(
    "--island", "names", multiple=True, metavar="NAME", help="Use only this island. May be given many times."
)
ADDRESS = click.option(
    "--address",
    metavar="RAY",
    help="Ray cluster to use. Default: that of the submitted job, of the island, $RAY_ADDRESS, or a private one.",
)


def with_extras(verb: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options for the networks that a mixture doesn't need. The command gets their kinds as `extras`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def given(*arguments: Any, **options: Any) -> None:
            asked = [kind for kind in EXTRAS if options.pop(kind)]
            command(*arguments, extras=asked, **options)

        helps = {
            "monolith": f"{verb} the monolith, too, with which `ddm evaluate` compares the mixture.",
            "student": f"{verb} the student, too: one network that learns from the finished experts.",
        }
        for kind in reversed(EXTRAS):
            click.option(f"--{kind}", is_flag=True, help=helps[kind])(given)
        return given

    return decorate


def _print_versions(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    """Print our version and those of Python and MAIN_LIBRARIES as installed. Imports none of them."""
    if not asked or ctx.resilient_parsing:
        return
    lines = [f"ddm, version {__version__}", f"python {platform.python_version()}"]
    for library in MAIN_LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            lines.append(f"{library} {metadata.version(library)}")
    click.echo("\n".join(lines))
    ctx.exit()


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_versions,
    help="Show the versions of ddm and of its main libraries, and exit.",
)
def main() -> None:
    """Train one diffusion model on computers that never talk to each other, and serve it.

    A RUN is a folder or URI that all stages read and write. Every command can be repeated: it skips what is finished
    and continues what was interrupted.

    \b
      ddm demo                                        all stages on this computer
      ddm recipes                                     what a run can begin with
      ddm init runs/digits --recipe digits            begin a run of your own
      ddm prepare runs/digits                         read, decode and embed the images
      ddm partition runs/digits                       cluster them into one shard per expert
      ddm train runs/digits all                       train all experts and the router on this machine
      ddm train runs/digits expert 0                  train one expert, anywhere
      ddm copy runs/digits /media/disk/digits         a copy for an island that can't see the run
      ddm watch runs/digits                           show progress, on any machine that sees the run
      ddm sample runs/digits --class 3 -o three.png   sample images from the mixture
      ddm serve runs/digits                           serve it over HTTP
    """
    if sys.flags.optimize > 1:
        raise ConfigError("Ray can't be loaded without docstrings; leave out -OO, or set PYTHONOPTIMIZE to 1 at most")
    quiet_pillow()
    prepare_ray()


def trained(verb: str, model: str, index: int | None, clusters: Sequence[int]) -> Artifact:
    """The artifact that MODEL and INDEX name. `clusters`: the numbers of the run's experts. Raises ConfigError."""
    if (model == "expert") != (index is not None):
        which = f"which one? e.g. expert {clusters[0]}" if model == "expert" else "takes no INDEX"
        raise ConfigError(f"{verb} {model}: {which}")
    if index is not None and index not in clusters:
        raise ConfigError(f"{verb} expert {index}: this run has experts {numbers_in_words(clusters)}")
    return Artifact(model) if index is None else expert(index)


def say(text: str, err: bool = False) -> None:
    """Print a line on stdout or stderr. Untrusted parts can't control the terminal."""
    click.echo(escape_unprintable(text), err=err)


def say_checked(name: str, wrong: str) -> None:
    """Print a line on something that was checked: what is wrong with it, or that it is sound."""
    say(f"  {name:<16} {f'wrong: {wrong}' if wrong else 'sound'}")


def say_derived(run: Any) -> None:
    """Name the runs that were derived from this one, since its own artifacts don't show them."""
    from ddm_ray.run.base import derived_from

    for url in derived_from(run.store):
        say(f"  {url} was derived from it: {ddm_line('status', url)}")


def warn(text: str) -> None:
    """Print a highlighted line on stderr."""
    click.secho(escape_unprintable(f"warning: {text}"), fg="yellow", bold=True, err=True)


def spill_folder(address: str | None, scratch: str | None) -> str | None:
    """The folder below which a private Ray spills objects; None on a cluster.

    `scratch`: an existing folder; by default the system's temporary one. Raises ConfigError if it is given for a
    cluster.
    """
    from ddm_ray.ray_session import ray_address
    from ddm_ray.store.refusals import temporary_folder

    if ray_address(address) == "local":
        return scratch or temporary_folder()
    if scratch:
        raise ConfigError("--scratch is for a private Ray: each machine of a cluster has the folder that it began with")
    return None


def ray_with_scratch(
    address: str | None, token_file: str | None, spills_below: str | None
) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that joins the Ray at an address, or starts a private one with all cores.

    A private Ray spills below the folder. The session raises the errors of `ray_session`, and StorageError.
    """

    @contextmanager
    def session() -> Iterator[None]:
        from ddm_ray.cores import usable_cores
        from ddm_ray.data.scratch import scratch_folder
        from ddm_ray.ray_session import ray_session

        with ExitStack() as stack:
            folder = str(stack.enter_context(scratch_folder(spills_below))) if spills_below else None
            stack.enter_context(ray_session(address, token_file, usable_cores(), folder))
            yield

    return session


@contextmanager
def progress(title: str, name: str, note: str = "starting") -> Iterator[Callable[[float, str], None]]:
    """Show a live view of one row while a command works, and yield the function that sets its share and note."""
    from ddm_ray.watch.live_view import LiveView

    with LiveView(title, [name], phrase=phrase) as view:
        view.show(name, 0.0, note)
        yield partial(view.stage, name)
        view.stage(name, 1.0)


@contextmanager
def waiting(note: str) -> Iterator[None]:
    """Show a note on a terminal while a command works for some seconds. It disappears, and a log doesn't get it."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(note) if console.is_terminal else nullcontext():
        yield


def make(run_url: str, artifact: Artifact, stage: Callable[[Any, Any], None], mends: bool = False) -> Any:
    """Run `stage(run, report)` with a live view unless the artifact is finished, and print its description.

    `mends`: the stage also runs for a finished artifact, to make missing files again.
    """
    from ddm_ray.jobs.describe import describe
    from ddm_ray.jobs.status import status
    from ddm_ray.run.run import Run

    run = Run.open(run_url)
    if not run.finished(artifact):
        with progress(run.url, artifact) as report:
            stage(run, report)
    elif mends:
        stage(run, None)
    say(f"{artifact}: {describe(status(run, artifact), phrase)}")
    return run
