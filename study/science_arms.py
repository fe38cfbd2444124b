"""One arm of one seed of a study: trained by the product itself, sampled, and measured by the study's ruler.

Shapes: N real rows, M images asked for, CHW image, K experts.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ddm_ray.config import SamplingSettings, load_recipe
from ddm_ray.core.streams import SeedPurpose, consecutive_seeds
from ddm_ray.data.loading.loader import Rows
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.evaluate.features import load_embedder
from ddm_ray.evaluate.image_set import Reference
from ddm_ray.evaluate.losses import heldout_losses
from ddm_ray.evaluate.measure import reference_of
from ddm_ray.evaluate.metrics import row_of
from ddm_ray.evaluate.real_rows import RealRows
from ddm_ray.evaluate.reference import Instruments
from ddm_ray.evaluate.samples import BATCH, here, one_thread
from ddm_ray.jobs.published import Weights
from ddm_ray.pictures.images import to_unit
from ddm_ray.placement import PreparePlacement, TrainPlacement
from ddm_ray.run.graph import MONOLITH, PARTITION, ROUTER, ROWS, STUDENT, Artifact
from ddm_ray.run.info import PartitionInfo, TrainedInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import ModelKind, Models, load_models
from science_forecast import forecast
from science_plan import DENSE, Arm, Plan
from science_uses import USES
from studies import share, trained

TOLD = "told"


@dataclass(frozen=True)
class Ruler:
    """What all arms of a study are measured by: real rows, their features, and which rows images are asked like."""

    run: Run
    rows: RealRows
    reference: Reference
    device: str = "cpu"

    @classmethod
    def of(cls, plan: Plan, folder: Path, device: str = "cpu") -> Self:
        """The ruler of a study, made below its folder unless it is there; on `device` all of the study is computed."""
        run = Run.create(str(folder / "ruler"), load_recipe(plan.recipe, plan.run_settings(plan.seeds.reported[0])))
        prepare(run, placement=PreparePlacement(use_gpu=device != "cpu"), execute=serial)
        partition(run, with_report=False)
        rows, embedder = RealRows.of(run), load_embedder(run.config.evaluate.features, device)
        with one_thread():
            by = Instruments(lambda data: data, embedder, here(device), device)
            reference = reference_of(run, rows, by, lambda *_: None)
        return cls(run, rows, reference, device)

    def floor(self, num_samples: int) -> dict[str, Any]:
        """Scores of real rows: as many drawn again, and those held out."""
        heldout = self.rows.heldout
        held = self.reference.see(lambda: [heldout.data_NCHW], heldout.label_N)
        sets = {"drawn again": self.reference.drawn_again(num_samples), "held out": held}
        return {name: row_of(images) for name, images in sets.items()}


@dataclass(frozen=True)
class Asked:
    """Images asked for: like real rows drawn at random, the same for all arms of a seed."""

    seeds: tuple[int, ...]
    row_M: Tensor
    label_M: Tensor
    cluster_M: Tensor
    null: int

    @classmethod
    def of(cls, plan: Plan, rows: Rows, null: int, seed: int) -> Self:
        """By the training rows of the seed's base; `null`: the label of no class."""
        row_M = torch.from_numpy(np.random.default_rng(seed).integers(len(rows), size=plan.num_samples))
        own = consecutive_seeds(seed, plan.num_samples, SeedPurpose.EVALUATION)
        return cls(own, row_M, rows.label_N[row_M], rows.cluster_N[row_M], null)

    def request(self, plan: Plan, settings: SamplingSettings) -> SampleRequest:
        """The request for them, under these settings."""
        label_M = self.label_M if plan.conditioned else torch.full_like(self.label_M, self.null)
        return SampleRequest(self.seeds, label_M, settings)


@dataclass
class Measuring:
    """The arms of one seed. `train`: training rows with their clusters by the seed's own base."""

    plan: Plan
    folder: Path
    seed: int
    ruler: Ruler
    base: Run
    train: Rows
    asked: Asked

    @classmethod
    def of(cls, plan: Plan, folder: Path, seed: int, ruler: Ruler) -> Self:
        """Those of a seed, whose base is clustered by now."""
        base = begun(ruler, folder / str(seed) / "base", plan, [*plan.run_settings(seed), *plan.arms["base"].settings])
        train, null = RealRows.of(base).train, base.config.data.num_classes or 0
        if train.ids != ruler.rows.train.ids:
            raise ValueError(f"{base.url}: its rows aren't the ruler's")
        return cls(plan, folder, seed, ruler, base, train, Asked.of(plan, train, null, seed))

    def measure(self, name: str) -> dict[str, Any]:
        """Train, sample and measure an arm: its candidates' scores, held-out losses, and FLOPs by network."""
        arm = self.plan.arms[name]
        kinds = {"run": self.of_run, "told": self.of_told}
        kinds |= dict.fromkeys(("forecast", "agreement"), self.of_partitions)
        return kinds.get(arm.kind, self.of_others)(name, arm)

    def clustered(self, name: str) -> Run:
        """The run of an arm, with its own partition."""
        settings = [*self.plan.run_settings(self.seed), *self.plan.arms[name].settings]
        if any(each.startswith("student.train=") for each in settings):
            settings.append(f"student.train.seed={self.seed}")
        return begun(self.ruler, self.folder / str(self.seed) / name, self.plan, settings)

    def own(self, name: str, run: Run) -> list[Artifact]:
        """What an arm trains of its run."""
        trains = {"experts": run.experts, "router": [ROUTER], "monolith": [MONOLITH], "student": [STUDENT]}
        return [artifact for word in self.plan.arms[name].trains for artifact in trains[word]]

    def made(self, name: str) -> Run:
        """The run of an arm with all networks that it needs, as it trains them or another arm does; once."""
        arm, run = self.plan.arms[name], self.clustered(name)
        own = self.own(name, run)
        needed = [*run.experts, ROUTER] if mixes(arm) else run.experts if "student" in arm.trains else ()
        if lacking := [each for each in needed if each not in own and not run.finished(each)]:
            share(self.made(arm.of), run, lacking)
        parts = self.plan.steps // self.plan.milestones
        shown = any(each.kind == "steps" and each.of == name for each in self.plan.arms.values())
        return self.train_all(run, own, milestone_steps=parts if shown else None)

    def train_all(self, run: Run, artifacts: Sequence[Artifact], **placement: Any) -> Run:
        """The run with these artifacts trained: one after another, or all at once on an accelerator, which has room."""
        if self.ruler.device == "cpu":
            return trained(run, artifacts, TrainPlacement(**placement))
        # Processes that share it wait for each other.
        placed = TrainPlacement(**placement, use_gpu=True, hang_seconds=120)
        with ThreadPoolExecutor(max(1, len(artifacts))) as pool:
            list(pool.map(lambda artifact: trained(run, [artifact], placed), artifacts))
        return run

    def models(
        self, run: Run, kind: ModelKind = "mixture", weights: Mapping[Artifact, Weights] | None = None
    ) -> Models:
        """Networks of a run; `weights`: those to take in place of the last ones."""
        return load_models(run, kind, self.ruler.device, milestones=weights)

    def of_run(self, name: str, arm: Arm) -> dict[str, Any]:
        """A run of its own: networks that it doesn't train are those of `of`."""
        run = self.made(name)
        candidates: dict[str, Models] = {kind: self.models(run, kind) for kind in DENSE if kind in arm.trains}
        scores: dict[str, Any] = {kind: self.score(models, "oracle", run) for kind, models in candidates.items()}
        losses: list[Any] = []
        if mixes(arm):
            mixture = self.models(run)
            strategies = self.plan.strategies_of(arm)
            scores |= {strategy: self.score(mixture, strategy, run) for strategy in strategies}
            heldout = RealRows.of(run).heldout
            if not self.plan.conditioned:
                heldout = replace(heldout, label_N=torch.full_like(heldout.label_N, self.asked.null))
            with one_thread():
                losses = heldout_losses(mixture, candidates, heldout, strategies, self.seed)
        return {
            "candidates": scores,
            "losses": {loss.model: {"loss": loss.loss, "by_t": loss.by_t} for loss in losses},
            "flops": {str(each): TrainedInfo.of(run.require(each)).training_flops for each in self.own(name, run)},
        }

    def of_told(self, name: str, arm: Arm) -> dict[str, Any]:
        """A monolith whose condition is the cluster."""
        run, request = self.told_run(name, arm)
        flops = {str(MONOLITH): TrainedInfo.of(run.require(MONOLITH)).training_flops}
        return {"candidates": {TOLD: self.scored(self.models(run, "monolith"), request, "oracle")}, "flops": flops}

    def told_run(self, name: str, arm: Arm) -> tuple[Run, SampleRequest]:
        """The run of a monolith told the cluster by the run `of`, with the class where models are told that.

        With the request for the images asked for, in the words of its condition.
        """
        clustered = self.clustered(arm.of)
        train = RealRows.of(clustered).train
        asked = self.asked_of(train)
        # Of each class the clusters have words of their own.
        step = clustered.config.partition.num_clusters if self.plan.conditioned else 0
        told_N, asked_M = train.cluster_N + step * train.label_N, asked.cluster_M + step * asked.label_M
        words = told_N.unique()
        source = written(
            self.folder / str(self.seed) / f"{name}-source", train.data_NCHW, torch.searchsorted(words, told_N)
        )
        others = {"source": str(source), "class_names": [f"{word}" for word in range(len(words))], "heldout": 0.0}
        fields = self.base.config.data.model_dump(mode="json", exclude={"num_classes"}) | others
        settings = [*self.plan.run_settings(self.seed), *arm.settings, f"data={json.dumps(fields)}"]
        settings += ["embedder={kind: pixels, dim: 8}", "partition={method: random, num_clusters: 2}"]
        if not self.plan.conditioned:
            settings += [f"{part}.train.condition_dropout=0.1" for part in ("expert", "router")]
        run = Run.create(str(self.folder / str(self.seed) / name), load_recipe(self.plan.recipe, settings))
        prepare(run, execute=serial)
        partition(run, with_report=False)
        self.train_all(run, [MONOLITH])
        return run, SampleRequest(self.asked.seeds, torch.searchsorted(words, asked_M), run.config.sample)

    def of_partitions(self, name: str, arm: Arm) -> dict[str, Any]:
        """What denoisers forecast, or agreement with classes, of each run whose partition is its own."""
        measured = [each for each in self.plan.partitions if each in self.plan.arms_of(self.seed)]
        runs = {each: self.clustered(each) for each in measured}
        if arm.kind == "agreement":
            clusters = {each: PartitionInfo.of(run.require(PARTITION)) for each, run in runs.items()}
            return {"candidates": {}, "agreement": {each: info.ari for each, info in clusters.items()}}
        return {"candidates": {}, "forecast": {each: forecast(run, self.seed) for each, run in runs.items()}}

    def of_others(self, name: str, arm: Arm) -> dict[str, Any]:
        """The networks of the base or another arm, used otherwise; nothing is trained."""
        return {"candidates": {}} | USES[arm.kind](self, self.made(arm.of), arm)

    def asked_of(self, train: Rows) -> Asked:
        """The images asked for, by the clusters that training rows have in another run."""
        return Asked.of(self.plan, train, self.asked.null, self.seed)

    def score(self, models: Models, strategy: str, run: Run) -> dict[str, Any]:
        """The score of the images asked for, of models by a strategy, and the networks' rows that an image costs."""
        return self.scored(models, self.asked.request(self.plan, run.config.sample), strategy)

    def scored(self, models: Models, request: SampleRequest, strategy: str) -> dict[str, Any]:
        """The score of a request's images."""
        images_MCHW, costs = self.sampled(models, request, strategy)
        with one_thread():
            images = self.ruler.reference.see(lambda: images_MCHW.split(BATCH), self.asked.label_M)
            return row_of(images) | costs

    def sampled(self, models: Models, request: SampleRequest, strategy: str) -> tuple[Tensor, dict[str, float]]:
        """A request's images (M, C, H, W), in the 256 steps of pictures, and the networks' rows that one costs."""
        if models.info.num_experts == 1:
            request = replace(request, cluster_B=torch.zeros(len(request.seeds), dtype=torch.int64))
        request, parts, rows = request.changed(strategy=strategy), list[Tensor](), [0, 0]
        with one_thread():
            for first in range(0, len(request.seeds), BATCH):
                sampled = models.sample(request.rows(slice(first, first + BATCH)))
                rows[0] += sampled.num_expert_rows
                rows[1] += sampled.num_router_rows
                parts.append((to_unit(sampled.images_BCHW.cpu()) * 255).round() / 127.5 - 1)
        expert_rows, router_rows = (count / len(request.seeds) for count in rows)
        return torch.cat(parts), {"expert_rows": expert_rows, "router_rows": router_rows}


def mixes(arm: Arm) -> bool:
    """True if an arm's mixture is sampled."""
    return arm.strategies is None or bool(arm.strategies)


def begun(ruler: Ruler, folder: Path, plan: Plan, settings: Sequence[str]) -> Run:
    """A run with rows of the ruler, and its own partition of them."""
    run = Run.create(str(folder), load_recipe(plan.recipe, settings))
    share(ruler.run, run, [ROWS])
    partition(run, with_report=False)
    return run


def written(folder: Path, data_NCHW: Tensor, label_N: Tensor) -> Path:
    """A folder of PNG files, one folder a label, all or nothing."""
    if not folder.exists():
        new = folder.with_name(f"{folder.name}-{os.getpid()}")
        pixels_NHWC = ((data_NCHW + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
        for number, (pixels_HWC, label) in enumerate(zip(pixels_NHWC, label_N.tolist(), strict=True)):
            place = new / f"{label:03d}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels_HWC.squeeze(-1) if pixels_HWC.shape[-1] == 1 else pixels_HWC).save(
                place / f"{number:06d}.png"
            )
        try:
            new.rename(folder)
        except OSError:
            shutil.rmtree(new)
    return folder


def result_path(folder: Path, seed: int, arm: str) -> Path:
    """The file of an arm's result."""
    return folder / "results" / str(seed) / f"{arm}.json"


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.rename(path)
