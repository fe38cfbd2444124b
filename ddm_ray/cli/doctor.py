"""The verb that examines a run: what a person asks first when something is odd."""

import click

from ddm_ray.cli.command import RUN, main
from ddm_ray.cli.fixes import phrase


@main.command()
@RUN
@click.option("--deep", is_flag=True, help="Read every byte of what is finished, and compare it with its checksum.")
def doctor(run_url: str, deep: bool) -> None:
    """Examine RUN: whether its storage keeps its word, and whether what is there is whole.

    Writes a few bytes below RUN/_probe-..., since a run rests on storage that creates an object only once and shows
    what was written; no bucket's word is taken for that. Exits with 1 if anything is wrong. Islands are looked at by
    `ddm islands check`, leftovers by `ddm tidy`.

    \b
      ddm doctor s3://lab/run7
      ddm doctor runs/digits --deep
    """
    from ddm_ray.storage.examination import examine
    from ddm_ray.storage.run import Run

    run = Run.open(run_url)
    click.echo(f"run {run.config.name!r} at {run.url}, configuration {run.fingerprint}")
    wrong = 0
    for finding in examine(run, deep):
        wrong += finding.error is not None
        text = "sound" if finding.error is None else f"wrong: {finding.error.text(phrase)}"
        click.echo(f"  {finding.name:<16} {text}")
    if wrong:
        raise SystemExit(1)
