"""The science study: what it measures is what the product's own evaluation finds, and a killed one goes on."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from ddm_ray.config import load_recipe
from ddm_ray.evaluate.run import evaluate, read_metrics
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.train import worker
from tests.conftest import ROOT

pytestmark = pytest.mark.contract

RENORMALISED = "top-2, not renormalised"
"""Of two experts this is no fault: it is `full`."""
PLAN: dict[str, Any] = {
    "name": "tiny",
    "question": "Does all of it work?",
    "recipe": "digits",
    "settings": [
        *(f"{part}.train.{field}" for part in ("expert", "router") for field in ("warmup_steps=0", "ema_decay=0.5")),
        "expert.model.depth=1",
        "expert.train.condition_dropout=0.3",
        "evaluate.strategies=[once, full]",
    ],
    "conditioned": True,
    "clusters": 2,
    "steps": 8,
    "num_samples": 120,
    "strategies": ["once", "full"],
    "milestones": 2,
    "seeds": {"choosing": [], "reported": [3]},
    "against": "wide/monolith",
    "arms": {
        "base": {"trains": ["experts", "router", "monolith"]},
        "told": {"kind": "told"},
        "k4": {"settings": ["partition.num_clusters=4"], "trains": [], "strategies": []},
        "k4-told": {"kind": "told", "of": "k4"},
        "steps": {"kind": "steps", "strategies": ["once"]},
        "prior": {"kind": "prior"},
        "average": {"kind": "average"},
        "blind": {
            "settings": ["router.train.condition_dropout=1.0"],
            "trains": ["router"],
            "strategies": ["full"],
        },
        "faults": {
            "kind": "faults",
            "of": "blind",
            "strategies": [RENORMALISED, "nucleus-0.9, bound left out", "sample-1, not renormalised", "full"],
        },
        "wide": {"settings": ["expert.model.width=128"], "trains": ["monolith"], "strategies": []},
        "guidance": {"kind": "guidance", "strategies": ["once"], "settings": ["sample.steps=3"]},
        "untold": {"kind": "untold", "strategies": ["once"]},
        "pairs": {"kind": "pairs", "strategies": ["full"]},
        "own-pairs": {"kind": "pairs", "of": "wide", "strategies": []},
        "copies": {"kind": "copies", "of": "wide", "strategies": []},
        "classified": {"kind": "classifier", "strategies": ["once"]},
        "forecast": {"kind": "forecast"},
        "clusters": {"kind": "agreement"},
    },
}


@pytest.fixture
def plans(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("science_plan")


@pytest.fixture
def arms(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("science_arms")


def trained_here(run: Run, artifacts: Iterable[Artifact], placement: TrainPlacement | None = None) -> Run:
    """As `studies.trained`, in this process: another one imports for seconds."""
    for artifact in artifacts:
        worker.train(run.url, artifact, placement or TrainPlacement())
    return run


@pytest.mark.chaos
@pytest.mark.usefixtures("world_of_one")
def test_a_study_measures_what_an_evaluation_does_and_goes_on(
    plans: ModuleType, arms: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "trained", trained_here)
    path, folder = tmp_path / "tiny.yaml", tmp_path / "tiny"
    path.write_text(yaml.safe_dump(PLAN, sort_keys=False))
    plan = plans.Plan.read(str(path))
    ruler = arms.Ruler.of(plan, folder)
    measuring = arms.Measuring.of(plan, folder, 3, ruler)
    results = {arm: measuring.measure(arm) for arm in plan.arms}
    distances = {
        arm: {name: row["frechet"] for name, row in result["candidates"].items()} for arm, result in results.items()
    }
    assert {arm: [*names] for arm, names in distances.items()} == {
        "base": ["monolith", "once", "full"],
        "told": ["told"],
        "k4": [],
        "k4-told": ["told"],
        "steps": ["monolith@4", "once@4"],
        "prior": ["once, by the router", "once, own cluster"],
        "average": ["average"],
        "blind": ["full"],
        "faults": [RENORMALISED, "nucleus-0.9, bound left out", "sample-1, not renormalised", "full"],
        "wide": ["monolith"],
        "guidance": [f"{name}, guidance {scale}" for name in ("monolith", "once") for scale in ("1.5", "2", "3", "5")],
        "untold": ["monolith", "once"],
        "pairs": [],
        "own-pairs": [],
        "copies": [],
        "classified": [f"{name}, classifier {seed}" for seed in range(3) for name in ("held out", "monolith", "once")],
        "forecast": [],
        "clusters": [],
    }
    guided = results["guidance"]["candidates"]["once, guidance 2"]
    assert guided["expert_rows"] == 6, "steps of its own, with a class and without"
    words = [Run.open(str(folder / "3" / arm)).config.data.num_classes or 0 for arm in ("base", "told", "k4-told")]
    assert words[0] == 10 < words[1] <= 20 and words[1] < words[2] <= 40, "of the clusters in each class"
    assert Run.open(str(folder / "3/told")).config.expert.train.condition_dropout == 0.3, "as all that are told"
    alike = {**results["pairs"]["alike"], "itself": results["own-pairs"]["alike"]["monolith"]}
    assert alike["itself"]["same seed"] == pytest.approx(1, abs=1e-6), "it is the one that ratios are to"
    assert all(each["another"] < 0.9 * each["same seed"] for each in alike.values())
    assert 0.8 < alike["monolith"]["same seed"] < 0.999 and 0.8 < alike["full"]["same seed"] < 0.999
    nearest = results["copies"]["nearest"]["monolith"]
    assert nearest["by_chance"] == pytest.approx(0.9, abs=0.01)
    assert abs(nearest["in_training"] - nearest["by_chance"]) < 5 * nearest["deviation"] < 0.5, "of few steps"
    classified = distances["classified"]
    for seed in range(3):
        assert classified[f"held out, classifier {seed}"] < classified[f"monolith, classifier {seed}"], "of few steps"
    forecast = results["forecast"]["forecast"]["base"]
    assert forecast["own cluster"] < forecast["monolith"]
    agreement = results["clusters"]["agreement"]
    assert agreement.keys() == {"base", "k4"} and 0 < agreement["base"] < agreement["k4"] < 1, "of ten classes"
    assert distances["faults"].pop(RENORMALISED) == pytest.approx(distances["blind"]["full"], rel=1e-4)
    assert distances["faults"].pop("full") == distances["blind"]["full"], "the sound one"
    every = [distance for names in distances.values() for distance in names.values()]
    assert len({*every}) == len(every), "no two are the same networks, asked alike"
    # The base by the product's own evaluation, of the same labels and noise.
    run = Run.open(str(folder / "3/base"))
    evaluate(run, "default")
    metrics = read_metrics(run, "default")
    assert {row["model"]: row["frechet"] for row in metrics["models"]} == pytest.approx(distances["base"])
    losses = {name: loss["loss"] for name, loss in results["base"]["losses"].items()}
    assert {row["model"]: row["loss"] for row in metrics["heldout_loss"]} == pytest.approx(losses)
    flops = results["base"]["flops"]
    assert flops["experts/000"] + flops["experts/001"] == pytest.approx(flops["monolith"])
    assert results["wide"]["flops"]["monolith"] > 1.5 * flops["monolith"]
    assert results["told"]["flops"]["monolith"] == pytest.approx(flops["monolith"], rel=0.01)
    # The command measures what is lacking, by the networks that there are, and leaves the rest as it is.
    for arm in plan.arms.keys() - {"prior"}:
        arms.write_result(arms.result_path(folder, 3, arm), results[arm] | {"plan": plan.digest(arm)})
    floor = ruler.floor(plan.num_samples) | {"plan": plan.digest("ruler")}
    arms.write_result(arms.result_path(folder, 3, "ruler"), floor)
    command = [sys.executable, str(ROOT / "study/science.py"), str(path), "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--results", str(tmp_path / "of")], capture_output=True, timeout=300, check=True, text=True
    )
    assert f"| base | once | {distances['base']['once']:.3g} |" in done.stdout
    measured = json.loads((tmp_path / "of/tiny.json").read_text())
    assert measured["plan"] == plan.model_dump(mode="json") and "drawn again" in measured["real"]
    assert measured["seeds"]["3"]["prior"]["candidates"] == results["prior"]["candidates"]
    assert measured["seeds"]["3"]["base"]["candidates"] == results["base"]["candidates"]
    # An arm that results have isn't measured again where its runs aren't; for others its networks are trained again.
    del measured["seeds"]["3"]["prior"]
    (tmp_path / "of/tiny.json").unlink()
    (tmp_path / "of/tiny.partial.json").write_text(json.dumps(measured))
    again = [*command[:-1], str(tmp_path / "elsewhere"), "--results", str(tmp_path / "of")]
    subprocess.run(again, capture_output=True, timeout=300, check=True, text=True)
    assert {path.name for path in (tmp_path / "elsewhere/tiny/3").iterdir()} == {"base"}
    assert [path.name for path in (tmp_path / "of").iterdir()] == ["tiny.json"]
    seeds = json.loads((tmp_path / "of/tiny.json").read_text())["seeds"]
    assert seeds["3"].pop("prior")["candidates"] == results["prior"]["candidates"]
    assert seeds == measured["seeds"]
    # Of another plan they aren't taken for this one's.
    path.write_text(yaml.safe_dump(PLAN | {"num_samples": 100}, sort_keys=False))
    other = subprocess.run(command, capture_output=True, timeout=300, check=False, text=True)
    assert other.returncode == 1 and "3/ruler.json: was measured by another plan; delete it" in other.stderr


@pytest.mark.chaos
def test_plans_can_be_read_and_choose_by_other_seeds_than_they_report(plans: ModuleType, tmp_path: Path) -> None:
    paths = [*plans.PLANS.rglob("*.yaml")]
    assert len(paths) > 1
    for path in paths:
        plan = plans.Plan.read(str(path.relative_to(plans.PLANS).with_suffix("")))
        assert plan.name == path.stem
        for arm in plan.arms.values():  # told has data of its own
            load_recipe(plan.recipe, [*plan.run_settings(0), *arm.settings])
    for change, words in (
        ({"seeds": {"choosing": [1, 3], "reported": [3]}}, r"seeds \[3\] are chosen by and reported"),
        ({"milestones": 3}, "steps 8 aren't 3 equal parts"),
        ({"arms": {"told": {"kind": "told"}} | PLAN["arms"]}, "the first arm has to be base"),
        ({"conditioned": False}, "arm guidance is of kind guidance: models here aren't told the class at all"),
        (
            {"against": "base/monolith", "arms": {"base": {}, "faults": {"kind": "faults", "of": "k4"}}},
            "of 'k4', which has to be a run before it",
        ),
    ):
        (tmp_path / "bad.yaml").write_text(yaml.safe_dump(PLAN | change, sort_keys=False))
        with pytest.raises(ValidationError, match=words):
            plans.Plan.read(str(tmp_path / "bad.yaml"))
