"""Pairs of texts, held against plain transformers and CrossEncoder: one pair at a time, float32."""

import functools
import json
import shutil

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from tokenizers import Tokenizer
from tokenizers.processors import (
    BertProcessing,
    ByteLevel,
    RobertaProcessing,
    Sequence,
    TemplateProcessing,
)
from transformers import (
    AutoModelForSequenceClassification,
    ByT5Tokenizer,
    CanineTokenizer,
    PreTrainedTokenizerFast,
)

from gpuclassify import (
    DistributedDataClassifier,
    DomainClassifier,
    Embedder,
    FastTextClassifier,
    FineWebEduClassifier,
    HeadClassifier,
    ModelMapper,
    PromptClassifier,
)
from gpuclassify import classify as classify_by_all
from gpuclassify.commands.cli import main
from gpuclassify.commands.settings import JobSettings, load_settings
from gpuclassify.jobs.execution import ModelProbe
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.tokenizing.gaps import WordCache
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
from gpuclassify.workers.run_context import collected_stats
from tests.loaders import LOADERS
from tests.oracle import assert_close, plain_tokenizer, probabilities, stacked
from tests.replicas import sample_texts
from tests.replicas.chat_models import write_chat_model
from tests.replicas.writing import edit
from tests.sentence_oracle import quiet

pytestmark = pytest.mark.usefixtures("one_torch_thread")
PAIR = ["premise", "hypothesis"]
QUERY = "which market fell"
PREMISES = [
    *sample_texts(9, seed=1, max_words=60),
    "",
    "short",
    "",
    None,
    "lonely",
    "short",
    "gap  ",
]
HYPOTHESES = [*sample_texts(9, seed=2, max_words=60), "", "", "short", "x", None, "short", "\n gap"]
FRAME = pd.DataFrame({"id": range(16), "premise": PREMISES, "hypothesis": HYPOTHESES})
IS_PAIR = FRAME[PAIR].notna().all(axis=1).to_numpy()
STRATEGIES = ("longest_first", "only_second")
TYPED = {"bert", "electra", "albert", "deberta-v2"}  # of the architectures below
ARCHITECTURES = (*sorted(TYPED), "roberta", "xlm-roberta", "modernbert", "distilbert", "gpt2")


def frame_pairs(directory, architecture):
    """Let a tokenizer frame pairs as the published one does."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.token_to_id
    if architecture == "roberta":
        tokenizer.post_processor = RobertaProcessing(("</s>", ids("</s>")), ("<s>", ids("<s>")))
    elif architecture == "xlm-roberta":
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> </s> $B </s>",
            special_tokens=[(name, ids(name)) for name in ("<s>", "</s>")],
        )
    elif architecture == "gpt2":
        tokenizer.post_processor = ByteLevel(trim_offsets=False)
    elif architecture == "electra":
        tokenizer.post_processor = BertProcessing(("[SEP]", ids("[SEP]")), ("[CLS]", ids("[CLS]")))
    else:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, ids(name)) for name in ("[CLS]", "[SEP]")],
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def pair_model(sequence_classifier, tmp_path_factory):
    """The directory of a small classifier of pairs, by architecture and settings."""

    @functools.cache
    def write(architecture="bert", **settings):
        source = sequence_classifier(architecture, **settings)
        return frame_pairs(
            shutil.copytree(source, tmp_path_factory.mktemp("pairs") / architecture), architecture
        )

    return write


@pytest.fixture(scope="session")
def logits(pair_model):
    """Logits of pairs by plain transformers, float32 (pairs, outputs).

    In lists of one, because it takes an empty second text for none where it stands alone.
    """

    def run(model, architecture, pairs, truncation="longest_first", max_length=512):
        tokenizer = plain_tokenizer(model)
        network = AutoModelForSequenceClassification.from_pretrained(model).float().eval()
        found = []
        for pair in pairs:
            inputs = tokenizer(
                [pair],
                truncation=truncation,
                max_length=max_length,
                return_tensors="pt",
                return_token_type_ids=architecture in TYPED,
            )
            if not inputs["input_ids"].numel():
                inputs = tokenizer("<|endoftext|>", return_tensors="pt")
            with torch.inference_mode():
                found.append(network(**inputs).logits[0].numpy())
        return np.stack(found)

    return run


def pairs_of(frame=FRAME):
    return list(zip(frame["premise"][IS_PAIR], frame["hypothesis"][IS_PAIR], strict=True))


def classify(model, frame=FRAME, **options):
    settings = {"text_field": PAIR, "label_field": "label", "score_field": "s", "autocast": False}
    return DistributedDataClassifier(model=model, **{**settings, **options})(frame)


@pytest.mark.parametrize("engine", ["auto", "padded", "reference"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pairs_get_the_scores_of_transformers(pair_model, logits, architecture, engine):
    model = pair_model(architecture)

    found = classify(model, engine=engine)

    expected = probabilities(logits(model, architecture, pairs_of()))
    assert_close(stacked(found["s"][IS_PAIR]), expected)
    assert found["s"].isna().tolist() == found["label"].isna().tolist() == (~IS_PAIR).tolist()
    pd.testing.assert_frame_equal(found[["id", *PAIR]], FRAME)


@pytest.mark.parametrize("architecture", ["bert", "deberta-v2", "xlm-roberta"])
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("truncation", [None, "only_second"])
def test_long_pairs_are_cut_as_transformers_cuts_them(
    pair_model, logits, architecture, loader, truncation
):
    model = pair_model(architecture)
    frame = FRAME.assign(premise=[text and text[:40] for text in PREMISES])

    found = classify(
        model,
        frame,
        loader=loader,
        pair_truncation=truncation,
        max_seq_length=48,
        seen_field="seen",
    )

    how = truncation or "longest_first"
    expected = probabilities(logits(model, architecture, pairs_of(frame), how, 48))
    assert_close(stacked(found["s"][IS_PAIR]), expected)
    assert 0 < (found["seen"] < 1).sum() < IS_PAIR.sum()


@pytest.mark.contract
@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize("max_chars", [None, 30])
def test_a_query_is_the_first_text_of_every_pair(pair_model, logits, architecture, max_chars):
    model = pair_model(architecture)

    found = classify(
        model, text_field="premise", query=QUERY, max_seq_length=40, max_chars=max_chars
    )

    is_text = FRAME["premise"].notna()
    pairs = [(QUERY, text[:max_chars]) for text in FRAME["premise"][is_text]]
    expected = probabilities(logits(model, architecture, pairs, "only_second", 40))
    assert_close(stacked(found["s"][is_text]), expected)
    assert found["s"].isna().tolist() == (~is_text).tolist()


def test_a_model_of_one_type_of_tokens_is_given_none(pair_model, logits):
    model = pair_model("bert", type_vocab_size=1)
    expected = probabilities(logits(model, "untyped", pairs_of()))
    assert_close(stacked(classify(model)["s"][IS_PAIR]), expected)


@pytest.mark.parametrize("max_chars", [None, 25])
def test_what_was_read_of_a_pair_is_told_of_both_texts(pair_model, max_chars):
    found = classify(
        pair_model("bert"), max_chars=max_chars, seen_field="seen", truncated_field="cut"
    )
    sizes = [
        np.array([[len(text[:n]) for text in pair] for pair in pairs_of()]) for n in (25, None)
    ]
    cut, whole = (np.maximum(size.sum(1), 1) for size in sizes)
    expected = np.ones(len(whole)) if max_chars is None else cut / whole
    assert_close(found["seen"][IS_PAIR], expected)
    assert found["cut"][IS_PAIR].tolist() == (expected < 1).tolist()
    assert found["cut"][~IS_PAIR].isna().all()


POST_PROCESSORS = {
    "none": None,
    "byte-level": ByteLevel(),
    "bert": BertProcessing(("[SEP]", 2), ("[CLS]", 1)),
    "roberta": RobertaProcessing(("[SEP]", 2), ("[CLS]", 1)),
    "behind": TemplateProcessing("$A", "$A [SEP]:1 $B:2", special_tokens=[("[SEP]", 2)]),
    "llama": Sequence(
        [
            ByteLevel(),
            TemplateProcessing("[CLS] $A", "[CLS] $A [CLS]:1 $B:1", special_tokens=[("[CLS]", 1)]),
        ]
    ),
}


@pytest.mark.parametrize("name", POST_PROCESSORS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("truncation", STRATEGIES)
def test_tokens_are_those_of_the_library_for_every_pair_of_lengths(
    pair_model, name, side, truncation
):
    tokenizer = plain_tokenizer(pair_model("bert"), truncation_side=side)
    if POST_PROCESSORS[name] is not None:
        tokenizer.backend_tokenizer.post_processor = POST_PROCESSORS[name]
    oracle = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if name == "none":
        state = json.loads(oracle.to_str()) | {"post_processor": None}
        oracle = Tokenizer.from_str(json.dumps(state))
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    words = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n"]
    pairs = [(" ".join(words[:m]), " ".join(words[:n])) for m in range(13) for n in range(13)]
    limit = 5 + oracle.num_special_tokens_to_add(is_pair=True)
    oracle.enable_truncation(limit, strategy=truncation, direction=side)
    kept, expected = [], []
    for pair in pairs:
        try:
            expected.append(oracle.encode(*pair))
            kept.append(pair)
        except Exception:
            with pytest.raises(ValueError, match=f'pair_truncation="{truncation}" leaves the fir'):
                TextTokenizer(tokenizer, limit, pairing=(None, truncation))([pair])

    found = TextTokenizer(tokenizer, limit, pairing=(None, truncation))(kept)

    filler = [tokenizer.pad_token_id]  # for a model that cannot read nothing
    ids = [encoding.ids or filler for encoding in expected]
    assert [own.tolist() for own in np.split(found.ids, found.offsets[1:-1])] == ids
    if name not in ("none", "byte-level", "roberta"):
        types = [number for encoding in expected for number in encoding.type_ids]
        assert found.type_ids.tolist() == types
    else:
        assert found.type_ids is None


@pytest.mark.parametrize("kind", [ByT5Tokenizer, CanineTokenizer])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("truncation", STRATEGIES)
def test_tokenizers_written_in_python_give_the_tokens_of_transformers(kind, side, truncation):
    tokenizer = kind(truncation_side=side)
    ours = TextTokenizer(kind(truncation_side=side), 12, pairing=(None, truncation))
    most = 8 if truncation == "longest_first" else 5
    pairs = [("abcdefgh"[:m], "stuvwxyz"[:n]) for m in range(1, most) for n in range(1, 9)]

    found = ours(pairs)

    how = {"truncation": truncation, "max_length": 12, "return_token_type_ids": True}
    expected = [tokenizer([pair], **how) for pair in pairs]
    ids = [one["input_ids"][0] for one in expected]
    assert [own.tolist() for own in np.split(found.ids, found.offsets[1:-1])] == ids
    types = [number for one in expected for number in one["token_type_ids"][0]]
    assert found.type_ids is None if not any(types) else found.type_ids.tolist() == types
    whole = [len(tokenizer([pair])["input_ids"][0]) for pair in pairs]
    assert found.whole_lengths.tolist() == whole


# Scores of a single output.


@pytest.mark.parametrize("activation", [None, "Sigmoid", "Identity"])
@pytest.mark.parametrize("place", ["config_sentence_transformers.json", "new", "old"])
def test_a_single_output_is_scored_as_cross_encoder_does(pair_model, tmp_path, activation, place):
    model = shutil.copytree(pair_model("bert", num_labels=1), tmp_path / "model")
    if activation:
        module = "linear" if activation == "Identity" else "activation"
        name = f"torch.nn.modules.{module}.{activation}"
        if place.endswith(".json"):
            with quiet():
                kind = getattr(torch.nn, activation)()
                CrossEncoder(str(model), activation_fn=kind, device="cpu").save(str(model))
        else:
            config = json.loads((model / "config.json").read_text())
            new = {"sentence_transformers": {"activation_fn": name, "version": "4.1.0"}}
            config |= new if place == "new" else {"sbert_ce_default_activation_function": name}
            (model / "config.json").write_text(json.dumps(config))

    found = classify(model, label_field=None, score_field="score")

    with quiet():
        encoder = CrossEncoder(str(model), device="cpu")
    expected = [encoder.predict([pair])[0] for pair in pairs_of()]
    assert_close(found["score"][IS_PAIR], expected)
    raw = classify(model, label_field=None, score_field="score", problem_type="regression")
    expected = [encoder.predict([p], activation_fn=torch.nn.Identity())[0] for p in pairs_of()]
    assert_close(raw["score"][IS_PAIR], expected)


def test_classes_are_those_of_cross_encoder(pair_model):
    model = pair_model("electra")
    with quiet():
        encoder = CrossEncoder(str(model), device="cpu")
    expected = [encoder.predict([pair], apply_softmax=True)[0] for pair in pairs_of()]
    assert_close(stacked(classify(model)["s"][IS_PAIR]), np.stack(expected))


def test_segment_ids_are_left_out_where_a_cross_encoder_of_transformers_5_leaves_them_out(
    pair_model, tmp_path
):
    model = shutil.copytree(pair_model("bert"), tmp_path / "model")
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "sep_token": "[SEP]"}
    plain = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"), **roles)
    plain.save_pretrained(model)

    with quiet():
        encoder = CrossEncoder(str(model), device="cpu")
    expected = [encoder.predict([pair], apply_softmax=True)[0] for pair in pairs_of()]
    assert_close(stacked(classify(model)["s"][IS_PAIR]), np.stack(expected))


def save_cross_encoder(source, folder, **settings):
    with quiet():
        CrossEncoder(str(source), device="cpu", **settings).save(str(folder))
    return folder


@pytest.mark.parametrize("max_seq_length", [None, 24])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_the_default_prompt_and_length_of_a_cross_encoder_are_applied(
    pair_model, tmp_path, architecture, count, max_seq_length
):
    model = save_cross_encoder(
        pair_model(architecture, num_labels=count),
        tmp_path / "model",
        prompts={"rank": "the market fell and ", "other": "oven"},
        default_prompt_name="rank",
    )
    if max_seq_length is not None:
        edit(model / "sentence_bert_config.json", max_seq_length=max_seq_length)
    with quiet():
        encoder = CrossEncoder(str(model), device="cpu")
    options = {"label_field": None, "score_field": "s"} if count == 1 else {}

    def scores(pairs, **how):
        how |= {"apply_softmax": count > 1, "show_progress_bar": False}
        return np.stack([encoder.predict([pair], **how)[0] for pair in pairs])

    found = classify(model, **options)["s"][IS_PAIR]
    assert_close(np.stack(found), scores(pairs_of()))
    is_text = FRAME["premise"].notna()
    found = classify(
        model, text_field="premise", query=QUERY, pair_truncation="longest_first", **options
    )
    pairs = [(QUERY, text) for text in FRAME["premise"][is_text]]
    assert_close(np.stack(found["s"][is_text]), scores(pairs))
    if count == 1:
        raw = classify(model, problem_type="regression", **options)["s"][IS_PAIR]
        assert_close(np.stack(raw), scores(pairs_of(), activation_fn=torch.nn.Identity()))


@pytest.mark.parametrize("has_modules", [True, False])
def test_settings_of_another_type_of_model_do_not_apply(pair_model, tmp_path, has_modules):
    """sentence-transformers reads them only where ``modules.json`` is of a CrossEncoder."""
    model = save_cross_encoder(
        pair_model("roberta", num_labels=1),
        tmp_path / "model",
        prompts={"rank": "the market fell and "},
        default_prompt_name="rank",
        activation_fn=torch.nn.Identity(),
    )
    if has_modules:
        edit(model / "config_sentence_transformers.json", model_type="SentenceTransformer")
    else:
        (model / "modules.json").unlink()
    with quiet():
        encoder = CrossEncoder(str(model), device="cpu")
    expected = [encoder.predict([pair])[0] for pair in pairs_of()]
    found = classify(model, label_field=None, score_field="score")
    assert_close(found["score"][IS_PAIR], expected)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("sentence_bert_config.json", {"do_lower_case": True}, "asks for lower-case texts"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "fill-mask"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"a": 1}}}, "processing_kw"),
        ("config_sentence_transformers.json", {"default_prompt_name": "gone"}, "prompt 'gone'"),
    ],
)
def test_settings_of_a_cross_encoder_that_are_not_followed_are_refused(
    pair_model, tmp_path, file, changes, message
):
    model = save_cross_encoder(pair_model("roberta", num_labels=1), tmp_path / "model")
    edit(model / file, **changes)
    with pytest.raises(CheckpointError, match=message):
        classify(model)


def test_a_cross_encoder_of_several_modules_is_refused(pair_model, tmp_path):
    model = save_cross_encoder(pair_model("roberta", num_labels=1), tmp_path / "model")
    modules = json.loads((model / "modules.json").read_text())
    modules += [{"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.Dense"}]
    (model / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=r"Dense in place 1.*runs one Transformer"):
        classify(model)


@pytest.mark.parametrize("name", ["acme.Squash", "acme.Identity", "Identity", "torch.Identity"])
def test_an_activation_that_is_not_known_is_refused_at_the_call(pair_model, tmp_path, name):
    model = shutil.copytree(pair_model("bert", num_labels=1), tmp_path / "model")
    edit(model / "config.json", sentence_transformers={"activation_fn": name})
    options = {"model": model, "text_field": PAIR}
    with pytest.raises(CheckpointError, match=rf'{name}, which.*problem_type="regression"'):
        DistributedDataClassifier(**options)(dd.from_pandas(FRAME, npartitions=2))
    DistributedDataClassifier(**options, problem_type="regression").check(FRAME)


# What single texts have.


@pytest.mark.parametrize("npartitions", [1, 5])
def test_frames_filters_and_decisions_are_those_of_single_texts(
    pair_model, logits, frames, npartitions
):
    model = pair_model("bert")
    labels = np.array(["LABEL_0", "LABEL_1", "LABEL_2"])
    scores = probabilities(logits(model, "bert", pairs_of()))
    expected = FRAME["id"][IS_PAIR][labels[scores.argmax(axis=1)] != "LABEL_1"].tolist()
    lazy = frames.lazy(FRAME, npartitions=npartitions)

    kept = classify(model, lazy, filter_by=["LABEL_0", "LABEL_2"])
    decided = classify(model, lazy, filter_by=["LABEL_0", "LABEL_2"], keep_field="keep")

    assert frames.to_pandas(kept)["id"].tolist() == expected
    found = frames.to_pandas(decided)
    assert found["id"][found["keep"]].tolist() == expected and len(found) == len(FRAME)
    assert frames.to_pandas(kept)["label"].dtype == kept._meta["label"].dtype
    assert list(decided.columns) == [*FRAME.columns, "label", "s", "keep"]


def test_equal_pairs_run_once_and_equal_first_texts_are_tokenized_once(pair_model, monkeypatch):
    model = pair_model("bert")
    encoded = []
    look_up = WordCache._look_up

    def noted(cache, *places):
        rows, which = look_up(cache, *places)
        encoded.append(len(rows))
        return rows, which

    monkeypatch.setattr(WordCache, "_look_up", noted)
    frame = pd.DataFrame({"premise": ["q"] * 6, "hypothesis": [*"abcd", "a", "a"]})
    with collected_stats() as runs:
        classify(model, frame)
        classify(model, frame, text_field="hypothesis", query=QUERY)
    assert [run.folded_rows for run in runs] == [2, 2]
    assert sum(encoded) == 1 + 4 + len(QUERY.split()) + 4


def test_two_classifiers_share_tokens_of_equal_pairs_alone(pair_model):
    own = {"text_field": PAIR, "autocast": False, "max_seq_length": 64}
    one = DistributedDataClassifier(model=pair_model("bert"), label_field="a", **own)
    own |= {"model": pair_model("bert", seed=5), "score_field": "s"}
    same = DistributedDataClassifier(**own, label_field="b")
    other = DistributedDataClassifier(
        **{**own, "text_field": "hypothesis", "score_field": "t"}, query=QUERY, label_field="c"
    )
    with collected_stats() as runs:
        found = classify_by_all(FRAME, [one, same, other])
    assert [run.shared_texts > 0 for run in runs] == [False, True, False]
    assert_close(stacked(found["s"][IS_PAIR]), stacked(same(FRAME)["s"][IS_PAIR]))
    has_text = FRAME["hypothesis"].notna()
    assert_close(stacked(found["t"][has_text]), stacked(other(FRAME)["t"][has_text]))


def test_classifiers_on_one_trunk_run_it_once_for_pairs(pair_model, tmp_path):
    first = pair_model("bert")
    second = shutil.copytree(first, tmp_path / "second")
    tensors = load_file(second / "model.safetensors")
    tensors["classifier.weight"] = -tensors["classifier.weight"]
    save_file(tensors, second / "model.safetensors", metadata={"format": "pt"})
    one, other = (
        DistributedDataClassifier(
            model=model, text_field=PAIR, autocast=False, label_field=f"l{n}", score_field=f"s{n}"
        )
        for n, model in enumerate((first, second))
    )
    with collected_stats() as runs:
        found = classify_by_all(FRAME, [one, other])
    assert runs[0].peak_sharing[0] == 2
    assert_close(stacked(found["s1"][IS_PAIR]), stacked(other(FRAME)["s1"][IS_PAIR]))


@pytest.mark.parametrize("query", [None, QUERY])
def test_jobs_of_the_command_line_read_pairs(pair_model, tmp_path, query):
    model = pair_model("bert")
    FRAME.assign(other="x").to_json(tmp_path / "in.jsonl", orient="records", lines=True)
    about = ["--text-field", "hypothesis"]
    about += ["--query", query] if query else ["--text-field", "premise"]
    words = [
        *("classify", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), "--field", "id"),
        *("--classifier", "checkpoint", "--model", str(model), "--max-seq-length", "60"),
        *("--score-field", "s", "--set", "autocast=false", *about),
        *("--dump-config", str(tmp_path / "job.yaml")),
    ]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    pipeline = JobSettings.of(load_settings(tmp_path / "job.yaml")).job()

    pipeline.run()

    found = pq.read_table(tmp_path / "out").to_pandas().sort_values("id")
    names = "hypothesis" if query else ["hypothesis", "premise"]
    expected = classify(model, text_field=names, query=query, max_seq_length=60)
    is_row = expected["s"].notna().to_numpy()
    assert_close(stacked(found["s"][is_row]), stacked(expected["s"][is_row]))
    assert found["s"].isna().tolist() == (~is_row).tolist()
    (plan,) = pipeline.plan(trial_seconds=None).classifiers
    tokens = plain_tokenizer(model)
    how = {"max_length": 60, "truncation": "only_second" if query else "longest_first"}
    rows = FRAME[is_row]
    pairs = zip([query] * len(rows) if query else rows["hypothesis"], rows["premise"], strict=True)
    if query:
        pairs = [(query, text) for text in rows["hypothesis"]]
    assert plan.tokens == sum(map(len, tokens([*pairs], **how)["input_ids"]))


@pytest.mark.parametrize("pairs", [{"text_field": PAIR}, {"query": QUERY}])
def test_workers_try_out_models_of_pairs(pair_model, pairs):
    mapper = DistributedDataClassifier(model=pair_model("bert"), **pairs)
    with collected_stats() as runs:
        ModelProbe((mapper,)).run(2**31)
    assert runs[0].rows == runs[0].batches == 1


def test_workers_try_out_questions_about_several_columns(tmp_path):
    model = write_chat_model(tmp_path / "chat", "qwen3")
    own = {"prompt": "{premise} so {hypothesis}?", "text_field": "premise", "answers": ["a", "b"]}
    with collected_stats() as runs:
        ModelProbe((PromptClassifier(model=model, **own),)).run(2**31)
    assert runs[0].rows == 1


def test_settings_of_pairs_tell_classifiers_apart(pair_model):
    own = {"model": pair_model("bert"), "text_field": "hypothesis"}
    settings = [{}, {"query": "a"}, {"query": "b"}, {"text_field": PAIR}]
    settings += [{"text_field": PAIR[::-1]}, {"query": "a", "pair_truncation": "longest_first"}]
    made = [DistributedDataClassifier(**{**own, **each}) for each in settings]
    keys = {repr(mapper.__dask_tokenize__()) for mapper in made}
    assert len(keys) == len({*made}) == len({str(mapper.describe()) for mapper in made}) == 6
    assert eval(made[3].code(), {"DistributedDataClassifier": DistributedDataClassifier}) == made[3]


def test_a_module_of_ones_own_takes_the_inputs_that_it_names(pair_model):
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, input_ids, attention_mask, token_type_ids=None):
            if token_type_ids is None:  # as it is called before any text is there
                token_type_ids = torch.zeros_like(input_ids)
            second = (token_type_ids * attention_mask).sum(1)
            return torch.stack([attention_mask.sum(1) - second, second], 1) * self.scale

    class Sides(ModelMapper):
        new_columns = {"first": "float32", "second": "float32"}

        def build_module(self, config):
            return Counts()

        def columns(self, outputs):
            return {"first": outputs[:, 0], "second": outputs[:, 1]}

    folder = pair_model("bert")
    own = shutil.copytree(folder, folder.parent / "own", dirs_exist_ok=True)
    save_file({"scale": torch.ones(1)}, own / "model.safetensors")
    found = Sides(model=own, text_field=PAIR)(FRAME)
    tokens = plain_tokenizer(own)(pairs_of(), truncation=True, return_token_type_ids=True)
    assert found["second"][IS_PAIR].tolist() == [sum(types) for types in tokens["token_type_ids"]]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DomainClassifier, {"text_field": ["a", "b", "c"]}, "name one column, or the two of a"),
        (DomainClassifier, {"text_field": ["a", "a"]}, "name one column, or the two of a pair"),
        (DomainClassifier, {"text_field": PAIR, "query": "q"}, "query='q' is a first text beside"),
        (
            DomainClassifier,
            {"text_field": PAIR, "text_template": "{premise}"},
            "text_template=None",
        ),
        (DomainClassifier, {"pair_truncation": "only_second"}, "needs query=, or two columns"),
        (
            DomainClassifier,
            {"query": "q", "long_text": "windows"},
            'long_text="windows" is not for',
        ),
        (
            FineWebEduClassifier,
            {"query": "q", "long_text": "lines"},
            'long_text="lines" is not for',
        ),
        (Embedder, {"text_field": PAIR}, "one text is read of a row: name both in text_template="),
        (FastTextClassifier, {"text_field": PAIR, "model": "m.bin"}, "name both in text_template="),
        (HeadClassifier, {"text_field": PAIR, "heads": {"a": "b"}}, "name both in text_template="),
        (
            PromptClassifier,
            {"text_field": PAIR, "model": "o/m", "prompt": "{premise}", "answers": ["a", "b"]},
            "name both columns in prompt=",
        ),
        (
            PromptClassifier,
            {"query": "q", "model": "o/m", "prompt": "{text}", "answers": ["a", "b"]},
            "query='q' has no meaning for a question: write it into prompt=",
        ),
    ],
)
def test_what_has_no_meaning_for_pairs_is_refused_at_the_call(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_columns_and_queries_that_do_not_fit_are_refused_at_the_call(pair_model):
    model = pair_model("bert")
    with pytest.raises(ValueError, match=r"no text column 'premis'.*Pass text_field="):
        classify(model, text_field=["premis", "hypothesis"])
    with pytest.raises(TypeError, match="column 'id' holds int64, not strings"):
        classify(model, text_field=["id", "hypothesis"])
    with pytest.raises(ValueError, match="leaves the first text whole, which has 40 tokens"):
        classify(model, text_field="premise", query="a " * 40, max_seq_length=32)
    with pytest.raises(TypeError, match="Embedder has no argument 'query'"):
        Embedder(query="q")
