"""YAML as a model's types read it: a text field takes the text as it is written, and numbers are decimal.

YAML itself guesses: it makes False of `no`, 8 of `010`, a date of `2024-01-01`, and nothing of what follows ` #`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from ddm_ray.errors import ConfigError
from ddm_ray.spelling import one_line

_PATTERNS = {
    "null": re.compile(r"(?:~|null|Null|NULL|)$"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"),
    "int": re.compile(r"[-+]?[0-9][0-9_]*$"),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    ),
}


@dataclass(frozen=True)
class _Scalar:
    """A scalar without quotes that may be another value than its text."""

    text: str
    value: Any


class _Loader(yaml.SafeLoader):
    """Reads scalars without quotes as `_Scalar`, if YAML 1.2's core schema takes them for other values than texts."""

    yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}  # noqa: RUF012

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """See yaml. Refuses a key that comes twice, of which YAML would drop the first."""
        node = super().compose_mapping_node(anchor)
        names = set[Any]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value} comes twice", problem_mark=key.start_mark)
            names |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return node


def _construct(kind: str, loader: yaml.SafeLoader, node: yaml.ScalarNode) -> _Scalar:
    plain = node.value.replace("_", "").lower()
    values: dict[str, Callable[[], Any]] = {
        "null": lambda: None,
        "bool": lambda: plain == "true",
        "int": lambda: int(plain),
        "float": lambda: float(plain.replace(".inf", "inf").replace(".nan", "nan")),
    }
    return _Scalar(node.value, values[kind]())


for _kind, _pattern in _PATTERNS.items():
    _tag = f"tag:yaml.org,2002:{_kind}"
    _Loader.add_implicit_resolver(_tag, _pattern, None)
    _Loader.add_constructor(_tag, partial(_construct, _kind))


def read_yaml(text: str | bytes, where: str, model: Any = Any) -> Any:
    """The plain data in YAML text, as fields of `model`, a pydantic model or another type.

    Raises ConfigError, naming `where`, for what isn't YAML in UTF-8.
    """
    try:
        return _typed(yaml.load(text, _Loader), [model])
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}: not YAML: {place}{error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not YAML: {one_line(error)}") from None


def read_setting(path: list[str], text: str, where: str, model: type[BaseModel]) -> Any:
    """The value of a setting of the field at a path, such as `data`, `source`, of a model.

    A text is taken as it is written, except for quotes around it. Raises ConfigError for what isn't YAML, and for a
    value of which YAML would leave out a part as a comment.
    """
    kinds: list[Any] = [model]
    for name in path:
        kinds = list(_below(kinds, name))
    if text in ("none", "None") and _may_be_none(kinds):
        raise ConfigError(f"{where}: {text} is a text like others; write null for no value")
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if _is_text(kinds) and not is_quoted:
        return None if _PATTERNS["null"].match(text) and _may_be_none(kinds) else text
    value = read_yaml(text, where, Union[tuple(kinds)] if kinds else Any)  # noqa: UP007
    marks = [token.end_mark.index for token in yaml.scan(text) if not isinstance(token, yaml.StreamEndToken)]
    if rest := text[max(marks) :].strip():
        raise ConfigError(f"{where}: {rest!r} isn't read, as it is a comment; leave it out")
    return value


def _typed(value: Any, kinds: list[Any]) -> Any:
    """A value of which each scalar is a text or another value, by the types that it may have."""
    if isinstance(value, _Scalar):
        as_text = _is_text(kinds) and not (value.value is None and _may_be_none(kinds))
        return value.text if as_text else value.value
    if isinstance(value, dict):
        names = {key: key.text if isinstance(key, _Scalar) else key for key in value}
        return {names[key]: _typed(each, list(_below(kinds, names[key]))) for key, each in value.items()}
    if isinstance(value, list):
        items = [
            argument for kind in _members(kinds) if get_origin(kind) in (list, tuple) for argument in get_args(kind)
        ]
        return [_typed(each, [kind for kind in items if kind is not ...]) for each in value]
    return value


def _members(kinds: Iterable[Any]) -> Iterator[Any]:
    """The types that unions and annotated types stand for."""
    for kind in kinds:
        if get_origin(kind) in (Union, UnionType):
            yield from _members(get_args(kind))
        elif get_origin(kind) is Annotated:
            yield from _members(get_args(kind)[:1])
        else:
            yield kind


def _below(kinds: Iterable[Any], name: str) -> Iterator[Any]:
    """The types that a field of this name may have."""
    for kind in _members(kinds):
        if get_origin(kind) is dict:
            yield get_args(kind)[1]
        elif isinstance(kind, type) and issubclass(kind, BaseModel) and name in kind.model_fields:
            yield kind.model_fields[name].annotation


def _is_text(kinds: list[Any]) -> bool:
    """True if a scalar of one of these types can only be a text."""
    scalars = [
        kind
        for kind in _members(kinds)
        if kind is not NoneType
        and get_origin(kind) not in (dict, list, tuple)
        and not (isinstance(kind, type) and issubclass(kind, BaseModel))
    ]
    return bool(scalars) and all(
        kind is str or (get_origin(kind) is Literal and all(isinstance(each, str) for each in get_args(kind)))
        for kind in scalars
    )


def _may_be_none(kinds: list[Any]) -> bool:
    return NoneType in _members(kinds)
