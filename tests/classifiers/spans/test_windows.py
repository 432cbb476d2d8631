"""Texts longer than a window: each token by the window that has more beside it, each span once."""

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForTokenClassification, BertConfig, BertForTokenClassification

from gpuclassify import SpanClassifier
from tests.classifiers.spans.test_token_classifiers import assert_equal_spans, rows_of
from tests.oracle import plain_tokenizer
from tests.replicas import sample_texts
from tests.replicas.texts import documents_of
from tests.replicas.tokenizers import trained_tokenizer, write_tokenizer
from tests.replicas.writing import save_model, seeded

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TOKENS, OVERLAP = 32, 8


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A model that calls "q" the beginning of a person and "j" its inside, whatever is beside."""
    directory = tmp_path_factory.mktemp("planted")
    tokenizer = trained_tokenizer("bert", documents_of(None))
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        id2label={0: "O", 1: "B-PER", 2: "I-PER"},
    )
    model = seeded(lambda: BertForTokenClassification(config).eval(), 0)
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight.zero_()
        for part in (
            model.bert.encoder.layer[0].attention.output,
            model.bert.encoder.layer[0].output,
        ):
            part.dense.weight.zero_()
            part.dense.bias.zero_()
        model.bert.embeddings.word_embeddings.weight.normal_(generator=torch.manual_seed(0))
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([0.0, -45.0, -45.0]))
        for row, letter in ((1, "q"), (2, "j")):
            ids = torch.tensor([[tokenizer.token_to_id(letter)]])
            model.classifier.weight[row] = model.bert(ids).last_hidden_state[0, 0]
    save_model(model, directory)
    write_tokenizer(directory, "bert", tokenizer, 512, "right")
    return str(directory)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("aggregation", ["simple", "first", "average", "max"])
def test_an_entity_on_any_border_of_windows_is_found_once(planted, aggregation, side, monkeypatch):
    if side == "left":  # windows are then counted from the end
        from gpuclassify.tokenizing.text_tokenizer import TextTokenizer

        monkeypatch.setattr(TextTokenizer, "cuts_left", property(lambda self: True))
    before = range(120)
    texts = ["a " * count + "q j j" + " a" * (120 - count) for count in before]
    settings = {"max_seq_length": TOKENS, "window_overlap": OVERLAP, "windows_field": "windows"}
    mapper = SpanClassifier(model=planted, aggregation=aggregation, seen_field="seen", **settings)
    found = mapper(texts)
    assert [[span[:3] for span in row] for row in rows_of(found["spans"])] == [
        [(2 * count, 2 * count + 5, "PER")] for count in before
    ]
    assert set(found["windows"]) == {6}
    assert (found["seen"] == 1).all()


def test_the_beginning_alone_is_read_if_asked(planted):
    texts = ["a " * count + "q j" for count in (10, 28, 40)]
    mapper = SpanClassifier(
        model=planted, long_text="truncate", max_seq_length=TOKENS, seen_field="seen"
    )
    found = mapper(texts)
    assert [len(row) for row in found["spans"]] == [1, 1, 0]
    assert found["seen"].tolist() == pytest.approx([1, 1, TOKENS / 44])


def labels_by_brute_force(directory, text, tokens, overlap):
    """Raw label and score of each token: by every window, the one with most beside the token."""
    tokenizer = plain_tokenizer(directory)
    model = AutoModelForTokenClassification.from_pretrained(directory).eval()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    room = tokens - tokenizer.num_special_tokens_to_add()
    best = [(-1, None)] * len(ids)
    for start in range(0, max(len(ids) - overlap, 1), room - overlap):
        stop = min(start + room, len(ids))
        framed = [tokenizer.cls_token_id, *ids[start:stop], tokenizer.sep_token_id]
        with torch.no_grad():
            scores = model(torch.tensor([framed])).logits[0, 1:-1].softmax(-1).numpy()
        for place in range(start, stop):
            left = place - start if start else np.inf
            right = stop - 1 - place if stop < len(ids) else np.inf
            if min(left, right) > best[place][0]:
                best[place] = (min(left, right), scores[place - start])
    return [(model.config.id2label[int(row.argmax())], float(row.max())) for _, row in best]


@pytest.mark.parametrize("overlap", [0, 1, 7, 12, 20])
def test_of_a_token_in_several_windows_the_one_with_more_beside_it_counts(
    token_classifier, overlap
):
    directory = token_classifier("bert")
    texts = [" ".join(sample_texts(9, seed=seed, max_words=60)) for seed in range(4)]
    mapper = SpanClassifier(
        model=directory,
        aggregation="none",
        max_seq_length=TOKENS,
        window_overlap=overlap,
        autocast=False,
    )
    found = rows_of(mapper(texts)["spans"])
    for text, spans in zip(texts, found, strict=True):
        expected = labels_by_brute_force(directory, text, TOKENS, overlap)
        assert len(expected) > 3 * TOKENS
        expected = [row for row in expected if row[0] != "O"]
        assert [span[2] for span in spans] == [label for label, _ in expected]
        assert [span[3] for span in spans] == pytest.approx([s for _, s in expected], abs=1e-5)


@pytest.mark.parametrize("architecture", ["roberta", "deberta-v2", "modernbert"])
def test_windows_of_a_text_that_fits_are_the_text(token_classifier, architecture):
    texts = [*sample_texts(20, seed=8, max_words=50), "", "one"]
    directory = token_classifier(architecture)
    whole = SpanClassifier(model=directory, long_text="truncate", autocast=False)(texts)
    windows = SpanClassifier(model=directory, autocast=False)(texts)
    assert_equal_spans(rows_of(windows["spans"]), rows_of(whole["spans"]), 0)


def test_partitions_and_company_change_nothing_of_long_texts(token_classifier):
    texts = [" ".join(sample_texts(n % 9 + 1, seed=n, max_words=60)) for n in range(18)]
    settings = {"max_seq_length": 64, "autocast": False, "aggregation": "max"}
    mapper = SpanClassifier(model=token_classifier("roberta"), **settings)
    whole = rows_of(mapper(texts)["spans"])
    for size in (1, 5):
        parts = [mapper(texts[at : at + size])["spans"] for at in range(0, len(texts), size)]
        assert_equal_spans(rows_of(pd.concat(parts)), whole)
