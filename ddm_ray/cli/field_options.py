"""Options of a command that are the fields of a pydantic model."""

from functools import cached_property
from pkgutil import resolve_name
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click

from ddm_ray.cli.command import OneOf


class FieldsCommand(click.Command):
    """A command that also takes the fields of a model as options, except for those in `but`.

    `model` is "module:class". The module is slow to import, so it is imported only when the command runs or shows its
    help. An option that isn't given is None, or the field's default `with_defaults`. One of a tuple of any length may
    be given several times.
    """

    def __init__(self, *args: Any, model: str, but: tuple[str, ...] = (), with_defaults: bool = False, **others: Any):
        super().__init__(*args, **others)
        self._model, self._but, self._with_defaults = model, but, with_defaults

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *params, help_option = super().get_params(ctx)
        return [*params, *self._options, help_option]

    @cached_property
    def _options(self) -> list[click.Parameter]:
        fields = resolve_name(self._model).model_fields
        return [self._option(name, field) for name, field in fields.items() if name not in self._but]

    def _option(self, name: str, field: Any) -> click.Option:
        annotation: Any = field.annotation
        if NoneType in get_args(annotation):
            [annotation] = [kind for kind in get_args(annotation) if kind is not NoneType]
        kind: Any = annotation if annotation in (int, float, bool) else str
        num_values, multiple = 1, False
        if get_origin(annotation) is Literal:
            kind = OneOf(get_args(annotation))
        elif get_origin(annotation) is tuple and get_args(annotation)[-1] is Ellipsis:
            multiple = True
        elif get_origin(annotation) is tuple:
            kind, num_values = float, len(get_args(annotation))
        default = field.default if self._with_defaults else None
        return click.Option(
            [name, f"--{name.replace('_', '-')}"],
            type=kind,
            is_flag=kind is bool,
            default=default,
            nargs=num_values,
            multiple=multiple,
            help=field.description,
            show_default=default not in (None, False, ()),
        )
