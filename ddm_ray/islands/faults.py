"""Faults of an island, by name and remedy, as its answers show them. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddm_ray.errors import ConfigError, DDMError, RayAway, WrongToken
from ddm_ray.islands.conduct import complaint
from ddm_ray.islands.jobs import SubmittedJob
from ddm_ray.islands.needs import ModelNeeds
from ddm_ray.islands.probe import ClusterReport, NodeReport, ProbeReport, StorageTrouble
from ddm_ray.placement import Island

GB = 1e9
MOST_SKEW = 60.0
"""Seconds by which clocks may differ. From 15 minutes on S3 refuses requests."""
# Of a shell: it can't be run, there is none; and of a command that doesn't know the words it was given.
NO_COMMAND, OTHER_COMMAND = (126, 127), 2
_OPEN = "start its Ray with RAY_AUTH_MODE=token"


@dataclass(frozen=True)
class Fault:
    """A fault by its name, the words of who met it, and the remedy in the imperative."""

    name: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}; {self.remedy}"


@dataclass(frozen=True)
class Answer:
    """All that was heard of an island that was asked.

    `reached`: its Jobs API answered something; `open`: also who gave no token; `odd`: what it answered him that was
    neither an answer nor a refusal; `refused`: why it took no job or told
    nothing of it; `log`: the job's last lines. `stored`: the report came back by the run's storage. `ahead`: bounds of
    its clock less the one here, in seconds; None without a report. `late`: its job was ended, since it took too long.
    """

    reached: bool = False
    open: bool = False
    odd: str = ""
    refused: DDMError | None = None
    job: SubmittedJob | None = None
    log: Sequence[str] = ()
    late: bool = False
    report: ProbeReport | None = None
    stored: bool = False
    ahead: tuple[float, float] | None = None


def faults(answer: Answer, island: Island, needs: Sequence[ModelNeeds], here: Mapping[str, str]) -> list[Fault]:
    """The faults that an answer shows, each name once.

    `needs`: those of the models that are still to be trained; `here`: the versions of whoever asks.
    """
    listed = [*_of_api(answer, island), *_of_job(answer)]
    if answer.report is not None:
        listed += _of_report(answer.report, answer, island, needs, here)
    named: dict[str, Fault] = {}
    for fault in listed:
        named.setdefault(fault.name, fault)
    return list(named.values())


def _of_api(answer: Answer, island: Island) -> Iterator[Fault]:
    if answer.open:
        what = "its Jobs API answers who gives no token, so whoever reaches it runs there what he likes"
        yield Fault("open to others", what, _OPEN)
    if answer.odd:
        what = f"who gives its Jobs API no token isn't refused, it {answer.odd}"
        yield Fault("an odd answer", what, "see what stands before its Ray, and that it lets in nobody without a token")
    if answer.refused is None:
        return
    why = answer.refused.message.removeprefix(f"island {island.name}: ")
    match answer.refused:
        case RayAway() if answer.reached:
            yield Fault("takes no job", why, "look at its Ray's logs, or start it again")
        case RayAway():
            remedy = "start its Ray, correct jobs, or open the way from here to that port"
            yield Fault("API unreachable", why, remedy)
        case WrongToken() | ConfigError():
            remedy = "name the file that has its token as token_file in the islands' file"
            yield Fault("wrong token", why, remedy)
        case _:
            yield Fault("no Jobs API", why, "correct jobs in the islands' file")


def _of_job(answer: Answer) -> Iterator[Fault]:
    """Faults of a job that gave no report."""
    job = answer.job
    if job is None or answer.report is not None or answer.refused is not None:
        return
    why = complaint(answer.log) or complaint(job.message.splitlines())
    if job.exit_code in NO_COMMAND:
        remedy = "install ddm-ray there, and start its Ray with the folder of its commands on PATH"
        yield Fault("no ddm", why, remedy)
    elif job.exit_code == OTHER_COMMAND:
        yield Fault("other versions", f"its ddm-ray doesn't know the probe: {why}", "install the same there and here")
    elif answer.late and job.status == "PENDING":
        yield Fault("takes no job", "the probe hasn't begun in time", "see whether its Ray's head has room for a job")
    elif answer.late:
        yield Fault("takes too long", f"the probe didn't end in time{': ' * bool(why)}{why}", "look at its Ray's logs")
    else:
        yield Fault("no report", f"the probe {job.status}: {why or 'nothing printed'}", "mend what it says")


def _of_report(
    report: ProbeReport, answer: Answer, island: Island, needs: Sequence[ModelNeeds], here: Mapping[str, str]
) -> Iterator[Fault]:
    nodes = report.cluster.nodes
    if report.cluster.open:
        what = "its Ray answers who gives no token, so whoever reaches its port runs there what he likes"
        yield Fault("open to others", what, _OPEN)
    if report.trouble is not None:
        yield _of_storage(report.trouble, "")
    elif not answer.stored:
        yield _of_storage(StorageTrouble(kind="elsewhere", text="what it wrote can't be read here"), "")
    for node in nodes:
        if node.trouble is not None:
            yield _of_storage(node.trouble, f"{node.name}: ")
    if report.creates_once is False:
        what = "storage ignores If-None-Match there, so two islands would take one model"
        remedy = "choose one that knows conditional writes, as S3, GCS, Azure, R2 and new versions of MinIO do"
        yield Fault("no conditional writes", what, remedy)
    yield from _of_clocks(answer.ahead or (0.0, 0.0), nodes)
    yield from _of_versions(nodes, here)
    yield from _of_resources(report, island)
    for node in nodes:
        if node.places:  # else nothing is trained on it; those for that may still be to come
            yield from _of_memory(node, _workers(report, island), island, needs)
            yield from _of_cache(node, needs)
            if node.no_encoder:
                remedy = "let it reach the hub, or copy the network into its cache (HF_HOME)"
                yield Fault("no text encoder", f"{node.name}: {node.no_encoder}", remedy)
    if not nodes and not report.cluster.silent:
        yield Fault("no report", "the probe names no machine", "look at its Ray's logs")
    for text in report.cluster.silent:
        yield Fault("a silent machine", text, "end its Ray, and start it again")


def _of_storage(trouble: StorageTrouble, where: str) -> Fault:
    match trouble.kind:
        case "elsewhere":
            remedy = "put the run where each island sees it: in a bucket, or in a folder that all machines share"
            return Fault("storage not shared", f"{where}{trouble.text}", remedy)
        case "no key":
            remedy = "start its Ray, on each machine, with a key that may read and write there"
            return Fault("no key", f"{where}{trouble.text}", remedy)
        case "away":
            return Fault("storage away", f"{where}{trouble.text}", "open the way from there to it")
        case "refused":
            return Fault("storage refuses", f"{where}{trouble.text}", "mend what it says")


def _of_clocks(ahead: tuple[float, float], nodes: Sequence[NodeReport]) -> Iterator[Fault]:
    clocks = [("", ahead)] + [(f"{node.name}: ", _sum(ahead, node.ahead)) for node in nodes]
    for where, (low, high) in clocks:
        # What is certain, whatever the time that the question took.
        skew = low if low > 0 else min(high, 0.0)
        if abs(skew) > MOST_SKEW:
            what = f"{where}its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the one here"
            yield Fault("clock off", what, "set both by a time server, as chrony does")


def _sum(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] + other[0], one[1] + other[1]


def _of_versions(nodes: Sequence[NodeReport], here: Mapping[str, str]) -> Iterator[Fault]:
    for node in nodes:
        others = []
        for library, version in here.items():
            named = node.versions.get(library)
            # Builds of one version, as 2.12.0+cpu, and patches of Python compute the same.
            if named is None or _comparable(library, named) != _comparable(library, version):
                others.append(f"{library.replace('_', '-')} {named or 'none'}, here {version}")
        if others:
            what = f"{node.name} has {'; '.join(others)}"
            yield Fault("other versions", what, "install the same there and here, as the constraints file has them")


def _comparable(library: str, version: str) -> str:
    return ".".join(version.split(".")[:2]) if library == "python" else version.partition("+")[0]


def _workers(report: ProbeReport, island: Island) -> int:
    """Number of workers that a training would have there now."""
    workers = island.train.workers
    return max(workers.min, min(workers.max, report.cluster.places))


def _of_resources(report: ProbeReport, island: Island) -> Iterator[Fault]:
    least, asked, resources = island.train.workers.min, island.train.asked, report.cluster.resources
    remedy = "change workers or resources_per_worker in the islands' file, or start more nodes"
    if awaits_machines(report, island):
        return
    lacking = [name for name, amount in asked.items() if resources.get(name, 0.0) < amount * least]
    for name in lacking:
        what = f"{least} x {asked[name]:g} {name} asked for, its Ray has {resources.get(name, 0.0):g}"
        yield Fault(f"too few {name}{'s' if name in ('CPU', 'GPU') else ''}", what, remedy)
    if not lacking and report.cluster.places < least:
        each = " and ".join(f"{amount:g} {name}" for name, amount in asked.items())
        what = f"{least} workers of {each} asked for, its nodes have room for {report.cluster.places}"
        yield Fault("too little room", what, remedy)
    for node in report.cluster.nodes:
        if island.train.use_gpu and node.places > len(node.gpus):
            what = f"{node.name}: Ray counts {node.places} for workers, torch sees {len(node.gpus)}"
            yield Fault("too few GPUs", what, "install a driver and a torch there that know each other")


def _of_memory(node: NodeReport, workers: int, island: Island, needs: Sequence[ModelNeeds]) -> Iterator[Fault]:
    """Memory that the state of a model takes, at least: activations and libraries come on top."""
    placement, own = island.train, max(1, min(workers, node.places))
    for need in needs:
        each = need.memory(workers, placement.use_gpu, placement.teachers)[placement.zero_stage]
        fewer = ", fewer teachers" if need.teachers_bytes(placement.use_gpu, placement.teachers) else ""
        remedy = f"choose more workers, a higher zero_stage{fewer}, or machines with more"
        if each is None:
            continue
        if placement.use_gpu and node.gpus:
            smallest = min(node.gpus, key=lambda gpu: gpu.memory)
            if each > smallest.memory:
                what = f"{node.name}: a {smallest.name} has {_gb(smallest.memory)}, its part of one {need.kind} takes"
                yield Fault("too little memory", f"{what} {_gb(each)}", remedy)
        # A GPU's state is copied to its machine's memory when it is saved.
        taken = need.state_bytes * own / workers if placement.use_gpu else each * own
        if taken > node.memory:
            what = f"{node.name} has {_gb(node.memory)}, the state of one {need.kind} takes {_gb(taken)} there"
            yield Fault("too little memory", what, remedy)


def _of_cache(node: NodeReport, needs: Sequence[ModelNeeds]) -> Iterator[Fault]:
    if node.no_room:
        remedy = "let its Ray's user read and write there, or name another folder as cache in the islands' file"
        yield Fault("cache refuses", f"{node.name}: {node.cache}: {node.no_room}", remedy)
    for need in needs:
        most = 0 if need.rows is None else max(need.rows.values())
        if node.room is not None and most > node.room:
            what = f"{node.name}: {node.cache} has room for {_gb(node.room)}, the rows of one {need.kind} are"
            remedy = "make room, or name a folder on a larger disk as cache in the islands' file"
            yield Fault("cache disk full", f"{what} {_gb(most)}", remedy)


def _gb(size: float) -> str:
    if size < GB / 10:
        return f"{size / 1e6:.0f} MB"
    return f"{size / GB:,.1f} GB" if size < 100 * GB else f"{size / GB:,.0f} GB"


def awaits_machines(report: ProbeReport, island: Island) -> bool:
    """True if it has room for fewer workers than asked for, and machines come there when they are asked for."""
    return report.cluster.grows and report.cluster.places < island.train.workers.min


def sound(answer: Answer, island: Island) -> str:
    """Words on an island without faults: its machines and clock, or that it has none yet, so that nobody knows."""
    report = answer.report
    assert report is not None
    nodes, cluster = report.cluster.nodes, report.cluster
    if awaits_machines(report, island):
        so_far = f"has machines for {cluster.places} of {_counted(island.train.workers.min, 'worker')} so far"
        return f"unknown: {so_far}: whether those to come have memory and room in the cache shows once they are there"
    return f"ok: {_sound(answer, nodes, cluster)}"


def _sound(answer: Answer, nodes: Sequence[NodeReport], cluster: ClusterReport) -> str:
    parts = [_counted(len(nodes), "machine")] if len(nodes) > 1 else []
    parts.append(_counted(cluster.places, "place") + " for workers")
    parts += [
        f"{_counted(round(cluster.resources.get(name, 0)), name)}"
        for name in ("CPU", "GPU")
        if name in cluster.resources
    ]
    if gpus := sorted({gpu.name for node in nodes for gpu in node.gpus}):
        parts[-1] += f" ({', '.join(gpus)})"
    parts.append(f"{_gb(min(node.memory for node in nodes))} of memory")
    if rooms := [node.room for node in nodes if node.room is not None]:
        parts.append(f"room for {_gb(min(rooms))} in the cache")
    parts.append(f"Ray {nodes[0].versions.get('ray', '')}")
    clocks = [answer.ahead or (0.0, 0.0)]
    clocks += [_sum(clocks[0], node.ahead) for node in nodes]
    parts.append(f"clock within {max(abs(bound) for clock in clocks for bound in clock):.1f} s")
    return ", ".join(parts)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
