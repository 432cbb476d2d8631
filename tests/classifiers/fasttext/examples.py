"""Examples of fastText's classifiers, which have no options of networks."""

from gpuclassify.classifiers import FAMILIES
from tests.examples import known_options


def linear(name):
    """Return the example of a family."""

    def example(fasttext_model, **options):
        own = known_options(FAMILIES[name], {"top_k": 2} | options)
        return FAMILIES[name](model=fasttext_model("chars"), **own)

    return example


EXAMPLES = {name: linear(name) for name in ("fasttext", "language")}
