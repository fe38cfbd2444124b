"""Optimizers that a training may name, by where their classes are; `train.optimizer` says what such a class has."""

from typing import TYPE_CHECKING, Literal

OPTIMIZERS = {
    "adamw": "ddm_ray.train.adamw:AdamW",
    "lion": "ddm_ray.train.lion:Lion",
}

if TYPE_CHECKING:
    OptimizerName = str  # mypy takes only literals that are written out
else:
    OptimizerName = Literal[*OPTIMIZERS]
