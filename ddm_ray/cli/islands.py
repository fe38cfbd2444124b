"""Verbs on islands. They use storage only, and so reach islands without open ports."""

import click

from ddm_ray.cli.command import MODELS, RUN, OneOf, main, say, waiting
from ddm_ray.cli.fixes import ddm_line, words
from ddm_ray.errors import ConfigError
from ddm_ray.run.graph import Artifact, trained_of, wanted_of
from ddm_ray.run.run import Run

WHY = click.option("--why", default="", metavar="TEXT", help="Reason, which the islands show.")


@main.group()
def islands() -> None:
    """Manage islands: check them, list what they do, drain them, and take that back.

    An island is a Ray cluster with a token of its own. It shares nothing with other islands but storage.

    \b
      ddm islands check RUN --islands islands.yaml
      ddm islands list RUN
      ddm islands drain RUN north
      ddm islands resume RUN north
    """


@islands.command("list")
@RUN
def list_workers(run_url: str) -> None:
    """List the islands at work on RUN, with what each trains or waits for.

    The command waits until each island gives a sign of life, which takes some seconds, at most half a minute.

    \b
      ddm islands list s3://lab/run7
    """
    from ddm_ray.islands.list_workers import list_workers, worker_line

    run = Run.open(run_url)
    with waiting("looking for signs of life"):
        calls = list_workers(run.store)
    for worker, lives in sorted(calls.items(), key=lambda call: call[0].id):
        say(worker_line(worker, lives))
    if not calls:
        start = f"start one: {ddm_line('work', run_url, '--island', 'NAME')}"
        left = not all(run.finished(artifact) for artifact in wanted_of(run.config, ()))
        say(f"no island is at work on {run.url}; {start if left else 'all is finished'}")


@islands.command()
@RUN
@click.argument("name")
@WHY
def drain(run_url: str, name: str, why: str) -> None:
    """Drain the island NAME: it saves its state, leaves RUN, and takes no job until `resume`.

    Other islands continue its job from that state. The island reads the request from storage within half a minute.

    \b
      ddm islands drain s3://lab/run7 room-2 --why "the room is cleaned on Friday"
    """
    from ddm_ray.jobs.stops import ask, drain_key

    run = Run.open(run_url)
    asked = ask(run.store, drain_key(name), why)
    say(f"island {name} " + ("is asked to leave" if asked else "was asked already") + _back(run_url, name))


@islands.command()
@RUN
@click.argument("model", type=OneOf(MODELS))
@click.argument("index", type=int, required=False)
@WHY
def stop(run_url: str, model: str, index: int | None, why: str) -> None:
    """Stop the training of a model of RUN. Its state is saved, and no island trains it until `resume`.

    \b
      ddm islands stop s3://lab/run7 expert 3
    """
    from ddm_ray.jobs.stops import ask, stop_key

    run = Run.open(run_url)
    artifact = _trained(run, model, index)
    if run.finished(artifact):
        raise ConfigError(f"{artifact} is finished: nothing is left to stop")
    asked = ask(run.store, stop_key(artifact), why)
    done = "is asked to stop" if asked else "was asked to already"
    say(f"{artifact} {done}{_back(run_url, *words(artifact))}")


@islands.command()
@RUN
@click.argument("what", nargs=-1, required=True, metavar="NAME | MODEL [INDEX]")
def resume(run_url: str, what: tuple[str, ...]) -> None:
    """Take back a `drain` or `stop`. If the island has left, start it again with `ddm work`.

    \b
      ddm islands resume s3://lab/run7 room-2
      ddm islands resume s3://lab/run7 expert 3
    """
    from ddm_ray.jobs.stops import drain_key, stop_key, take_back

    run = Run.open(run_url)
    model, *index = what
    trained = model in MODELS
    if len(index) > 1 or (index and not (trained and index[0].isdecimal())):
        raise ConfigError(f"{' '.join(what)}: an island's name, or a model: expert 3, router")
    artifact = _trained(run, model, int(index[0]) if index else None) if trained else None
    key = stop_key(artifact) if artifact else drain_key(model)
    if not take_back(run.store, key):
        say(f"there is no request to stop {artifact or f'island {model}'}")
        return
    work = ddm_line("work", run_url, "--island", model)
    say(f"{artifact} may be trained again" if artifact else f"island {model} may work again: start `{work}` there")


def _back(run_url: str, *what: str) -> str:
    return f"; take that back with: {ddm_line('islands', 'resume', run_url, *what)}"


def _trained(run: Run, model: str, index: int | None) -> Artifact:
    """The artifact for these words. Raises ConfigError if the run doesn't train it."""
    known = {" ".join(words(artifact)): artifact for artifact in trained_of(run.config)}
    name = model if index is None else f"{model} {index}"
    if name not in known:
        raise ConfigError(f"{name}: {run.url} trains no such model", f"choose of {', '.join(known)}")
    return known[name]
