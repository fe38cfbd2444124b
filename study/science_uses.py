"""What the networks of an arm do when they are used otherwise: nothing is trained.

Shapes: M images, CHW image; N training rows, H held-out ones, T of both, D features.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ddm_ray.config import load_recipe
from ddm_ray.evaluate.distances import BLOCK, between
from ddm_ray.evaluate.features import see, train_features
from ddm_ray.evaluate.image_set import Reference
from ddm_ray.evaluate.metrics import row_of
from ddm_ray.evaluate.real_rows import RealRows
from ddm_ray.evaluate.reference import RealFeatures
from ddm_ray.evaluate.samples import BATCH, one_thread
from ddm_ray.jobs.published import Weights, published
from ddm_ray.run.graph import Artifact, trained_of
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import Models, monolith_info
from science_faults import FAULTS, faulty
from science_plan import Arm

if TYPE_CHECKING:
    from science_arms import Measuring

GUIDANCE_SCALES = (1.5, 2.0, 3.0, 5.0)
CLASSIFIER_SEEDS = (0, 1, 2)


def average(measuring: "Measuring", run: Run, arm: Arm) -> dict[str, Any]:
    """One network, whose weights are the mean of the experts'."""
    mixture = measuring.models(run)
    experts = [expert for k in range(len(run.experts)) if isinstance(expert := mixture.experts[k], nn.Module)]
    network = copy.deepcopy(experts[0])
    states = [expert.state_dict() for expert in experts]
    mean = {name: torch.stack([state[name].double() for state in states]).mean(0) for name in states[0]}
    network.load_state_dict({name: tensor.to(states[0][name].dtype) for name, tensor in mean.items()})
    models = Models(monolith_info(run), (network,), None, mixture.device)
    return {"candidates": {"average": measuring.score(models, "oracle", run)}}


def prior(measuring: "Measuring", run: Run, arm: Arm) -> dict[str, Any]:
    """The experts, drawn once by the router at pure noise, or as each row's own cluster."""
    mixture = measuring.models(run)
    of_router = replace(mixture, info=replace(mixture.info, prior_CK=None))
    own = measuring.asked_of(RealRows.of(run).train)
    request = replace(own.request(measuring.plan, run.config.sample), cluster_B=own.cluster_M)
    return {
        "candidates": {
            "once, by the router": measuring.score(of_router, "once", run),
            "once, own cluster": measuring.scored(mixture, request, "oracle"),
        }
    }


def faults(measuring: "Measuring", run: Run, arm: Arm) -> dict[str, Any]:
    """Mixtures whose weights have a fault, and by the sound strategies of these."""
    mixture = measuring.models(run)
    sound = dict.fromkeys(fault.split(",")[0] for fault in FAULTS)
    return {
        "candidates": {
            name: measuring.score(faulty(run, mixture, name, measuring.seed), "oracle", run)
            if name in FAULTS
            else measuring.score(mixture, name, run)
            for name in ((*FAULTS, *sound) if arm.strategies is None else arm.strategies)
        }
    }


def steps(measuring: "Measuring", run: Run, arm: Arm) -> dict[str, Any]:
    """All after each part of the steps but the last."""
    scores, part = dict[str, Any](), measuring.plan.steps // measuring.plan.milestones
    for at in range(part, measuring.plan.steps, part):
        for name, models, strategy in used(measuring, run, arm, weights_after(run, at)):
            scores[f"{name}@{at}"] = measuring.score(models, strategy, run)
    return {"candidates": scores}


def guidance(measuring: "Measuring", run: Run, arm: Arm) -> dict[str, Any]:
    """All by several scales of classifier-free guidance, and by the arm's own settings of sampling."""
    plan, scores = measuring.plan, dict[str, Any]()
    settings = [*plan.run_settings(measuring.seed), *plan.arms[arm.of].settings, *arm.settings]
    unguided = measuring.asked.request(plan, load_recipe(plan.recipe, settings).sample)
    for name, models, strategy in used(measuring, run, arm):
        for scale in GUIDANCE_SCALES:
            request = unguided.changed(guidance_scale=scale)
            scores[f"{name}, guidance {scale:g}"] = measuring.scored(models, request, strategy)
    return {"candidates": scores}


def untold(measuring: "Measuring", run: Run, arm: Arm) -> dict[str, Any]:
    """Scores without the class, of networks that were trained without it at times."""
    request = measuring.asked.request(measuring.plan, run.config.sample)
    request = replace(request, condition=torch.full_like(measuring.asked.label_M, measuring.asked.null))
    each = used(measuring, run, arm)
    return {"candidates": {name: measuring.scored(models, request, strategy) for name, models, strategy in each}}


def pairs(measuring: "Measuring", run: Run, arm: Arm) -> dict[str, Any]:
    """How alike images of the same seed are to those of the monolith that all ratios are to, and other ones to it.

    By the mean cosine of their pixels about the training rows' mean image; where models are told the class, about
    the class's, and others are of the same class.
    """
    plan, request = measuring.plan, measuring.asked.request(measuring.plan, run.config.sample)
    against = measuring.models(measuring.made(plan.against.partition("/")[0]), "monolith")
    theirs_MCHW, _ = measuring.sampled(against, request, "oracle")
    assert isinstance(request.condition, Tensor)
    train, other_M = measuring.train, another_of_its_class(request.condition)
    mean_MCHW = train.data_NCHW.mean(0).expand_as(theirs_MCHW)
    if plan.conditioned:
        mean_MCHW = class_means(train.data_NCHW, train.label_N)[request.condition]
    alike = dict[str, Any]()
    for name, models, strategy in used(measuring, run, arm):
        images_MCHW, _ = measuring.sampled(models, request, strategy)
        alike[name] = {
            "same seed": cosine(images_MCHW - mean_MCHW, theirs_MCHW - mean_MCHW),
            "another": cosine(images_MCHW - mean_MCHW, theirs_MCHW[other_M] - mean_MCHW),
        }
    return {"alike": alike}


def copies(measuring: "Measuring", run: Run, arm: Arm) -> dict[str, Any]:
    """How often the nearest of all real rows is a training row, of all images of each model."""
    reference, request = measuring.ruler.reference, measuring.asked.request(measuring.plan, run.config.sample)
    if not reference.whole_set:
        raise ValueError("copies of rows whose features aren't kept can't be told: study fewer rows")

    def features(images_MCHW: Tensor) -> np.ndarray:
        with one_thread():
            return see(reference.net, images_MCHW.split(BATCH), reference.embedder).features_ND

    train_ND, heldout_HD = reference.real.features_MD, features(measuring.ruler.rows.heldout.data_NCHW)
    nearest = dict[str, Any]()
    for name, models, strategy in used(measuring, run, arm):
        images_MCHW, _ = measuring.sampled(models, request, strategy)
        nearest[name] = asdict(Nearest.of(features(images_MCHW), train_ND, heldout_HD))
    return {"nearest": nearest}


def classifier(measuring: "Measuring", run: Run, arm: Arm) -> dict[str, Any]:
    """Scores in the features of the evaluation's small classifier, by several seeds: of all, and of rows held out."""
    ruler, request = measuring.ruler, measuring.asked.request(measuring.plan, run.config.sample)
    rows, own = ruler.rows.train, ruler.reference
    sampled = {"held out": (ruler.rows.heldout.data_NCHW, ruler.rows.heldout.label_N)}
    for name, models, strategy in used(measuring, run, arm):
        sampled[name] = measuring.sampled(models, request, strategy)[0], measuring.asked.label_M
    scores = dict[str, Any]()
    with one_thread():
        for seed in CLASSIFIER_SEEDS:
            net = train_features(rows.data_NCHW, rows.label_N, int(rows.label_N.max()) + 1, seed)
            real = RealFeatures.of(net, rows)
            reference = Reference(net, real, rows, own.prior_CK, seed, own.labelled, own.whole_set)
            for name, (images_MCHW, label_M) in sampled.items():
                images = reference.see(partial(images_MCHW.split, BATCH), label_M)
                scores[f"{name}, classifier {seed}"] = row_of(images)
    return {"candidates": scores}


USES: Mapping[str, Callable[["Measuring", Run, Arm], dict[str, Any]]] = {
    "average": average,
    "prior": prior,
    "faults": faults,
    "steps": steps,
    "guidance": guidance,
    "untold": untold,
    "pairs": pairs,
    "copies": copies,
    "classifier": classifier,
}


def used(
    measuring: "Measuring", run: Run, arm: Arm, weights: Mapping[Artifact, Weights] | None = None
) -> Iterator[tuple[str, Models, str]]:
    """The monolith of a run, if the arm that it is of trains one, and its mixture by each strategy of an arm.

    `weights`: those to take in place of the last ones.
    """
    if "monolith" in measuring.plan.arms[arm.of].trains:
        yield "monolith", measuring.models(run, "monolith", weights), "oracle"
    if strategies := measuring.plan.strategies_of(arm):
        mixture = measuring.models(run, weights=weights)
        for strategy in strategies:
            yield strategy, mixture, strategy


def weights_after(run: Run, at: int) -> dict[Artifact, Weights]:
    """The weights after so many steps of all that is trained."""
    done = [artifact for artifact in trained_of(run.config) if run.manifest(artifact)]
    return {
        artifact: next(weights for weights in every if weights.step == at)
        for artifact, every in published(run, done).items()
    }


def class_means(data_NCHW: Tensor, label_N: Tensor) -> Tensor:
    """The mean image of each class, (largest label + 1, C, H, W); of a class without any, not a number."""
    return torch.stack([data_NCHW[label_N == label].mean(0) for label in range(int(label_N.max()) + 1)])


def another_of_its_class(label_M: Tensor) -> Tensor:
    """For each image the next one of its class, the first after the last (M,); itself where it is alone."""
    other_M = torch.arange(len(label_M))
    for label in label_M.unique():
        own = (label_M == label).nonzero().squeeze(1)
        other_M[own] = own.roll(-1)
    return other_M


def cosine(a_MCHW: Tensor, b_MCHW: Tensor) -> float:
    """The mean cosine of images with those of the same place, in [-1, 1]."""
    return float(torch.cosine_similarity(a_MCHW.flatten(1).double(), b_MCHW.flatten(1).double()).mean())


@dataclass(frozen=True)
class Nearest:
    """The share of samples whose nearest row is one of training, and its mean and standard deviation by chance.

    That is over which rows are held out: of a model that knows those no less, any as many would do as well. Few rows
    are the nearest of many samples, so that the deviation is larger than a coin's. A copy is one more than by chance.
    """

    in_training: float
    by_chance: float
    deviation: float

    @classmethod
    def of(cls, samples_MD: np.ndarray, train_ND: np.ndarray, heldout_HD: np.ndarray) -> Self:
        """From features; of two rows as near as each other the first one, training rows before held-out ones."""
        rows_TD = np.concatenate([train_ND, heldout_HD])
        blocks = (samples_MD[first : first + BLOCK] for first in range(0, len(samples_MD), BLOCK))
        nearest_M = np.concatenate([between(block_BD, rows_TD).argmin(1) for block_BD in blocks])
        share_T = np.bincount(nearest_M, minlength=len(rows_TD)) / len(samples_MD)
        # Drawn without replacement: a sum of H of the T shares.
        variance = len(train_ND) * len(heldout_HD) / (len(rows_TD) - 1) * share_T.var()
        chance = len(train_ND) / len(rows_TD)
        return cls(float(share_T[: len(train_ND)].sum()), chance, float(variance**0.5))
