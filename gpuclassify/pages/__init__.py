"""Pages of HTML that open without a network, and what they share: looks, pictures and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template

from gpuclassify.pages.readable import readable_time, short_number


def page_template(package: str, folder: str, name: str, **filters: Callable[..., Any]) -> Template:
    """A template, which may import from ``parts.html.j2``, and escapes all that it is given.

    Parameters
    ----------
    package, folder : str
        Where it is: a package, and a folder in it.
    name : str
    **filters
        Filters of its own, beside ``percent``, ``short``, ``thousands`` and ``time``.
    """
    environment = Environment(
        loader=ChoiceLoader(
            [PackageLoader(package, folder), PackageLoader("gpuclassify", "pages")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": "{:.1%}".format,
        "short": short_number,
        "thousands": "{:,.0f}".format,
        "time": readable_time,
        **filters,
    }
    return environment.get_template(name)
