"""Two commands that train the same, and trainings that save their states before their command ends."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from socket import gethostname
from typing import Any

from ddm_ray.cli.command import waiting
from ddm_ray.errors import DDMError, InTraining, Left
from ddm_ray.remedies import Give
from ddm_ray.run.graph import Artifact
from ddm_ray.signals import first_signal_noted
from ddm_ray.spelling import some

LOOK_SECONDS = 0.5
"""Pause between two looks whether the other command has saved its state."""
Watch = Callable[[list[Any]], None]


@contextmanager
def saving_first(run: Any, artifacts: Sequence[Artifact], watch: Watch) -> Iterator[tuple[Watch, Callable[[], bool]]]:
    """Yield `watch` and `leaving` for `train_all`: once a signal has come, these trainings end with their states saved.

    The second signal ends the command at once. Raises Left, with the steps that are saved.
    """
    with first_signal_noted() as came:
        asked: set[str] = set()

        def watch_and_leave(statuses: list[Any]) -> None:
            if came.is_set():
                _leave(run, statuses, asked)
            with suppress(OSError):  # of a terminal that is closed, or a log on a full disk: neither ends a training
                watch(statuses)

        try:
            yield watch_and_leave, came.is_set
        except DDMError as error:
            # Where all processes got the signal, Ray is gone before a state is saved.
            if came.is_set() and error.passes:
                raise Left(_saved(run, artifacts)) from None
            raise


def require_no_other(run: Any, artifacts: Sequence[Artifact], take_over: bool) -> None:
    """Raise InTraining if another command trains one of these artifacts. `take_over`: let it save its state and end."""
    from ddm_ray.islands.takeover import TakeOver
    from ddm_ray.jobs.living_launches import living_launches

    with waiting("looking for other commands that train this"):
        living = living_launches(run.store, artifacts)
    if not take_over:
        _refuse(living)
    taken = [TakeOver(run, each.artifact, f"a command on {gethostname()}", bool(each.attempt)) for each in living]
    with waiting("waiting until the other command has saved its state"):
        while not all(each.done for each in taken):
            time.sleep(LOOK_SECONDS)


def require_no_other_here(run: Any, artifact: Artifact) -> None:
    """Raise InTraining if another command on this machine trains an artifact. It takes no time."""
    from ddm_ray.jobs.living_launches import living_launches

    _refuse(living_launches(run.store, [artifact], here_alone=True))


def _refuse(living: Sequence[Any]) -> None:
    """Raise InTraining if there are such launches."""
    if living:
        names = some([f"{each.artifact} ({each.place})" for each in living])
        fix = Give("take-over", "wait for it, or let it save its state and end, and go on from there")
        raise InTraining(f"another command trains {names}", fix)


def _leave(run: Any, statuses: Sequence[Any], asked: set[str]) -> None:
    """Ask the launch of each living attempt to end, once. Raises Left if there is none."""
    from ddm_ray.jobs.attempts import Attempt
    from ddm_ray.jobs.launches import Launch
    from ddm_ray.jobs.stops import ask, launch_stop_key

    living = [each for each in statuses if each.state == "begun" and not each.silent and each.job.failure is None]
    if not living:
        raise Left("nothing is trained that could be saved")
    for each in living:
        launch_id = Attempt(run.store, each.artifact, each.job.attempt).claim().get("launch", "")
        if launch_id and launch_id not in asked:
            if not asked:
                print("asked to end: states are being saved (once more ends it at once)", file=sys.stderr)
            asked.add(launch_id)
            ask(run.store, launch_stop_key(Launch(each.artifact, launch_id)), "its command is to end")


def _saved(run: Any, artifacts: Sequence[Artifact]) -> str:
    """Words on the step from which each training goes on."""
    from ddm_ray.jobs.job_files import list_jobs

    files = list_jobs(run.store, artifacts)
    left = {artifact: files[artifact].saved[1] for artifact in artifacts if not files[artifact].committed}
    steps = [f"{artifact} at step {step}" for artifact, step in left.items() if step]
    none = [artifact for artifact, step in left.items() if not step]
    saved = f"saved are {', '.join(steps)}" if steps else ""
    begins = f"nothing is saved of {some(none)}" if none else ""
    return f"asked to end; {'; '.join(filter(None, (saved, begins)))}; the same command goes on"
