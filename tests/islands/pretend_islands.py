"""Islands that pull from one run, pretended: storage, workers and time are objects; the rule, the pulses and the
promises are the product's. Workers judge silence by their own clocks, which are up to a day off.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ddm_ray.islands.choose import OpenJob, Worker
from ddm_ray.islands.promises import Promises
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.pulse import Pulses

TICK, BEAT, LOOK, SAVE, GRACE, BACKOFF, DAY = 5.0, 10.0, 15.0, 60.0, 60.0, 300.0, 86400.0
BY_HAND = "a training begun by hand"


@dataclass(eq=False)
class Attempt:
    """One try of an artifact, FLOP `done` and, of these, `saved`; `over` when it says itself that it has ended."""

    by: str
    done: float
    saved: float
    beat: int = 0
    over: bool = False


@dataclass
class Presence:
    """The words of a worker about itself."""

    beat: int
    speed: float | None
    holds: Artifact | None
    only: frozenset[str] | None
    failed: frozenset[str]


class Bucket:
    """All that the islands share. Takes are created if absent, the first commit counts."""

    def __init__(self, works: dict[Artifact, float]):
        self.works = works
        self.takes: dict[Artifact, list[str]] = {artifact: [] for artifact in works}
        self.attempts: dict[Artifact, list[Attempt]] = {artifact: [] for artifact in works}
        self.presences: dict[str, Presence] = {}
        self.committed: dict[Artifact, Attempt] = {}
        self.commits, self.second_commits, self.lost_takes = 0, 0, 0

    @property
    def unfinished(self) -> list[Artifact]:
        return [artifact for artifact in self.works if artifact not in self.committed]

    def take(self, artifact: Artifact, number: int, worker: str) -> bool:
        """Create a take; False if there is one of this number."""
        if number < len(self.takes[artifact]):
            self.lost_takes += 1
            return False
        self.takes[artifact].append(worker)
        return True

    def begin(self, artifact: Artifact, by: str) -> Attempt:
        """A new attempt, which goes on from the most that was saved."""
        saved = max((attempt.saved for attempt in self.attempts[artifact]), default=0.0)
        self.attempts[artifact].append(Attempt(by, saved, saved))
        return self.attempts[artifact][-1]

    def train(self, artifact: Artifact, attempt: Attempt, work: float) -> bool:
        """Train on by so much work, save now and then; True if that was all, and it has committed or come too late."""
        attempt.done, attempt.beat = attempt.done + work, attempt.beat + 1
        if attempt.beat % round(SAVE / TICK) == 0:
            attempt.saved = attempt.done
        if attempt.done < self.works[artifact]:
            return False
        attempt.over = True
        if artifact in self.committed:
            self.second_commits += 1
        else:
            self.committed[artifact] = attempt
            self.commits += 1
        return True


@dataclass(eq=False)
class Process:
    """A worker. Between what it sees and what it does a tick passes, in which others may do the same."""

    id: str
    bucket: Bucket
    speed: float
    only: frozenset[str] | None
    offset: float
    chance: random.Random
    cursed: set[Artifact]
    ends: str = ""  # a fault to come: "taking", right after its next take, or "saving"
    frozen: bool = False
    gone: bool = False
    known_speed: float | None = None
    artifact: Artifact | None = None
    attempt: Attempt | None = None
    intent: tuple[Artifact, int] | None = None
    failed: dict[Artifact, float] = field(default_factory=dict)
    pulses: Pulses = field(default_factory=Pulses)
    promises: Promises = field(default_factory=lambda: Promises(GRACE))
    reason: str = ""
    _beat: int = 0
    _next_beat: float = float("-inf")
    _next_look: float = float("-inf")

    def step(self, now: float) -> None:
        """A tick of its life."""
        if self.frozen or self.gone:
            return
        own = now + self.offset
        if self.attempt:
            self._train(own)
        elif self.intent:
            self._take(*self.intent)
        if own >= self._next_beat:
            self._speak(own)
        if own >= self._next_look and not self.gone:
            self._next_look = own + LOOK
            if self.attempt:
                self._stand(own)
            else:
                self._look(own)

    def leave(self) -> None:
        """Save and go, as when its island is drained."""
        if self.attempt:
            self.attempt.saved, self.attempt.over = self.attempt.done, True
        self.gone = True
        self.bucket.presences.pop(self.id, None)

    def _train(self, own: float) -> None:
        assert self.artifact and self.attempt
        if self.artifact in self.cursed:
            self.failed[self.artifact] = own + BACKOFF
            self._drop()
        elif self.bucket.train(self.artifact, self.attempt, self.speed * TICK):
            self._drop()
        else:
            self.known_speed = self.speed * self.chance.uniform(0.9, 1.1)

    def _drop(self) -> None:
        assert self.attempt
        self.attempt.over = True
        self.artifact = self.attempt = None
        self._next_beat = self._next_look = float("-inf")

    def _take(self, artifact: Artifact, number: int) -> None:
        self.intent = None
        self._next_look = float("-inf")
        if self.bucket.take(artifact, number, self.id):
            if self.ends == "taking":
                self.gone = True
            elif artifact not in self.bucket.committed:
                self.artifact, self.attempt = artifact, self.bucket.begin(artifact, self.id)
                self._next_beat = float("-inf")

    def _speak(self, own: float) -> None:
        self._next_beat, self._beat = own + BEAT, self._beat + 1
        self.failed = {artifact: until for artifact, until in self.failed.items() if own < until}
        self.bucket.presences[self.id] = Presence(
            self._beat, self.known_speed, self.artifact, self.only, frozenset(self.failed)
        )

    def _stand(self, own: float) -> None:
        """End if another has its place: by a newer take, a newer attempt that moves, or because all is done."""
        assert self.artifact and self.attempt
        newest = self.bucket.attempts[self.artifact][-1]
        moves = newest is not self.attempt and newest.beat > 1 and self._silence(self.artifact, newest.beat, own) == 0
        if self.bucket.takes[self.artifact][-1] != self.id or moves or self.artifact in self.bucket.committed:
            self._drop()

    def _silence(self, key: str, beat: int, own: float) -> float:
        number = len(self.bucket.attempts[Artifact(key)]) if key in self.bucket.attempts else 0
        return self.pulses.take(key, number, beat, own)

    def _look(self, own: float) -> None:
        if unfinished := self.bucket.unfinished:
            workers = self._workers(own)
            jobs = [self._job(artifact, set(workers), own) for artifact in unfinished]
            self.chance.shuffle(jobs)
            choice = self.promises.choose(jobs, list(workers.values()), self.id, own)
            self.reason = choice.reason
            assert (choice.take is None) == bool(choice.reason)
            if choice.take is not None:
                self.intent = (choice.take, len(self.bucket.takes[choice.take]))

    def _workers(self, own: float) -> dict[str, Worker]:
        alive = {
            name: presence
            for name, presence in self.bucket.presences.items()
            if name == self.id or self._silence(f"presence of {name}", presence.beat, own) < GRACE
        }
        return {name: Worker(name, presence.speed, presence.only, presence.failed) for name, presence in alive.items()}

    def _job(self, artifact: Artifact, alive: set[str], own: float) -> OpenJob:
        takes, attempts = self.bucket.takes[artifact], self.bucket.attempts[artifact]
        newest = attempts[-1] if attempts else None
        done = max((attempt.saved for attempt in attempts), default=0.0)
        owner = obstacle = ""
        if takes and takes[-1] in alive and self.bucket.presences[takes[-1]].holds == artifact:
            owner = takes[-1]
        if newest and not newest.over and self._silence(artifact, newest.beat, own) < GRACE:
            if newest.by == BY_HAND:
                owner = BY_HAND
            elif not owner:
                obstacle = "silent for less than the grace time"
        done = newest.done if owner and newest else done
        return OpenJob(artifact, max(self.bucket.works[artifact] - done, 1e-6), owner, obstacle)


class Liar(Process):
    """One that is there, says that it is fast, or nonsense, and never takes anything."""

    def step(self, now: float) -> None:
        self.known_speed = self.speed
        if not self.gone and not self.frozen and now + self.offset >= self._next_beat:
            self._speak(now + self.offset)


class Fleet:
    """Islands of these speeds, a worker each, some held to some artifacts; `faults` may befall them until `calm`."""

    def __init__(self, works: dict[Artifact, float], speeds: list[float], seed: int):
        self.bucket, self.speeds, self.now = Bucket(works), speeds, 0.0
        self.chance = random.Random(seed)
        self.only: list[frozenset[str] | None] = [None for _ in speeds]
        self.cursed: list[set[Artifact]] = [set() for _ in speeds]
        self.hands: list[tuple[Artifact, Attempt]] = []
        self._numbers = [0 for _ in speeds]
        self.processes = [self._process(island) for island in range(len(speeds))]
        self.liars: list[Liar] = []
        self._moved = (0.0, 0)

    def _process(self, island: int, kind: Callable[..., Process] = Process) -> Process:
        self._numbers[island] += 1
        name, offset = f"{island:02d}/{self._numbers[island]:04d}", self.chance.uniform(-DAY, DAY)
        speed, only, cursed = self.speeds[island], self.only[island], self.cursed[island]
        return kind(name, self.bucket, speed, only, offset, self.chance, cursed)

    def restart(self, island: int) -> None:
        """Another process in place of this island's, which dies without a word, if it lives."""
        self.processes[island].gone = True
        self.processes[island] = self._process(island)

    def lie(self, speed: float) -> None:
        liar = self._process(self.chance.randrange(len(self.speeds)), Liar)
        liar.speed = speed
        self.liars.append(liar)  # type: ignore[arg-type]

    def train_by_hand(self, artifact: Artifact) -> None:
        """Somebody trains it without asking anybody."""
        if artifact not in self.bucket.committed:
            self.hands.append((artifact, self.bucket.begin(artifact, BY_HAND)))

    def advance(self, ticks: int) -> None:
        """Let time pass, in which whoever acts does so in another order each tick."""
        for _ in range(ticks):
            self.now += TICK
            for artifact, attempt in list(self.hands):
                if self.bucket.train(artifact, attempt, 2.0 * TICK):
                    self.hands.remove((artifact, attempt))
            everybody = [*self.processes, *self.liars]
            self.chance.shuffle(everybody)
            for process in everybody:
                process.step(self.now)

    def calm(self) -> None:
        """End all faults: whoever is frozen wakes, whoever is gone comes back; liars stay."""
        self.hands.clear()
        for island, process in enumerate(self.processes):
            self.cursed[island].clear()
            self.only[island] = None
            process.frozen, process.ends, process.only = False, "", None
            if process.gone:
                self.restart(island)

    def finish(self) -> None:
        """Go on until all is done. Raises AssertionError where nobody has taken or finished anything for too long.

        Too long: all times of grace, and longer than the slowest trains the most work.
        """
        longest = max(self.bucket.works.values()) / min(process.speed for process in self.processes)
        patience, (since, before) = 2 * BACKOFF + 4 * GRACE + 2 * longest, (self.now, -1)
        while self.bucket.unfinished:
            self.advance(1)
            moves = self.bucket.commits + sum(map(len, self.bucket.takes.values()))
            if moves != before:
                since, before = self.now, moves
            reasons = {process.id: process.artifact or process.reason for process in self.processes}
            assert self.now - since < patience, f"nothing moves: {reasons}"
