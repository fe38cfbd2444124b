"""The plan of a run: days, bytes, memory and price of its trainings on each island, and of the whole. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddm_ray.islands.choose import OpenJob, Worker, choose
from ddm_ray.islands.needs import ModelNeeds
from ddm_ray.islands.speeds import IslandSpeed
from ddm_ray.islands.traffic import NOTHING, Traffic, foresee
from ddm_ray.placement import Island
from ddm_ray.storage.graph import Artifact

GB, DAY, HOUR = 1e9, 86400.0, 3600.0
MOST_EGRESS = 0.1
"""Share of compute's price from which the price of traffic is warned of."""
RARE_MINUTES = 60.0


@dataclass(frozen=True)
class Training:
    """One model's whole training on one island: seconds of its loop, traffic, and number of states."""

    seconds: float
    traffic: Traffic
    num_states: int

    @property
    def bytes_a_day(self) -> float:
        """Bytes written, by the day."""
        return self.traffic.written * DAY / self.seconds


@dataclass(frozen=True)
class Share:
    """An island's part in the run: what it trains, in this order, until `seconds`, and what passes to and fro."""

    artifacts: tuple[Artifact, ...] = ()
    seconds: float = 0.0
    traffic: Traffic = NOTHING

    def price(self, island: Island) -> float | None:
        """The price of its workers until it is done; None if the file has none."""
        return None if island.price_per_hour is None else island.price_per_hour * self.seconds / HOUR

    def egress(self, per_gb: float) -> float:
        """The price of its traffic, both ways."""
        return per_gb * (self.traffic.written + self.traffic.read) / GB


@dataclass(frozen=True)
class Outcome:
    """A run at one set of speeds: each island's trainings by kind, its share, and seconds until all is trained."""

    trainings: Mapping[str, Mapping[str, Training]]
    shares: Mapping[str, Share]
    seconds: float


@dataclass(frozen=True)
class RunPlan:
    """A run's plan: its needs, the islands whose speed is known, and outcomes at the least and the most speed."""

    needs: Sequence[ModelNeeds]
    islands: Mapping[str, Island]
    speeds: Mapping[str, IslandSpeed]
    slow: Outcome
    fast: Outcome

    def room(self, island: Island) -> float:
        """Bytes of states that storage holds at most, of the largest model, while this island trains it."""
        return (island.train.keep_states + 1) * max(need.state_bytes for need in self.needs)

    def warnings(self, per_gb: float) -> list[str]:
        """A line for each island whose traffic, at a price a GB, costs too much beside its workers, with the remedy."""
        lines = []
        for name, share in self.slow.shares.items():
            island, egress = self.islands[name], share.egress(per_gb)
            price = share.price(island)
            if not price or egress <= MOST_EGRESS * price:
                continue
            trained = self.slow.trainings[name].values()
            most = max(training.bytes_a_day for training in trained)
            remedy = "keep its storage near"
            if island.train.minutes_between_states < RARE_MINUTES:
                rare = self._with_minutes(name, RARE_MINUTES, share) * per_gb / GB
                remedy = f"set checkpoint_minutes: {RARE_MINUTES:g}, which makes it {rare:,.2f}, or {remedy}"
            lines.append(
                f"{name}: traffic costs {egress:,.2f}, {egress / price:.0%} of its workers' {price:,.2f}; a training"
                f" writes {most / GB:,.1f} GB a day: {remedy}"
            )
        return lines

    def _with_minutes(self, name: str, minutes: float, share: Share) -> float:
        """Bytes of an island's share if its states were saved so seldom."""
        island = self.islands[name]
        placement = island.train.model_copy(update={"checkpoint_minutes": minutes, "checkpoint_steps": None})
        rarer = island.model_copy(update={"train": placement})
        trainings = trainings_on(rarer, self.needs, self.speeds[name], 0)
        traffic = share_of(share.artifacts, share.seconds, trainings, self.needs).traffic
        return traffic.written + traffic.read


def plan(needs: Sequence[ModelNeeds], islands: Mapping[str, Island], speeds: Mapping[str, IslandSpeed]) -> RunPlan:
    """The plan of a run on those of the islands whose speed is known. Raises ValueError if there is none."""
    known = {name: island for name, island in islands.items() if name in speeds}
    if not known:
        raise ValueError("no island's speed is known")
    return RunPlan(needs, known, speeds, *(_outcome(needs, known, speeds, end) for end in (0, 1)))


def trainings_on(island: Island, needs: Sequence[ModelNeeds], speed: IslandSpeed, end: int) -> dict[str, Training]:
    """One whole training of each kind on an island, at its slowest (`end` 0) or fastest (1)."""
    trainings = {}
    for need in needs:
        seconds = need.flops / speed.of(need.kind)[end]
        artifact, steps = next(iter(need.left)), need.job.train.steps
        sizes = need.sizes(island.train)
        traffic, states = foresee(need.config, artifact, sizes, steps, seconds, island.train, need.rows)
        trainings[need.kind] = Training(seconds, traffic, states)
    return trainings


def _outcome(
    needs: Sequence[ModelNeeds], islands: Mapping[str, Island], speeds: Mapping[str, IslandSpeed], end: int
) -> Outcome:
    trainings = {name: trainings_on(island, needs, speeds[name], end) for name, island in islands.items()}
    seconds = {
        artifact: {name: left * trainings[name][need.kind].seconds for name in islands}
        for need in needs
        for artifact, left in need.left.items()
        if left > 0
    }
    ends = schedule(seconds)
    shares = {
        name: share_of([artifact for artifact, _ in done], done[-1][1] if done else 0.0, trainings[name], needs)
        for name in islands
        for done in [ends.get(name, [])]
    }
    return Outcome(trainings, shares, max((share.seconds for share in shares.values()), default=0.0))


def share_of(
    artifacts: Sequence[Artifact], seconds: float, trainings: Mapping[str, Training], needs: Sequence[ModelNeeds]
) -> Share:
    """An island's part in a run, of these artifacts until then."""
    traffic = NOTHING
    left = {artifact: share for need in needs for artifact, share in need.left.items()}
    for artifact in artifacts:
        traffic += trainings[artifact.kind].traffic.scaled(left[artifact])
    return Share(tuple(artifacts), seconds, traffic)


def schedule(seconds: Mapping[Artifact, Mapping[str, float]]) -> dict[str, list[tuple[Artifact, float]]]:
    """The artifacts that each island trains, with the second at which each is done, as islands choose by themselves.

    `seconds`: of each artifact on each island.
    """
    names = sorted({name for by_island in seconds.values() for name in by_island})
    done: dict[str, list[tuple[Artifact, float]]] = {name: [] for name in names}
    # Islands are told apart by one speed each: that of the longest job; others count as so much of it.
    longest = max(seconds, key=lambda artifact: (max(seconds[artifact].values()), artifact), default=None)
    if longest is None:
        return done
    speeds = {name: 1.0 / seconds[longest][name] for name in names}
    workers = [Worker(name, speeds[name]) for name in names]
    works = {
        artifact: sum(each[name] * speeds[name] for name in names) / len(names) for artifact, each in seconds.items()
    }
    now, held = 0.0, dict[str, tuple[Artifact, float]]()
    while works or held:
        for name in names:
            if name in held or not works:
                continue
            jobs = [OpenJob(artifact, work) for artifact, work in works.items()]
            jobs += [OpenJob(one, max(end - now, 0.0) * speeds[owner], owner) for owner, (one, end) in held.items()]
            if (taken := choose(jobs, workers, name).take) is not None:
                held[name] = (taken, now + seconds[taken][name])
                del works[taken]
        name = min(held, key=lambda owner: (held[owner][1], owner))
        artifact, now = held.pop(name)
        done[name].append((artifact, now))
    return done
