"""Storage, pretended: a store in memory, a run there of which only trainings matter, and trainings without a network.

What they leave is written by the product's own code, or by that of `tests/jobs/attempts.py`.
"""

import json
from collections import defaultdict
from collections.abc import Mapping

from ddm_ray.errors import DDMError, GaveUp
from ddm_ray.islands.run_view import take_key
from ddm_ray.jobs.attempts import HEARTBEAT, Attempt, claim
from ddm_ray.jobs.fencing import Fence
from ddm_ray.jobs.job_files import TAKES, list_jobs
from ddm_ray.jobs.launches import Launch, noted
from ddm_ray.run.graph import Artifact, shard
from ddm_ray.run.manifest import NAME, Identity, Manifest
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from tests.infos import info_of
from tests.jobs.attempts import beat, fail, save

TICK, SAVE, STEPS, DAY = 5.0, 60.0, 20, 86400.0
UNSEEN = 90.0
"""Time after which must have been seen what nothing tells of but a listing, as a training begun by hand."""
DAMAGE = b"{"
_MANY = ("experts", "islands")


class PretendStore(Store):
    """Objects in memory, kept by artifact and by island, since many islands look at many jobs."""

    def __init__(self) -> None:
        self.local, self.url = None, "pretended"
        self._places: dict[str, dict[str, bytes]] = defaultdict(dict)

    def _place(self, key: str) -> tuple[dict[str, bytes], str]:
        words = key.split("/")
        cut = 2 if words[0] in _MANY else 1
        return self._places["/".join(words[:cut])], "/".join(words[cut:])

    def read(self, key: str, most: int | None = None, cut: bool = True) -> bytes:
        place, name = self._place(key)
        if name not in place:
            raise FileNotFoundError(key)
        return place[name][:most]

    def write(self, key: str, data: bytes) -> None:
        place, name = self._place(key)
        place[name] = data

    def create(self, key: str, data: bytes) -> bool:
        place, name = self._place(key)
        return place.setdefault(name, data) is data

    def exists(self, key: str) -> bool:
        place, name = self._place(key)
        return name in place

    def sizes(self, prefix: str) -> Mapping[str, int]:
        if prefix in _MANY:
            places = [(each.partition("/"), place) for each, place in self._places.items()]
            return {
                f"{each}/{name}": len(data)
                for (kind, _, each), place in places
                if kind == prefix
                for name, data in place.items()
            }
        place, below = self._place(prefix)
        start = f"{below}/" if below else ""
        return {name.removeprefix(start): len(data) for name, data in place.items() if name.startswith(start)}

    def folders(self, prefix: str) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.sizes(prefix) if "/" in name})

    def delete(self, prefix: str) -> None:
        for name in list(self.sizes(prefix)):
            self.delete_one(f"{prefix}/{name}")

    def delete_one(self, key: str) -> None:
        place, name = self._place(key)
        place.pop(name, None)


class PretendRun(Run):
    """A run of these jobs, FLOP by artifact; all shards but the `missing` ones are there. The first commit counts."""

    def __init__(self, works: dict[Artifact, float]):
        self.store, self.url, self.works = PretendStore(), "pretended", works
        self.base, self.kept = None, {}
        self.missing: dict[Artifact, float] = {}  # and since when
        self._manifests: dict[Artifact, Manifest] = {}
        self.committed: dict[Artifact, Training] = {}
        self.second_commits, self.lost_takes = 0, 0

    @property
    def unfinished(self) -> list[Artifact]:
        return [artifact for artifact in self.works if artifact not in self.committed]

    @property
    def takes(self) -> dict[Artifact, int]:
        """Number of takes by artifact."""
        return {artifact: len(self.store.sizes(f"{artifact}/{TAKES}")) for artifact in self.works}

    def by_hand(self, artifact: Artifact) -> bool:
        return False

    def inputs(self, artifact: Artifact) -> tuple[Artifact, ...]:
        return () if artifact.cluster is None else (shard(artifact.cluster),)

    def finished(self, artifact: Artifact, accepted: bool = False, unread: object = ()) -> Manifest | None:
        if not artifact.trains:
            return None if artifact in self.missing else Manifest(artifact, Identity({}), {}, {})
        return self._manifests.get(artifact)

    def commit(self, training: "Training") -> None:
        """Commit what was trained, unless somebody has."""
        artifact = training.artifact
        manifest = Manifest(artifact, Identity({}), {}, info_of(artifact).as_json())
        if self.store.create(f"{artifact}/{NAME}", f"{training.launch}".encode()):
            assert artifact not in self.committed
            self.committed[artifact], self._manifests[artifact] = training, manifest
        else:
            self.second_commits += 1

    def take(self, artifact: Artifact, number: int, worker: str, launch: Launch) -> bool:
        """Create a take; False if there is one of this number."""
        taken = json.dumps({"worker": worker, "launch": launch.id}).encode()
        created = self.store.create(take_key(artifact, number), taken)
        self.lost_takes += not created
        return created

    def damage_heartbeat(self, artifact: Artifact) -> None:
        """Spoil the last words of its newest attempt."""
        files = list_jobs(self.store, [artifact])[artifact]
        if files.attempts and files.beats(files.attempts[-1]):
            self.store.write(f"{artifact}/attempts/{files.attempts[-1]:04d}/{HEARTBEAT}", DAMAGE)


class Training:
    """A launch, and the attempt that it has now, None before one: FLOP `done` of this attempt and those before it.

    `since`: when it was launched, or, where it has waited for long, when all must have seen that it trains at last.
    `stalled`: it was frozen since then, so others may take its place.
    """

    def __init__(self, run: PretendRun, launch: Launch, since: float):
        with noted(run.store, launch) as begun:
            self.launch = begun
        self.run, self.artifact, self.since = run, launch.artifact, since
        self.attempt: Attempt | None = None
        self.fence: Fence | None = None
        self.failures, self.stalled = 0, False
        self.done, self._first, self._saved, self._beats, self._ticks = 0.0, 0, 0, 0, 0

    @property
    def work(self) -> float:
        return self.run.works[self.artifact]

    @property
    def step(self) -> int:
        return int(STEPS * self.done / self.work)

    @property
    def stands(self) -> bool:
        """True if it must be seen to live: never stalled, and what was begun after it is dead without a word."""
        files = list_jobs(self.run.store, [self.artifact])[self.artifact]
        if self.stalled or self.attempt is None:
            return False
        newest = Attempt(self.run.store, self.artifact, files.attempts[-1])
        if newest.number == self.attempt.number:
            return True
        silent = self.attempt.number in files.older and files.beats(newest.number) and not files.failed(newest.number)
        return silent and self.run.store.read(f"{newest.prefix}/{HEARTBEAT}") != DAMAGE

    def begin(self, own_clock: float, now: float) -> None:
        """Claim an attempt, which goes on from the newest state."""
        if now - self.since > SAVE / 2:
            self.since = now + UNSEEN
        self._saved = list_jobs(self.run.store, [self.artifact])[self.artifact].saved[1]
        self.attempt = claim(self.run.store, self.artifact, self.launch.claim_fields())
        self.fence = Fence(self.attempt, lambda: self.clock)
        self.clock, self.done = own_clock, self._saved * self.work / STEPS
        self._first, self._beats, self._ticks = self._saved, 0, 0

    def train(self, speed: float) -> bool:
        """Train for a tick, save now and then; True if that was all, and it has committed or come too late.

        It beats step by step, and by itself until the first step is done.
        """
        assert self.attempt
        before, self.done, self._ticks = self.step, self.done + speed * TICK, self._ticks + 1
        if self.step > before or self.step == self._first:
            self._beats += 1
            rate = STEPS * speed / self.work if self.step > self._first else None
            beat(self.attempt, self._beats, min(self.step, STEPS), STEPS, steps_per_second=rate, beat_seconds=TICK)
        if self.done >= self.work:
            self.run.commit(self)
            return True
        if self._ticks % round(SAVE / TICK) == 0:
            self.save()
        return False

    def save(self) -> None:
        """Leave a state to go on from."""
        if self.attempt and self.step > self._saved:
            self._saved = self.step
            save(self.attempt, self.step)
            self.attempt.drop_states(1)

    def end(self, error: DDMError) -> None:
        """End because of others: say why, and try no more."""
        if self.attempt:
            self.attempt.fail({**error.to_fields(), "final": not error.passes})
        self.launch.give_up(self.run.store, error)

    def fail(self, final: bool) -> bool:
        """Fail; True if its launch tries no more, because that is in vain or it has failed too often."""
        assert self.attempt
        fail(self.attempt, "no luck", final)
        self.attempt, self.failures = None, self.failures + 1
        if self.failures > 2 and not final:
            self.launch.give_up(self.run.store, GaveUp("no luck"))
        return final or self.failures > 2
