"""Aegis against plain transformers and peft: whole prompts, one at a time, decoded to the end."""

import bisect
import functools
import hashlib
import json
import shutil

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gpuclassify import AegisClassifier
from gpuclassify.classifiers.questions.aegis import Verdict, read_answer
from gpuclassify.classifiers.questions.safety_template import TemplateError
from gpuclassify.inference.residency import MODELS
from gpuclassify.mapping.runners import NonFiniteOutputError
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.workers.run_context import collected_stats
from tests.oracle import plain_tokenizer
from tests.replicas import safety_template, sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TEXTS = [
    *sample_texts(24, max_words=60),
    "",
    " leading space",
    "\nleading line break",
    "twice",
    "twice",
    "天気がいい 🙂",
]
FRAME = pd.DataFrame({"text": [*TEXTS, None]}, index=np.arange(len(TEXTS) + 1) // 2)
DIGEST = hashlib.sha256(safety_template().encode()).hexdigest()
CODES = [f"O{number}" for number in range(1, 14)]


@pytest.fixture(scope="module")
def aegis(safety_models):
    """An Aegis classifier on the small models."""

    def make(variant="defensive", **options):
        return AegisClassifier(
            model=getattr(safety_models, variant),
            base_model=safety_models.base,
            **{"template_digest": DIGEST, "autocast": False, **options},
        )

    return make


def resident_identities():
    """What each model in this process was loaded from."""
    keys = MODELS.keys()
    return [key[0] for key in keys]


@functools.cache
def plain_answer(base, adapter, prompt):
    """What the decoder writes after a prompt, by generate, decoded without the prompt."""
    tokenizer, model = plain_model(base, adapter)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        whole = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=100,
            do_sample=False,
            pad_token_id=0,
        )
    return tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


@functools.cache
def plain_model(base, adapter):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return plain_tokenizer(base), PeftModel.from_pretrained(model, adapter).eval()


def prompt_of(document):
    head, tail = safety_template().split("User: \n")
    return f"{head}User: {document}\n{tail}"


def published_label(answer):
    """The known tools' rule: one category exactly, or unknown."""
    lines = answer.split("\n")
    if lines[0].strip() == "safe":
        return "safe"
    if lines[0].strip() != "unsafe" or len(lines) == 1:
        return "unknown"
    return lines[1].strip() if lines[1].strip() in CODES else "unknown"


def answers_of(models, variant, texts=TEXTS):
    adapter = getattr(models, variant)
    return [plain_answer(models.base, adapter, prompt_of(text)) for text in texts]


@pytest.mark.parametrize("variant", ["defensive", "permissive"])
def test_labels_are_those_of_plain_generation(safety_models, aegis, frames, variant):
    found = frames.to_pandas(aegis(variant)(frames.lazy(FRAME, npartitions=3)))

    expected = [published_label(answer) for answer in answers_of(safety_models, variant)]
    assert found["aegis_pred"].iloc[:-1].tolist() == expected
    assert pd.isna(found["aegis_pred"].iloc[-1])
    assert len(set(expected)) >= 4
    assert found.index.tolist() == FRAME.index.tolist()


def test_categories_and_raw_answers(safety_models, aegis, frames):
    classifier = aegis(categories_field="categories", keep_raw=True)
    lazy = classifier(frames.lazy(FRAME))

    found = frames.to_pandas(lazy)

    answers = answers_of(safety_models, "defensive")
    assert found["aegis_pred"].iloc[:-1].tolist() == [*map(published_label, answers)]
    assert list(found.columns) == ["text", "aegis_pred", "categories", "_aegis_raw_pred"]
    assert found["_aegis_raw_pred"].iloc[:-1].tolist() == answers
    for categories, answer in zip(found["categories"].iloc[:-1], answers, strict=True):
        lines = answer.split("\n")
        named = [code.strip() for code in lines[1].split(",")] if len(lines) > 1 else []
        if lines[0].strip() != "unsafe" or named[0] not in CODES:
            named = []
        assert list(categories) == list(dict.fromkeys(c for c in named if c in CODES))
    assert max(len(categories) for categories in found["categories"].iloc[:-1]) > 1
    assert found.iloc[-1].isna().all()
    if frames.name == "pandas":
        assert found.dtypes.to_dict() == lazy._meta.dtypes.to_dict()


def test_most_of_every_prompt_is_run_once_a_process(aegis):
    aegis()(FRAME)
    with collected_stats() as (stats):
        aegis()(FRAME)

    (run,) = stats
    assert run.prefix_tokens > 0.6 * run.tokens
    assert run.padded_tokens < run.tokens


def test_settings_without_a_meaning_for_a_prompt_are_refused(aegis):
    with pytest.raises(ValueError, match="has no meaning for a prompt"):
        aegis(long_text="windows")
    with pytest.raises(ValueError, match="max_seq_length=50 leaves no room for a document"):
        aegis(max_seq_length=50)(FRAME)


def test_filters_and_decisions(aegis):
    labels = aegis()(FRAME)["aegis_pred"]
    safe = aegis(filter_by="safe")(FRAME)
    kept = aegis(filter_by=["O1", "O2", "unknown"], keep_field="kept")(FRAME)

    assert safe.index.tolist() == FRAME.index[(labels == "safe").to_numpy(dtype=bool)].tolist()
    assert kept["kept"].tolist() == labels.isin(["O1", "O2", "unknown"]).tolist()
    with pytest.raises(ValueError, match=r"no label 'O14' in AegisClassifier.*Labels are unknown"):
        aegis(filter_by="O14")(dd.from_pandas(FRAME, npartitions=1))


def test_a_document_that_is_too_long_keeps_the_question(safety_models, aegis):
    long = " ".join(sample_texts(5, seed=5, min_words=50, max_words=60))
    tokenizer = plain_tokenizer(safety_models.base)
    limit = len(tokenizer(prompt_of(""))["input_ids"]) + 100
    classifier = aegis(
        max_seq_length=limit, max_chars=None, truncated_field="cut", seen_field="seen"
    )

    found = classifier(pd.DataFrame({"text": [long, "short"]}))

    def tokens(chars):
        return len(tokenizer(prompt_of(long[:chars]))["input_ids"])

    chars = bisect.bisect_right(range(len(long)), limit, key=tokens) - 1
    answers = answers_of(safety_models, "defensive", [long[:chars], "short"])
    assert found["aegis_pred"].tolist() == [published_label(answer) for answer in answers]
    assert found["cut"].tolist() == [True, False]
    assert found["seen"].tolist() == [pytest.approx(chars / len(long), abs=0.05), 1]


def test_the_template_may_be_given_as_text_or_file(safety_models, aegis, tmp_path):
    expected = aegis()(FRAME)
    text = safety_template()
    (tmp_path / "prompt.txt").write_text(text)

    assert aegis(template=text, template_digest=None)(FRAME).equals(expected)
    assert aegis(template=tmp_path / "prompt.txt")(FRAME).equals(expected)
    with pytest.raises(TemplateError, match=f'template_digest="{DIGEST}"'):
        aegis(template=tmp_path / "prompt.txt", template_digest=None)(FRAME)


def test_a_missing_or_unknown_template_is_an_error_at_the_call(safety_models, aegis, tmp_path):
    ddf = dd.from_pandas(FRAME, npartitions=1)
    shutil.copytree(safety_models.defensive, tmp_path / "adapter")
    with pytest.raises(TemplateError, match="template_digest="):
        aegis(template_digest=None)(ddf)
    (tmp_path / "adapter" / "README.md").unlink()
    classifier = AegisClassifier(model=tmp_path / "adapter", base_model=safety_models.base)
    with pytest.raises(TemplateError, match=r"there is no README\.md of .*Pass template="):
        classifier(ddf)


def test_an_adapter_for_another_base_is_refused_at_the_call(safety_models, aegis, tmp_path):
    ddf = dd.from_pandas(FRAME, npartitions=1)
    shutil.copytree(safety_models.defensive, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = {
        name: t[:, :32].clone() if "lora_A" in name else t for name, t in load_file(path).items()
    }
    save_file(tensors, path)
    other = AegisClassifier(
        model=tmp_path / "adapter", base_model=safety_models.base, template_digest=DIGEST
    )
    with pytest.raises(CheckpointError, match=r"have another shape: .*lora_A.weight \(4, 32\)"):
        other(ddf)
    with pytest.raises(CheckpointError, match=r"is no adapter: it has no adapter_config\.json"):
        AegisClassifier(
            model=safety_models.base, base_model=safety_models.base, template_digest=DIGEST
        )(ddf)
    with pytest.raises(CheckpointError, match=r"tensors are missing: transformer\.h"):
        config = json.loads((safety_models.base / "config.json").read_text())
        shutil.copytree(safety_models.base, tmp_path / "base")
        (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
        AegisClassifier(
            model=safety_models.defensive, base_model=tmp_path / "base", template_digest=DIGEST
        )(ddf)


def test_logits_that_are_not_finite_fail_with_the_row(safety_models, tmp_path):
    shutil.copytree(safety_models.base, tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][7] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    broken = AegisClassifier(
        model=safety_models.defensive, base_model=tmp_path / "base", template_digest=DIGEST
    )
    with pytest.raises(NonFiniteOutputError, match="row 0"):
        broken(FRAME)


def test_teardown_frees_the_decoder(aegis):
    classifier = aegis()
    classifier.setup()
    base = classifier.model.checkpoint.base
    assert base in resident_identities()
    classifier.teardown()
    assert base not in resident_identities()


def test_both_generations_of_spellings():
    old = AegisClassifier(
        aegis_variant="a/b", pred_column="p", raw_pred_column="r", keep_raw_pred=True
    )
    new = AegisClassifier(model="a/b", label_field="p", raw_output_field="r", keep_raw_output=True)
    assert old == new
    assert AegisClassifier().options.model.endswith("Defensive-1.0")


ANSWERS = [
    "safe",
    " safe",
    "safe\n",
    "safe\nO3",
    "safer",
    "unsafe",
    "unsafe\n",
    "unsafe\nO1",
    "unsafe\n O13 ",
    "unsafe\nO1\nO2",
    "unsafe\nO3, O13",
    "unsafe\nO3,O3,O7,O99",
    "unsafe\nO3,",
    "unsafe\nO14",
    "unsafe\nO3 O4",
    "unsafe\n,O3",
    "unsafe\nviolence",
    "unsafely\nO1",
    "Unsafe\nO1",
    "\nsafe",
    "",
    "   ",
    "I cannot say",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_complete_answer_is_read_like_the_known_tools_do(answer):
    assert read_answer(answer, True).label == published_label(answer)


@pytest.mark.parametrize(
    ("answer", "label", "categories"),
    [
        ("unsafe\nO3, O13", "unknown", ("O3", "O13")),
        ("unsafe\nO3,O3,O7,O99", "unknown", ("O3", "O7")),
        ("unsafe\nO3,", "unknown", ("O3",)),
        ("unsafe\n,O3", "unknown", ()),
        ("unsafe\nO99,O3", "unknown", ()),
        ("safe", "safe", ()),
        ("unsafe\nO2", "O2", ("O2",)),
    ],
)
def test_several_categories_are_kept(answer, label, categories):
    assert read_answer(answer, True) == Verdict(label, categories)


@pytest.mark.parametrize("needs_all", [False, True])
@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_decided_early_is_what_the_whole_answer_says(answer, needs_all):
    whole = read_answer(answer, True)
    for end in range(len(answer) + 1):
        early = read_answer(answer[:end], False, needs_all)
        if early is None:
            continue
        assert early.label == whole.label
        if needs_all:
            assert early == whole
        assert read_answer(answer[:end], True).label == whole.label


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ("safe\n...", 5),
        ("unsafe\nO3\n...", 10),
        ("unsafe\nO3, O4", 10),
        ("unsafe\nO14", 10),
        ("unsafe\nX", 8),
        ("The text", 1),
        ("sab", 3),
    ],
)
def test_nothing_is_decoded_after_the_decision(answer, end):
    undecided = [n for n in range(len(answer) + 1) if read_answer(answer[:n], False) is None]
    assert undecided == list(range(end))
