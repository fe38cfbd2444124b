"""The verb that checks islands remotely, by a job on each that runs `ddm doctor`."""

import re
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from uuid import uuid4

from ddm_ray.cli.command import ISLAND_NAMES, ISLANDS_WITH_JOBS, RUN, say, with_extras
from ddm_ray.cli.fixes import phrase
from ddm_ray.cli.islands import islands
from ddm_ray.cli.launch import chosen_islands
from ddm_ray.errors import ConfigError, RayError, StorageError
from ddm_ray.placement import Island
from ddm_ray.run.run import Run

LONGEST_SECONDS = 150.0
"""Time after which a job is stopped."""
_FINDING = re.compile(r"\S+ (sound$|wrong: )")


@islands.command()
@RUN
@ISLANDS_WITH_JOBS
@ISLAND_NAMES
@with_extras("Check for")
def check(run_url: str, file: str, names: tuple[str, ...], extras: list[str]) -> None:
    """Check each island of FILE before RUN is trained there. Print what is wrong, and the remedy.

    The command submits a job to each island through its Jobs API, as `ddm launch` does. The job runs `ddm doctor` for
    some seconds and compares storage and versions with those here. On an island that scales, only machines that are
    running are checked. Exits with 0 if nothing is wrong, else with 1.

    \b
      ddm islands check s3://lab/run7 --islands islands.yaml
      ddm islands check s3://lab/run7 --islands islands.yaml --island north
    """
    from ddm_ray.jobs.versions import installed_versions

    run = Run.open(run_url)
    sites = chosen_islands(file, names)
    folder, interrupted = f"_probe-{uuid4().hex}", threading.Event()
    asked = [
        "--note",
        f"{folder}/note",
        *(f"--expect={name}={version}" for name, version in installed_versions().items()),
    ]

    def lines_of(island: Island) -> tuple[bool, list[str]]:
        """Return whether an island is sound, and its job's lines."""
        words = ["ddm", "doctor", run.url, "--island", island.name, "--placement", island.to_json(), *asked]
        line = shlex.join([*words, *(f"--{kind}" for kind in extras)])
        try:
            return _checked(island, line, interrupted)
        except (RayError, ConfigError) as error:
            return False, [error.text(phrase).removeprefix(f"island {island.name}: ")]

    say(f"checking {', '.join(sites)} by a job on each", err=True)
    width, faulty = max(map(len, sites)), 0
    run.store.write(f"{folder}/note", b"")
    try:
        with ThreadPoolExecutor(len(sites)) as pool:
            begun = {pool.submit(lines_of, island): name for name, island in sites.items()}
            try:
                for each in as_completed(begun):
                    sound, lines = each.result()
                    faulty += not sound
                    for line in lines:
                        say(f"{begun[each]:{width}}  {line}")
            except BaseException:
                interrupted.set()
                raise
    finally:
        with suppress(StorageError):  # a few bytes
            run.store.delete(folder)
    if faulty:
        raise RayError(f"{faulty} of {len(sites)} islands can't train this run: see above")


def _checked(island: Island, line: str, interrupted: threading.Event) -> tuple[bool, list[str]]:
    from ddm_ray.islands.jobs import JobsAPI
    from ddm_ray.islands.supervisor import complaint

    if island.jobs is None:
        raise ConfigError("no Jobs API is named", "add jobs: http://HEAD:8265 to it")
    job, log = JobsAPI(island.name, island.jobs, island.token_file).run(line, LONGEST_SECONDS, interrupted)
    findings = [each for each in log if _FINDING.match(each)]
    why = complaint(log) or complaint(job.message.splitlines()) or "it printed nothing"
    return job.status == "SUCCEEDED", findings or [f"the job {job.status}: {why}"]
