"""Models whose leading layers are equal run them once, and give what each gives alone."""

import json
import re
import shutil
import weakref

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from gpuclassify import DistributedDataClassifier, Embedder, HeadClassifier, classify
from gpuclassify.inference.batching import PaddedBatch
from gpuclassify.inference.linear import ArrangedLinear
from gpuclassify.inference.loaded_model import LoadedModel
from gpuclassify.inference.residency import MODELS
from gpuclassify.jobs.input.readers import ParquetReader
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.models.head_network import HeadNetwork
from gpuclassify.workers.run_context import collected_stats
from tests.oracle import plain_tokenizer
from tests.replicas import sample_texts, write_sequence_classifier
from tests.sentence_oracle import save_sentence_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LAYERS = 4
TEXTS = [*sample_texts(40, seed=3, max_words=120), None, "", "word", "word"]
FRAME = pd.DataFrame({"id": range(len(TEXTS)), "text": TEXTS})
NOTHING = None
_LAYER = re.compile(r"(?:layers?|h)\.(\d+)\.")
_FRONT = re.compile(r"embed|encoder\.LayerNorm|wte|wpe")


def graft(source, target, depth):
    """Give the model in `target` the embeddings and the first layers of the one in `source`."""
    ours = load_file(source / "model.safetensors")
    theirs = load_file(target / "model.safetensors")
    for name, tensor in ours.items():
        layer = _LAYER.search(name)
        if _FRONT.search(name) if layer is None else int(layer[1]) < depth:
            theirs[name] = tensor
    save_file(theirs, target / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def trunk(tmp_path):
    """Write models that have their first layers in common."""

    def write(architecture="bert", depth=LAYERS, count=3, size="num_hidden_layers", **settings):
        settings = {size: LAYERS} | settings
        paths = []
        for seed in range(count):
            path = tmp_path / f"{architecture}{seed}"
            paths.append(write_sequence_classifier(path, architecture, seed=seed, **settings))
            graft(paths[0], path, depth)
        return paths

    return write


def classifiers(paths, *own, **settings):
    """One a path, each with columns of its own and perhaps settings of its own."""
    own = [*own, *[{}] * len(paths)]
    return [
        DistributedDataClassifier(
            model=path, label_field=f"label_{n}", score_field=f"score_{n}", **settings, **own[n]
        )
        for n, path in enumerate(paths)
    ]


def run(mappers, frame=FRAME):
    """What they give, and how many layers, of how many, each ran once for how many models."""
    with collected_stats() as stats:
        found = classify(frame, mappers)
    return found, [
        each.peak_sharing and (*each.peak_sharing[1:], each.peak_sharing[0]) for each in stats
    ]


def one_by_one(mappers, frame=FRAME):
    for mapper in mappers:
        frame = mapper(frame)
    return frame


def assert_same(found, expected):
    assert list(found.columns) == list(expected.columns)
    assert found.index.tolist() == expected.index.tolist()
    for name in expected.columns:
        one, other = found[name].dropna(), expected[name].dropna()
        assert one.index.tolist() == other.index.tolist()
        if isinstance(other.iloc[0], list | np.ndarray):
            np.testing.assert_allclose(np.stack(one), np.stack(other), rtol=0, atol=2e-5)
        else:
            assert one.tolist() == other.tolist()


@pytest.fixture
def forwards(monkeypatch):
    """For each forward of a network the name of its model, and its texts."""
    seen = []
    forward = LoadedModel.forward

    def noting(self, batch: PaddedBatch, side):
        seen.append((self.identity, len(batch.rows)))
        return forward(self, batch, side)

    monkeypatch.setattr(LoadedModel, "forward", noting)
    return seen


def rows_of(forwards, path):
    return sum(rows for name, rows in forwards if str(path) in name)


@pytest.mark.parametrize("depth", [LAYERS - 1, LAYERS])
@pytest.mark.parametrize("how", ["auto", "padded"])
@pytest.mark.parametrize(
    "architecture", ["bert", "deberta-v2", "modernbert", "roberta", "distilbert", "gpt2", "llama"]
)
def test_scores_are_those_of_plain_transformers(trunk, architecture, how, depth):
    sizes = {"distilbert": "n_layers", "gpt2": "n_layer"}
    paths = trunk(architecture, depth, size=sizes.get(architecture, "num_hidden_layers"))
    known = FRAME["text"].notna() & (FRAME["text"] != "")
    frame = FRAME[known]

    found, sharing = run(classifiers(paths, engine=how), frame)

    assert sharing == [(depth, LAYERS, 3), NOTHING, NOTHING]
    for number, path in enumerate(paths):
        tokenizer = plain_tokenizer(path)
        plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
        with torch.inference_mode():
            expected = [
                plain(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0].softmax(0)
                for text in frame["text"]
            ]
        scores = np.stack(found[f"score_{number}"])
        np.testing.assert_allclose(scores, torch.stack(expected), rtol=0, atol=2e-5)


def test_later_models_run_what_is_their_own_alone(trunk, forwards):
    paths = trunk(depth=3)
    run(classifiers(paths))  # measures
    models = [
        resident.model
        for key, resident in MODELS._residents.items()
        if any(str(path) in str(key) for path in paths)
    ]
    calls = []
    for model in models:
        for number, layer in enumerate(model.module.bert.encoder.layer):
            layer.attention.register_forward_hook(lambda *_, number=number: calls.append(number))

    run(classifiers(paths))

    batches = calls.count(0)
    assert [calls.count(number) for number in range(LAYERS)] == [batches] * 3 + [3 * batches]


def test_equal_weights_are_in_memory_once(trunk):
    paths = trunk(depth=3, count=2)
    run(classifiers(paths))
    modules = [
        resident.model.module
        for key, resident in MODELS._residents.items()
        if any(str(path) in str(key) for path in paths)
    ]
    first, second = (dict(module.named_parameters()) for module in modules)
    own = {name for name in first if first[name].data_ptr() != second[name].data_ptr()}
    assert own
    assert all(".layer.3." in name or "pooler" in name or "classifier" in name for name in own)
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        ours, theirs = (
            [part.arranged for part in each.modules() if isinstance(part, ArrangedLinear)]
            for each in modules
        )
        assert sum(a is b for a, b in zip(ours, theirs, strict=True)) >= 3 * 6  # layers, weights


@pytest.mark.parametrize("architecture", ["bert", "deberta-v2", "modernbert"])
@pytest.mark.parametrize("how", ["auto", "padded"])
def test_rows_that_a_filter_drops_run_no_further(trunk, forwards, architecture, how):
    paths = trunk(architecture, LAYERS - 1)
    labels = one_by_one(classifiers(paths))
    common = [labels[name].mode()[0] for name in ("label_0", "label_1")]
    own = [{"filter_by": label} for label in common]
    first, second, third = classifiers(paths, *own, engine=how)
    expected = one_by_one([first, second, third])
    after_first = first(FRAME)
    assert 0 < len(expected) < len(after_first) < len(FRAME)
    run([first, second, third])  # measures
    forwards.clear()

    found, sharing = run([first, second, third])

    assert_same(found, expected)
    assert sharing == [(3, LAYERS, 3), NOTHING, NOTHING]
    texts = [frame["text"].dropna().nunique() for frame in (FRAME, after_first, expected)]
    assert [rows_of(forwards, path) for path in paths] == texts


def test_a_filter_between_them_that_is_not_in_step_holds(trunk, forwards, checkpoint):
    paths = trunk(count=2)
    first, last = classifiers(paths)
    other = DistributedDataClassifier(
        model=checkpoint("content-type"), label_field="other", filter_by="News"
    )
    found, sharing = run([first, other, last])
    assert sharing == [NOTHING] * 3
    assert_same(found, one_by_one([first, other, last]))

    kept = DistributedDataClassifier(model=checkpoint("content-type"), label_field="other")
    found, sharing = run([first, kept, last])
    assert sharing == [(LAYERS, LAYERS, 2), NOTHING, NOTHING]


@pytest.mark.parametrize(
    "change",
    ["no layer", "an embedding", "a setting", "a tokenizer", "a length", "a precision", "a column"],
)
def test_what_differs_shares_nothing(trunk, tmp_path, change):
    paths = trunk(count=2)
    frame, settings = FRAME.assign(other=FRAME["text"]), {}
    if change in ("no layer", "an embedding"):
        tensors = load_file(paths[1] / "model.safetensors")
        words = {"no layer": "layer.0.output.dense.bias", "an embedding": "word_embeddings.weight"}
        name = next(name for name in tensors if words[change] in name)
        tensors[name].view(-1)[-1] += 1e-6  # of a token that hardly a text has
        save_file(tensors, paths[1] / "model.safetensors", metadata={"format": "pt"})
    elif change == "a setting":
        path = paths[1] / "config.json"
        text = path.read_text()
        assert '"layer_norm_eps": 1e-12' in text
        path.write_text(text.replace('"layer_norm_eps": 1e-12', '"layer_norm_eps": 1e-11'))
    elif change == "a tokenizer":
        path = paths[1] / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocabulary = tokenizer["model"]["vocab"]
        *_, one, other = vocabulary
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
        path.write_text(json.dumps(tokenizer))
    else:
        settings = {
            "a length": {"max_seq_length": 64},
            "a precision": {"dtype": "bfloat16"},
            "a column": {"text_field": "other"},
        }[change]
    mappers = classifiers(paths, {}, settings)
    found, sharing = run(mappers, frame)
    assert sharing == [NOTHING, NOTHING]
    assert_same(found, one_by_one(mappers, frame))


def test_other_lengths_are_remembered_apart(trunk):
    paths = trunk(count=2)
    assert run(classifiers(paths, {}, {"max_seq_length": 64}))[1] == [NOTHING, NOTHING]
    assert run(classifiers(paths))[1] == [(LAYERS, LAYERS, 2), NOTHING]


def test_models_without_a_padding_id_share_nothing(trunk):
    """They run a text at a time."""
    paths = trunk("gpt2", count=2, size="n_layer", pad_token_id=None)
    mappers = classifiers(paths)
    found, sharing = run(mappers)
    assert sharing == [NOTHING, NOTHING]
    assert_same(found, one_by_one(mappers))


class Marked(PartitionMap):
    """A mapper of one's own, whose runner is another thing."""

    drops_rows = False
    runner = "a hare"

    def check(self, frame):
        pass

    def meta(self, frame):
        return frame.iloc[:0].assign(marked=True)

    def map_frame(self, frame, meta_dtypes=None):
        return frame.assign(marked=True)


def test_mappers_of_ones_own_stand_between(trunk):
    first, last = classifiers(trunk(count=2))
    found, sharing = run([first, Marked(), last])
    assert sharing == [(LAYERS, LAYERS, 2), NOTHING]
    assert_same(found, one_by_one([first, Marked(), last]))


def test_a_model_that_two_mappers_have_runs_once_behind_its_first_filter(trunk, forwards):
    paths = trunk()
    common = one_by_one(classifiers(paths[:1]))["label_0"].mode()[0]
    first, second, third = classifiers(paths, {"filter_by": common}, {"filter_by": common})
    again = DistributedDataClassifier(model=paths[1], label_field="again")
    mappers = [first, second, again, third]
    expected = one_by_one(mappers)
    run(mappers)  # measures
    forwards.clear()
    found, sharing = run(mappers)
    assert sharing == [(LAYERS, LAYERS, 3), *[NOTHING] * 3]
    assert_same(found, expected)
    passed = first(FRAME)["text"].nunique()
    assert [rows_of(forwards, path) for path in paths[1:]] == [passed, expected["text"].nunique()]


@pytest.mark.parametrize("number", range(3))
def test_outputs_that_are_not_finite_are_made_again(trunk, monkeypatch, number):
    mappers = classifiers(trunk(), {"filter_by": "LABEL_0"}, {"min_confidence": 0.3})
    expected = one_by_one(mappers)
    forward = LoadedModel.forward

    def failing(self, batch, side):
        outputs = forward(self, batch, side).clone()
        if f"bert{number}" in self.identity and len(batch.rows) > 1:
            outputs[1], outputs[0, 0] = torch.nan, torch.inf
        return outputs

    monkeypatch.setattr(LoadedModel, "forward", failing)
    assert_same(run(mappers)[0], expected)


def test_threads_and_evictions_change_nothing(trunk):
    mappers = classifiers(trunk("deberta-v2", LAYERS - 1), {"filter_by": "LABEL_0"})
    texts = [text and f"{text} {n}" for n in range(4) for text in TEXTS]
    frame = pd.DataFrame({"text": texts})
    expected = one_by_one(mappers, frame)
    MODELS.evict()
    with dask.config.set(scheduler="threads", num_workers=4):
        found = classify(dd.from_pandas(frame, npartitions=8), mappers).compute()
    assert_same(found, expected)


def test_what_was_measured_keeps_no_model(trunk):
    mappers = classifiers(trunk(count=2))
    run(mappers)
    kept = [weakref.ref(resident.model.module) for resident in MODELS._residents.values()]
    for mapper in mappers:
        mapper.teardown()
        assert not mapper.runner.is_loaded
    MODELS.evict()
    assert [found() for found in kept] == [None] * len(kept)


@pytest.mark.parametrize("long_text", ["windows", "ends"])
def test_windows_run_in_step_too(trunk, long_text):
    paths = trunk(count=2)
    mappers = classifiers(paths, max_seq_length=32, long_text=long_text)
    found, sharing = run(mappers)
    assert sharing == [(LAYERS, LAYERS, 2), NOTHING]
    assert_same(found, one_by_one(mappers))
    first, last = classifiers(paths, {"filter_by": "LABEL_0"}, long_text=long_text)
    assert run([first, last])[1] == [NOTHING] * 2  # a window does not tell of its text


@pytest.mark.parametrize(("pooling", "depth"), [("mean", LAYERS - 1), ("cls", LAYERS)])
def test_embeddings_and_heads_join(trunk, tmp_path, pooling, depth):
    paths = trunk(count=2, depth=LAYERS)
    backbone = str(save_sentence_model(tmp_path / "sentence", paths[0], pooling))
    # sentence-transformers saves the tokenizer as transformers 5 builds it anew.
    shutil.copy(f"{paths[0]}/tokenizer.json", backbone)
    head = HeadNetwork([(np.ones((1, 32), "float32"), np.zeros(1, "float32"))], "regression", ["s"])
    head.save(tmp_path / "head")
    mappers = [
        *classifiers(paths),
        Embedder(model=backbone, max_seq_length=None),
        HeadClassifier(heads={"edu": tmp_path / "head"}, backbone=backbone),
    ]
    found, sharing = run(mappers)
    # The classifiers' last layer gives the states of first tokens alone, which no mean is made of.
    assert sharing == [(depth, LAYERS, 3), NOTHING, NOTHING, NOTHING]  # two have one model
    assert_same(found, one_by_one(mappers))


def test_a_chain_of_pipes_is_one_pass(trunk):
    first, second, third = classifiers(trunk())
    lazy = dd.from_pandas(FRAME, npartitions=2)
    piped = lazy.pipe(first).pipe(second)
    expected = one_by_one([first, second, third])
    with dask.config.set(scheduler="sync"), collected_stats() as stats:
        found = piped.pipe(third).compute()
        assert [each.peak_sharing for each in stats] == [[3, LAYERS, LAYERS], None, None] * 2
        assert_same(found, expected)
        some = piped.pipe(third)[["id", "label_2", "label_0"]].compute()
        assert some.equals(found[["id", "label_2", "label_0"]])
        both = dd.concat([piped[["id"]], piped.pipe(third)[["label_2"]]], axis=1).compute()
        assert both["label_2"].tolist() == found["label_2"].tolist()


def test_a_lack_of_memory_halves_batches_of_all(trunk, monkeypatch):
    mappers = classifiers(trunk())
    expected, _ = run(mappers)
    left = [2]
    forward = LoadedModel.forward

    def short_of_memory(self, batch, side):
        if len(batch.rows) > 4 and "bert2" in self.identity and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, batch, side)

    monkeypatch.setattr(LoadedModel, "forward", short_of_memory)
    with collected_stats() as stats:
        found = classify(FRAME, mappers)
    assert stats[0].out_of_memory == 2
    assert_same(found, expected)


def test_a_plan_and_a_report_tell(trunk, tmp_path):
    path = tmp_path / "in.parquet"
    FRAME.dropna().to_parquet(path)
    stages = [ParquetReader(path), *classifiers(trunk(depth=3)), ParquetWriter(tmp_path / "out")]
    pipeline = Pipeline(stages)
    told = "3 of 4 layers run once for 3 models"
    assert told in str(pipeline.plan())
    summary = pipeline.run()
    assert told in str(summary)
    assert told in (tmp_path / "out/_report/report.html").read_text()


def test_lines_run_in_step_and_filters_drop_texts_by_all_their_lines(trunk):
    texts = ["\n".join(TEXTS[row : row + 3]) for row in range(0, 36, 3)]
    frame = pd.DataFrame({"text": [*texts, None, "", texts[0]]})
    kept = {"line_min_score": {"LABEL_1": 0.3}, "kept_share_field": "share", "min_kept_share": 0.3}
    settings = {"long_text": "lines", "max_seq_length": 64}
    paths = trunk(depth=LAYERS - 1, count=2)
    for own in ({}, kept):
        mappers = classifiers(paths, own, **settings)
        found, steps = run(mappers, frame)
        assert_same(found, one_by_one(mappers, frame))
        assert steps[0] == ((3, 4, 2) if not own else NOTHING)
    assert 0 < len(found) < len(frame)
