"""What a plan says beforehand: of the paper's large run, of islands whose speed is unknown, and of what is left."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ddm_ray import cli
from ddm_ray.config import load_recipe
from ddm_ray.islands.needs import needs_of
from ddm_ray.islands.plan import RunPlan, plan, schedule
from ddm_ray.islands.presence import PresenceKeeper
from ddm_ray.islands.speeds import by_peak, left_by_trainings
from ddm_ray.islands.traffic import num_states
from ddm_ray.models.flops import training_flops_per_row
from ddm_ray.placement import Island, TrainPlacement
from ddm_ray.storage.attempts import claim
from ddm_ray.storage.graph import ROUTER, STUDENT, Artifact, expert, experts_of
from ddm_ray.storage.run import Run
from ddm_ray.train.estimate import bytes_a_parameter
from ddm_ray.train.saving import SaveClock
from tests.random_run import make_data
from tests.storage.jobs import beat

DAY = 86400
NODE = Island(
    gpu="NVIDIA H100 80GB HBM3", price_per_hour=20.0, train=TrainPlacement(workers=8, use_gpu=True, zero_stage=1)
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    """The experts of ddm-24b on eight nodes of eight H100, the last of which saves its states each hour."""
    run = Run.create(str(tmp_path_factory.mktemp("large") / "run"), load_recipe("ddm-24b"))
    rare = NODE.model_copy(update={"train": NODE.train.model_copy(update={"checkpoint_minutes": 60.0})})
    islands = {f"node-{number}": NODE for number in range(7)} | {"rare": rare}
    speeds = {name: by_peak(island, "bf16") for name, island in islands.items()}
    return plan(needs_of(run, experts_of(run.config)), islands, speeds)


def test_the_papers_large_run(large: RunPlan) -> None:
    (need,) = large.needs
    assert need.flops == pytest.approx(0.77e21, rel=0.01)
    assert need.state_bytes == pytest.approx(16 * need.parameters, rel=1e-3) == pytest.approx(48e9, rel=0.01)
    assert need.weights_bytes == pytest.approx(4 * need.parameters, rel=2e-3)
    assert large.slow.seconds / DAY == pytest.approx(3.7, abs=0.05)
    assert large.fast.seconds / DAY == pytest.approx(2.2, abs=0.05)
    assert all(len(share.artifacts) == 1 for share in large.slow.shares.values())
    each = large.slow.trainings["node-0"]["expert"]
    assert each.bytes_a_day == pytest.approx(13.9e12, rel=0.02), "48 GB each 5 minutes"
    assert large.slow.trainings["rare"]["expert"].bytes_a_day < each.bytes_a_day / 10
    assert large.room(NODE) == 3 * need.state_bytes
    by_stage = need.memory(8, use_gpu=True)
    assert by_stage[0] is None, "in bf16"
    assert by_stage[1:] == [pytest.approx(need.parameters * size) for size in (4 + 22 / 8, 2 + 24 / 8, 26 / 8)]


def test_traffic_that_costs_too_much_is_warned_of_with_the_remedy(large: RunPlan) -> None:
    price = large.slow.shares["node-0"].price(NODE)
    assert price == pytest.approx(20 * 24 * 3.74, rel=0.01)
    egress = large.slow.shares["node-0"].egress(0.09)
    assert egress == pytest.approx(0.09 * 13.87e3 * 3.74, rel=0.02)
    lines = {line.partition(":")[0]: line for line in large.warnings(0.09)}
    assert len(lines) == 8
    assert "set checkpoint_minutes: 60" in lines["node-0"] and f"{egress / price:.0%}" in lines["node-0"]
    assert "checkpoint_minutes" not in lines["rare"] and "storage near" in lines["rare"]
    assert large.warnings(0.09 * 0.09 * price / egress) == [], "below a tenth"
    assert len(large.warnings(0.09 * 0.11 * price / egress)) == 7


def naive_states(seconds: float, steps: int, minutes: float, every: int | None, young: bool) -> int:
    """States of a training whose every step is looked at."""
    clock, states = SaveClock(minutes, 0.0, young), 0
    for step in range(1, steps):
        now = step * seconds / steps
        if clock.due(now) or (every and step % every == 0):
            clock.saved(now)
            clock.written(now)
            states += 1
    return states + 1


@pytest.mark.parametrize("young", [True, False])
@pytest.mark.parametrize("seconds", [0.5, 5.1, 60.0, 5000.0])
@pytest.mark.parametrize(("minutes", "every"), [(10.0, None), (1.0, 70), (float("inf"), 70), (0.05, None)])
def test_states_are_as_many_as_the_clock_saves(seconds: float, minutes: float, every: int | None, young: bool) -> None:
    states = naive_states(seconds, 1000, minutes, every, young)
    assert num_states(seconds, 1000, minutes, (every, None), young) == states


def artifacts(number: int) -> list[Artifact]:
    return [expert(cluster) for cluster in range(number)]


def test_the_schedule_is_the_islands_own() -> None:
    """A slow island leaves the last job to a fast one that will be done with it sooner."""
    seconds = {artifact: {"fast": 10.0, "slow": 25.0} for artifact in artifacts(3)}
    done = schedule(seconds)
    assert [end for _, end in done["fast"]] == [10.0, 20.0] and [end for _, end in done["slow"]] == [25.0]
    seconds = {artifact: {"fast": 10.0, "slow": 35.0} for artifact in artifacts(3)}
    assert [len(schedule(seconds)[name]) for name in ("fast", "slow")] == [3, 0]
    assert schedule({}) == {}


def test_many_islands_finish_within_a_fifth_of_the_least_time() -> None:
    speeds = {f"island-{number}": 1.0 + number % 16 for number in range(8)}
    seconds = {artifact: {name: 100 / speed for name, speed in speeds.items()} for artifact in artifacts(32)}
    done = schedule(seconds)
    assert sorted(artifact for jobs in done.values() for artifact, _ in jobs) == artifacts(32)
    assert max(jobs[-1][1] for jobs in done.values() if jobs) <= 1.2 * 32 * 100 / sum(speeds.values())


@pytest.fixture
def tiny(tmp_path: Path) -> Run:
    return make_data(str(tmp_path / "run"), num_rows=60)


def test_speeds_are_those_that_trainings_left(tiny: Run) -> None:
    """By kind and island; presences, which are rough, count where no heartbeat does; nonsense nowhere."""
    for artifact, island, flops in (
        (expert(0), "north", 4e9),
        (expert(1), "north", 6e9),
        (Artifact("router"), "south", "fast"),
    ):
        beat(claim(tiny.store, artifact, {"island": island}), 1, 1, flops_per_second=flops)
    with (
        PresenceKeeper(tiny.store, "south", speed=2e9, holds=""),
        PresenceKeeper(tiny.store, "north", speed=9e9, holds=""),
    ):
        speeds = left_by_trainings(tiny, [expert(0), expert(1), Artifact("router")])
    assert {name: speed.of("expert") for name, speed in speeds.items()} == {"north": (5e9,) * 2, "south": (2e9,) * 2}


def ddm_plan(tmp_path: Path, islands: str, *arguments: str) -> Result:
    file = tmp_path / "islands.yaml"
    file.write_text(islands)
    return CliRunner().invoke(cli.main, ["plan", str(tmp_path / "run"), "--islands", str(file), *arguments])


TWO = "islands: {known: {gpu: 1e12, workers: 2, price_per_hour: 36}, unknown: {gpu: MI300X}}"


@pytest.mark.usefixtures("tiny")
def test_an_island_of_unknown_speed_is_left_out_by_name(tmp_path: Path) -> None:
    done = ddm_plan(tmp_path, TWO, "--mfu", "50")
    assert done.exit_code == 0, done.output
    assert "unknown is left out: its gpu 'MI300X' isn't known (known are torch's names, numbers of FLOP/s, and B2" in (
        done.output
    )
    assert "V100 PCIe): give --flops unknown=1e15" in done.output
    done = ddm_plan(tmp_path, TWO, "--flops", "unknown=2e12", "--mfu", "50", "--json")
    numbers = json.loads(done.stdout)
    assert numbers["unknown"] == {} and numbers["islands"].keys() == {"known", "unknown"}
    each = numbers["islands"]["known"]["models"]["expert"]["slow"]
    assert each["seconds"] == pytest.approx(numbers["models"]["expert"]["flops"] / (2 * 0.5e12))
    share = numbers["islands"]["known"]["slow"]
    assert share["price"] == pytest.approx(36 / 3600 * share["seconds"])


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--flops", "knwn=1"), "no island 'knwn'"),
        (("--flops", "known=much"), "FLOP/s above 0, as known=1e15"),
        (("--mfu", "0"), "write percents as 30-50"),
        (("--mfu", "90-50"), "write percents as 30-50"),
        (("--island", "third"), "choose one of known, unknown with --island"),
        (("--island", "unknown"), "unknown: its gpu 'MI300X' isn't known (known are"),
        (("--calibrate",), "measures this machine: which island is it; name it with --island NAME"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    done = ddm_plan(tmp_path, TWO, *arguments)
    assert done.exit_code == 1
    assert expected in done.output and done.output.count("\n") == 1


@pytest.mark.usefixtures("tiny")
def test_a_gpu_goes_by_its_short_name(tmp_path: Path) -> None:
    short, long = (f"islands: {{north: {{gpu: {name}}}}}" for name in ("H100", "NVIDIA H100 80GB HBM3"))
    done, other = (json.loads(ddm_plan(tmp_path, text, "--json").stdout) for text in (short, long))
    assert done["seconds"] == other["seconds"]
    assert "1 x 66.9 TFLOP/s (NVIDIA H100 80GB HBM3) at 30" in done["islands"]["north"]["speed"]
    with pytest.raises(LookupError, match=r"^its gpu 'V100' has no peak in bf16$"):
        by_peak(Island(gpu="V100"), "bf16")


@pytest.mark.parametrize("teacher", ["label", "top-2"])
def test_a_students_teachers_take_memory_and_time(tmp_path: Path, teacher: str) -> None:
    settings = ("partition.num_clusters=5", "expert.train.global_batch=40", f"student.teacher={teacher}")
    run = make_data(str(tmp_path / "run"), settings=settings, num_rows=60)
    expert_need, student, router = needs_of(run, [expert(0), STUDENT, ROUTER])
    assert expert_need.memory(1, False, 2) == expert_need.memory(1, False)
    asked = 0 if teacher == "label" else router.parameters
    for use_gpu, size in ((False, 4), (True, 2)):
        alone = bytes_a_parameter(student.job.train.precision, 1, use_gpu)
        for teachers, held in ((None, 5), (2, 2), (9, 5)):
            beside = size * (held * expert_need.parameters + asked)
            with_teachers = [one and one * student.parameters + beside for one in alone]
            assert student.memory(1, use_gpu, teachers) == with_teachers
    own = training_flops_per_row(student.job.build(), run.config.data.shape)
    assert student.flops > own * student.job.batch * student.job.train.steps


def test_what_is_trained_already_is_left_out(tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def left(of: Mapping[str, float]) -> Callable[..., object]:
        return lambda _run, artifact, _files: type("Status", (), {"fraction": of.get(artifact, 0.0)})

    artifacts = experts_of(tiny.config)
    speeds = {"here": by_peak(Island(gpu=1e9), "fp32")}
    monkeypatch.setattr("ddm_ray.islands.needs.status", left({}))
    anew = plan(needs_of(tiny, artifacts), {"here": Island()}, speeds)
    monkeypatch.setattr("ddm_ray.islands.needs.status", left({artifacts[0]: 1.0, artifacts[1]: 0.5}))
    rest = plan(needs_of(tiny, artifacts), {"here": Island()}, speeds)
    assert rest.slow.shares["here"].artifacts == artifacts[1:]
    assert rest.slow.seconds == pytest.approx(anew.slow.seconds / 4)
    assert rest.slow.shares["here"].traffic.written == pytest.approx(anew.slow.shares["here"].traffic.written / 4)
