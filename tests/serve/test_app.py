"""What is checked before anything starts, the Serve configuration, and the deployments' own code."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError
from ray.serve._private.build_app import build_app as unfold
from ray.serve.schema import ServeDeploySchema

from ddm_ray.config import SamplingSettings, load_recipe
from ddm_ray.errors import RunError, SamplingError, ServeError
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.sampling.driver import sample
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import load_model, mixture_info
from ddm_ray.serve.app import ServeArgs, build_app, serve_run
from ddm_ray.serve.deployments import ExpertReplica, RouterReplica
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.run import Run
from tests.random_run import make_run

MIXTURE = Path(__file__).parents[2] / "serving" / "mixture.yaml"


def test_a_port_in_use_is_told_before_anything_starts(tiny_run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port} on 127.0.0.1 is in use; choose another"):
            serve_run(tiny_run.url, port)


@pytest.mark.parametrize(
    ("host", "port"), [("203.0.113.1", 8000), ("no.such.host.invalid", 8000), ("127.0.0.1", 70000)]
)
def test_an_impossible_address_is_told(tiny_run: Run, host: str, port: int) -> None:
    with pytest.raises(ServeError, match=f"can't listen on {host} port {port}"):
        serve_run(tiny_run.url, port, host)


def test_an_unfinished_run_says_what_is_missing(tmp_path: Path) -> None:
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny"))
    with pytest.raises(ServeError, match=r"has no partition, experts/000, experts/001, router yet; make partition$"):
        build_app(ServeArgs(run=run.url))


def test_one_missing_expert_is_named_with_its_command(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), num_rows=40)
    run.store.delete("experts/001")
    with pytest.raises(ServeError, match=r"has no experts/001 yet; make experts/001$"):
        build_app(ServeArgs(run=run.url))


def test_a_relative_path_that_leads_nowhere_says_so() -> None:
    with pytest.raises(RunError, match="give 'runs/nowhere' as an absolute path"):
        build_app(ServeArgs(run="runs/nowhere"))


def test_arguments_are_checked() -> None:
    with pytest.raises(ValidationError, match="runn"):
        ServeArgs.model_validate({"runn": "/x", "run": "/x"})


def test_mixture_yaml_names_exactly_the_deployments_of_four_experts(tmp_path: Path) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(MIXTURE.read_text()))
    (application,) = config.applications
    assert ServeArgs.model_validate(application.args).run == "runs/digits"
    assert load_recipe("digits").partition.num_clusters == 4
    run = make_run(str(tmp_path / "run"), "digits", num_rows=40)
    built = unfold(build_app(ServeArgs(run=run.url)), name="ddm")
    names = {deployment.name for deployment in built.deployments}
    assert names == {"expert-000", "expert-001", "expert-002", "expert-003", "router", "api"}
    assert [deployment.name for deployment in application.deployments] == [
        *sorted(names - {"router", "api"}),
        "router",
        "api",
    ]
    assert built.ingress_deployment_name == "api"
    assert config.http_options.host == "127.0.0.1"
    for deployment in application.deployments:
        scaling = deployment.autoscaling_config
        assert scaling["target_ongoing_requests"] < deployment.max_ongoing_requests


def test_gpu_shares_of_all_parts_fit_one_gpu(tiny_run: Run) -> None:
    built = unfold(build_app(ServeArgs(run=tiny_run.url, device="cuda")), name="ddm")
    shares = [deployment.ray_actor_options.get("num_gpus", 0) for deployment in built.deployments]
    assert 0.99 < sum(shares) <= 1 and shares.count(0) == 1


def test_an_expert_by_itself_samples_what_the_mixture_samples_with_it(tiny_run: Run) -> None:
    drawn = DDMPipeline.from_run(tiny_run)(class_labels=[4] * 12, seeds=0, output_type="pt")
    for cluster in (0, 1):
        (rows,) = torch.nonzero(drawn.experts_SB[0] == cluster, as_tuple=True)
        request = SampleRequest(
            tuple(rows.tolist()),
            torch.full((len(rows),), 4),
            SamplingSettings(steps=10, strategy="oracle"),
            torch.full((len(rows),), cluster),
        )
        result = ExpertReplica(tiny_run.url, cluster, "cpu").sample(request)
        assert (result.experts_SB == cluster).all() and result.num_expert_rows == 10 * len(rows)
        unit = ((result.images_BCHW + 1) / 2).clamp(0, 1)
        assert len(rows) and torch.allclose(unit, drawn.images[rows], atol=1e-5)


def test_velocity_and_logits_are_the_models_own(tiny_run: Run) -> None:
    x_BCHW, t_B, label_B = torch.randn(5, 1, 8, 8), torch.rand(5), torch.tensor([0, 3, 9, 10, 1])
    arrays = [part.numpy() for part in (x_BCHW, t_B, label_B)]
    x_before = x_BCHW.clone()
    with torch.inference_mode():
        velocity = load_model(tiny_run, Artifact("experts/001"))(x_BCHW, t_B, label_B)
        logits = load_model(tiny_run, Artifact("router"))(x_BCHW, t_B, label_B)
    assert np.allclose(ExpertReplica(tiny_run.url, 1, "cpu").velocity(*arrays), velocity, atol=1e-6)
    assert np.allclose(RouterReplica(tiny_run.url, "cpu").logits(*arrays), logits, atol=1e-6)
    assert torch.equal(x_BCHW, x_before)


def test_concurrent_calls_of_one_replica_do_not_mix(tiny_run: Run) -> None:
    info = mixture_info(tiny_run).with_available(torch.tensor([True, False]))
    model = load_model(tiny_run, Artifact("experts/000"))
    expert = ExpertReplica(tiny_run.url, 0, "cpu")

    def request(seed: int) -> SampleRequest:
        settings = SamplingSettings(steps=6, guidance_scale=1.0 + seed % 3, strategy="oracle", solver="heun")
        return SampleRequest((seed,), torch.tensor([seed % 10]), settings, torch.tensor([0]))

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(expert.sample, map(request, range(24))))
    for seed, result in enumerate(together):
        alone = sample(request(seed).changed(strategy="once"), info, [model, None])
        assert (result.images_BCHW - alone.images_BCHW).abs().max() < 1e-5


def test_an_expert_refuses_images_of_other_clusters(tiny_run: Run) -> None:
    settings = SamplingSettings(steps=1, strategy="oracle")
    with pytest.raises(SamplingError, match="the expert of a wanted cluster isn't there"):
        ExpertReplica(tiny_run.url, 0, "cpu").sample(
            SampleRequest((1, 2), torch.tensor([3, 3]), settings, torch.tensor([0, 1]))
        )
