"""Templates such as ``"{url}\\n\\n{text}"``: one text a row, of several columns."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence


def template_fields(template: str) -> tuple[str, ...]:
    """The columns that a template names, each once.

    Raises
    ------
    ValueError
        A brace stands alone, or holds more or less than a column's name.
    """
    return tuple(dict.fromkeys(name for _, name in _pieces(template) if name is not None))


def fill_template(
    template: str, columns: Mapping[str, Sequence[str | None]], text_field: str
) -> list[str | None]:
    """The texts of rows: null where that of `text_field` is, and without what else is null.

    Parameters
    ----------
    template : str
    columns : mapping of str to sequence of str or None
        The values of `template_fields`, one a row.
    text_field : str
    """
    pieces = _pieces(template)
    layout = "".join(text.replace("%", "%%") + "%s" * (name is not None) for text, name in pieces)
    named = [columns[name] for _, name in pieces if name is not None]
    rows = zip(columns[text_field], zip(*named, strict=True), strict=True)
    return [
        None if text is None else layout % tuple(value or "" for value in values)
        for text, values in rows
    ]


def _pieces(template: str) -> list[tuple[str, str | None]]:
    """Texts as they stand, each with the column that follows it, if one does."""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as err:
        raise ValueError(
            f"text_template={template!r} has a brace of its own ({err}): write {{{{ for {{ and "
            "}} for }"
        ) from err
    for _, name, form, conversion in pieces:
        if name == "" or form or conversion:
            raise ValueError(
                f"text_template={template!r} has braces that hold more or less than a name: write "
                "columns as in {url}, without forms and conversions"
            )
    return [(text, name) for text, name, _, _ in pieces]
