"""Examples of decoders: prompts, and guards on a decoder."""

from gpuclassify import (
    AegisClassifier,
    InstructionDataGuardClassifier,
    Perplexity,
    PromptClassifier,
)
from gpuclassify.classifiers import FAMILIES
from tests.replicas import safety_template

# Settings of families that ask about other columns than the text, or whose first answer is a code.
OWN = {
    "prompt": {"answers": ["yes", "no"], "score_field": "scores", "keep_raw": True},
    "qwen3guard-response": {"response": "Certainly."},
    "wildguard": {"opening": "\nAnswer: "},
    "taxonomy": {"confidence_field": None},
}


def question(name):
    """Return the example of a family; a template of texts is its prompt."""
    own = {"text_field": "text", "confidence_field": "sure", **OWN.get(name, {})}

    def example(chat_model, **options):
        prompt = options.pop("text_template", "{text}")
        return FAMILIES[name](model=chat_model("qwen3"), prompt=prompt, **own | options)

    return example


def aegis(safety_models, **options):
    return AegisClassifier(
        model=safety_models.permissive,
        base_model=safety_models.base,
        template=safety_template(),
        **{"categories_field": "categories", **options},
    )


def instruction_data_guard(safety_models, **options):
    return InstructionDataGuardClassifier(
        model=safety_models.guard,
        adapter=safety_models.defensive,
        base_model=safety_models.base,
        **options,
    )


def perplexity(chat_model, **options):
    """Reads whole texts only, in windows."""
    options.pop("long_text", None)
    return Perplexity(model=chat_model("qwen3"), max_seq_length=32, **options)


EXAMPLES = {
    **{name: question(name) for name in FAMILIES if issubclass(FAMILIES[name], PromptClassifier)},
    "aegis": aegis,
    "perplexity": perplexity,
    "instruction-data-guard": instruction_data_guard,
}
