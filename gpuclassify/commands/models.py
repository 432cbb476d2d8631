"""Command ``gpuclassify models``: list classifiers, models and labels."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.commands.console import wrong_call_exits
from gpuclassify.commands.settings import families, family_name, find_family
from gpuclassify.models.checkpoint import some_of
from gpuclassify.settings.checks import setting_names

if TYPE_CHECKING:
    from gpuclassify.classifiers.published import Published
    from gpuclassify.mapping.text_mapper import TextMapper

_wrapped = textwrap.TextWrapper(100, subsequent_indent=" " * 13, break_on_hyphens=False).fill


@click.command()
@click.argument("family", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all labels.")
def models(family: str | None, as_json: bool) -> None:
    """List the classifiers, their models, licences and output columns; for FAMILY also labels.

    Classes come first, then the published checkpoints that have a name. Labels are those of the
    published models. Works without a network.

    \b
    gpuclassify models domain
    gpuclassify models stack-edu-python
    """
    from gpuclassify.classifiers.published import CATALOGUE

    everything = {**families(), **{entry.name: entry for entry in CATALOGUE}}
    with wrong_call_exits():
        chosen = everything if family is None else {family_name(family): find_family(family)}
    described = [_describe(name, choice) for name, choice in chosen.items()]
    if as_json:
        click.echo(json.dumps(described, indent=2))
        return
    for row in described:
        columns = ", ".join(f"{name} ({kind})" for name, kind in row["columns"].items())
        access = ", needs access to a gated model" if row["is_gated"] else ""
        click.echo(f"{row['family']}: {row['purpose']}")
        click.echo(f"    model    {row['model']}")
        click.echo(f"    licence  {row['licence']}{access}")
        click.echo(f"    columns  {columns or 'as the model has it'}")
        for variant, words in row["variants"].items():
            most = 5 if family is None else len(words)
            click.echo(_wrapped(f"    {variant:<8} {some_of(words, most)}"))
        if family is not None:
            for name in ("class", "reads", "cite", "note", "checked"):
                if row[name]:
                    click.echo(_wrapped(f"    {name:<8} {row[name]}"))
            fields = row["labels_by_column"] or {"": row["labels"]}
            for column, labels in fields.items():
                many = len(labels) or "none, or as the model has them"
                click.echo(f"    labels   {many}{column and f' of {column}'}")
                click.echo("".join(f"        {label}\n" for label in labels), nl=False)


def _describe(name: str, family: type[TextMapper] | Published) -> dict[str, Any]:
    from gpuclassify.classifiers.published import CHECKED, Published

    published = family if isinstance(family, Published) else None
    mapper_type = family.kind if isinstance(family, Published) else family
    settings = setting_names(family.Options)
    needed = [f"--{name}" for name in ("model", "heads") if name in settings]
    columns = default_columns(family) if "model" in family.defaults or not needed else {}
    return {
        "family": name
        if published is None or not published.variants
        else f"{name}-{published.variant}",
        "class": mapper_type.__qualname__,
        "purpose": family.purpose,
        "model": family.defaults.get("model", next(iter(needed), "none")),
        "licence": family.licence,
        "is_gated": family.is_gated,
        "columns": columns,
        "reads": length_read(family.defaults),
        "cite": family.cite,
        "note": published and published.note,
        "checked": published and CHECKED,
        "variants": {published.variant: list(published.variants)}
        if published and published.variants
        else {},
        "labels": list(
            published.settings.get("labels", ()) if published else mapper_type.published_labels
        ),
        "labels_by_column": labels_by_column(family),
    }


def length_read(defaults: Mapping[str, Any]) -> str:
    """Describe the maximum length of text that a classifier reads, such as "512 tokens"."""
    parts = [
        f"{defaults[name]:,} {what}"
        for name, what in (("max_chars", "characters"), ("max_seq_length", "tokens"))
        if defaults.get(name)
    ]
    how = {"windows": ", in as many windows as it takes", "ends": ", at both ends"}
    read = " and ".join(parts) or "all that the model can"
    return read + how.get(defaults.get("long_text", ""), "")


def default_columns(family: type[TextMapper] | Published) -> dict[str, str]:
    """Return the columns that a classifier adds by default: their Arrow types, by name.

    It is only the label column if the classifier needs settings of the user, such as labels.
    """
    kind: Any = getattr(family, "kind", family)
    required = {own.name for own in fields(family.Options) if own.default is MISSING}
    if required - family.defaults.keys():
        return {family.defaults["label_field"]: "string"}
    return {field.name: str(field.type) for field in kind(**family.defaults).schema()}


def labels_by_column(family: type[TextMapper] | Published) -> dict[str, list[str]]:
    """Return the labels of each output column of a classifier with several, else {}."""
    fields = dict(family.defaults.get("fields", ()))
    return {name: list(field.labels) for name, field in fields.items() if hasattr(field, "labels")}
