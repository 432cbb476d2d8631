"""The card of a head: what it is, how it was trained, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuclassify.training.evaluation import Evaluation
from gpuclassify.training.page import figure_name, shown
from gpuclassify.training.split import PARTS

_WHAT = {
    "linear": "A linear layer",
    "mlp": "Two layers with a ReLU between them",
    "pooler": "A BERT's pooler and a linear layer",
}
_CARD = """\
---
library_name: gpuclassify
pipeline_tag: text-classification
---
# {name}

{what} on embeddings of `{backbone}`, whose own weights are as they were. Labels: {labels}.

```python
{usage}
```

## Evaluation

On {test:,} of {rows:,} annotated texts, which took no part in training. `evaluation.html` has
pictures.

| figure | value |
|---|---|
{figures}

## Training

| | |
|---|---|
{training}
"""


def card(name: str, record: Mapping[str, Any], evaluation: Evaluation) -> str:
    """The card as Markdown.

    Parameters
    ----------
    name : str
        Of the head's directory.
    record : mapping
        See `gpuclassify.training.head.Head`.
    evaluation : Evaluation
        Of the test part.
    """
    data = record["data"]
    return _CARD.format(
        name=name,
        what=_WHAT[record["settings"]["kind"]],
        usage=_usage(name, record),
        labels=", ".join(record["labels"]),
        backbone=record["backbone"]["model"],
        test=data["test"],
        rows=sum(data[part] for part in PARTS),
        figures=_table(
            {
                figure_name(key, evaluation.threshold): shown(v)
                for key, v in evaluation.summary.items()
            }
        ),
        training=_table(
            {k: value for part in evaluation.about.values() for k, value in part.items()}
        ),
    )


def _usage(name: str, record: Mapping[str, Any]) -> str:
    """Code that runs the head."""
    settings = record["settings"]
    given = [f"{key}={value!r}" for key, value in record["reading"].items()]
    if settings["kind"] != "pooler":
        runner = "HeadClassifier"
        given.insert(0, f"heads={{{settings['label_field']!r}: {name!r}}}")
    else:
        is_number = settings["task"] == "regression"
        runner = "FineWebEduClassifier" if is_number else "DistributedDataClassifier"
        given.insert(0, f"model={name!r}")
    return f"from gpuclassify import {runner}\n\nddf = {runner}({', '.join(given)})(ddf)"


def _table(values: Mapping[str, Any]) -> str:
    return "\n".join(
        f"| {name} | {str(value).replace('|', chr(92) + '|')} |"
        for name, value in values.items()
        if value is not None
    )
