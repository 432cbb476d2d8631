"""A trained head is scikit-learn's or torch's on plain embeddings, and is what runs from disk."""

import importlib.metadata
import json

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss, mean_squared_error
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_sample_weight
from threadpoolctl import threadpool_info
from torch.nn import functional as F
from transformers import AutoModel, BertForSequenceClassification

from gpuclassify import (
    DistributedDataClassifier,
    Embedder,
    FineWebEduClassifier,
    Head,
    HeadClassifier,
)
from gpuclassify.corpus.training import fitting
from gpuclassify.corpus.training.fitting import PENALTIES, RECIPES, Examples, Fit
from gpuclassify.corpus.training.labels import LabelColumns, read_labels
from gpuclassify.corpus.training.split import folds, split
from gpuclassify.corpus.training.tasks import Classes
from gpuclassify.corpus.training.trained_head import CARD, PAGE, RECORD
from gpuclassify.models.checkpoint import CheckpointError
from tests.kills import kills
from tests.oracle import assert_close, plain_tokenizer, raw_outputs, stacked
from tests.replicas.annotated import LISTS, MINILM, annotated_texts
from tests.sentence_oracle import encoded

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TASKS = {"classes": "topic", "multilabel": "labels", "regression": "grade"}


def split_of(frame, label, seed=0):
    """Train, validation and test rows by hosts."""
    strata = np.unique(frame[label], return_inverse=True)[1]
    return split(strata, pd.factorize(frame["host"])[0], seed)


@pytest.fixture(scope="module")
def plain(annotated):
    """Embeddings by sentence-transformers, without the noise of MiniLM's three dead columns."""
    vectors = encoded(MINILM, annotated.text).astype(np.float64)
    return np.where(np.abs(vectors) < 1e-7, 0, vectors)


@pytest.fixture(scope="module")
def fit(annotated, kept):
    """Trains a head on MiniLM's embeddings of the annotated texts."""

    def fit(task="classes", frame=None, **settings):
        given = {"label_field": TASKS.get(task), "backbone": MINILM, "embeddings": kept, **settings}
        return Head.fit(annotated if frame is None else frame, task=task, **given)

    return fit


# Oracles.


def test_a_linear_head_of_classes_is_scikit_learns(annotated, plain, fit):
    head = fit(group="host")
    parts, topics = split_of(annotated, "topic"), annotated.topic.to_numpy()
    models = {
        penalty: make_pipeline(
            StandardScaler(), LogisticRegression(C=1 / penalty, max_iter=1_000)
        ).fit(plain[parts["train"]], topics[parts["train"]])
        for penalty in PENALTIES
    }
    chosen = min(
        models,
        key=lambda penalty: log_loss(
            topics[parts["validation"]], models[penalty].predict_proba(plain[parts["validation"]])
        ),
    )
    assert head.record["training"]["penalty"] == chosen
    assert_close(head.scores(plain), models[chosen].predict_proba(plain), 2e-3)
    assert head.labels == ("money", "nature", "sport")


def test_few_held_out_rows_are_judged_by_cross_validation_and_enough_as_they_are(
    annotated, plain, fit, monkeypatch
):
    """Of scikit-learn's heads, each chosen and judged by parts of its own."""
    grades, hosts = annotated.grade.to_numpy(), pd.factorize(annotated.host)[0]
    head, expected = fit("regression", group="host"), np.zeros(len(annotated))
    for parts in folds(grades, hosts):
        train, validation, test = parts.values()
        models = [
            make_pipeline(StandardScaler(), Ridge(alpha=penalty)).fit(plain[train], grades[train])
            for penalty in PENALTIES
        ]
        best = min(
            models,
            key=lambda model: mean_squared_error(
                grades[validation], model.predict(plain[validation])
            ),
        )
        expected[test] = best.predict(plain[test])
    found = head.evaluation
    assert (found.rows, found.folds) == (240, 10)
    assert found.summary["root_mean_squared_error"] == pytest.approx(
        mean_squared_error(grades, expected) ** 0.5, rel=1e-3
    )
    assert "10-fold cross-validation" in str(found)
    assert "240 annotated texts are few" in str(found)

    monkeypatch.setattr("gpuclassify.corpus.training.trained_head.ENOUGH_ROWS", 20)
    held_out = fit("regression", group="host")
    rows = split_of(annotated, "grade")["test"]
    assert (held_out.evaluation.rows, held_out.evaluation.folds) == (len(rows), None)
    errors = held_out.scores(plain[rows])[:, 0] - grades[rows]
    assert held_out.evaluation.summary["mean_absolute_error"] == pytest.approx(
        np.abs(errors).mean(), rel=1e-3
    )
    assert_close(held_out.scores(plain), head.scores(plain), 0)  # the head is the same one


def test_a_label_that_is_not_in_all_train_parts_leaves_the_held_out_rows(annotated, fit):
    frame = annotated.assign(topic=annotated.topic.mask(annotated.host == "host 3", "odd"))
    found = fit(frame=frame, group="host").evaluation
    assert found.folds is None
    assert found.rows < 40
    assert str(found).startswith(f"{found.rows} annotated texts.\n")


def test_a_linear_head_of_numbers_is_scikit_learns(annotated, plain, fit):
    head = fit("regression", group="host")
    parts, grades = split_of(annotated, "grade"), annotated.grade.to_numpy()
    models = {
        penalty: make_pipeline(StandardScaler(), Ridge(alpha=penalty)).fit(
            plain[parts["train"]], grades[parts["train"]]
        )
        for penalty in PENALTIES
    }
    chosen = min(
        models,
        key=lambda penalty: mean_squared_error(
            grades[parts["validation"]], models[penalty].predict(plain[parts["validation"]])
        ),
    )
    assert head.record["training"]["penalty"] == chosen
    assert_close(head.scores(plain)[:, 0], models[chosen].predict(plain), 2e-3)
    assert head.evaluation.summary["spearman"] > 0.7
    assert head.record["grades"] == (0, 5)


def test_two_labels_and_several_are_scikit_learns_too(annotated, plain, fit):
    frame = annotated.assign(topic=annotated.topic == "sport")
    head = fit(frame=frame, group="host")
    rows = split_of(frame, "topic")["train"]
    penalty = head.record["training"]["penalty"]
    model = make_pipeline(StandardScaler(), LogisticRegression(C=1 / penalty, max_iter=1_000))
    model.fit(plain[rows], frame.topic[rows])
    assert head.labels == ("False", "True")
    objects = dd.from_pandas(frame.astype({"topic": object}), npartitions=2)
    assert fit(frame=objects, group="host").labels == head.labels
    assert_close(head.scores(plain), model.predict_proba(plain), 2e-3)

    lists = [["sport"] if topic == "sport" else [] for topic in annotated.topic]
    lone = fit("multilabel", frame=annotated.assign(labels=pd.Series(lists, dtype=LISTS)))
    assert lone.labels == ("sport",)
    assert ((lone.scores(plain)[:, 0] > 0.5) == (annotated.topic == "sport")).mean() > 0.9

    several = fit("multilabel")
    assert several.labels == ("money", "nature", "sparse", "sport")
    is_sparse = several.scores(plain)[:, 2] > 0.5
    assert (is_sparse == annotated.grade.eq(1)).mean() > 0.8
    assert several.evaluation.summary["auc"] > 0.8


def test_a_balanced_head_weighs_labels_alike(annotated, plain, fit):
    rare = annotated[(annotated.topic != "sport") | (annotated.index % 4 == 0)]
    head = fit(frame=rare, group="host", balanced=True)
    rows = split_of(rare, "topic")["train"]
    penalty = head.record["training"]["penalty"]
    vectors = plain[rare.index]
    scaler = StandardScaler().fit(vectors[rows])
    counts = rare.topic.value_counts()
    weights = len(rare) / 3 / counts[rare.topic].to_numpy()  # as class_weight="balanced", of all
    model = LogisticRegression(C=1 / penalty, max_iter=1_000)
    model.fit(scaler.transform(vectors[rows]), rare.topic.iloc[rows], weights[rows])
    assert_close(head.scores(vectors), model.predict_proba(scaler.transform(vectors)), 5e-3)


@pytest.mark.parametrize(
    ("class_weight", "weights"),
    [
        ("balanced", "balanced"),
        ({"sport": 5, "money": 0.5}, {"sport": 5, "money": 0.5, "nature": 1}),
    ],
)
def test_a_head_of_weighed_labels_chosen_by_other_texts_is_scikit_learns(
    annotated, plain, fit, class_weight, weights
):
    rare = annotated[(annotated.topic != "sport") | (annotated.index % 4 == 0)]
    trained, other = rare[rare.index < 180], rare[rare.index >= 180]
    head = fit(frame=trained, group="host", validation=other, class_weight=class_weight)
    parts = split_of(trained, "topic")
    rows = np.sort(np.concatenate([parts["train"], parts["validation"]]))
    vectors, topics = plain[trained.index], trained.topic.to_numpy()
    scaler = StandardScaler().fit(vectors[rows])
    of_rows = compute_sample_weight(weights, topics)
    if weights == "balanced":
        weights = dict(zip(topics, of_rows, strict=True))
    losses, models = {}, {}
    for penalty in PENALTIES:
        models[penalty] = LogisticRegression(C=1 / penalty, max_iter=1_000)
        models[penalty].fit(scaler.transform(vectors[rows]), topics[rows], of_rows[rows])
        found = models[penalty].predict_proba(scaler.transform(plain[other.index]))
        weigh = [weights[topic] for topic in other.topic]
        losses[penalty] = log_loss(other.topic, found, sample_weight=weigh)
    best = min(losses, key=losses.get)
    assert head.record["training"]["penalty"] == best
    assert list(head.record["training"]["losses"].values()) == pytest.approx(
        list(losses.values()), rel=1e-2
    )
    expected = models[best].predict_proba(scaler.transform(plain))
    assert_close(head.scores(plain), expected, 5e-3)
    assert head.record["data"]["validation"] == len(other)
    assert head.record["data"]["has_own_validation"]
    assert head.evaluation.rows == len(trained)


def test_the_loss_of_weighed_labels_is_torchs(annotated, plain, fit):
    weights = {"nature": 2, "sport": 0.25}
    head = fit(kind="mlp", class_weight=weights, epochs=2, validation=annotated)
    targets = torch.tensor(annotated.topic.map(head.labels.index).to_numpy())
    logits = torch.from_numpy(head.network.apply(plain)).float()
    by_label = torch.tensor([weights.get(label, 1.0) for label in head.labels])
    expected = F.cross_entropy(logits, targets, weight=by_label)
    assert head.record["settings"]["class_weight"] == weights
    every = Examples(plain, targets.numpy(), by_label.numpy()[targets])
    found = Fit(head.task, head.labels, every, every, head.record["settings"])
    assert found._loss(logits.numpy()) == pytest.approx(float(expected), rel=1e-5)


def test_grades_and_the_rarest_of_several_labels_are_weighed(annotated, plain, fit):
    head = fit("regression", group="host", class_weight={5: 9.0, 0: 0.5})
    rows, grades = split_of(annotated, "grade")["train"], annotated.grade.to_numpy()
    weights = np.select([grades == 5, grades == 0], [9.0, 0.5], 1.0)
    scaler = StandardScaler().fit(plain[rows])
    model = Ridge(alpha=head.record["training"]["penalty"])
    model.fit(scaler.transform(plain[rows]), grades[rows], weights[rows])
    assert_close(head.scores(plain)[:, 0], model.predict(scaler.transform(plain)), 5e-3)
    fit("multilabel", class_weight={"sparse": 3})


def test_a_validation_number_that_is_no_grade_has_the_weight_of_the_nearest_grade(annotated, fit):
    other = annotated[:40].assign(grade=annotated.grade[:40] + np.linspace(-0.25, 0.25, 40))
    head = fit("regression", class_weight={5: 9.0}, validation=other)
    grades = np.float32([0, 1, 1, 2, 5])
    assert head.task.strata(np.float32([2.25, 5, -1, 9, 1]), grades).tolist() == [2, 3, 0, 3, 1]
    assert head.task.strata_names(grades, ("grade",)) == ["0", "1", "2", "5"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"class_weight": "balancd"}, ValueError, r"class_weight='balancd'.*\{\"spam\": 5\}"),
        ({"class_weight": {"sport": -1}}, ValueError, "numbers from 0 on"),
        ({"class_weight": {"sport": 1}, "balanced": True}, ValueError, "not balanced="),
        ({"class_weight": {"sprot": 2}}, TypeError, "no label 'sprot'.*mean 'sport'"),
    ],
)
def test_weights_that_fit_no_label_are_refused(fit, options, error, message):
    with pytest.raises(error, match=message):
        fit(**options)


def test_labels_to_choose_by_that_are_not_trained_on_are_refused(annotated, fit):
    other = annotated[:9].assign(topic="weather")
    with pytest.raises(ValueError, match=r"holds \['weather'\], which the head does not know"):
        fit(validation=other)
    with pytest.raises(ValueError, match="no column 'topic'"):
        fit(validation=annotated[:9].drop(columns="topic"))


def test_a_pooler_is_trained_as_the_whole_frozen_model_would_be(annotated):
    """FineWeb-Edu's recipe on the whole of BERT, whose embeddings and encoder are frozen."""
    annotated = annotated[:80]
    rows = split_of(annotated, "grade", seed=3)["train"]
    settings = {"epochs": 2, "learning_rate": 1e-3, "seed": 3}
    head = fit_pooler(annotated, MINILM, **settings)

    tokenizer = plain_tokenizer(MINILM)
    batch = tokenizer(annotated.text.tolist(), padding=True, return_tensors="pt")
    grades = torch.tensor(annotated.grade[rows].to_numpy(), dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = BertForSequenceClassification.from_pretrained(
            MINILM, num_labels=1, classifier_dropout=0.0, hidden_dropout_prob=0.0
        )
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.bert.embeddings.requires_grad_(False)
        model.bert.encoder.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
        best = (-1.0, None)
        for epoch in range(2):
            (order,) = torch.randperm(len(rows)).split(256)
            own = {name: each[rows[order]] for name, each in batch.items()}
            logits = model(**own).logits[:, 0]
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - epoch / 2)
            optimizer.zero_grad()
            F.mse_loss(logits, grades[order]).backward()
            optimizer.step()
            if epoch + 1 == head.record["training"]["best_epoch"]:
                best = (epoch, {k: v.clone() for k, v in model.state_dict().items()})
    # Weights of hardly any gradient go either way by AdamW's steps, which are of one size.
    states = plain_cls_states(MINILM, annotated.text)
    with torch.inference_mode():
        untrained = logits_of(model, before, batch)
        trained = logits_of(model, best[1], batch)
    assert_close(head.scores(states), trained, 1e-2)
    assert np.abs(trained - untrained).mean() > 0.1


def logits_of(model, weights, batch):
    model.load_state_dict(weights)
    return model.eval()(**batch).logits.numpy()


def fit_pooler(frame, backbone, **settings):
    options = {"label_field": "grade", "task": "regression", "kind": "pooler", "group": "host"}
    return Head.fit(frame, backbone=backbone, **{**options, **settings})


# From disk.


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("task", TASKS)
def test_what_is_saved_scores_as_the_head_does(fit, plain, annotated, tmp_path, kind, task):
    head = fit(task, kind=kind)
    folder = head.save(tmp_path / "head")
    score_field = "{head}_score"
    result = HeadClassifier(heads={"x": folder}, score_field=score_field, autocast=False)(annotated)
    expected = head.scores(plain)
    found = result.x_score.to_numpy()[:, None] if task == "regression" else stacked(result.x_score)
    assert_close(found, expected, 1e-4)
    if task == "classes":
        assert (result.x_pred == np.array(head.labels)[expected.argmax(axis=1)]).all()

    again = Head.load(folder)
    assert_close(again.scores(plain), expected, 0)
    assert again.evaluation == head.evaluation
    assert again.labels == head.labels
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["config.json", "model.safetensors", RECORD, CARD, PAGE]
    )
    again.save(folder)


def test_a_pooler_is_a_whole_classifier(annotated, tiny, tmp_path):
    head = fit_pooler(annotated, tiny, epochs=30, learning_rate=3e-3)
    folder = head.save(tmp_path / "edu")
    texts = annotated.text[:20]
    expected = raw_outputs(folder, texts)  # by AutoModelForSequenceClassification
    states = plain_cls_states(tiny, texts)
    assert_close(head.scores(states), expected, 1e-4)
    result = FineWebEduClassifier(model=folder, autocast=False)(annotated[:20])
    assert_close(result["fineweb-edu-score-float"], expected[:, 0].clip(0, 5), 1e-4)
    before, after = (load_file(f"{path}/model.safetensors") for path in (tiny, folder))
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {
        *("bert.pooler.dense.weight", "bert.pooler.dense.bias"),
        *("classifier.weight", "classifier.bias"),
    }
    again = Head.load(folder)
    assert_close(again.scores(states), expected, 1e-4)
    assert again.evaluate(annotated).rows == len(annotated)
    again.save(folder)


@pytest.mark.parametrize("kind", ["linear", pytest.param("pooler", marks=pytest.mark.slow)])
def test_a_killed_save_leaves_the_old_head_or_the_new_one(annotated, tiny, kept, tmp_path, kind):
    heads = {}
    for label in ("topic", "host"):
        epochs = {"epochs": 1} if kind == "pooler" else {}
        options = {"kind": kind, "embeddings": kept, **epochs}
        heads[label] = Head.fit(annotated, label_field=label, backbone=tiny, **options)
    folder, found = tmp_path / "head", set()
    for _ in kills(lambda: heads["host"].save(folder), lambda: heads["topic"].save(folder)):
        loaded = Head.load(folder)
        label = loaded.record["settings"]["label_field"]
        found.add(label)
        assert loaded.record == json.loads(json.dumps(heads[label].record))
        own, expected = loaded.network.layers, heads[label].network.layers
        assert all((a == b).all() for a, b in zip(sum(own, ()), sum(expected, ()), strict=True))
        assert loaded.labels == heads[label].labels
        heads["topic"].save(folder)
        assert not [path for path in folder.iterdir() if path.name[0] == "."]
    assert found == {"topic", "host"}


def test_a_killed_training_leaves_no_half_embeddings_and_damaged_ones_are_made_again(
    annotated, tiny, tmp_path, embedded_texts, caplog
):
    frame, embedder = annotated[:5], Embedder(model=tiny)
    columns = LabelColumns("text", "topic")

    def read():
        return read_labels(frame, columns, embedder, tmp_path).vectors

    expected = read()
    (path,) = tmp_path.iterdir()
    for _ in kills(read, lambda: path.unlink(missing_ok=True)):
        assert (read() == expected).all()
        assert list(tmp_path.iterdir()) == [path]

    content = path.read_bytes()
    for place in (0, 20, 60, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        embedded_texts.clear()
        assert (read() == expected).all()
        assert sum(embedded_texts) == 5
    assert caplog.text.count("is damaged") == 5


def test_a_pooler_of_classes_is_run_as_any_checkpoint(annotated, tiny, tmp_path):
    head = fit_pooler(annotated, tiny, label_field="topic", task="classes", epochs=2)
    folder = head.save(tmp_path / "topics")
    classifier = DistributedDataClassifier(model=folder, score_field="scores", autocast=False)
    result = classifier(annotated[:9])
    assert classifier.labels == ["money", "nature", "sport"]
    expected = head.scores(plain_cls_states(tiny, annotated.text[:9]))
    assert_close(stacked(result.scores), expected, 1e-4)


def plain_cls_states(directory, texts):
    tokenizer = plain_tokenizer(directory)
    model = AutoModel.from_pretrained(directory).float().eval()
    with torch.inference_mode():
        states = [
            model(**tokenizer(text, truncation=True, return_tensors="pt")).last_hidden_state[0, 0]
            for text in texts
        ]
    return torch.stack(states).numpy()


def test_the_card_tells_data_figures_settings_and_versions(fit, tmp_path):
    head = fit(group="host")
    card = (head.save(tmp_path / "topics") / CARD).read_text()
    for said in (
        "# topics\n",
        "HeadClassifier(heads={'topic': 'topics'})",
        f"| train | {head.record['data']['train']} |",
        "by 10-fold cross-validation",
        f"| macro-F1 | {head.evaluation.summary['macro_f1']:.3f} | ",
        "| seed | 0 |",
        f"| torch | {importlib.metadata.version('torch')} |",
        f"| penalty | {head.record['training']['penalty']} |",
    ):
        assert said in card
    assert not [path for path in (tmp_path / "topics").iterdir() if path.suffix in (".pkl", ".bin")]


def test_columns_may_have_any_name(annotated, fit, plain):
    expected = fit(group="host")
    renamed = annotated.rename(columns={"topic": "digest", "host": "label", "text": "has_text"})
    head = fit(frame=renamed, text_field="has_text", label_field="digest", group="label")
    np.testing.assert_array_equal(head.scores(plain), expected.scores(plain))


def test_a_directory_of_another_model_is_left_alone(fit, annotated, tiny, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    pooler = fit_pooler(annotated, tiny, epochs=1)
    for head in (fit(), pooler):
        with pytest.raises(FileExistsError, match="another model"):
            head.save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"Head\.save"):
        Head.load(tmp_path)


def nest(record):
    for _ in range(10):
        record["backbone"] = [record["backbone"]]


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["reading"].update(cache_dir="/etc"),
        lambda record: record["reading"].update(token="hf_x"),
        lambda record: record["reading"].update(model="other"),
        lambda record: record["backbone"].update(cache_dir="/etc"),
        lambda record: record["backbone"].update(model=["/etc"]),
        lambda record: record["backbone"].pop("model"),
        lambda record: record["settings"].update(kind="pickle"),
        lambda record: record["settings"].update(task="../x"),
        lambda record: record["settings"].update(task=["classes"]),
        lambda record: record.pop("reading"),
        lambda record: record.update(reading="max_chars"),
        nest,
    ],
)
def test_a_record_with_settings_that_no_head_has_is_refused(fit, tmp_path, change):
    folder = fit().save(tmp_path / "head")
    record = json.loads((folder / RECORD).read_text())
    change(record)
    (folder / RECORD).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"head/training\.json"):
        Head.load(folder)


@pytest.mark.parametrize("content", [b"[]", b"\xff", b"[" * 100_000, b"", b"1" * 5000])
def test_a_record_that_cannot_be_read_is_named(fit, tmp_path, content):
    folder = fit().save(tmp_path / "head")
    (folder / RECORD).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"head/training\.json"):
        Head.load(folder)


# The same data.


def test_a_lazy_frame_trains_the_same_head(annotated, fit, plain):
    head = fit(group="host", embeddings=None)
    lazy = fit(frame=dd.from_pandas(annotated, npartitions=5), group="host", embeddings=None)
    assert lazy.record["data"] == head.record["data"]
    assert_close(lazy.scores(plain), head.scores(plain), 1e-4)
    several = dd.from_pandas(annotated, npartitions=2)
    assert fit("multilabel", frame=several).labels == ("money", "nature", "sparse", "sport")


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_seed_gives_the_same_weights(fit, kind):
    first, again, other = (fit(kind=kind, seed=seed) for seed in (7, 7, 8))
    assert [w.tobytes() for w in first.network.tensors().values()] == [
        w.tobytes() for w in again.network.tensors().values()
    ]
    assert first.network.layers[0][0].tobytes() != other.network.layers[0][0].tobytes()


def test_training_stops_where_it_gets_no_better(annotated, fit):
    by_chance = annotated.assign(topic=np.random.default_rng(0).permutation(annotated.topic))
    found = fit(frame=by_chance, kind="mlp", epochs=50).record["training"]
    assert found["epochs"] == found["best_epoch"] + RECIPES["mlp"].patience < 50


@pytest.mark.parametrize("task", ["classes", "multilabel"])
def test_frames_of_either_library_train_the_same_head(annotated, fit, plain, frames, task):
    expected = fit(task, group="host")
    head = fit(task, frame=frames.plain(annotated), group="host", embeddings=None)
    assert head.record["data"] == expected.record["data"]
    assert_close(head.scores(plain), expected.scores(plain), 1e-4)


@pytest.mark.parametrize("kind", ["linear", pytest.param("mlp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rows_for_threads", "most"), [(20_000, 1), (1, 3)])
def test_few_rows_are_fitted_on_one_thread(fit, kind, rows_for_threads, most, monkeypatch):
    monkeypatch.setattr(fitting, "ROWS_FOR_THREADS", rows_for_threads)
    before, seen = torch.get_num_threads(), []
    losses = Classes.losses

    def noted(*arguments):
        pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
        seen.append(max(torch.get_num_threads(), *pools))
        return losses(*arguments)

    monkeypatch.setattr(Classes, "losses", noted)
    torch.set_num_threads(3)
    try:
        fit(kind=kind)
        assert {*seen} == {most}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_training_leaves_the_random_state_alone(fit):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fit(kind="mlp")
    assert torch.equal(torch.rand(3), expected)


def test_no_host_is_in_two_parts_and_no_text_without_hosts(annotated, monkeypatch):
    from gpuclassify.corpus.training import trained_head as module

    seen = {}

    def split(strata, groups, seed):
        seen["groups"], seen["parts"] = groups, real(strata, groups, seed)
        return seen["parts"]

    real = module.split
    monkeypatch.setattr(module, "split", split)
    twice = pd.concat([annotated, annotated[:80]], ignore_index=True)
    twice.loc[:40, "host"] = None
    twice.loc[240:245, "host"] = "mirror"  # has texts of other hosts
    for group in ("host", None):
        Head.fit(twice, label_field="topic", backbone=MINILM, group=group)
        for names in (twice.text, twice.host.fillna("")) if group else (twice.text,):
            found = [set(names[rows]) - {""} for rows in seen["parts"].values()]
            assert not (found[0] & found[1] or found[0] & found[2] or found[1] & found[2])


def test_a_text_of_too_many_groups_is_counted_and_large_groups_are_refused(annotated, fit, caplog):
    copied = pd.concat([annotated, annotated.drop_duplicates("host").assign(text="Not found")])
    fit(frame=copied, group="host")
    assert "1 texts stand in several groups" in caplog.text
    hosts = annotated.host.where(annotated.index < 6, "one host")
    with pytest.raises(
        ValueError, match=r"part has \d of 240 rows .*the largest of \d has 234 rows"
    ):
        fit(frame=annotated.assign(host=hosts), group="host")


# Embeddings are made once.


def test_kept_embeddings_serve_the_same_texts_only(annotated, tiny, tmp_path, embedded_texts):
    fit_pooler(annotated, tiny, epochs=1, embeddings=tmp_path)
    assert sum(embedded_texts) == len(annotated)
    head = fit_pooler(annotated, tiny, epochs=1, embeddings=tmp_path, seed=2)
    fit_pooler(dd.from_pandas(annotated, npartitions=3), tiny, epochs=1, embeddings=tmp_path)
    head.evaluate(annotated, embeddings=tmp_path)
    assert sum(embedded_texts) == len(annotated)  # another seed, a lazy frame, an evaluation

    files = list(tmp_path.iterdir())
    assert [path.suffix for path in files] == [".safetensors"]
    assert load_file(files[0])["embeddings"].dtype == torch.float32
    head.evaluate(annotated[::-1], embeddings=tmp_path)  # the same ones in another order
    assert sum(embedded_texts) == 2 * len(annotated)
    settings = {"pooling": "cls", "normalize": False, "prompt": ""}
    shorter = Embedder(model=tiny, max_seq_length=9, **settings)
    fit_pooler(annotated, shorter, epochs=1, embeddings=tmp_path)
    assert sum(embedded_texts) == 3 * len(annotated)


def test_a_lazy_frame_is_made_once(annotated, tiny):
    made = []

    def make(frame):
        made.append(len(frame))
        return frame

    lazy = dd.from_pandas(annotated, npartitions=2).map_partitions(make, meta=annotated)
    made.clear()
    fit_pooler(lazy, tiny, epochs=1)
    assert sum(made) == len(annotated)


def test_an_embedder_brings_its_settings(annotated, tmp_path):
    embedder = Embedder(
        model=MINILM, text_field="content", prompt="query: ", max_chars=40, autocast=False
    )
    head = Head.fit(annotated, label_field="topic", backbone=embedder)
    assert head.network.backbone.prompt == "query: "
    folder = head.save(tmp_path / "head")
    assert "max_chars=40" in (folder / CARD).read_text()
    assert Head.load(folder).embedder.options.max_chars == 40
    cut = [text[:40] for text in annotated.text[:6]]
    expected = head.scores(encoded(MINILM, [f"query: {text}" for text in cut]))
    classifier = HeadClassifier(
        heads={"x": folder}, score_field="{head}_score", max_chars=40, autocast=False
    )
    assert_close(stacked(classifier(annotated[:6]).x_score), expected, 1e-4)


# Bad input.


def without(frame, column, rows):
    frame = frame.copy()
    frame.loc[:rows, column] = None
    return frame


def test_rows_without_text_or_label_are_left_out_and_counted(annotated, fit, caplog):
    frame = without(without(annotated, "topic", 9), "text", 4)
    head = fit(frame=frame)
    data = head.record["data"]
    assert (data["null_texts"], data["null_labels"]) == (5, 5)
    assert data["train"] + data["validation"] + data["test"] == 230
    assert "left out 10 of 240 rows" in caplog.text
    evaluation = head.evaluate(frame)
    assert evaluation.rows == 230
    assert evaluation.about["Evaluated"] == {"rows": 230, "null_texts": 5, "null_labels": 5}


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize(
    ("column", "rows"), [("text", 240), ("topic", 240), (None, 0)], ids=["text", "label", "empty"]
)
def test_nothing_to_learn_from(annotated, fit, column, rows, lazily):
    frame = annotated[:0] if column is None else without(annotated, column, rows)
    frame = dd.from_pandas(frame, npartitions=1) if lazily else frame
    with pytest.raises(ValueError, match=r"none of \d+ rows has a text and a label"):
        fit(frame=frame)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"label_field": "tpoic"}, ValueError, "no column 'tpoic'.* Did you mean 'topic'.*label_"),
        ({"group": "hots"}, ValueError, "no column 'hots'.* Did you mean 'host'.*group="),
        ({"text_field": "body"}, ValueError, "no column 'body'.*text_field="),
        ({"label_field": "text"}, ValueError, "'text' holds the texts"),
        ({"text_field": "grade", "label_field": "topic"}, TypeError, "'grade' holds int64"),
        ({"task": "clases"}, ValueError, "task='clases'.*Did you mean 'classes'"),
        ({"kind": "svm"}, ValueError, "kind='svm' is not one of 'linear', 'mlp', 'pooler'"),
        ({"backbone": 3}, TypeError, "backbone=3: pass a Hub name"),
        ({"backbone": Embedder(model=MINILM, text_template="{a} {text}")}, ValueError, "reads one"),
        ({"epochs": 3}, ValueError, 'epochs have no meaning for kind="linear"'),
        ({"balanced": "yes"}, TypeError, "balanced='yes'"),
        ({"kind": "mlp", "hidden_size": 0}, ValueError, "hidden_size=0"),
        ({"kind": "mlp", "hidden_size": None}, ValueError, "hidden_size=None.*needs a width"),
        ({"kind": "mlp", "learning_rate": -1.0}, ValueError, "learning_rate=-1.0 must be above 0"),
        ({"kind": "mlp", "learning_rate": np.nan}, ValueError, "learning_rate=nan must be above"),
        ({"seed": "x"}, TypeError, "seed='x' is a str"),
        ({"seed": -1}, ValueError, "seed=-1 must be at least 0"),
        ({"seed": 1 << 64}, ValueError, "seed=18446744073709551616 must be below"),
        ({"seed": None}, TypeError, "seed=None is a NoneType"),
        ({"embeddings": __file__}, FileExistsError, "test_trained_head"),
        ({"label_field": "topic", "task": "regression"}, TypeError, "'topic' holds .*, not num"),
        ({"label_field": "topic", "task": "multilabel"}, TypeError, "'topic' holds .* not lists"),
        ({"label_field": "labels", "task": "classes"}, TypeError, "'labels' holds .*: classes are"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named_before_texts_are_embedded(
    fit, settings, error, message, embedded_texts
):
    is_of_settings = "label_field" not in settings  # what a column holds is read later
    with pytest.raises(error, match=message):
        fit(**({"embeddings": None} if is_of_settings else {}) | settings)
    assert not (is_of_settings and embedded_texts)


def test_settings_may_be_numpys(fit, tmp_path):
    numpys = {"epochs": np.int64(2), "learning_rate": np.float32(0.5), "seed": np.int64(3)}
    numpys |= {"hidden_size": np.int16(8), "balanced": np.bool_(True)}
    plain = fit(kind="mlp", **{name: value.item() for name, value in numpys.items()})
    head = fit(kind="mlp", **numpys)
    assert head.record == plain.record
    assert Head.load(head.save(tmp_path / "head")).evaluation == plain.evaluation


@pytest.mark.parametrize(
    ("task", "labels", "message"),
    [
        ("classes", ["a"] * 239 + ["b"], r"too few examples in 'label' of 'b' \(1\): each needs 3"),
        ("classes", ["a"] * 240, "all rows of 'label' have the label 'a'"),
        ("classes", [1.5] + [2.0] * 239, "'label' holds 1.5.*regression"),
        ("regression", [3] * 240, "all rows of 'label' hold 3"),
        ("regression", [np.inf] + [1.0] * 239, "'label' holds infinity"),
        ("multilabel", [["a"]] * 120 + [["a", "b"]] * 120, r"'not a' \(0\)"),
        ("multilabel", [["b"]] + [["a"]] * 100 + [[]] * 139, r"'b' \(1\)"),
        ("multilabel", [[]] * 240, "no row of 'label' has a label"),
    ],
)
def test_labels_that_cannot_be_learned_are_named(annotated, fit, task, labels, message):
    values = pd.Series(labels, dtype=LISTS if task == "multilabel" else None)
    with pytest.raises((ValueError, TypeError), match=message):
        fit(task, frame=annotated.assign(label=values), label_field="label")


def test_whole_numbers_are_classes_in_their_order(annotated, fit):
    labels = annotated.grade.where(annotated.index > 0).replace(5, 11)  # float, because of a null
    head = fit(frame=annotated.assign(label=labels), label_field="label")
    assert head.labels == ("0", "1", "2", "3", "4", "11")


def test_a_label_of_one_group_trains_and_others_are_named_if_they_cannot(annotated, fit):
    frame = annotated.assign(topic=annotated.topic.mask(annotated.host == "host 3", "odd"))
    for seed in range(6):
        assert "odd" in fit(frame=frame, group="host", seed=seed).labels
    own = annotated.assign(host=annotated.topic)  # three groups, of a label each
    with pytest.raises(ValueError, match="are all in the validation and test parts"):
        fit(frame=own, group="host")


def test_a_label_that_the_head_does_not_know(annotated, fit):
    head = fit()
    with pytest.raises(ValueError, match=r"holds \['weather'\], which the head does not know"):
        head.evaluate(annotated.assign(topic="weather"))
    with pytest.raises(ValueError, match="no column 'topic'"):
        head.evaluate(annotated.drop(columns="topic"))


def test_a_pooler_is_of_a_bert_and_of_cls(annotated, sequence_classifier, tiny):
    with pytest.raises(ValueError, match="is a roberta model, and kind="):
        fit_pooler(annotated, str(sequence_classifier("roberta")))
    with pytest.raises(ValueError, match=r'pass Embedder\(pooling="cls"'):
        fit_pooler(annotated, Embedder(model=tiny))


def test_training_that_diverges_says_so(annotated, fit):
    with pytest.raises(ArithmeticError, match="learning_rate=1e"):
        fit("regression", kind="mlp", learning_rate=1e30)


def test_unseen_texts_are_judged(fit):
    head = fit()
    evaluation = head.evaluate(annotated_texts(80, seed=9))
    assert evaluation.rows == 80
    assert evaluation.summary["macro_f1"] > 0.9
    assert evaluation.about["Settings"]["kind"] == "linear"
    assert repr(head).startswith("Head(kind='linear', task='classes', labels=['money', 'nature'")
