"""The card of a head: what it is, how it was trained, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuclassify.training.evaluation import Evaluation
from gpuclassify.training.page import figure_name, shown

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


def card(
    name: str,
    what: str,
    usage: str,
    labels: str,
    about: Mapping[str, Mapping[str, Any]],
    evaluation: Evaluation,
) -> str:
    """The card as Markdown.

    Parameters
    ----------
    name, what : str
        Of the head.
    usage : str
        Code that runs it.
    labels : str
    about : mapping
        Tables by their title: names and values of data, settings and versions.
    evaluation : Evaluation
    """
    data = about["Data"]
    return _CARD.format(
        name=name,
        what=what,
        usage=usage,
        labels=labels,
        backbone=about["Settings"]["backbone"],
        test=data["test"],
        rows=sum(data[part] for part in ("train", "validation", "test")),
        figures=_table(
            {
                figure_name(key, evaluation.threshold): shown(v)
                for key, v in evaluation.summary.items()
            }
        ),
        training=_table({key: value for part in about.values() for key, value in part.items()}),
    )


def _table(values: Mapping[str, Any]) -> str:
    return "\n".join(
        f"| {name} | {str(value).replace('|', chr(92) + '|')} |"
        for name, value in values.items()
        if value is not None
    )
