"""Networks compiled in sizes that are kept: all code is made at first, and answers are the plain networks'."""

import logging
import threading
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor
from torch._inductor import config

from ddm_ray.config import SamplingSettings
from ddm_ray.errors import ServeError
from ddm_ray.run.run import Run
from ddm_ray.sampling import driver
from ddm_ray.sampling.buckets import bucket_sizes
from ddm_ray.sampling.cuda_graphs import Graphs
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import load_models
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.engine import computing
from ddm_ray.serve.engine.computing import Computing, Networks, in_buckets
from ddm_ray.serve.engine.local_runner import local_engine
from ddm_ray.serve.engine.versions import Versions
from tests.counted_graphs import counted_graphs
from tests.models.test_text_condition import CLASSES, NETWORKS, TEXT, perturbed
from tests.pretend_graphs import PretendCUDA
from tests.sampling.test_buckets import call

pytestmark = pytest.mark.contract

MOST = 6
OF = {"expert 0": NETWORKS[0], "expert 1": NETWORKS[0], "router": NETWORKS[1]}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [CLASSES, TEXT], ids=["labels", "texts"])
def test_code_is_made_once_a_size_whatever_calls_come_from_whichever_thread(kind: dict) -> None:
    """For two experts together, and for the router, which is a network of its own shape."""
    plain = {name: perturbed(of, **kind) for name, of in OF.items()}
    answers = list[tuple[str, int, Tensor]]()
    torch.set_num_threads(2)
    with counted_graphs() as graphs:
        fields = in_buckets({name: perturbed(of, **kind) for name, of in OF.items()}, call(kind, MOST), None)
        assert graphs.num == 2 * len(bucket_sizes(MOST)) > 8 and not graphs.breaks

        def serve() -> None:
            torch.set_num_threads(1)  # as engines do
            # Code is made for tensors of inference mode and for others apart; the server has both.
            for count, inference in product((*range(1, 2 * MOST), 2, 5), (False, True)):
                with torch.inference_mode(inference):
                    inputs = call(kind, count)
                answers.extend((name, count, field(*inputs)) for name, field in fields.items())

        thread = threading.Thread(target=serve)
        with torch.compiler.set_stance("fail_on_recompile"):
            thread.start()
            thread.join(60)
    assert len(answers) == 2 * 3 * (2 * MOST + 1)
    with torch.inference_mode():
        for name, count, answer in answers:
            torch.testing.assert_close(answer, plain[name](*call(kind, count)), rtol=0, atol=1e-5)


def test_an_engine_of_compiled_networks_makes_no_code_for_requests(
    tiny_run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any size, guided or not, with or without the router, in its own thread; what is made is told before."""
    monkeypatch.setattr(computing, "PROGRESS_S", 0.0)
    models = load_models(tiny_run)
    asked = [
        SampleRequest(
            tuple(range(number, number + count)),
            torch.arange(count) % 10,
            SamplingSettings(strategy=strategy, steps=3, guidance_scale=scale),
        )
        for number, (count, strategy, scale) in enumerate(
            [(1, "once", 1.0), (2, "full", 2.0), (3, "top-1", 2.0), (5, "full", 3.0), (1, "top-2", 1.5)]
        )
    ]
    with caplog.at_level(logging.INFO, "ray.serve"), counted_graphs() as graphs:
        networks = Networks(tiny_run.config.data, models.info, Computing(max_rows=3, compile=True))
        version = Versions(tiny_run).newest()
        engine = local_engine(models.info, version, [0, 1], networks, tiny_run.config.data)
        assert graphs.num == 2 * len(bucket_sizes(6))
        lines = [line for line in caplog.messages if line.startswith("compiled")]
        assert len(lines) == 3 * 5 and lines[-1].startswith("compiled 5 of 5 calls in ")
        assert lines[0].endswith("lastly experts/000 for 6 rows") and lines[-1].endswith("lastly router for 1 rows")
        with torch.compiler.set_stance("fail_on_recompile"):
            futures = [engine.submit(start(each, models.info)) for each in asked]
            results = [future.result(60).rows.result() for future in futures]
        engine.close()
    for each, result in zip(asked, results, strict=True):
        right = driver.sample(each, models.info, models.experts, models.router)
        torch.testing.assert_close(result.images_BCHW, right.images_BCHW, rtol=1e-5, atol=1e-5)


def test_on_a_gpu_every_size_of_every_network_is_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, plain = PretendCUDA(monkeypatch), perturbed(**CLASSES)
    with counted_graphs():
        largest = call(CLASSES, 3)
        fields = in_buckets({name: perturbed(of, **CLASSES) for name, of in OF.items()}, largest, Graphs(*largest))
        assert len(cuda.captures) == len(OF) * len(bucket_sizes(3))
        answer = fields["expert 1"](*call(CLASSES, 5))
    with torch.inference_mode():
        torch.testing.assert_close(answer, plain(*call(CLASSES, 5)), rtol=0, atol=1e-5)


def test_without_a_compiler_it_is_said_what_to_do() -> None:
    with config.patch({"cpp.cxx": (None, "/no/such/compiler"), "force_disable_caches": True}):
        torch.compiler.reset()
        with pytest.raises(ServeError, match=r"expert can't be compiled: .*No working C\+\+ compiler.*g\+\+"):
            in_buckets({"expert": perturbed(**CLASSES)}, call(CLASSES, 1), None)
    torch.compiler.reset()
