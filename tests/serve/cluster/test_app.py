"""The arguments of a server, the Serve configuration, and the deployments' own code."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from pydantic import ValidationError
from ray.serve._private.build_app import build_app as unfold
from ray.serve.schema import ServeDeploySchema
from safetensors.torch import load
from torch import Tensor

from ddm_ray.cli import main
from ddm_ray.config import Precision, load_recipe
from ddm_ray.core.condition import Text
from ddm_ray.errors import RunError, SamplingError, ServeError
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import ExpertCall
from ddm_ray.sampling.serialization import pack_call
from ddm_ray.serve.cluster.app import build_app
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.cluster.codec import from_arrays, to_arrays
from ddm_ray.serve.cluster.server import last_error
from ddm_ray.serve.engine.versions import Versions
from ddm_ray.serve.http.guard import Limits
from tests.random_run import make_data, make_run
from tests.serve.conftest import replica_of

MIXTURE = Path(__file__).parents[3] / "serving" / "mixture.yaml"


def test_an_unfinished_run_says_what_is_missing(tmp_path: Path) -> None:
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny"))
    with pytest.raises(ServeError, match=r"has no partition yet; first make rows$"):
        build_app(ServeArgs(run=run.url))
    run = make_data(str(tmp_path / "data"), num_rows=40)
    missing = r"no expert of .*/data has published weights yet; make experts/000 and the other models$"
    with pytest.raises(ServeError, match=missing):
        build_app(ServeArgs(run=run.url))


def test_a_relative_path_that_leads_nowhere_says_so() -> None:
    with pytest.raises(RunError, match="give 'runs/nowhere' as an absolute path"):
        build_app(ServeArgs(run="runs/nowhere"))


def test_arguments_are_checked() -> None:
    with pytest.raises(ValidationError, match="runn"):
        ServeArgs.model_validate({"runn": "/x", "run": "/x"})


def test_every_field_is_an_option_of_the_command_line() -> None:
    done = CliRunner().invoke(main, ["serve", "--help"])
    assert done.exit_code == 0
    for name, field in ServeArgs.model_fields.items():
        assert field.description
        assert (f"--{name.replace('_', '-')} " in done.output) is (name not in ("run", "local"))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--resident", "1"], "error: resident: Input should be greater than or equal to 2, got 1\n"),
        (["--placement", "multiplexed", "--compile"], "error: compile: multiplexed experts aren't compiled"),
    ],
)
def test_a_bad_option_is_one_line(tiny_run: Run, options: list[str], line: str) -> None:
    done = CliRunner().invoke(main, ["serve", tiny_run.url, "--device", "cpu", *options])
    assert done.exit_code == 1
    assert line in done.output and "Traceback" not in done.output


def test_mixture_yaml_names_exactly_the_deployments_of_four_experts(tmp_path: Path) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(MIXTURE.read_text()))
    (application,) = config.applications
    args = ServeArgs.model_validate(application.args)
    assert (args.run, args.placement) == ("runs/digits", "per-expert")
    assert load_recipe("digits").partition.num_clusters == 4
    run = make_run(str(tmp_path / "run"), "digits", num_rows=40)
    built = unfold(build_app(args.model_copy(update={"run": run.url})), name="ddm")
    names = {deployment.name for deployment in built.deployments}
    assert names == {"expert-000", "expert-001", "expert-002", "expert-003", "api"}
    assert [deployment.name for deployment in application.deployments] == [*sorted(names - {"api"}), "api"]
    assert built.ingress_deployment_name == "api"
    assert config.http_options.host == "127.0.0.1"
    for deployment in application.deployments:
        scaling = deployment.autoscaling_config
        assert scaling["target_ongoing_requests"] < deployment.max_ongoing_requests


@pytest.mark.parametrize(
    ("placement", "dense", "replicas", "num_parts"),
    [
        ("colocated", None, 3, 3),
        ("multiplexed", None, 1, 1),
        ("per-expert", None, 2, 4),
        ("colocated", "monolith", 2, 3),
        ("per-expert", "monolith", 1, 4),
    ],
)
def test_gpu_shares_of_all_parts_fit_one_gpu(
    tiny_run: Run, placement: str, dense: str | None, replicas: int, num_parts: int
) -> None:
    args = ServeArgs(run=tiny_run.url, device="cuda", placement=placement, dense=dense, replicas=replicas)
    built = unfold(build_app(args), name="ddm")
    shares = [
        deployment.ray_actor_options.get("num_gpus", 0)
        for deployment in built.deployments
        for _ in range(deployment._deployment_config.num_replicas)
    ]
    assert len(shares) == num_parts and 0.99 < sum(shares) <= 1
    assert shares.count(0) == (replicas if placement == "per-expert" else 0)


def test_origins_reach_the_guard_as_browsers_write_them(tiny_run: Run) -> None:
    args = ServeArgs(run=tiny_run.url, allow_origin=("http://localhost:3000/", "*"))
    (ingress,) = unfold(build_app(args), name="ddm").deployments
    (limits,) = (each for each in ingress.init_args if isinstance(each, Limits))
    assert limits.origins == ("http://localhost:3000", "*")


def call(run: Run, cluster: int, method: str, *arguments: Any, precision: Precision = "fp32") -> Any:
    """The answer of an expert's replica, by its newest weights."""

    async def answer() -> Any:
        replica = await replica_of(run, cluster, precision=precision)
        return await getattr(replica, method)(*arguments, Versions(run).newest().pair(cluster))

    return asyncio.run(answer())


def velocity(run: Run, asked: ExpertCall, precision: Precision = "fp32") -> Tensor:
    """The answer of the expert's replica to a call."""
    return load(call(run, asked.expert, "velocity", pack_call(asked), precision=precision))["velocity"]


def some_call() -> ExpertCall:
    """Five rows for expert 1, one of them without a class."""
    return ExpertCall(1, torch.randn(5, 1, 8, 8), torch.rand(5), torch.tensor([0, 3, 9, 10, 1]))


def test_a_replica_in_bf16_answers_in_fp32(tiny_run: Run) -> None:
    asked = some_call()
    low, right = (velocity(tiny_run, asked, precision) for precision in ("bf16", "fp32"))
    assert low.dtype == right.dtype == torch.float32
    assert 0 < (low - right).square().mean() ** 0.5 < 0.02 * right.square().mean() ** 0.5


def test_a_replica_that_cant_start_is_told_by_its_last_line() -> None:
    """Serve's words for it, shortened."""
    before = 'The deployment failed to start 2 times in a row. Error:\nray::ServeReplica\n  File "x.py", line 1\n'
    ours = "ddm_ray.errors.ServeError: expert can't be compiled: no compiler; install one (compile)\n"
    assert last_error(before + ours) == "expert can't be compiled: no compiler; install one (compile)"
    assert last_error(before + "RuntimeError: CUDA: none") == "RuntimeError: CUDA: none"


def test_bytes_that_are_no_rows_are_refused(tiny_run: Run) -> None:
    with pytest.raises(SamplingError, match="these bytes are no trajectories"):
        call(tiny_run, 0, "run", b"nothing", None, None)


@pytest.mark.parametrize("pooled", [True, False])
def test_a_text_crosses_as_arrays(pooled: bool) -> None:
    text = Text(torch.randn(2, 3, 4), torch.tensor([[True, True, False]] * 2), torch.randn(2, 5) if pooled else None)
    back = from_arrays(to_arrays(text))
    assert torch.equal(back.tokens_BLE, text.tokens_BLE) and torch.equal(back.mask_BL, text.mask_BL)
    assert (back.pooled_BP is None) == (not pooled) and (not pooled or torch.equal(back.pooled_BP, text.pooled_BP))
