"""Examples of mappers that are made of several."""

from gpuclassify import FineWebEduClassifier, FineWebMixtralEduClassifier, QualityClassifier, Route
from gpuclassify.mapping.chain import Chain


def chain(checkpoint, **options):
    first = QualityClassifier(model=checkpoint("quality"), autocast=False)
    return Chain((first, FineWebEduClassifier(model=checkpoint("fineweb-edu"), **options)))


def route(checkpoint, **options):
    options |= {"label_field": "label", "score_field": "score", "int_score_field": "int"}
    edu = FineWebEduClassifier(model=checkpoint("fineweb-edu"), **options)
    mixtral = FineWebMixtralEduClassifier(model=checkpoint("fineweb-mixtral-edu"), **options)
    return Route(by="id", to={**dict.fromkeys(range(8), edu), 9: mixtral}, otherwise=mixtral)


EXAMPLES = {"chain": chain, "route": route}
