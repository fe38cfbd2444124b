"""The verb that begins a run which trains on where another one is."""

import click

from ddm_ray.cli.command import RUN, main, say, warn


@main.command()
@RUN
@click.argument("settings", nargs=-1, required=True, metavar="PART.train.steps=N...")
def extend(run_url: str, settings: tuple[str, ...]) -> None:
    """Train the experts, router or student of RUN for more steps than it was begun with.

    Makes a run of its own, RUN/extended/0001 (0002, ...), and names it: train, evaluate and serve that one. It has the
    rows and the partition of RUN, and what is finished there and not extended; each training goes on from RUN's newest
    state, with its optimizer, and ends with the same bits as one that was begun with so many steps. Nothing in RUN
    changes: what is finished stays as it was, and islands that work on RUN go on with RUN alone. The same command again
    names the same run.

    Possible where a step doesn't depend on how many there are: train.schedule constant or inverse-sqrt, and no
    unmasked_steps. The monolith trains for as many steps as the experts. A student whose teachers train for longer is
    another one, and begins at step 0. States of what is finished have to be there: `ddm tidy --delete` deletes them,
    unless an extension is still to go on from them. Where it isn't possible, begin another run with these weights:
    --set expert.train.init_from.source=RUN --set expert.train.init_from.network=own

    \b
      ddm extend runs/digits expert.train.steps=4000
      ddm extend runs/digits expert.train.steps=4000 router.train.steps=3000
      ddm train runs/digits/extended/0001 expert 0
      ddm compare runs/digits runs/digits/extended/0001
    """
    from ddm_ray.cli.fixes import command
    from ddm_ray.config.longer import parse_steps
    from ddm_ray.jobs.extend import extend as begin
    from ddm_ray.run.run import Run

    extended = begin(Run.open(run_url), parse_steps(settings))
    for artifact, step in extended.goes_on.items():
        say(f"{artifact} goes on from step {step}")
    for artifact in extended.begins_again:
        warn(f"{artifact} begins again at step 0: the state that it ended with is gone")
    first = next(iter(extended.goes_on))
    say(f"run {extended.run.config.name!r} at {extended.run.url}; next: {command(extended.run.url, first)}")
