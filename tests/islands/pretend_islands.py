"""Islands that pull from one run, pretended: storage, workers and time are objects, and faults befall them."""

import random
from math import inf

from ddm_ray.islands.work import MAX_AGAIN_SECONDS
from ddm_ray.islands.worker_heartbeat import LEASE_SECONDS
from ddm_ray.jobs.job_status import START_SECONDS
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.stops import ask, drain_key, launch_stop_key, stop_key, take_back
from ddm_ray.run.graph import Artifact
from tests.islands.pretend_storage import DAY, STEPS, TICK, UNSEEN, PretendRun, Training
from tests.islands.pretend_workers import Intent, Island, Liar, Process


class Fleet:
    """Islands of these speeds, a worker each; what befalls them lasts until `calm`.

    A take of what another one trains for all to see, and the same one job idle beside the same idle island for longer
    than the rule has it, are AssertionErrors.
    """

    def __init__(self, works: dict[Artifact, float], speeds: list[float], seed: int):
        self.run, self.speeds, self.now = PretendRun(works), speeds, 0.0
        self.chance = random.Random(seed)
        self.islands = [Island(f"{index:02d}", speed) for index, speed in enumerate(speeds)]
        self.processes = [self._process(island) for island in self.islands]
        self.ghosts: list[Process] = []  # frozen when another came in their place; they may wake
        self.liars: list[Liar] = []
        self.hands: list[Training] = []
        self.stopped: dict[Artifact, float] = {}  # and since when

    def _process(self, island: Island, kind: type[Process] = Process) -> Process:
        return kind(island, self.run, self.chance, self.now, self._require_free)

    @property
    def everybody(self) -> list[Process]:
        return [*self.processes, *self.ghosts, *self.liars]

    @property
    def at_work(self) -> list[tuple[Process, Training]]:
        """Whoever trains something now."""
        return [(each, each.training) for each in self.everybody if each.awake and each.training]

    def restart(self, index: int) -> None:
        """Another process in place of this island's, which is dead then, unless it is frozen."""
        old = self.processes[index]
        if old.frozen and not old.gone:
            self.ghosts.append(old)
        old.gone = not old.frozen
        self.processes[index] = self._process(self.islands[index])

    def wake(self, index: int) -> None:
        """Wake whoever is frozen on this island."""
        for process in self.everybody:
            if process.frozen and process.island is self.islands[index]:
                process.frozen, process.woke = False, self.now

    def lie(self, speed: float) -> None:
        self.liars.append(self._process(Island(f"liar{len(self.liars)}", speed), Liar))

    def train_by_hand(self, artifact: Artifact) -> None:
        """Somebody trains it without asking anybody."""
        if artifact not in self.run.committed:
            launch = Launch(artifact, f"{int(1000 * (self.now + 2 * DAY)):011x}{self.chance.getrandbits(32):08x}")
            self.hands.append(Training(self.run, launch, self.now))

    def advance(self, ticks: int) -> None:
        """Let time pass, in which whoever acts does so in another order each tick."""
        for _ in range(ticks):
            self.now += TICK
            for training in list(self.hands):
                if training.attempt is None:
                    training.begin(self.now, self.now)
                elif training.train(2.0):
                    self.hands.remove(training)
            everybody = self.everybody
            self.chance.shuffle(everybody)
            for process in everybody:
                process.step(self.now)

    def _require_free(self, process: Process, intent: Intent) -> None:
        """Raise AssertionError for a take of what the worker must have seen to be stopped, trained, or not ready.

        Trained: by hand; or by a worker that was never frozen, and is not asked to end by a taker. Also
        where it should stand by an older worker.
        """
        artifact, unseen = intent.artifact, intent.looked - UNSEEN
        assert self.stopped.get(artifact, inf) > unseen, f"{process.id} takes {artifact}, which is stopped"
        lacks = [each for each in self.run.inputs(artifact) if self.run.missing.get(each, inf) < process.born]
        assert not lacks, f"{process.id} takes {artifact}, which needs {lacks}"
        for each in self.everybody:
            older = each.island is process.island and each.id < process.id and each.awake
            assert not older or each.woke > unseen, f"{process.id} takes a job beside {each.id}"
        held = [
            (training, intent.looked - TICK)
            for each, training in self.at_work
            if each.id != intent.job.holder and not self.run.store.exists(launch_stop_key(training.launch))
        ]
        for training, since in [*held, *((each, unseen) for each in self.hands)]:
            if training.artifact == artifact and training.since < since and training.stands:
                raise AssertionError(f"{process.id} takes {artifact}, trained by {training.launch}")

    def calm(self) -> None:
        """End faults: whoever is frozen wakes, whoever is gone comes back, requests are taken back.

        Liars stay, as do islands without room, if not all are.
        """
        self.hands.clear()
        self.run.missing.clear()
        for process in self.everybody:
            process.ends = ""
        nowhere = not any(island.room for island in self.islands)
        for artifact in list(self.stopped):
            self.allow(artifact)
        for index, island in enumerate(self.islands):
            take_back(self.run.store, drain_key(island.name))
            island.cursed.clear()
            island.only = None
            island.room |= nowhere
            self.wake(index)
            if self.processes[index].gone or self.processes[index].restricted:
                self.processes[index].gone = True
                self.restart(index)

    def stop(self, artifact: Artifact) -> None:
        ask(self.run.store, stop_key(artifact), "its rows are wrong")
        self.stopped.setdefault(artifact, self.now)

    def allow(self, artifact: Artifact) -> None:
        take_back(self.run.store, stop_key(artifact))
        self.stopped.pop(artifact, None)

    def lose_shard(self, artifact: Artifact) -> None:
        self.run.missing |= dict.fromkeys(self.run.inputs(artifact), self.now)

    def drain(self, index: int) -> None:
        ask(self.run.store, drain_key(self.islands[index].name), "moving day")

    def finish(self) -> None:
        """Go on until all is done. Raises AssertionError where a job and an island have idled too long, both at once.

        Too long: what was begun is waited for until its lease has expired, of each island without room in turn, and
        what has failed as the worker's own failures have it.
        """
        longest = max(self.run.works.values()) / min(island.speed for island in self.islands)
        turns = 1 + sum(not island.room for island in self.islands)
        patience = MAX_AGAIN_SECONDS + turns * START_SECONDS + 3 / STEPS * longest + 4 * LEASE_SECONDS
        idle: dict[str, float] = {}
        alone: dict[str, float] = {}
        while unfinished := self.run.unfinished:
            self.advance(1)
            jobs = set(unfinished) - {training.artifact for _, training in self.at_work if training.attempt}
            islands = {island.name for island in self.islands} - {each.island.name for each, _ in self.at_work}
            awake = {each.id: each.ahead for each in self.everybody if each.awake}
            by_dead = [name for name, ahead in awake.items() if ahead and ahead not in awake and self.run.unfinished]
            alone = {name: alone.get(name, self.now) for name in by_dead}
            assert all(self.now - since < UNSEEN for since in alone.values()), f"{by_dead} stand by who is dead"
            idle = {name: idle.get(name, self.now) for name in jobs | islands}
            if jobs and islands:
                since = max(min(idle[name] for name in names) for names in (jobs, islands))
                reasons = {
                    each.id: (each.training and each.training.artifact) or each.reason for each in self.everybody
                }
                assert self.now - since < patience, f"{sorted(jobs)} and {sorted(islands)} idle: {reasons}"
