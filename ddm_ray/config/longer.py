"""A configuration that trains on where another one ends: for more steps of the same training, or as a new one."""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from ddm_ray.config.run import RunConfig, parse_config
from ddm_ray.config.training import InitFrom, TrainConfig
from ddm_ray.config.yaml_fields import read_yaml
from ddm_ray.errors import ConfigError

Part = Literal["expert", "router", "student"]
"""A part of the configuration with a schedule of its own; the monolith has the experts'."""
PARTS: tuple[Part, ...] = get_args(Part)
_FIELDS = {f"{part}.train.steps": part for part in PARTS}
OTHERWISE = "or begin a run of more steps with these weights (train.init_from)"


def parse_steps(settings: Iterable[str]) -> dict[Part, int]:
    """The steps of each part that settings such as `expert.train.steps=500` name. Raises ConfigError."""
    steps: dict[Part, int] = {}
    for setting in settings:
        field, equals, text = setting.partition("=")
        if field not in _FIELDS or not equals:
            asked = "the monolith trains for as many steps as the experts, " if field.startswith("monolith.") else ""
            raise ConfigError(
                f"{setting!r:.100}: {asked}what can be raised is {', '.join(_FIELDS)}; anything else is another run's"
            )
        value = read_yaml(text, f"setting {setting!r:.100}")
        if type(value) is not int or value < 1:
            raise ConfigError(f"{field}: a number of steps is a whole number above 0, got {text!r:.60}")
        if steps.setdefault(_FIELDS[field], value) != value:
            raise ConfigError(f"{field} is given twice")
    return steps


def train_of(config: RunConfig, part: Part, cluster: int | None = None) -> TrainConfig:
    """The schedule of a part; of a cluster's expert, with its own changes."""
    if part == "student":
        return config.student_train
    job = config.expert_of(cluster) if cluster is not None else getattr(config, part)
    return job.train  # type: ignore[no-any-return]


def lengthened(config: RunConfig, steps: Mapping[Part, int]) -> RunConfig:
    """The configuration with more steps. Raises ConfigError where its first steps wouldn't be those of `config`.

    That is so of a rate that falls towards the last step, and of masks that the last steps leave out.
    """
    fields = config.model_dump(mode="json")
    for part, more in steps.items():
        train = train_of(config, part)
        field = f"{part}.train"
        if more <= train.steps:
            raise ConfigError(f"{field}.steps is {train.steps} already, and {more} aren't more")
        if train.schedule not in ("constant", "inverse-sqrt"):
            raise ConfigError(
                f"{field}.schedule is {train.schedule}: its rate falls towards the last step: the {train.steps} that"
                f" are done aren't the first of {more}. Schedules constant and inverse-sqrt can be extended; begin a"
                f" run with one, {OTHERWISE}"
            )
        if train.unmasked_steps:
            raise ConfigError(
                f"{field}.unmasked_steps is {train.unmasked_steps}: the last of {train.steps} steps saw all tokens, and"
                f" of {more} they would be masked. Without it a run can be extended; begin one, {OTHERWISE}"
            )
        fields[part]["train"] = train.model_copy(update={"steps": more}).model_dump(mode="json")
    return parse_config(fields, f"{' and '.join(steps)} with more steps")


def continued(config: RunConfig, steps: Mapping[Part, int], url: str, source: str) -> RunConfig:
    """The configuration of a run on more rows; its trainings begin with the weights of the one at `url`.

    Each has a schedule of its own, from step 0, of as many steps as `steps` has, or as before. Raises ConfigError.
    """
    fields = config.model_dump(mode="json")
    fields["data"]["source"] = source
    own: list[Part] = ["student"] if config.student.train else []
    for part in dict.fromkeys([*PARTS[:2], *own, *steps]):
        train = train_of(config, part)
        first = InitFrom(source=url, network="own") if part != "student" or train.init_from else None
        changes = {"steps": steps.get(part, train.steps), "init_from": first}
        fields[part]["train"] = train.model_copy(update=changes).model_dump(mode="json")
    return parse_config(fields, "the run with more rows")
