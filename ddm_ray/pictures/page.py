"""HTML pages that hold their pictures and fetch nothing, from the templates beside this file."""

from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def page(template: str, **values: Any) -> str:
    """The page that `templates/TEMPLATE.html` makes of the values, all of which it escapes."""
    return _environment().get_template(f"{template}.html").render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["data_url"] = _data_url
    return environment


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"
