"""A training's schedule and mask: what they may be, and what doesn't fit."""

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.config import TrainConfig, load_recipe
from ddm_ray.core.names import ScheduleName
from ddm_ray.core.schedules import learning_rate
from ddm_ray.errors import ConfigError

STEPS = {"steps": 100, "batch": 8}
DIFFUSERS = "train.mask_ratio is 0.5, but FluxTransformer2DModel takes all tokens"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("schedule=step", "schedule: Input should be 'constant', 'cosine', 'linear' or 'inverse-sqrt', got 'step'"),
        ("final_learning_rate=1e-5", "final_learning_rate 1e-05 is never reached by schedule constant; leave it out"),
        ("schedule=cosine final_learning_rate=2e-3", "final_learning_rate 0.002 is above learning_rate 0.001, and no"),
        ("schedule=linear warmup_steps=300", "warmup_steps 300 leaves none of steps 300 for schedule linear to fall"),
        ("unmasked_steps=5", "unmasked_steps 5 is for training with a mask_ratio; leave it out"),
        ("mask_ratio=0.5 unmasked_steps=300", "unmasked_steps 300 leaves none of steps 300 to mask; lower it"),
    ],
)
def test_a_training_that_does_not_fit_is_told(settings: str, message: str) -> None:
    with pytest.raises(ConfigError) as failure:
        load_recipe("tiny", tuple(f"expert.train.{setting}" for setting in settings.split()))
    assert message in str(failure.value)
    assert "expert.train" in str(failure.value) and str(failure.value).isprintable()


@pytest.mark.parametrize(
    ("recipe", "job", "message"),
    [
        ("tiny", "router", "router: train.mask_ratio is 0.5, but a router sees all tokens; leave it out"),
        ("ddm-24b", "expert", f"expert: {DIFFUSERS}; leave it out, or train a DiT"),
    ],
)
def test_only_a_dit_is_trained_on_some_tokens(recipe: str, job: str, message: str) -> None:
    with pytest.raises(ConfigError) as failure:
        load_recipe(recipe, (f"{job}.train.mask_ratio=0.5",))
    assert str(failure.value) == f"recipe {recipe} with {job}.train.mask_ratio=0.5: {message}"
    assert load_recipe("imagenet256-k8", ("expert.train.mask_ratio=0.5",)).expert.train.mask_ratio == 0.5


@given(
    st.sampled_from(get_args(ScheduleName)),
    st.integers(1, 20),
    st.integers(0, 20),
    st.sampled_from([0.0, 1e-5, 1e-3, 2e-3]),
)
def test_every_training_that_is_accepted_has_its_rates(schedule: str, steps: int, warmup: int, final: float) -> None:
    fields = {"schedule": schedule, "steps": steps, "warmup_steps": warmup, "final_learning_rate": final}
    try:
        train = TrainConfig.model_validate({**STEPS, **fields, "learning_rate": 1e-3})
    except ValueError:
        return
    rates = [
        learning_rate(step, schedule=schedule, base=1e-3, final=final, warmup_steps=warmup, steps=steps)
        for step in range(train.steps)
    ]
    assert max(rates) == 1e-3
    if schedule in ("cosine", "linear"):
        assert rates[-1] == final


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("expert.train.condition_dropout=0", "student.train={steps: 3, batch: 4}"),
            "student.train.condition_dropout needs teachers that know the null condition: set expert.train",
        ),
        (
            ("student.teacher=full", "router.train.condition_dropout=0"),
            "student.train.condition_dropout needs teachers that know the null condition: set router.train",
        ),
        (
            ("student.guidance_scale=2.0", "student.teacher=full", "router.train.condition_dropout=0"),
            "student.guidance_scale needs teachers that know the null condition: set router.train",
        ),
        (
            ("sample.guidance_scale=3.0", "student.train={steps: 3, batch: 4, condition_dropout: 0}"),
            "student.train.condition_dropout is 0, and sample.guidance_scale 3.0 needs a null condition",
        ),
        (
            ("experts={1: {train: {condition_dropout: 0}}}",),
            "needs teachers that know the null condition: set experts.1.train.condition_dropout above 0",
        ),
        (
            ("student.start=largest", "experts={1: {model: {width: 32}}}"),
            "student.start largest takes weights of experts that are alike, and experts.1 is another network",
        ),
        (("student.teacher=sticky",), "student.teacher: 'sticky' holds experts along an image's way"),
        (("student.start=average", "student.model={width: 32, depth: 1, heads: 2}"), "start average takes an expert's"),
    ],
)
def test_a_student_that_cannot_be_taught_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_recipe("digits", settings)


def test_a_student_of_masked_experts_leaves_tokens_out_only_if_it_can() -> None:
    with pytest.raises(ConfigError, match=r"student: train.mask_ratio is 0.5, but \w+2DModel takes all tokens"):
        load_recipe("ddm-24b", ("student.train={steps: 3, batch: 4, mask_ratio: 0.5}",))
