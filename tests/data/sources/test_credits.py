"""Credits for pictures of others stand wherever what was learnt from them is shown."""

from pathlib import Path

import pytest

from ddm_ray.config import load_recipe
from ddm_ray.config.data import CREDITS, TWEMOJI
from ddm_ray.data.partition.stage import partition
from ddm_ray.evaluate.report import sentences
from ddm_ray.evaluate.run import evaluate, read_metrics
from ddm_ray.sampling.card import model_card
from ddm_ray.serve.answers import model_entry
from ddm_ray.storage.graph import REPORT
from tests.data.rows import commit_rows
from tests.random_run import make_run


@pytest.mark.parametrize(
    ("source", "credit"),
    [
        ("emoji", TWEMOJI),
        ("domains:500", TWEMOJI),
        ("patches:50", "China by danielbuechele and flower by vultilion, CC BY 2.0"),
        ("digits", None),
    ],
)
def test_whoever_shows_samples_credits_the_pictures(tmp_path: Path, source: str, credit: str | None) -> None:
    settings = (f"data.source={source}", "evaluate={num_samples: 8, strategies: [once]}", "sample.steps=2")
    run = make_run(str(tmp_path / "run"), num_rows=60, settings=settings)
    evaluate(run, "one")
    shown = {
        "card": model_card(run, "monolith"),
        "evaluation": " ".join(sentences(read_metrics(run, "one"))),
        "server": str(model_entry("emoji", run.config, 2, run.config.sample)["credit"]),
    }
    assert {name for name, text in shown.items() if (credit or "CC BY") in text} == (set(shown) if credit else set())


def test_the_report_of_a_partition_credits_the_pictures(tmp_path: Path) -> None:
    run = commit_rows(str(tmp_path / "run"), ("data.source=emoji", "data.num_classes=9"))
    partition(run)
    assert TWEMOJI in run.read(REPORT, "report.html").decode()


def test_every_packaged_source_has_a_credit() -> None:
    for name in ("emoji", "domains", "patches"):
        assert load_recipe("tiny", (f"data.source={name}",)).data.credit == CREDITS[name]
    assert load_recipe("tiny", ("data.source=/photos/emoji",)).data.credit is None
