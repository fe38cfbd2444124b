"""What a pipeline of many experts asks for and loads: as much for each as of few, and nothing of those unused."""

from collections import Counter
from pathlib import Path

import pytest

from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run import graph
from ddm_ray.run.run import Run
from ddm_ray.sampling.offload import OffloadedToDisk
from tests.random_run import make_run
from tests.store_meter import StoreMeter

pytestmark = pytest.mark.contract
FEW, MANY = 4, 12


def run_of(folder: Path, experts: int) -> str:
    settings = (f"partition.num_clusters={experts}", f"expert.train.global_batch={experts}")
    return make_run(str(folder / f"{experts}"), settings=settings, num_rows=20 * experts).url


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return {experts: run_of(tmp_path_factory.mktemp("runs"), experts) for experts in (FEW, MANY)}


@pytest.mark.parametrize(("offload", "each"), [("disk", 2), (None, 6)])
def test_an_expert_more_costs_few_requests(
    urls: dict[int, str], monkeypatch: pytest.MonkeyPatch, offload: str | None, each: int
) -> None:
    """Its manifest and that of its shard; and once more with its two files, if it is loaded at first."""
    requests = {}
    for experts, url in urls.items():
        with monkeypatch.context() as patch:
            meter = StoreMeter(patch)
            DDMPipeline.from_run(url, offload=offload)
            requests[experts] = meter.requests
    more = requests[MANY] - requests[FEW]
    assert more == Counter(get=each * (MANY - FEW))


def test_the_list_of_experts_is_made_once(urls: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    made, experts_of = [], graph.experts_of
    monkeypatch.setattr(graph, "experts_of", lambda config: made.append(config) or experts_of(config))
    run = Run.open(urls[MANY])
    DDMPipeline.from_run(run, offload="disk")("3", num_images_per_prompt=8, seeds=0, strategy="once")
    assert len(made) == 1


@pytest.mark.parametrize("strategy", ["once", "top-1"])
def test_experts_that_no_image_uses_are_not_read(urls: dict[int, str], strategy: str) -> None:
    pipeline = DDMPipeline.from_run(urls[MANY], offload="disk")
    experts = pipeline.models.experts
    assert isinstance(experts, OffloadedToDisk) and experts.num_fetched == 0
    output = pipeline("3", num_images_per_prompt=2, seeds=0, strategy=strategy, num_inference_steps=1)
    assert experts.num_fetched == len(set(output.routing_SBK.argmax(dim=2).flatten().tolist())) <= 2
    experts.close()
