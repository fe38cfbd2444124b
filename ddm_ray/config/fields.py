"""All fields of a model of configuration, as its types have them: for a page, and for the message on a mistyped one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ddm_ray.config.networks import NetworkConfig
from ddm_ray.spelling import closest_match

_PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_BOUNDS = {
    bounds.Gt: ("gt", "above"),
    bounds.Ge: ("ge", "at least"),
    bounds.Lt: ("lt", "below"),
    bounds.Le: ("le", "at most"),
}


@dataclass(frozen=True)
class ConfigField:
    """One field: its name, the values that it takes, its default (`required` without one), and words on it."""

    name: str
    values: str
    default: str
    about: str


@dataclass(frozen=True)
class FieldGroup:
    """The fields of one part of the configuration, which may stand at several dotted `paths` ("" is the top).

    `kind`: the network's, where a part may be of several; else empty.
    """

    paths: tuple[str, ...]
    kind: str
    about: str
    fields: tuple[ConfigField, ...]


def field_groups(root: type[BaseModel]) -> list[FieldGroup]:
    """The parts of a model in their order, each once."""
    by_model: dict[type[BaseModel], FieldGroup] = {}
    for path, model in _models(root, ""):
        known = by_model.get(model)
        paths = (*(known.paths if known else ()), path)
        by_model[model] = replace(known, paths=paths) if known else _group(model, path)
    return list(by_model.values())


def meant_field(field: str, root: type[BaseModel]) -> str:
    """`; did you mean A?` for the dotted field that an unknown one is nearest to, by its last name; else empty.

    Those of its own part come first; of others at most three that have the name. A network's kind stands behind a field
    that others don't have.
    """
    parent, _, name = field.rpartition(".")
    kinds = {
        f"{path}.{known}".removeprefix("."): _kind(model)
        for path, model in _models(root, "")
        for known in model.model_fields
    }
    dotted = [*kinds]
    beside = [path for path in dotted if path.rpartition(".")[0] == parent]
    for paths in (beside, dotted):
        near = closest_match(name, [path.rpartition(".")[2] for path in paths])
        if near is not None:
            named = dict.fromkeys(path for path in paths if path.rpartition(".")[2] == near)
            matches = [
                f"{path} of a {kinds[path]}" if kinds[path] else path
                for path in sorted(named, key=lambda path: path.count("."))
            ]
            return f"; did you mean {' or '.join(matches[:3])}?"
    return ""


def _models(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Each part of a model with its dotted path, the model itself first."""
    yield path, model
    for name, field in model.model_fields.items():
        for part in _parts(field.annotation):
            yield from _models(part, f"{path}.{name}".removeprefix("."))


def _parts(annotation: Any) -> list[type[BaseModel]]:
    """Models that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _parts(arguments[0])
    return [part for each in arguments for part in _parts(each)] if _is_union(annotation) else []


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _group(model: type[BaseModel], path: str) -> FieldGroup:
    fields = tuple(_field(name, field) for name, field in model.model_fields.items())
    return FieldGroup((path,), _kind(model), _as_one_text(model.__doc__ or ""), fields)


def _kind(model: type[BaseModel]) -> str:
    return model.kind() if issubclass(model, NetworkConfig) else ""


def _field(name: str, field: FieldInfo) -> ConfigField:
    if _parts(field.annotation):
        values = "fields of its own"
        default = "required" if field.is_required() else "none" if field.default is None else "their defaults"
    else:
        values = _values(field.annotation, field.metadata)
        default = "required" if field.is_required() else _default(field.get_default(call_default_factory=True))
    return ConfigField(name, values, default, _as_one_text(field.description or ""))


def _values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Words on the values of a type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(arguments[0], [*arguments[1:], *metadata])
    if _is_union(annotation):
        kinds = [each for each in arguments if each is not NoneType]
        # Bounds of a field that may be none stand beside the union.
        words = [_values(each, metadata) for each in kinds]
        return " or ".join([*words, *(["none"] if NoneType in arguments else [])])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"{len(arguments)} of: {_values(arguments[0])}"
    if origin is tuple:
        return f"list of {_values(arguments[0])}s"
    if origin is dict:
        return "fields"
    return ", ".join([_PLAIN.get(annotation, "any"), *_range(metadata)]).replace("number, above", "number above")


def _range(metadata: Sequence[Any]) -> list[str]:
    """Words on the bounds among a field's metadata."""
    flat = [bound for each in metadata for bound in (getattr(each, "metadata", None) or [each])]
    words = []
    for kind, (name, word) in _BOUNDS.items():
        words += [f"{word} {getattr(each, name):,}" for each in flat if isinstance(each, kind)]
    return words


def _default(value: Any) -> str:
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, tuple):
        return ", ".join(map(_default, value))
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _as_one_text(text: str) -> str:
    return " ".join(text.split())
