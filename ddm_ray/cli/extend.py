"""The verb that continues a run for more steps."""

import click

from ddm_ray.cli.command import RUN, main, say, warn


@main.command()
@RUN
@click.argument("settings", nargs=-1, required=True, metavar="PART.train.steps=N...")
def extend(run_url: str, settings: tuple[str, ...]) -> None:
    """Train the experts, router or student of RUN for more steps than RUN was begun with.

    The command makes a new run, RUN/extended/0001 (0002, ...), and prints its name. Train, evaluate and serve that run.
    It shares RUN's rows, partition and finished artifacts that aren't extended. Each training job continues from RUN's
    newest state, with its optimizer, and ends with the same bits as a job that was begun with so many steps. Nothing in
    RUN changes, and islands that work on RUN aren't affected. The same command again names the same run.

    A run can be extended if a step doesn't depend on the number of steps: train.schedule is constant or inverse-sqrt,
    and there are no unmasked_steps. The monolith trains for as many steps as the experts. If a student's teachers train
    for longer, the student begins at step 0 again. The states of finished jobs must still exist: `ddm tidy --delete`
    deletes them, unless an extension still needs them. If a run can't be extended, begin another run with its weights:
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
        warn(f"{artifact} begins again at step 0: its last state is gone")
    first = next(iter(extended.goes_on))
    say(f"run {extended.run.config.name!r} at {extended.run.url}; next: {command(extended.run.url, first)}")
