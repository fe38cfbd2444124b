"""The plain word on a training follows from its curve by the numbers that are stated, and from nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.config import load_recipe
from ddm_ray.config.longer import lengthened
from ddm_ray.errors import DDMError
from ddm_ray.remedies import Begin, Extend
from ddm_ray.storage.graph import MONOLITH, ROUTER, STUDENT, expert
from ddm_ray.storage.info import HeldoutInfo, TrainedInfo
from ddm_ray.storage.manifest import Identity, Manifest
from ddm_ray.storage.status import describe, status
from ddm_ray.storage.trend import (
    CERTAIN,
    GROUPS,
    LOSSES,
    RISES,
    STEPS,
    STILL_FALLS,
    STILL_INITIAL,
    finding_of,
    ground,
    measurements,
    more_steps,
    trend_of,
    verdict_of,
)
from tests.infos import commit_written, info_of
from tests.random_run import make_data

TOTAL, EVERY = 400, 20
LEVELS = [0.5 + 0.1 * group for group in range(GROUPS)]
"""Losses of groups of rows, which differ far more than anything that training changes."""


def curve_of(heldout: Any, training: Any, noise: float = 0.0) -> dict[str, list[float]]:
    """A curve whose held-out loss at a share of the steps is `heldout` times each group's level, and `training` alike.

    `noise`: by which share groups change differently, from one measurement to the next.
    """
    steps = range(EVERY, TOTAL + 1, EVERY)
    odd = [(-1.0) ** group for group in range(GROUPS)]
    return {
        "loss": [training(step / TOTAL) for step in range(1, TOTAL + 1)],
        STEPS: [float(step) for step in steps],
        LOSSES: [
            heldout(step / TOTAL) * level * (1 + noise * sign * (-1.0) ** (step // EVERY))
            for step in steps
            for level, sign in zip(LEVELS, odd, strict=True)
        ],
    }


def line(until: float, after: float) -> Any:
    """1 up to three quarters of the steps, then straight to `after`, in the end; `until`: what it falls from before."""
    return lambda share: (
        until + (1 - until) * share / 0.75 if share <= 0.75 else 1 + (after - 1) * (share - 0.75) / 0.25
    )


@given(fall=st.floats(-0.5, 0.5), trained=st.floats(-0.5, 0.5))
def test_what_still_falls_in_both_ways_is_undertrained(fall: float, trained: float) -> None:
    def training(share: float) -> float:  # the mean of the last quarter against that of the quarter before
        return 1 - trained if share > 0.75 else 1.0

    trend = trend_of(curve_of(line(1.0, 1 - fall), training))
    assert trend is not None
    assert (trend.step, trend.since) == (TOTAL, 300)
    assert trend.fall == pytest.approx(fall, abs=1e-9)
    assert trend.trained_since == pytest.approx(max(0.0, trained), abs=1e-6)
    if min(abs(fall - STILL_FALLS), abs(trained - STILL_FALLS)) > 1e-6:
        assert (finding_of(trend) == "undertrained") == (min(fall, trained) > STILL_FALLS)
    if finding_of(trend) == "undertrained":
        assert f"over the last 100 steps its loss still fell by {fall:.1%} ±" in ground(trend)
        assert f"by {trained:.1%} in training" in ground(trend)


@given(rise=st.floats(0.0, 0.5), fall=st.floats(0.05, 0.9))
def test_what_rises_held_out_and_falls_in_training_overfits(rise: float, fall: float) -> None:
    heldout = line(2.0, 1 + rise)  # lowest at three quarters
    trend = trend_of(curve_of(heldout, lambda share: 1 - fall * share))
    assert trend is not None and trend.lowest == (300 if rise > 0 else trend.lowest)
    assert trend.rise == pytest.approx(rise, abs=1e-9)
    if abs(rise - RISES) > 1e-6:
        assert (finding_of(trend) == "overfits") == (rise > RISES)
    at_rest = trend_of(curve_of(heldout, lambda share: 1.0))
    assert at_rest is not None and finding_of(at_rest) is None, "a loss that rises everywhere is another matter"
    if rise > RISES + 1e-6:
        assert "rose by" in ground(trend) and "from step 300 on, while that in training fell by" in ground(trend)


@given(scale=st.floats(1e-3, 1e3), fall=st.floats(0.0, 0.6), noise=st.floats(0.0, 0.5))
def test_a_finding_is_certain_and_has_no_scale(scale: float, fall: float, noise: float) -> None:
    curve = curve_of(line(1.5, 1 - fall), lambda share: 1 - fall * share, noise)
    trend = trend_of(curve)
    scaled = trend_of(
        {name: [scale * one for one in values] if name != STEPS else values for name, values in curve.items()}
    )
    assert trend is not None and scaled is not None
    for name in ("fall", "fall_error", "rise", "rise_error", "trained_since"):
        assert getattr(trend, name) == pytest.approx(getattr(scaled, name), abs=1e-9)
    if finding_of(trend) == "undertrained":
        assert trend.fall > CERTAIN * trend.fall_error
    if finding_of(trend) == "overfits":
        assert trend.rise > CERTAIN * trend.rise_error


def test_a_fall_within_what_rows_differ_by_is_no_ground() -> None:
    curve = curve_of(line(1.5, 0.88), lambda share: 1 - 0.4 * share)
    sure = trend_of(curve)
    assert sure is not None and finding_of(sure) == "undertrained"
    # The same mean, of groups of which half fell by far more and half rose.
    apart = [loss * (1 + 0.3 * (-1.0) ** group) for group, loss in enumerate(curve[LOSSES][-GROUPS:])]
    mean = sum(apart) / sum(curve[LOSSES][-GROUPS:])
    unsure = trend_of(curve | {LOSSES: [*curve[LOSSES][:-GROUPS], *(loss / mean for loss in apart)]})
    assert unsure is not None and unsure.fall == pytest.approx(sure.fall)
    assert unsure.fall_error > 5 * sure.fall_error and finding_of(unsure) is None


@given(initial=st.floats(0.0, 1.0))
def test_an_average_that_is_still_what_it_began_with_is_undertrained(initial: float) -> None:
    trend = trend_of(curve_of(line(1.0, 1.0), lambda share: 1.0), initial)
    assert trend is not None
    assert (finding_of(trend) == "undertrained") == (initial > STILL_INITIAL)
    assert (f"still {initial:.0%} of the average" in ground(trend)) == (initial > STILL_INITIAL)
    steps = more_steps(TOTAL, trend)
    assert steps >= 2 * TOTAL and steps % TOTAL == 0
    if STILL_INITIAL < initial < 1:  # so many steps leave them a twentieth at the most
        assert initial ** (steps / TOTAL) <= 0.05


@pytest.mark.parametrize(
    "change",
    [
        {STEPS: [], LOSSES: []},
        {LOSSES: [1.0] * (GROUPS * 3)},
        {LOSSES: [float("nan")] * (GROUPS * TOTAL // EVERY)},
        {LOSSES: [float("inf")] * (GROUPS * TOTAL // EVERY)},
        {LOSSES: [0.0] * (GROUPS * TOTAL // EVERY)},
    ],
)
def test_without_sound_measurements_there_is_no_word(change: dict[str, list[float]]) -> None:
    assert trend_of(curve_of(line(1.0, 1.0), lambda share: 1.0) | change) is None
    once = trend_of({"loss": [1.0] * 400, STEPS: [400.0], LOSSES: [1.0] * GROUPS}, initial=0.5)
    assert once is not None and (once.fall, once.rise, finding_of(once)) == (0.0, 0.0, "undertrained")
    assert trend_of({"loss": [1.0] * 9, "grad_norm": [1.0] * 9}) is None
    assert measurements({STEPS: [3.0], LOSSES: [1.0] * 7}) == ([], [])


FALLS = HeldoutInfo(
    step=300,
    loss=0.5,
    error=0.01,
    since=225,
    fall=0.2,
    fall_error=0.01,
    trained_since=0.1,
    lowest=300,
    rise=0.0,
    rise_error=0.0,
    trained_since_lowest=0.0,
)
RISEN = FALLS.model_copy(update={"fall": -0.1, "lowest": 200, "rise": 0.1, "trained_since_lowest": 0.3})


@pytest.mark.parametrize("artifact", [expert(1), ROUTER, MONOLITH, STUDENT])
def test_what_is_advised_can_be_done(artifact: Any) -> None:
    info = TrainedInfo.model_validate(vars(info_of(artifact, step=300, heldout=FALLS)))
    config = load_recipe("tiny")
    verdict = verdict_of("runs/a", config, artifact, info)
    part = "expert" if artifact in (expert(1), MONOLITH) else artifact
    assert verdict is not None and verdict.fix == Extend("runs/a", f"{part}.train.steps", "600")
    lengthened(config, {part: 600})
    falling = load_recipe("tiny", tuple(f"{each}.train.schedule=cosine" for each in ("expert", "router")))
    verdict = verdict_of("runs/a", falling, artifact, info)
    assert verdict is not None and verdict.fix == Begin("", f"{part}.train.steps", "600")
    assert verdict_of("runs/a", config, artifact, info.model_copy(update={"heldout": None})) is None
    # Across a border that carries errors.
    carried = DDMError.from_fields(json.loads(json.dumps(DDMError("why", Extend("runs/a", "b", "3")).to_fields())))
    assert carried.fix == Extend("runs/a", "b", "3")


def test_it_is_said_in_the_status(tmp_path: Any) -> None:
    run = make_data(str(tmp_path / "run"), num_rows=60)
    for artifact, trend in zip((*run.experts, ROUTER), (FALLS, RISEN, None), strict=True):
        run.store.write(f"{artifact}/weights", b"x")
        commit_written(run, artifact, ["weights"], info_of(artifact, step=300, heldout=trend))
    first, second, third = (describe(status(run, artifact)) for artifact in (*run.experts, ROUTER))
    assert first == (
        "300 steps, loss 0.2500, held out 0.5000, 1.0 GFLOP in 2 s; undertrained: over the last 75 steps its loss"
        " still fell by 20.0% ± 1.0% on held-out rows, by 10.0% in training; extend it to expert.train.steps=600"
    )
    assert second == (
        "300 steps, loss 0.2500, held out 0.5000, 1.0 GFLOP in 2 s; overfits: its held-out loss rose by 10.0% ± 0.0%"
        " from step 200 on, while that in training fell by 30.0%"
    )
    assert third == "300 steps, loss 0.2500, 1.0 GFLOP in 2 s"


def test_a_record_without_measurements_is_that_of_older_versions() -> None:
    """Byte by byte, and read as before."""
    plain, measured = (info_of(ROUTER, heldout=trend) for trend in (None, FALLS))
    assert "heldout" not in plain.as_json() and measured.as_json()["heldout"]["fall"] == 0.2
    for info in (plain, measured):
        manifest = Manifest(ROUTER, Identity({}), {}, json.loads(json.dumps(info.as_json())))
        assert TrainedInfo.of(manifest) == info
