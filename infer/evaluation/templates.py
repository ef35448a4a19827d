"""Renders reports, model cards and drawings from the Jinja templates in this folder."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def needs_escaping(template: str | None) -> bool:
    """Return whether the values that are inserted into a template must be HTML-escaped: true for
    HTML and SVG, false for Markdown.

    template: file name of the template
    """
    return template is not None and not template.endswith(".md.j2")


REPORT_JINJA_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=needs_escaping,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render_template(template: str, **values: object) -> str:
    """Return the text of a template after `values` were inserted.

    template: file name of the template in this folder
    """
    return REPORT_JINJA_ENVIRONMENT.get_template(template).render(values)
