"""Pages, cards and drawings from the jinja2 templates beside this file."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: not name.endswith(".md.j2"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(template: str, **values: object) -> str:
    """Return a template's text with these values in it; in HTML and SVG they are escaped."""
    return TEMPLATES.get_template(template).render(values)
