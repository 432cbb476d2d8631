"""ModelMapper: a torch module of your own, or columns of your own."""

from __future__ import annotations

from gpuclassify.mapping.heads import Head
from gpuclassify.mapping.text_mapper import TextMapper


class ModelMapper(TextMapper):
    """Runs a torch module of your own, or reads a model's outputs in your own way.

    A subclass declares three things, of which the first may be left out for a
    network that transformers knows:

    ``build_module(self, config)``
        Makes the torch module, with random weights, from the parsed
        ``config.json`` (a dict, empty without that file). The weights in
        ``model.safetensors`` are loaded into it by name. Its
        ``forward(input_ids, attention_mask)`` takes int64 (rows, width)
        tensors, the mask with 1 for a token and 0 for padding, and returns
        (rows, outputs).
    ``new_columns``
        Names of the new columns and their kinds: "str", "float32", "int64",
        "bool", "list<float32>" or "list<float16>".
    ``columns(self, outputs)``
        The columns' values, one a text, from the outputs, float32 (texts,
        outputs): a dict of arrays or lists.

    `DistributedDataClassifier` takes the same declarations. There,
    ``new_columns`` and ``columns`` may be left out if the outputs are logits of
    labels.

    Raises
    ------
    TypeError
        ``new_columns`` is not declared.

    Examples
    --------
    >>> class Readability(ModelMapper):
    ...     new_columns = {"readability": "float32"}
    ...
    ...     def build_module(self, config):
    ...         return ReadabilityNet(config["vocabulary"])
    ...
    ...     def columns(self, outputs):
    ...         return {"readability": outputs[:, 0]}
    """

    def make_heads(self) -> tuple[Head, ...]:
        """There is none but that of the declared columns."""
        raise TypeError(
            f"{type(self).__qualname__} declares no new_columns: declare them and write "
            "columns(outputs), or use DistributedDataClassifier, which makes labels of its outputs"
        )
