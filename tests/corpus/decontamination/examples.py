"""Example of `Decontaminate`, which has no options of models."""

from gpuclassify import Decontaminate
from tests.examples import FRAME, known_options


def decontaminate(tmp_path_factory, **options):
    options = {"items_field": "items", "passages_field": "passages", **options}
    return Decontaminate(
        against=FRAME[["text"]].iloc[:9],
        against_field="text",
        ngram=5,
        min_words=2 if options.get("max_chars") is None else 3,
        cut=True,
        index_dir=tmp_path_factory.getbasetemp() / "indexes",
        **known_options(Decontaminate, options),
    )


EXAMPLES = {"decontaminate": decontaminate}
