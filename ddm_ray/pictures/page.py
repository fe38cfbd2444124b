"""Self-contained HTML pages, rendered from the templates beside this file."""

from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ddm_ray.spelling import escape_unprintable


def render_page(template: str, **values: Any) -> str:
    """Render `templates/TEMPLATE.html` with these values. Markup and unprintable characters in them are escaped."""
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
        finalize=_finalized,
    )
    environment.filters["data_url"] = _data_url
    return environment


def _finalized(value: Any) -> Any:
    """The value with the unprintable characters of a text escaped, except those of our own markup."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "\n".join(map(escape_unprintable, value.split("\n")))


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"
