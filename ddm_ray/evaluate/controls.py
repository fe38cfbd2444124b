"""Controls of an evaluation: images that a working measure must find bad, and what follows where it doesn't."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ddm_ray.evaluate.metrics import Column, columns

MOSAICS, NOISE = "mosaics of real rows", "noise"
"""Names of the lines of controls: each quarter of a mosaic is another real row's."""
FAR = 5.0
"""A model is far if its distance exceeds that of held-out real rows by this factor.

There may be fewer held-out rows than samples. Fewer rows have a larger distance, so this errs in the model's favour.
"""
CONFIRMED = 0.8
"""Controls that reach this share of what held-out rows reach in a measure show that the measure can't tell."""
LIKE_MOSAICS, LIKE_NOISE = 0.5, 0.5
"""A model is far if its distance exceeds this share of the mosaics'; above this share of noise's it learnt nothing."""


def held_out(metrics: dict[str, Any]) -> dict[str, Any] | None:
    """The line of the held-out real rows; None if there is none."""
    return next((row for row in metrics["real"] if row["model"].endswith("held out")), None)


def marked(metrics: dict[str, Any]) -> list[Column]:
    """The columns of all metrics. Where one can't tell, each value of a model is followed by a question mark."""
    blind = {column.key for column, _, _ in _blind(metrics)}
    models = {row["model"] for row in metrics["models"]}
    return [replace(each, unsure=models) if each.key in blind else each for each in columns()]


def cautions(metrics: dict[str, Any]) -> list[str]:
    """Words on models that are like controls, the gravest first, and on measures that don't tell controls from rows."""
    real = {row["model"]: row for row in metrics["real"]}
    heldout, lines, shares = held_out(metrics), list[str](), dict[str, float]()
    if noise := real.get(NOISE):
        every = {row["model"]: row["frechet"] / noise["frechet"] for row in metrics["models"]}
        shares = {model: share for model, share in every.items() if share > LIKE_NOISE}
        each = ", ".join(f"{model} has {share:.0%}" for model, share in shares.items())
        lines += [f"Nothing was learnt, or too little: {each} of noise's distance."] if shares else []
    if mosaics := real.get(MOSAICS):
        for row in metrics["models"]:
            grounds = _grounds(row["frechet"], mosaics["frechet"], heldout["frechet"] if heldout else None)
            if grounds and row["model"] not in shares:
                lines.append(f"{row['model']} is far from real rows: its distance is {' and '.join(grounds)}.")
    for column, control, value in _blind(metrics):
        assert heldout
        what = f"{column.heading[0].upper()}{column.heading[1:]}"
        lines.append(f"{what} can't tell here: {control} {value}, held-out real rows {column.cell(heldout)}.")
    return lines


def _blind(metrics: dict[str, Any]) -> Iterator[tuple[Column, str, str]]:
    """The columns that find a control as good as held-out rows, each with that control and its value in words."""
    real = {row["model"]: row for row in metrics["real"]}
    heldout = held_out(metrics)
    for column in columns() if heldout else ():
        for name, have in ((NOISE, "noise has"), (MOSAICS, "mosaics have")):
            row = real.get(name)
            applies = name == NOISE or column.sees_mosaics
            if row and heldout and applies and _alike(column, row.get(column.key), heldout.get(column.key)):
                yield column, have, column.cell(row)
                break


def _alike(column: Column, control: float | None, real: float | None) -> bool:
    """True if a value of a control is as good as that of real rows, or nearly."""
    if control is None or real is None or column.best is None:
        return False
    return control > CONFIRMED * real if column.best == "highest" else CONFIRMED * control < real


def _grounds(distance: float, mosaics: float, heldout: float | None) -> list[str]:
    """The reasons, in words, for calling a model of this Fréchet distance far from real rows."""
    grounds = []
    if distance > LIKE_MOSAICS * mosaics:
        grounds.append(f"{distance / mosaics:.0%} of that of mosaics, each of four real rows ({mosaics:.3g})")
    if heldout is not None and distance > FAR * heldout:
        grounds.append(f"{distance / heldout:.0f} times that of held-out real rows ({heldout:.3g})")
    return grounds
