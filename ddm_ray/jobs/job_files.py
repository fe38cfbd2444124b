"""JobFiles: what the names of a training job's files say about it. One listing serves many jobs."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ddm_ray.jobs.attempts import CLAIM, FAILED, HEARTBEAT, PICTURE, PICTURES, attempt_number, step_of
from ddm_ray.run.graph import Artifact
from ddm_ray.run.manifest import NAME
from ddm_ray.store.store import Store

BEGUN, STOP, TAKES = "BEGUN-", "STOP", "takes"
_BEGUN = re.compile(rf"launches/(?P<launch>[A-Za-z0-9._-]{{1,100}})/{BEGUN}(?P<after>[0-9]{{4,9}})")
_COMMITTED = re.compile(rf"attempts/(?P<attempt>[^/]+)/(?P<kind>weights|state)/(?P<step>[^/]+)/{re.escape(NAME)}")
_PICTURE = re.compile(
    rf"attempts/(?P<attempt>[^/]+)/(?:{PICTURES}/(?P<state>[^/]+)\.png|weights/(?P<weights>[^/]+)/{re.escape(PICTURE)})"
)
_TAKE = re.compile(rf"{TAKES}/([0-9]{{4,9}})")


@dataclass(frozen=True)
class JobFiles:
    """The files below one job's artifact: their sizes in bytes by relative key."""

    artifact: Artifact
    sizes: Mapping[str, int]

    @property
    def unlisted(self) -> bool:
        """True if the artifact's own folder can't be listed, or isn't a folder."""
        return "" in self.sizes

    @property
    def committed(self) -> bool:
        """True if the artifact has a manifest. Only `Run.finished` tells whether it is this run's."""
        return NAME in self.sizes

    @cached_property
    def attempts(self) -> list[int]:
        """Numbers of the attempts, ascending."""
        words = (key.split("/") for key in self.sizes)
        numbers = {attempt_number(word[1]) for word in words if word[0] == "attempts" and len(word) > 2}
        return sorted(number for number in numbers if number is not None)

    def claimed(self, attempt: int) -> bool:
        """True if the attempt has a claim."""
        return self._holds(attempt, CLAIM)

    def beats(self, attempt: int) -> bool:
        """True if the attempt has written a heartbeat."""
        return self._holds(attempt, HEARTBEAT)

    def failed(self, attempt: int) -> bool:
        """True if the attempt has noted why it ended."""
        return self._holds(attempt, FAILED)

    @property
    def stopped(self) -> bool:
        """True if there is a stop request for the artifact."""
        return STOP in self.sizes

    @property
    def takes(self) -> int:
        """Number of the newest take of the job by an island's worker; 0: none."""
        return max((int(match[1]) for key in self.sizes if (match := _TAKE.fullmatch(key))), default=0)

    @property
    def older(self) -> list[int]:
        """Numbers of older attempts that may still train beside the newest one, newest first.

        They have a heartbeat and no noted end, and no later attempt has saved a state, which would supersede them.
        """
        first = self.saved[0]
        older = [number for number in self.attempts[:-1] if number >= first]
        return [number for number in reversed(older) if self.beats(number) and not self.failed(number)]

    @property
    def last_launch(self) -> tuple[str, int] | None:
        """Id of the launch that began last, and the number of the newest attempt at that time.

        If several began after the same attempt, the clocks of their machines decide which is the last.
        """
        launch, after = max(self.begun, key=lambda begun: begun[::-1], default=("", 0))
        return (launch, after) if launch else None

    @property
    def begun(self) -> set[tuple[str, int]]:
        """Ids of all launches, each with the number of the newest attempt when it began."""
        matches = (match for key in self.sizes if (match := _BEGUN.fullmatch(key)))
        return {(match["launch"], int(match["after"])) for match in matches}

    @property
    def launches(self) -> set[str]:
        """Ids of all launches."""
        return {launch for launch, _ in self.begun}

    def launched_after(self, attempt: int) -> list[str]:
        """Ids of the launches that began when that attempt was the newest."""
        return [launch for launch, after in self.begun if after == attempt]

    @property
    def saved(self) -> tuple[int, int]:
        """Attempt and step of the state that the next attempt continues from; (0, 0) if there is none.

        It is the newest attempt's newest committed state. It hasn't been read.
        """
        return max(self._steps("state"), default=(0, 0))

    @property
    def published(self) -> int | None:
        """Step of the latest published weights; None if there are none."""
        return max((step for _, step in self.weights), default=None)

    @property
    def weights(self) -> list[tuple[int, int]]:
        """Attempt and step of all published weights. They are committed, but haven't been read."""
        return self._steps("weights")

    @property
    def picture(self) -> tuple[int, str] | None:
        """Step and key of the newest picture of what the model samples: the one of the highest step."""
        pictures = list[tuple[int, int, str]]()
        for key in self.sizes:
            if match := _PICTURE.fullmatch(key):
                number, step = attempt_number(match["attempt"]), step_of(match["state"] or match["weights"])
                pictures += [(step, number, key)] if number is not None and step is not None else []
        step, _, key = max(pictures, default=(0, 0, ""))
        return (step, key) if key else None

    def _holds(self, attempt: int, name: str) -> bool:
        return f"attempts/{attempt:04d}/{name}" in self.sizes

    def _steps(self, kind: str) -> list[tuple[int, int]]:
        """(attempt, step) of all committed folders of a kind."""
        matches = (match for key in self.sizes if (match := _COMMITTED.fullmatch(key)) and match["kind"] == kind)
        steps = [(attempt_number(match["attempt"]), step_of(match["step"])) for match in matches]
        return [(number, step) for number, step in steps if number is not None and step is not None]


def list_jobs(store: Store, artifacts: Iterable[Artifact]) -> dict[Artifact, JobFiles]:
    """The files of each job, or of another artifact, from one listing for all of a folder."""
    by_folder: dict[str, list[Artifact]] = defaultdict(list)
    for artifact in artifacts:
        by_folder[artifact.rpartition("/")[0]].append(artifact)
    jobs: dict[Artifact, JobFiles] = {}
    for folder, members in by_folder.items():
        if not folder or len(members) == 1:
            jobs |= {artifact: JobFiles(artifact, store.sizes(artifact)) for artifact in members}
            continue
        sizes_by_name: dict[str, dict[str, int]] = defaultdict(dict)
        for key, size in store.sizes(folder).items():
            name, _, rest = key.partition("/")
            sizes_by_name[name][rest] = size
        for artifact in members:
            jobs[artifact] = JobFiles(artifact, sizes_by_name[artifact.rpartition("/")[2]])
    return jobs
