"""The verb that checks a run and the machines that are to train it."""

from typing import TYPE_CHECKING

import click

from ddm_ray.cli.command import ISLAND, ISLANDS, RUN, main, say_checked, with_extras
from ddm_ray.cli.mend import examined
from ddm_ray.errors import ConfigError
from ddm_ray.placement import Island, load_island
from ddm_ray.run.graph import wanted_of
from ddm_ray.run.run import Run

if TYPE_CHECKING:
    from ddm_ray.islands.checks import Machine


@main.command()
@RUN
@click.option("--deep", is_flag=True, help="Read every byte of finished artifacts, and compare checksums.")
@click.option("--mend", is_flag=True, help="Mend what is damaged, as the command advises without this option.")
@ISLANDS
@ISLAND
@with_extras("Check for")
@click.option("--placement", hidden=True, help="Fields of the island as JSON, instead of a file.")
@click.option("--expect", "expected", multiple=True, hidden=True, help="Expected LIBRARY=VERSION.")
@click.option("--note", default="", hidden=True, help="Key of an object on the run's storage.")
def doctor(
    run_url: str,
    deep: bool,
    mend: bool,
    islands: str | None,
    island: str | None,
    extras: list[str],
    placement: str | None,
    expected: tuple[str, ...],
    note: str,
) -> None:
    """Check whether RUN is undamaged, and whether this machine can train what is left.

    The command checks the run's storage (conditional writes, reads and listings that show the last write), versions,
    Ray, GPUs, memory, the cache's disk, text encoders, and each artifact. With --islands FILE --island NAME it joins
    that island's Ray instead, and checks each machine with room for a worker; `ddm islands check` does that remotely.
    It writes a few bytes below RUN/_probe-... and deletes them. Exits with 1 if anything is wrong.

    --mend makes damaged artifacts sound again. It deletes nothing but small records of what is damaged: files that are
    sound stay, and a trained model is written again from its last training state, with the same bytes. It leaves alone
    what a training uses that is alive, and names the command where steps have to be trained again.

    \b
      ddm doctor s3://lab/run7
      ddm doctor runs/digits --deep
      ddm doctor runs/digits --deep --mend
      ddm doctor s3://lab/run7 --islands islands.yaml --island north      on a machine of north
    """
    run = Run.open(run_url)
    if mend and (islands or placement):
        raise ConfigError("--mend is for the run, not for machines; leave --islands out")
    site = Island.from_json(island or "", placement) if placement else load_island(islands, island)
    from ddm_ray.islands.checks import check  # it imports torch, which takes seconds

    click.echo(f"run {run.config.name!r} at {run.url}, configuration {run.fingerprint}")
    machine = _machine(run, site, extras, dict(each.partition("=")[::2] for each in expected), note)
    if islands or placement:
        wrong = _show(_on_island(site, machine))
    else:
        wrong = _show([("", check(machine))]) + examined(run, run_url, deep, mend)
    if wrong:
        raise SystemExit(1)


def _machine(run: Run, site: Island, extras: list[str], expected: dict[str, str], note: str) -> "Machine":
    from ddm_ray.islands.checks import Machine
    from ddm_ray.islands.needs import needs_of
    from ddm_ray.models.hub import encoders_in_training

    needs = [need for need in needs_of(run, wanted_of(run.config, extras)) if any(need.left.values())]
    workers, names = site.train.workers.min, encoders_in_training(run.config) if needs else ()
    return Machine(run.url, site.train, needs, names, workers, workers, expected=expected, note=note)


def _on_island(site: Island, machine: "Machine") -> list[tuple[str, dict[str, str]]]:
    from ddm_ray.islands.machines import check_machines
    from ddm_ray.ray_session import losses_of_ray, ray_session

    with losses_of_ray(), ray_session(*site.ray()):
        return list(check_machines(machine))


def _show(machines: list[tuple[str, dict[str, str]]]) -> int:
    """Print a line for each check, or one for each of its different complaints. Return the number of complaints."""
    wrong = 0
    for check in dict.fromkeys(check for _, answers in machines for check in answers):
        complaints: dict[str, list[str]] = {}
        for name, answers in machines:
            if complaint := answers.get(check):
                complaints.setdefault(complaint, []).append(name)
        for complaint, names in complaints.items():
            say_checked(check, complaint if len(names) == len(machines) else f"{', '.join(names)}: {complaint}")
        if not complaints:
            say_checked(check, "")
        wrong += len(complaints)
    return wrong
