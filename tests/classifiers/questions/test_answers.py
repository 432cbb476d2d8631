"""Answers of several fields, against a walk of the same form by plain transformers."""

import functools
import itertools
import string

import numpy as np
import pandas as pd
import pytest

from gpuclassify import PromptClassifier, TaxonomyClassifier
from gpuclassify.classifiers.questions.answers import Choice, Free, Several
from tests.chat_oracle import ChatOracle
from tests.decoder_oracle import write_decoder
from tests.replicas import sample_texts
from tests.replicas.chat_models import write_chat_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
PROMPT = "Judge what follows.\n\n{text}\n\nAnswer:"
TEXTS = [*sample_texts(6, max_words=60), "", "{a}"]
FRAME = pd.DataFrame({"text": TEXTS})
CODES = [f"S{number}" for number in range(1, 15)]
JSON_WORDS = ['{"codes":["S1","S10"],"harms":["Sexual","Other"],"kind":"good"}'] * 20
HARMS = ["Violence", "Sexual", "Sexual (minor)", "Privacy", "Other"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The directory of a small decoder, by its architecture; each is written once.

    After "JSON" in the name, the tokenizer knows words of JSON: `","` and `"],"` are a token each.
    """
    return functools.cache(
        lambda name: write_chat_model(
            tmp_path_factory.mktemp("model"), name.split()[0], JSON_WORDS * ("JSON" in name)
        )
    )


@pytest.fixture(scope="module")
def oracle(directory):
    return functools.cache(lambda name: ChatOracle(directory(name)))


def as_oracle_field(own):
    """A field in the oracle's own words."""
    if isinstance(own, Free):
        return "free", own.max_tokens, own.stop
    choice = own if isinstance(own, Choice) else Choice(own)
    texts = {label: list(several) for label, several in choice.spellings}
    if isinstance(own, Several):
        return "several", texts, own.separator, own.none
    return "choice", texts, choice.ends


FORMS = {
    "guard of two lines": (
        "Safety: {safety}\nCategories: {harms}",
        {"safety": ["Safe", "Unsafe", "Unsure"], "harms": Several(HARMS, none="None")},
    ),
    "codes of one and two digits": (
        "{safety}\n{codes}",
        {
            "safety": Choice(["safe", "unsafe"], ends=["safe"]),
            "codes": Several(CODES, separator=","),
        },
    ),
    "a list first": ("{codes}.", {"codes": Several(CODES, separator=", ", none="none")}),
    "a list between": (
        "A: {codes}\nB: {next}\nC: {last}",
        {"codes": Several(["S1", "S10", "S11"], separator=","), "next": ["yes", "no"],
         "last": {"good": ["good", "fine"], "bad": "bad"}},
    ),
    "json": (
        '{{"user": "{user}", "response": "{response}", "harms": "{harms}"}}',
        {"user": ["safe", "unsafe"], "response": ["safe", "unsafe"], "harms": Several(HARMS)},
    ),
    "pairs of numbers": (
        "{a},{b}\n{c},{d}",
        {
            "a": [str(n) for n in range(1, 26)],
            "b": {"none": ["skip", "-1"], **{str(n): str(n) for n in range(1, 26)}},
            "c": [str(n) for n in range(-1, 7)],
            "d": ["skip", "1", "2"],
        },
    ),
    "free text": (
        "{first},{second}\nKind: {kind}",
        {"first": Free(6, stop=","), "second": Free(4), "kind": ["good", "bad"]},
    ),
    "lists of json": (
        '{{"codes":["{codes}"],"harms":["{harms}"],"kind":"{kind}"}}',
        {"codes": Several(CODES, separator='","'), "harms": Several(HARMS, separator='","'),
         "kind": ["good", "bad"]},
    ),
    "a separator that also follows the list": (
        "{harms}, and {kind}", {"harms": Several(HARMS), "kind": ["good", "bad"]},
    ),
    "what follows a list begins as its separator or not": (
        "{harms}{kind}", {"harms": Several(HARMS), "kind": ["; no", ", yes", ", not", " end"]},
    ),
    "a list of free texts": (
        "{kind}: {names}",
        {"kind": ["good", "bad"], "names": Free(12, stop="\n", separator="e")},
    ),
    "free text last": ("{kind}: {why}", {"kind": ["good", "bad"], "why": Free(5, stop="e")}),
}  # fmt: skip


WITH_COMMAS = {
    "guard of two lines",
    "json",
    "lists of json",
    "a separator that also follows the list",
    "what follows a list begins as its separator or not",
}  # which the tokens of Gemma's copy cross


@pytest.mark.parametrize(
    ("name", "form"),
    [*itertools.product(["qwen2", "llama3"], FORMS),
     *itertools.product(["qwen2 JSON"], ["json", "lists of json"]),
     *itertools.product(["gemma2"], sorted(FORMS.keys() - WITH_COMMAS))],
)  # fmt: skip
def test_fields_are_those_of_a_walk_by_whole_logits(directory, oracle, name, form):
    answer, fields = FORMS[form]
    has_label = not isinstance(next(iter(fields.values())), Free | Several)
    classifier = PromptClassifier(
        model=directory(name), prompt=PROMPT, answer=answer, fields=fields, confidences=True,
        confidence_field="sure" if has_label else None,
    )  # fmt: skip

    found = classifier(FRAME)

    literals, names = [""], []
    for text, field, *_ in string.Formatter().parse(answer):
        literals[-1] += text
        if field is not None:
            names.append(field)
            literals.append("")
    own = [as_oracle_field(fields[field]) for field in names]
    plain = oracle(name)
    seen = set()
    for row, text in enumerate(TEXTS):
        values, shares = plain.walk(plain.prompt(PROMPT.replace("{text}", text)), literals, own)
        for field, kind, value, share in zip(names, own, values, shares, strict=True):
            said = found[field].iloc[row]
            if kind[0] == "several":
                assert list(said) == (value or [])
            elif getattr(fields[field], "separator", None):
                assert list(said) == [one for one in value.split("e") if one]
            else:
                assert said == value if value is not None else pd.isna(said)
            is_label = has_label and field == names[0]
            sure = found["sure" if is_label else f"{field}_confidence"]
            np.testing.assert_allclose(sure.iloc[row], share, atol=1e-5)
        seen.add(str(values))
    assert len(seen) > 1


def test_the_taxonomy_is_read_line_by_line(directory, oracle):
    classifier = TaxonomyClassifier(
        model=directory("qwen2"), max_seq_length=2_000, confidences=True
    )

    found = classifier(FRAME.iloc[:3])

    form, plain = classifier.options.form, oracle("qwen2")
    own = [as_oracle_field(one) for one in form.fields]
    for row, text in enumerate(TEXTS[:3]):
        prompt = plain.prompt(text, system="taxonomy")
        values, shares = plain.walk(prompt, list(form.literals), own)
        assert found.loc[row, list(form.names)].tolist() == values
        sure = found.loc[row, [f"{name}_confidence" for name in form.names]]
        np.testing.assert_allclose(sure.astype(float), shares, atol=1e-5)
    assert len(form.names) == 20


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"answers": ["yes"]}, ValueError, "leave no choice"),
        ({"answers": {"yes": ["yes", "Yes"]}}, ValueError, "leave no choice"),
        ({"answers": {"yes": [], "no": ["no", "No"]}}, ValueError, "'yes' has no text"),
        ({"answers": ["yes", "yes"]}, ValueError, "'yes' is given twice"),
        ({"answers": {"a": "yes", "b": ["no", "yes"]}}, ValueError, "'yes' is given twice"),
        ({"answers": ["yes", " "]}, ValueError, "option ' ' is empty"),
        ({"answers": ["yes", ""]}, ValueError, "option '' is empty"),
        ({"answers": ["no", "not sure"]}, ValueError, "'no' is how 'not sure' begins"),
        ({"answers": [1, 2]}, TypeError, "option 1 is a int"),
        ({"answers": "yes"}, TypeError, "pass a list of labels"),
        ({"answers": ["yes", "no"], "answer": "{a}"}, ValueError, "pass either answers="),
        ({"answer": "{a}"}, ValueError, "pass either answers="),
        ({}, ValueError, "pass either answers="),
        ({"fields": {"a": ["x", "y"]}}, ValueError, "pass either answers="),
        ({"answer": "{a}", "fields": {}}, TypeError, "pass a dict of a field's name"),
        ({"answer": "{a}", "fields": {"a": []}}, ValueError, "leave no choice"),
        ({"answer": "{a}", "fields": {"a": None}}, TypeError, "pass a list of labels"),
        ({"answer": "{a}", "fields": {"b": ["x", "y"]}}, ValueError, "each must be in both"),
        ({"answer": "{a}{a}", "fields": {"a": ["x", "y"]}}, ValueError, "each must be in both"),
        ({"answer": "no field", "fields": {"a": ["x", "y"]}}, ValueError, "each must be in both"),
        ({"answer": "{a} {", "fields": {"a": ["x", "y"]}}, ValueError, "a brace of its own"),
        (
            {"answer": "{a}, x{b}", "fields": {"a": Several(["x", "y"]), "b": ["x", "y"]}},
            ValueError,
            "not told from those of another",
        ),
        (
            {"answer": "{a}.", "fields": {"a": Several(["x", "x, y"])}},
            ValueError,
            "not told from those of another",
        ),
        (
            {"answer": "{a}d {b}", "fields": {"a": ["x", "an"], "b": ["x", "y"]}},
            ValueError,
            "the tokenizer writes the end of 'an' otherwise where 'd x' follows",
        ),
    ],
)
def test_answers_that_cannot_be_read_are_refused_at_the_call(
    directory, never_loads, options, error, message
):
    with pytest.raises(error, match=message):
        PromptClassifier(model=directory("qwen2"), prompt=PROMPT, **options)(FRAME)


def test_ends_are_labels():
    with pytest.raises(ValueError, match="are none of the labels"):
        Choice(["yes", "no"], ends=["maybe"])
    with pytest.raises(ValueError, match="ends=\\['yes'\\] is for Choice"):
        Several(["yes", "no"], ends=["yes"])


def test_options_that_are_one_token_to_the_tokenizer_are_refused(tmp_path, never_loads):
    model = write_decoder(tmp_path)  # which knows w3 to w63
    with pytest.raises(ValueError, match="option 'no' are not told from those of another"):
        PromptClassifier(model=model, chat=False, prompt="{text} is ", answers=["yes", "no"])(FRAME)
