"""The verb that asks islands whether a run can be trained there, and the one that answers on them."""

import shlex
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import click

from ddm_ray.cli.command import ISLAND_NAMES, ISLANDS_WITH_JOBS, RUN, say, with_extras
from ddm_ray.cli.islands import islands
from ddm_ray.cli.launch import chosen_islands
from ddm_ray.errors import ConfigError, RayError, StorageError
from ddm_ray.placement import Island
from ddm_ray.spelling import printable
from ddm_ray.storage.graph import wanted_of
from ddm_ray.storage.run import Run

MOST_LINE = 2000


@islands.command()
@RUN
@ISLANDS_WITH_JOBS
@ISLAND_NAMES
@with_extras("Have it fit")
def check(run_url: str, file: str, names: tuple[str, ...], extras: list[str]) -> None:
    """Ask each island of FILE, before RUN is trained there, whether it can be; name what is wrong and the remedy.

    Submits a job to each through its Jobs API, as `ddm launch` does, which looks around for some seconds. Asks whether
    that API takes the token, and answers nobody without it; whether what is written to storage here is read there and
    the other way round, and created only once; how far the clocks differ; whether versions are the same, and workers,
    memory and the cache's disk large enough for what is still to be trained.

    Writes a few small files beside the run's, and deletes them. Exits with 0 if nothing wrong is found, else with 1. An
    island whose machines come when they are asked for is unknown until they are there.

    \b
      ddm islands check s3://lab/run7 --islands islands.yaml
      ddm islands check s3://lab/run7 --islands islands.yaml --island north
    """
    from ddm_ray.islands.check import Question, note_of
    from ddm_ray.islands.faults import Fault, faults, sound
    from ddm_ray.islands.needs import needs_of
    from ddm_ray.storage.versions import versions

    run = Run.open(run_url)
    sites = chosen_islands(file, names)
    run.store.require_create()
    needs = needs_of(run, wanted_of(run.config, extras))
    needs = [need for need in needs if any(need.left.values())]
    note, interrupted, refusals = note_of(run), threading.Event(), list[StorageError]()

    def ask(island: Island) -> tuple[list[Fault], str]:
        try:
            island.require_run(run.url)
        except ConfigError as error:
            return [Fault("another storage", error.message, "make the run there, or correct storage in FILE")], ""
        if island.jobs is None:
            return [Fault("no Jobs API", f"{file} names none", "add jobs: http://HEAD:8265 to it")], ""
        question = Question(run, island, note, lambda id_: probe_line(run.url, island, id_), interrupted)
        try:
            answer = question.ask()
        except StorageError as error:  # of the run's storage as seen from here: others' answers are told all the same
            refusals.append(error)
            return [Fault("storage refuses here", error.message, "mend that, and ask again")], ""
        wrong = faults(answer, island, needs, versions())
        return wrong, "" if wrong else sound(answer, island)

    say(f"asking {', '.join(sites)}; a job looks around on each", err=True)
    width, faulty = max(map(len, sites)), 0
    with ThreadPoolExecutor(len(sites)) as pool:
        asked = {pool.submit(ask, island): name for name, island in sites.items()}
        try:
            for each in as_completed(asked):
                wrong, words = each.result()
                for line in [str(fault) for fault in wrong] or [words]:
                    # Much of it is the island's words.
                    say(f"{asked[each]:{width}}  {printable(line, MOST_LINE)}")
                faulty += bool(wrong)
        except BaseException:
            interrupted.set()
            raise
    if refusals and faulty == len(refusals):
        raise refusals[0]
    if faulty:
        raise RayError(f"{faulty} of {len(sites)} islands can't train this run as they are: see above")


def probe_line(run_url: str, island: Island, question: str) -> str:
    """The line of shell that answers a question on an island."""
    return shlex.join(["ddm", "islands", "probe", run_url, "--placement", island.to_json(), "--question", question])


@islands.command(hidden=True)
@RUN
@click.option("--placement", required=True, metavar="JSON", help="Fields of the island.")
@click.option("--question", required=True, metavar="ID", help="Id of the question that this answers.")
def probe(run_url: str, placement: str, question: str) -> None:
    """Answer a question of `ddm islands check`, which submits this as a job: look around, and report.

    \b
      ddm islands probe s3://lab/run7 --placement '{}' --question 0123456789abcdef
    """
    from ddm_ray.islands import nodes
    from ddm_ray.islands.probe import MARK
    from ddm_ray.islands.probe import probe as report_of
    from ddm_ray.ray_session import losses_of_ray, ray_session

    if not (question.isascii() and question.isalnum()):
        raise ConfigError(f"--question {question!r:.60}: letters and digits")
    island = Island.from_json("here", placement)
    with losses_of_ray(), ray_session(*island.ray()):
        cluster = nodes.look_at_cluster(run_url, question, island.train)
    report = report_of(run_url, question, cluster)
    click.echo(MARK + report.to_json())
