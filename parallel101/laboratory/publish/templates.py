"""Fills the templates of the site's pages, which are in the folder templates/.

Values are escaped, unless a filter or a macro has made them HTML.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from parallel101.laboratory.publish.offline_page import file_text
from parallel101.laboratory.viz.scene import script_json


@cache
def environment() -> Environment:
    """Return the site's templates.

    {{ file("page.css") }} is the text of a file in this folder.
    """
    made = Environment(
        loader=PackageLoader("parallel101.laboratory.publish"),
        autoescape=lambda name: ".html" in str(name),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.globals["file"] = as_html(file_text)
    made.filters["script"] = as_html(script_json)
    made.filters["markdown"] = as_html(_markdown)
    made.filters["inline"] = as_html(
        lambda text: _markdown(text).strip().removeprefix("<p>").removesuffix("</p>")
    )
    return made


def _markdown(text: str) -> str:
    # nbconvert takes over a second, and a page that plays in a notebook has no Markdown
    from parallel101.laboratory.publish.markdown import to_html

    return to_html(text)


def render(name: str, **values: object) -> str:
    """Return the template `name`.html.jinja2, or that of a file with an ending, such as cite.md."""
    file = name if "." in name else f"{name}.html"
    return environment().get_template(f"{file}.jinja2").render(**values)


def as_html(function: Callable[..., str]) -> Callable[..., Markup]:
    """Let a template use what the function returns as HTML."""
    return lambda *args: Markup(function(*args))
