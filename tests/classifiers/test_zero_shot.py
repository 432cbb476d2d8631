"""Zero-shot labels, held against transformers' own pipeline: one text at a time, in float32."""

import json
import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    BartConfig,
    ByT5Tokenizer,
    CanineTokenizer,
    ZeroShotClassificationPipeline,
)
from transformers.pipelines.zero_shot_classification import ZeroShotClassificationArgumentHandler

from gpuclassify import ZeroShotClassifier
from gpuclassify import classify as classify_by_all
from gpuclassify.commands.cli import main
from gpuclassify.commands.settings import JobSettings, load_settings
from gpuclassify.jobs.execution import ModelProbe
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.tokenizing.gaps import WordCache
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
from gpuclassify.workers.run_context import collected_stats
from tests.mapping.test_pairs import POST_PROCESSORS, frame_pairs
from tests.oracle import assert_close, assert_labels_agree, plain_tokenizer, stacked
from tests.replicas import sample_texts
from tests.replicas.texts import documents_of
from tests.replicas.tokenizers import trained_tokenizer, write_tokenizer
from tests.replicas.writing import save_model, seeded

pytestmark = pytest.mark.usefixtures("one_torch_thread")
NAMES = {"News": "reports of {current} events", "Food": "something to cook", "Ads": "an offer"}
HYPOTHESIS = "The topic is {}, or so."
MOST = 80  # tokens of a pair where texts are cut
THREE = ("contradiction", "neutral", "entailment")  # facebook/bart-large-mnli, roberta-large-mnli
TEXTS = [*sample_texts(7, seed=6, max_words=50), "", "gap  ", "gap  ", None, "天気 🙂"]
FRAME = pd.DataFrame({"id": range(12), "text": pd.Series(TEXTS, dtype="str")})
IS_TEXT = FRAME["text"].notna().to_numpy()


@pytest.fixture
def nli_model(sequence_classifier, tmp_path):
    """The directory of a small NLI model, by its architecture and labels."""

    def write(architecture="bert", labels=THREE):
        folder = tmp_path / f"{architecture}-{len(list(tmp_path.iterdir()))}"
        if architecture == "bart":
            return write_bart(folder, labels)
        shutil.copytree(sequence_classifier(architecture, labels=tuple(labels)), folder)
        return frame_pairs(folder, architecture)

    return write


def write_bart(folder, labels):
    """A small encoder-decoder, which reads each pair twice, and its last end token."""
    folder.mkdir()
    tokenizer = trained_tokenizer("roberta", documents_of(None))
    sizes = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    config = BartConfig(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=32,
        max_position_embeddings=128,
        init_std=0.2,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        **sizes,
    )
    build = AutoModelForSequenceClassification.from_config
    save_model(seeded(lambda: build(config).float(), 0), folder)
    write_tokenizer(folder, "roberta", tokenizer, 128, "right")
    return frame_pairs(folder, "roberta")


class PairsOfAnyText(ZeroShotClassificationArgumentHandler):
    """Pairs of an empty text, too, which the pipeline refuses."""

    def __call__(self, text, labels, template):
        if text:
            return super().__call__(text, labels, template)
        return [["", template.format(label)] for label in labels], [text]


def pipeline_scores(model, texts, labels=NAMES, multi_label=False, max_tokens=None, **how):
    """Scores in the order of `labels` by transformers, float64 (texts, labels)."""
    tokenizer = plain_tokenizer(model)
    if max_tokens is not None:
        tokenizer.model_max_length = max_tokens
    network = AutoModelForSequenceClassification.from_pretrained(model).float().eval()
    if network.config.model_type == "bert":
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    parts = {"model": network, "tokenizer": tokenizer, "args_parser": PairsOfAnyText()}
    pipeline = ZeroShotClassificationPipeline(**parts, device="cpu")
    how = {"hypothesis_template": HYPOTHESIS, "multi_label": multi_label, **how}
    found = []
    for text in texts:
        said = pipeline(text, candidate_labels=[*labels.values()], **how)
        scores = dict(zip(said["labels"], said["scores"], strict=True))
        found.append([scores[description] for description in labels.values()])
    return np.array(found)


def zero_shot(model, **options):
    settings = {"labels": NAMES, "hypothesis": HYPOTHESIS, "score_field": "s", "autocast": False}
    return ZeroShotClassifier(model=str(model), **{**settings, **options})


@pytest.mark.contract
@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize(
    ("architecture", "labels"),
    [
        ("deberta-v2", ["entailment", "not_entailment"]),
        ("deberta-v2", ["entailment", "neutral", "contradiction"]),
        ("bert", ["not_entailment", "entailment"]),
        ("bert", ["CONTRADICTION", "ENTAILMENT", "NEUTRAL"]),
        ("roberta", THREE),
        ("modernbert", THREE),
        ("bart", THREE),
    ],
)
def test_scores_are_those_of_the_pipeline_of_transformers(
    nli_model, architecture, labels, multi_label
):
    model = nli_model(architecture, labels)

    found = zero_shot(model, multi_label=multi_label)(FRAME)

    expected = pipeline_scores(model, FRAME["text"][IS_TEXT], multi_label=multi_label)
    assert expected.std(axis=0).min() > 0.001, "scores that are all alike prove nothing"
    assert_close(stacked(found["s"][IS_TEXT]), expected)
    assert_labels_agree(found["zero_shot_pred"][IS_TEXT], [*NAMES], expected)
    assert found.loc[~IS_TEXT, ["s", "zero_shot_pred"]].isna().all(axis=None)
    pd.testing.assert_frame_equal(found[["id", "text"]], FRAME)


@pytest.mark.parametrize("engine", ["auto", "padded", "reference"])
@pytest.mark.parametrize("max_chars", [None, 300])
def test_long_texts_are_cut_and_hypotheses_never(nli_model, engine, max_chars):
    model, texts = nli_model(), [text and text * 9 for text in TEXTS]
    labels = NAMES | {"Long": "a rather longer description of it " * 2}
    own = {"engine": engine, "max_chars": max_chars, "seen_field": "seen", "max_seq_length": MOST}

    found = zero_shot(model, labels=labels, **own)(FRAME.assign(text=texts))

    read = [text[:max_chars] for text in texts if text is not None]
    assert_close(
        stacked(found["s"][IS_TEXT]), pipeline_scores(model, read, labels, max_tokens=MOST)
    )
    tokens = plain_tokenizer(model)
    hypotheses = [HYPOTHESIS.format(description) for description in labels.values()]
    shares = []
    for text in read:
        sizes = [len(ids) for ids in tokens([(text, other) for other in hypotheses]).input_ids]
        shares.append(sum(min(size, MOST) for size in sizes) / sum(sizes))
    if max_chars is None:
        assert_close(found["seen"][IS_TEXT], shares)
    assert 0 < (found["seen"] < 1).sum() < IS_TEXT.sum()


@pytest.mark.parametrize("name", POST_PROCESSORS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_tokens_are_those_of_the_library_for_every_pair_of_lengths(nli_model, name, side):
    tokenizer = plain_tokenizer(nli_model(), truncation_side=side)
    state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"post_processor": None}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    if POST_PROCESSORS[name] is not None:
        tokenizer.backend_tokenizer.post_processor = POST_PROCESSORS[name]
    oracle = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    words = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n"]
    texts = [" ".join(words[:count]) for count in range(13)]
    limit = 7 + oracle.num_special_tokens_to_add(is_pair=True)
    hypotheses = tuple(" ".join(words[-count:]) for count in range(1, 7))
    oracle.enable_truncation(limit, strategy="only_first", direction=side)

    found = TextTokenizer(tokenizer, limit, pairing=(hypotheses, "only_first")).encode(texts)

    for text, tokens in zip(texts, found, strict=True):
        expected = [oracle.encode(text, other) for other in hypotheses]
        assert [ids.tolist() for ids in tokens.windows] == [pair.ids for pair in expected]
        if tokens.type_ids is not None:
            assert [ids.tolist() for ids in tokens.type_ids] == [pair.type_ids for pair in expected]


@pytest.mark.parametrize("kind", [ByT5Tokenizer, CanineTokenizer])
def test_tokenizers_written_in_python_give_the_tokens_of_transformers(kind):
    texts, hypotheses = ["abcdefgh"[:count] for count in range(1, 9)], ("s", "stuvw")
    tokenizer = kind()

    found = TextTokenizer(kind(), 12, pairing=(hypotheses, "only_first")).encode(texts)

    for text, tokens in zip(texts, found, strict=True):
        how = {"truncation": "only_first", "max_length": 12}
        expected = tokenizer([(text, other) for other in hypotheses], **how)["input_ids"]
        assert [ids.tolist() for ids in tokens.windows] == expected


def test_a_text_is_tokenized_once_for_all_labels(nli_model, monkeypatch):
    encoded = []
    tokenize = WordCache._tokenize

    def noted(cache, words, short):
        encoded.extend(words)
        return tokenize(cache, words, short)

    monkeypatch.setattr(WordCache, "_tokenize", noted)
    texts = ["an unheard-of beginning", "an unheard-of end"]
    with collected_stats() as runs:
        zero_shot(nli_model("roberta"))(pd.DataFrame({"text": texts * 2}))
    assert [encoded.count(text) for text in texts] == [1, 1] or not {*texts} & {*encoded}
    assert len(encoded) == len({*encoded})
    assert (runs[0].folded_rows, runs[0].windows) == (2, 2 * len(NAMES))


def test_a_single_label_is_scored_by_itself(nli_model):
    model, labels = nli_model(), {"Ads": "an offer"}
    found = zero_shot(model, labels=labels, labels_field="all")(FRAME)
    expected = pipeline_scores(model, FRAME["text"][IS_TEXT], labels)
    assert_close(stacked(found["s"][IS_TEXT]), expected)
    given = [[*row] for row in found["all"][IS_TEXT]]
    assert given == [["Ads"] if score >= 0.5 else [] for (score,) in expected]


def test_contradiction_is_found_by_its_name(nli_model, tmp_path):
    """transformers takes the first output, or the last if the first one is entailment."""
    model = nli_model(labels=["neutral", "entailment", "contradiction"])
    swapped = shutil.copytree(model, tmp_path / "swapped")
    tensors, order = load_file(model / "model.safetensors"), [2, 1, 0]
    for name in ("classifier.weight", "classifier.bias"):
        tensors[name] = tensors[name][order].contiguous()
    save_file(tensors, swapped / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    names = {"0": "contradiction", "1": "entailment", "2": "neutral"}
    config |= {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}
    (swapped / "config.json").write_text(json.dumps(config))
    found = zero_shot(model, multi_label=True)(FRAME)
    expected = pipeline_scores(swapped, FRAME["text"][IS_TEXT], multi_label=True)
    assert_close(stacked(found["s"][IS_TEXT]), expected)


@pytest.mark.parametrize("npartitions", [1, 5])
def test_filters_and_thresholds_are_by_label(nli_model, frames, npartitions):
    model = nli_model()
    scores = pipeline_scores(model, FRAME["text"][IS_TEXT], multi_label=True)
    ids, lazy = FRAME["id"][IS_TEXT], frames.lazy(FRAME, npartitions=npartitions)
    food, least = np.unique(scores[:, 1].round(4))[3:5].mean(), 0.4

    chosen = zero_shot(model, multi_label=True, min_score={"Food": float(food)})(lazy)
    several = zero_shot(
        model,
        multi_label=True,
        labels_field="all",
        thresholds={"News": least},
        filter_by=["News", "Ads"],
        score_format="struct",
    )(lazy)

    assert frames.to_pandas(chosen)["id"].tolist() == ids[scores[:, 1] >= food].tolist()
    found = frames.to_pandas(several)
    given = scores >= [least, 0.5, 0.5]
    assert found["id"].tolist() == ids[given[:, 0] | given[:, 2]].tolist()
    rows = given[given[:, 0] | given[:, 2]]
    names = np.array([*NAMES])
    assert [[*row] for row in found["all"]] == [names[row].tolist() for row in rows]
    assert [*found["s"].iloc[0]] == [*NAMES]


@pytest.mark.parametrize("first", [{}, {"min_confidence": 0.45}])
def test_models_on_one_trunk_share_its_layers_and_keep_their_scores(nli_model, tmp_path, first):
    model = nli_model()
    other = shutil.copytree(model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["classifier.weight"] = -tensors["classifier.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    one = zero_shot(model, label_field="a", score_field=None, **first)
    two = zero_shot(other, label_field="b")
    with collected_stats() as runs:
        found = classify_by_all(FRAME, [one, two])
    kept = one(FRAME)
    assert found["id"].tolist() == kept["id"].tolist()
    expected = two(kept)
    has_text = expected["text"].notna()
    assert_close(stacked(found["s"][has_text]), stacked(expected["s"][has_text]))
    assert (runs[0].peak_sharing or [0])[0] == (0 if first else 2)
    assert len(kept) < len(FRAME) or not first


@pytest.mark.parametrize("form", ["names", "descriptions"])
def test_jobs_of_the_command_line_take_labels(nli_model, tmp_path, form):
    model, labels = nli_model(), NAMES if form == "descriptions" else {"a": "a", "b": "b"}
    FRAME.to_json(tmp_path / "in.jsonl", orient="records", lines=True)
    words = [f"--label={name}={text}" for name, text in labels.items()]
    words = words if form == "descriptions" else ["--label", ",".join(labels)]
    words = [
        *("classify", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), "--field", "id"),
        *("--classifier", "zero-shot", "--model", str(model), "--score-field", "s"),
        *("--hypothesis", HYPOTHESIS, "--multi-label", "--max-seq-length", "40"),
        *("--set", "autocast=false", *words, "--dump-config", str(tmp_path / "job.yaml")),
    ]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    job = JobSettings.of(load_settings(tmp_path / "job.yaml")).job()

    job.run()

    found = pq.read_table(tmp_path / "out").to_pandas().sort_values("id")
    texts = FRAME["text"][IS_TEXT].tolist()
    expected = pipeline_scores(model, texts, labels, multi_label=True, max_tokens=40)
    assert_close(stacked(found["s"][IS_TEXT]), expected)
    (plan,) = job.plan(trial_seconds=None).classifiers
    pairs = [(text, HYPOTHESIS.format(label)) for text in texts for label in labels.values()]
    tokens = plain_tokenizer(model)(pairs, truncation="only_first", max_length=40).input_ids
    assert plan.tokens == sum(map(len, tokens))
    assert f"every text is read {len(labels)} times, once with each label" in [*plan.lines()]
    whole = [len(ids) for ids in plain_tokenizer(model)(pairs).input_ids]
    assert abs(plan.mean_tokens - np.mean(whole)) < 1


def test_workers_try_out_zero_shot_models(nli_model):
    with collected_stats() as runs:
        ModelProbe((zero_shot(nli_model()),)).run(2**31)
    assert (runs[0].rows, runs[0].windows) == (1, len(NAMES))


def test_settings_tell_classifiers_apart():
    own = [{}, {"labels": [*NAMES]}, {"hypothesis": "{}"}, {"multi_label": True}]
    own += [{"labels": dict(reversed(NAMES.items()))}]
    made = [zero_shot("acme/nli", **options) for options in own]
    keys = {repr(mapper.options.__dask_tokenize__()) for mapper in made}
    assert len(keys) == len({*made}) == len({str(one.options.describe()) for one in made}) == 5
    assert eval(made[0].code(), {"ZeroShotClassifier": ZeroShotClassifier}) == made[0]


@pytest.mark.parametrize("labels", [["NEGATIVE", "POSITIVE"], ["LABEL_0", "LABEL_1", "LABEL_2"]])
def test_a_model_without_entailment_is_refused_by_its_name_at_the_call(nli_model, labels):
    model = nli_model(labels=labels)
    with pytest.raises(CheckpointError, match=rf"{model.name} has no label of entai.*{labels[0]}"):
        zero_shot(model)(FRAME)


def test_independent_labels_need_a_contradiction(nli_model):
    model = nli_model(labels=["entailment", "neutral", "other"])
    with pytest.raises(CheckpointError, match=r"no label of contradiction.*entailment, neutral"):
        zero_shot(model, multi_label=True)(FRAME)
    assert zero_shot(model)(FRAME)["s"].notna().sum() == IS_TEXT.sum()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"labels": []}, ValueError, "names no label"),
        ({"labels": "ads"}, TypeError, "labels='ads': pass a list of labels, or a dict of label"),
        ({"labels": {"a", "b"}}, TypeError, "without order: pass a list"),
        ({"labels": ["a", "b", "a"]}, ValueError, "labels has 'a' twice"),
        ({"labels": {"a": ""}}, TypeError, r"labels\['a'\]='' is not a description"),
        ({"labels": {3: "c"}}, TypeError, "a label in labels=3 is not a text: name each label"),
        ({"labels": [("a", "b", "c")]}, TypeError, "is not a text: name each label"),
        ({"hypothesis": "It is."}, ValueError, r"hypothesis='It is.' needs \{\} once"),
        ({"hypothesis": "{} or {}"}, ValueError, r"needs \{\} once"),
        ({"filter_by": "Sport"}, ValueError, "no label 'Sport'"),
        ({"labels_field": "all"}, ValueError, "these compete: pass multi_label=True"),
        ({"problem_type": "regression"}, ValueError, "pass multi_label=True if several"),
        ({"query": "q"}, ValueError, "query='q' has no meaning.*write it into hypothesis="),
        ({"pair_truncation": "only_second"}, ValueError, "the text is cut, and the hypothesis"),
        ({"text_field": ["a", "b"]}, ValueError, "the second text of each pair is the hypothesis"),
        ({"long_text": "windows"}, ValueError, 'long_text="windows" is not for pairs'),
        ({"window_aggregation": "max"}, ValueError, "window_aggregation='max' is for windows"),
        ({"max_seq_length": 8}, ValueError, "shorter description of the label, or a larger max"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_call(nli_model, options, error, message):
    with pytest.raises(error, match=message):
        zero_shot(nli_model(), **options)(FRAME)


def test_labels_are_required():
    with pytest.raises(TypeError, match="ZeroShotClassifier needs labels="):
        ZeroShotClassifier()
