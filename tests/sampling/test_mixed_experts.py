"""A run whose experts differ: a small one that predicts noise on another path beside one of velocities, all trained.

All that follows training takes them: images, exports, offloading, evaluations, engines of a server, plans.
"""

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from ddm_ray import cli
from ddm_ray.cli.train import most_work_first
from ddm_ray.core.flow import Flow
from ddm_ray.core.snr import VelocityField
from ddm_ray.evaluate.run import evaluate
from ddm_ray.islands.needs import needs_of
from ddm_ray.islands.run_view import work_of
from ddm_ray.models.flops import training_flops_per_row
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import MONOLITH, ROUTER, STUDENT, expert, wanted_of
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import load_trained, mixture_info
from ddm_ray.serve.engine.computing import Computing, Networks, expert_costs
from ddm_ray.serve.engine.local_runner import colocated_runners, multiplexed_runners
from ddm_ray.serve.engine.segments import SegmentSampler
from ddm_ray.serve.engine.versions import Versions
from ddm_ray.train.job import train_job
from ddm_ray.train.teachers import load_teachers, offloaded_teachers
from tests.random_run import make_data
from tests.text_run import make_text_run

pytestmark = pytest.mark.contract

SETTINGS = (
    "expert.model.analytic_skip=",
    "partition.numbers=[1, 4]",
    "experts={4: {model: {width: 16}, flow: {prediction: noise, path: cosine}, train: {batch: 8, steps: 9}}}",
    "expert.train.steps=6",
    "expert.train.batch=4",
    "router.train.steps=6",
    "router.train.batch=8",
    "student.train={steps: 5, batch: 6}",
    "evaluate.strategies=[once, full]",
    "evaluate.num_samples=40",
    "sample.steps=3",
)
USUAL, OTHER = 1, 4
STRATEGIES = ("once", "top-1", "full")


@pytest.fixture(scope="module")
def run(world_of_one: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    from ddm_ray.train import worker

    run = make_data(str(tmp_path_factory.mktemp("mixed") / "run"), settings=SETTINGS, num_rows=120)
    for artifact in wanted_of(run.config, ["monolith", "student"]):
        worker.train(run.url, artifact, TrainPlacement())
    return run


def images(pipeline: DDMPipeline, strategy: str) -> Tensor:
    output = pipeline(class_labels=list(range(8)), seeds=range(8), strategy=strategy, output_type="pt")
    assert isinstance(output.images, Tensor)
    return output.images


def test_each_expert_is_its_own_network_and_counts_its_own_cost(run: Run) -> None:
    usual, other = (load_trained(run, expert(each)) for each in (USUAL, OTHER))
    assert isinstance(other, VelocityField) and other.flow == Flow("cosine", "noise")
    assert not isinstance(usual, VelocityField)
    for cluster, steps, batch in ((USUAL, 6, 4), (OTHER, 9, 8)):
        job, info = train_job(run, expert(cluster)), run.require(expert(cluster)).info
        flops = steps * batch * training_flops_per_row(job.build(), (1, 8, 8))
        assert (info["step"], info["training_flops"], work_of(run)(expert(cluster))) == (steps, flops, flops)
    assert work_of(run)(expert(OTHER)) < work_of(run)(MONOLITH)
    order = most_work_first(run, [ROUTER, expert(OTHER), expert(USUAL), MONOLITH])
    assert order == [MONOLITH, *sorted([expert(OTHER), expert(USUAL), ROUTER], key=work_of(run), reverse=True)]
    assert train_job(run, MONOLITH).batch == 12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_images_are_the_same_wherever_the_experts_are(run: Run, tmp_path: Path, strategy: str) -> None:
    pipeline = DDMPipeline.from_run(run)
    right = images(pipeline, strategy)
    pipeline.save_pretrained(tmp_path / "exported")
    for offload in (None, "host", "disk"):
        assert torch.equal(images(DDMPipeline.from_run(run, offload=offload), strategy), right)
        reloaded = DDMPipeline.from_pretrained(tmp_path / "exported", offload=offload)
        assert torch.equal(images(reloaded, strategy), right)
    config = json.loads((tmp_path / f"exported/expert_{OTHER:03d}/config.json").read_text())
    assert (config["width"], config["flow"]) == (16, {"path": "cosine", "prediction": "noise"})


@pytest.mark.parametrize("resident", [None, 2])
def test_engines_of_a_server_paint_the_same(run: Run, resident: int | None) -> None:
    info, version = mixture_info(run), Versions(run).newest()
    networks = Networks(run.config.data, info, Computing(max_rows=4, resident=resident))
    place = colocated_runners if resident is None else multiplexed_runners
    runners = place(info, version, networks, run.config.data)
    sampler = SegmentSampler(info, runners.of_expert, runners.mixing)
    try:
        for strategy in STRATEGIES:
            request = SampleRequest(tuple(range(8)), torch.arange(8), run.config.sample.changed(strategy=strategy))
            painted = asyncio.run(sampler.sample(request)).result.images_BCHW
            right = images(DDMPipeline.from_run(run), strategy)
            torch.testing.assert_close((painted / 2 + 0.5).clamp(0, 1), right, atol=1e-4, rtol=0)
    finally:
        runners.engine.close()


def test_a_multiplexer_learns_the_speed_of_each_form(run: Run) -> None:
    info, version = mixture_info(run), Versions(run).newest()
    networks = Networks(run.config.data, info, Computing(max_rows=2, resident=2))
    engines = multiplexed_runners(info, version, networks, run.config.data).engine
    large, small = expert_costs(run.config)
    assert large > 2 * small and large + small == pytest.approx(2)
    try:
        speeds = [each.scheduler.speed for each in engines.of_expert]
        assert speeds[0] is not speeds[1] and all(speed.seconds(1) > 0 for speed in speeds)
    finally:
        engines.close()


def test_teachers_predict_what_the_student_learns(run: Run) -> None:
    """Each row's own expert, asked at the row's own signal-to-noise ratio, as a velocity of the linear path."""
    x_BCHW, t_B, label_B = torch.randn(6, 1, 8, 8), torch.linspace(0.1, 0.9, 6), torch.arange(6)
    right = [load_trained(run, artifact)(x_BCHW, t_B, label_B) for artifact in run.experts]
    with offloaded_teachers(run, None, torch.device("cpu"), 2) as offloaded:
        for teachers in (load_teachers(run, None, torch.device("cpu")), offloaded):
            for number, expected in enumerate(right):
                field = teachers.experts[number]
                assert field is not None
                torch.testing.assert_close(field(x_BCHW, t_B, label_B), expected, atol=1e-5, rtol=1e-4)
    asked = [spec["config"]["width"] for spec, _ in train_job(run, STUDENT).asked]
    assert asked == [32, 16] and sum(share for _, share in train_job(run, STUDENT).asked) == 1


def test_an_evaluation_compares_only_what_is_alike(run: Run) -> None:
    evaluate(run)
    folder = Path(run.url) / "eval/demo"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["curves"].keys() == {f"expert {USUAL}", f"expert {OTHER}", "router", "monolith", "student"}
    jobs = {job["job"]: job for job in metrics["training"]["jobs"]}
    assert jobs[expert(USUAL)]["parameters"] > jobs[expert(OTHER)]["parameters"]
    assert metrics["training"]["experts_flops"] == jobs[expert(USUAL)]["flops"] + jobs[expert(OTHER)]["flops"]
    losses = {row["model"]: row["loss"] for row in metrics["heldout_loss"]}
    assert {"monolith", "full", "own cluster"} <= losses.keys() and all(map(math.isfinite, losses.values()))
    assert (folder / "report.html").is_file()


def test_networks_of_two_kinds_make_one_mixture(tmp_path: Path) -> None:
    """A DiT of ours beside a transformer of diffusers, on texts and latents."""
    arguments = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "pos_embed_max_size": 4}
    other = {"name": "SD3Transformer2DModel", "arguments": {**arguments, "caption_projection_dim": 16}}
    run = make_text_run(tmp_path, (f"experts={{1: {{model: {json.dumps(other)}, flow: {{path: cosine}}}}}}",))
    asked = {"seeds": range(4), "output_type": "latent", "num_inference_steps": 3}
    pipeline = DDMPipeline.from_run(run)
    pipeline.save_pretrained(tmp_path / "saved")
    for strategy in ("full", "top-1"):
        right = pipeline(["a cat"] * 4, strategy=strategy, **asked).images
        for again in (
            DDMPipeline.from_run(run, offload="host"),
            DDMPipeline.from_pretrained(tmp_path / "saved", offload="disk"),
        ):
            assert torch.equal(again(["a cat"] * 4, strategy=strategy, **asked).images, right)
    index = json.loads((tmp_path / "saved/model_index.json").read_text())
    assert [index[f"expert_00{number}"][1] for number in (0, 1)] == ["DiT", "DiffusersTransformer"]


def test_a_plan_has_a_line_for_each_kind_of_expert(run: Run, tmp_path: Path) -> None:
    begun = Run.create(str(tmp_path / "begun"), run.config)
    needs = {need.name: need for need in needs_of(begun, wanted_of(begun.config))}
    assert needs.keys() == {f"expert {USUAL}", f"expert {OTHER}", "router"}
    assert needs[f"expert {USUAL}"].parameters > 3 * needs[f"expert {OTHER}"].parameters
    (student,) = needs_of(begun, [STUDENT])
    held = sum(need.parameters for name, need in needs.items() if name != ROUTER)
    assert student.teachers_bytes(False, None) == 4 * held
    printed = CliRunner().invoke(cli.main, ["init", str(tmp_path / "printed"), "--recipe", "tiny", *_set(SETTINGS)])
    lines = [line.split()[:3] for line in printed.output.splitlines()]
    assert ["expert", str(USUAL), "1"] in lines and ["expert", str(OTHER), "1"] in lines, printed.output


def _set(settings: tuple[str, ...]) -> Iterator[str]:
    for setting in settings:
        yield from ("--set", setting)
