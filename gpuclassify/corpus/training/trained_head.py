"""Train, evaluate, save and load heads: small networks that read embeddings, as last layers do."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpuclassify import hub
from gpuclassify._version import __version__, installed_versions
from gpuclassify.classifiers.embedder import Embedder, sentence_model
from gpuclassify.corpus.statistics.agreement import grades_of
from gpuclassify.corpus.training.evaluation import (
    ENOUGH_ROWS,
    Evaluation,
    evaluate,
    require_libraries,
)
from gpuclassify.corpus.training.fitting import (
    Examples,
    Fit,
    pooler_embedder,
    read_layers,
    save_classifier,
)
from gpuclassify.corpus.training.labels import LabelColumns, LabelledRows, read_labels
from gpuclassify.corpus.training.split import folds, refuse_small, split
from gpuclassify.corpus.training.tasks import (
    TASKS,
    Task,
    refuse_rare,
    refuse_untrained,
    row_weights,
    untrained,
)
from gpuclassify.frames import Frame, LazyFrame  # needed at run time: type hints are evaluated
from gpuclassify.hub.saving import CONFIG, finish_saving, saving
from gpuclassify.models.checkpoint import CheckpointError, checking_values, read_checkpoint
from gpuclassify.models.head_network import (
    Backbone,
    HeadNetwork,
    load_head,
    read_head,
    refuse_other_model,
)
from gpuclassify.models.tensors import check_digest
from gpuclassify.settings.checks import check_seed, check_values, with_plain_values
from gpuclassify.settings.options import StrPath
from gpuclassify.settings.paths import exists

Kind = Literal["linear", "mlp", "pooler"]
TaskName = Literal["classes", "multilabel", "regression"]
PACKAGES = ("numpy", "scikit-learn", "torch", "transformers")  # versions recorded with a head
ACTIVATIONS = {"linear": None, "mlp": "relu", "pooler": "tanh"}
RECORD, PAGE, CARD = "training.json", "evaluation.html", "README.md"
# Settings of an embedder that its classifier needs, and a head's own files do not store.
_READING = ("max_chars", "long_text", "end_chars", "window_overlap", "window_aggregation")


# Its public name is `Head`; `gpuclassify.mapping.heads.Head` is another class.
@dataclass(frozen=True, eq=False)
class TrainedHead:
    """Last layers of a classifier, which read the embeddings of a frozen model.

    `Head.fit` trains a head, `evaluate` measures it, `save` writes it for ``HeadClassifier`` (or,
    for ``kind="pooler"``, as a whole classifier), and `load` reads it again.

    Attributes
    ----------
    network : HeadNetwork
        The layers.
    embedder : Embedder
        Mapper that makes the embeddings.
    record : dict
        Record of the training, as JSON values: settings, data, versions and evaluation.

    Examples
    --------
    >>> head = Head.fit(
    ...     annotated, label_field="quality", backbone="intfloat/e5-base-v2"
    ... )  # doctest: +SKIP
    >>> print(head.evaluation)  # doctest: +SKIP
    >>> head.save("quality-head")  # doctest: +SKIP
    >>> ddf = HeadClassifier(heads={"quality": "quality-head"})(ddf)  # doctest: +SKIP
    """

    network: HeadNetwork
    embedder: Embedder
    record: dict[str, Any]

    @classmethod
    @with_plain_values
    def fit(
        cls,
        annotated: Frame | LazyFrame,
        *,
        label_field: str,
        backbone: StrPath | Embedder,
        text_field: str = "text",
        kind: Kind = "linear",
        task: TaskName = "classes",
        group: str | None = None,
        embeddings: StrPath | None = None,
        validation: Frame | LazyFrame | None = None,
        balanced: bool = False,
        class_weight: str | Mapping[Any, float] | None = None,
        hidden_size: int | None = 256,
        epochs: int | None = None,
        learning_rate: float | None = None,
        seed: int = 0,
    ) -> TrainedHead:
        """Train a head on annotated texts.

        Rows without a text or a label are left out, and counted. A tenth of the other rows is the
        test part, for the evaluation, and a tenth is the validation part, to select the penalty or
        the epoch. Parts have similar shares of each label. Rows with the same group or text are in
        the same part, and groups that share a text count as one. The shares of parts are as exact
        as whole groups allow, and the largest groups are in the train part. Layers are trained on
        this machine's CPU, by scikit-learn or torch; the same seed gives the same weights.

        If the test part has fewer than 400 rows, the evaluation is by cross-validation: ten more
        heads (fewer if there are fewer groups) are trained on other parts, so that each row is in
        the test part of one of them. It is of the test part after all if one of these heads would
        be trained without a label.

        Parameters
        ----------
        annotated : dask.dataframe.DataFrame, pandas.DataFrame or cudf.DataFrame
        label_field : str
            Column of the labels: texts, whole numbers or booleans for classes, lists of them for
            ``task="multilabel"``, numbers for a regression.
        backbone : str, path or Embedder
            Hub name or directory of the embedding model, whose weights do not change. Pass an
            `Embedder` for other settings.
        text_field : str
            Column of the text.
        kind : {"linear", "mlp", "pooler"}
            scikit-learn's LogisticRegression or Ridge; two layers with a ReLU between them; or the
            pooler of a BERT and a classifier, which read the state of ``[CLS]``, as in FineWeb-Edu.
        task : {"classes", "multilabel", "regression"}
            One label per text, any number of labels, or a number.
        group : str, optional
            Column, such as the host; rows with the same value are in the same part. A warning
            counts texts that are in too many groups to join these.
        embeddings : path, optional
            Directory that caches embeddings.
        validation : DataFrame, optional
            Annotated texts with the same columns, to select the penalty or the epoch. The
            validation part of `annotated` is then used for training, too.
        balanced : bool
            Give all labels, or grades of a regression, the same total weight.
        class_weight : str or dict, optional
            Weight of rows by label, or grade: "balanced", or numbers by label, 1 for others. A row
            with several labels has the weight of the rarest one.
        hidden_size : int or None
            Width between the layers of ``kind="mlp"``.
        epochs : int, optional
            Maximum epochs for ``kind="mlp"`` and ``"pooler"``. Default: 50 and 20.
        learning_rate : float, optional
            Learning rate for ``kind="mlp"`` and ``"pooler"``. Default: 0.001 and 0.0003.
        seed : int
            Seed of parts and training.

        Returns
        -------
        Head
            Its `evaluation` is of the test part, or by cross-validation.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, a column is missing or unusable, all labels are the same, a
            label has fewer than three examples or none in the train part, `validation` has another
            label, there are fewer than three groups, or groups are so large that a part has too few
            rows.
        ArithmeticError
            Training diverges in the first epoch, because `learning_rate` is too large.
        ModuleNotFoundError
            scikit-learn or scipy is not installed.
        """
        settings = fit_settings(
            kind=kind,
            task=task,
            text_field=text_field,
            label_field=label_field,
            group=group,
            balanced=balanced,
            class_weight=class_weight,
            hidden_size=hidden_size,
            epochs=epochs,
            learning_rate=learning_rate,
            seed=seed,
        )
        embedder = _embedder_of(backbone, kind)
        columns = LabelColumns(text_field, label_field, group)
        labelled, selection = read_labels(annotated, columns, embedder, embeddings), None
        if validation is not None:
            columns = LabelColumns(text_field, label_field)
            selection = read_labels(validation, columns, embedder, embeddings)
        return _fit(TASKS[task](label_field), embedder, labelled, settings, selection)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the network's outputs, in order."""
        return self.network.labels

    @property
    def evaluation(self) -> Evaluation:
        """Evaluation on the test part, or by cross-validation if the test part is small."""
        return Evaluation(**self.record["evaluation"], about=_about(self.record))

    @property
    def task(self) -> Task:
        """Task that the head has learned, such as to select one of several classes."""
        settings = self.record["settings"]
        return TASKS[settings["task"]](settings["label_field"])

    def scores(self, embeddings: np.ndarray) -> np.ndarray:
        """Return probabilities, or the numbers of a regression.

        Parameters
        ----------
        embeddings : numpy.ndarray
            float32 (texts, dimensions), from the `embedder`.

        Returns
        -------
        numpy.ndarray
            float32 (texts, outputs).
        """
        return self.task.scores(self.network.apply(embeddings))

    def evaluate(
        self,
        dataset: Frame | LazyFrame,
        *,
        text_field: str | None = None,
        label_field: str | None = None,
        group: str | None = None,
        embeddings: StrPath | None = None,
    ) -> Evaluation:
        """Evaluate the head on annotated texts that it was not trained on.

        Rows without a text or a label are left out, and counted in the result's `about`.

        Parameters
        ----------
        dataset : dask.dataframe.DataFrame, pandas.DataFrame or cudf.DataFrame
        text_field : str, optional
            Column of the text. Default: the column used in training.
        label_field : str, optional
            Column of the labels. Default: the column used in training.
        group : str, optional
            Column, such as the host. Rows with the same value are not independent, which makes
            intervals wider.
        embeddings : path, optional
            Directory that caches embeddings.

        Raises
        ------
        TypeError, ValueError
            A column is missing or unusable, or a label is not one of the head's.
        """
        settings = self.record["settings"]
        columns = LabelColumns(
            text_field or settings["text_field"], label_field or settings["label_field"], group
        )
        labelled = read_labels(dataset, columns, self.embedder, embeddings)
        task = TASKS[settings["task"]](columns.label)
        targets = task.targets(task.read(labelled.labels), self.labels)
        rows = {
            "rows": len(targets),
            "null_texts": labelled.null_texts,
            "null_labels": labelled.null_labels,
        }
        return self._judge(
            self.network.apply(labelled.vectors),
            targets,
            labelled.groups,
            about={"Evaluated": rows},
        )

    def save(self, directory: StrPath) -> Path:
        """Write the head, its card and its evaluation's page to a directory; replace an older head.

        Returns the path of the directory. `HeadClassifier` runs the head from there. A head of
        ``kind="pooler"`` is saved as a whole BertForSequenceClassification, which
        `FineWebEduClassifier` (for a regression) and `DistributedDataClassifier` run. All files are
        replaced at once: readers see the older head or this one, also if the process is killed
        meanwhile.

        Raises
        ------
        FileExistsError
            The directory holds another model.
        """
        kind = self.record["settings"]["kind"]
        folder = check_directory(directory, kind)
        with saving(folder) as temporary:
            if kind != "pooler":
                self.network.write(temporary)
            elif folder.resolve() != Path(self.embedder.model.identity.name).resolve():
                save_classifier(self.network, self.embedder, temporary)
            record = json.dumps(self.record, indent=1, ensure_ascii=False)
            (temporary / RECORD).write_text(f"{record}\n", encoding="utf-8")
            card = self.evaluation.card(folder.name, self.record)
            (temporary / CARD).write_text(card, encoding="utf-8")
            self.evaluation.save(temporary / PAGE)
        return folder

    @classmethod
    def load(cls, directory: StrPath, *, backbone: StrPath | Embedder | None = None) -> TrainedHead:
        """Load a head from a directory written by `save`.

        Parameters
        ----------
        directory : path
        backbone : str, path or Embedder, optional
            Hub name or directory of the embedding model, if its name has changed since training. An
            `Embedder` is used unchanged.

        Raises
        ------
        FileNotFoundError
            The directory holds no trained head.
        CheckpointError, ModelChangedError
            The weights are damaged, or were replaced during loading.
        """
        folder = Path(os.fspath(directory)).expanduser()
        finish_saving(folder)
        if not exists(folder / RECORD):
            raise FileNotFoundError(
                f"{folder} has no {RECORD}: name a directory that Head.save() wrote"
            )
        identity = hub.resolve(folder)
        record = hub.read_json_file(folder / RECORD)
        with checking_values(folder / RECORD):
            _check_record(record, folder / RECORD)
            described = Backbone(**record["backbone"])
            settings, labels = record["settings"], tuple(record["labels"])
            if settings["kind"] == "pooler":
                described = replace(described, model=str(folder), revision=None)
                task = TASKS[settings["task"]]
                check_digest(read_checkpoint(identity), folder)
                layers = tuple(read_layers(folder))
                network = HeadNetwork(layers, task.problem_type, labels, "tanh", backbone=described)
            else:
                network = load_head(read_head(identity))
            hub.download(identity)  # raises if a file has changed since `identity`
            if isinstance(backbone, Embedder):
                return cls(network, backbone, record)
            if backbone is not None:
                described = replace(described, model=os.fspath(backbone), revision=None)
            return cls(network, Embedder(**asdict(described), **record["reading"]), record)

    def _judge(
        self,
        outputs: np.ndarray,
        targets: np.ndarray,
        groups: np.ndarray,
        *,
        folds: int | None = None,
        about: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Evaluation:
        return evaluate(
            self.task,
            outputs,
            targets,
            self.labels,
            groups=groups,
            folds=folds,
            bounds=self.record["grades"],
            about={**(about or {}), **_about(self.record)},
        )

    def __repr__(self) -> str:
        settings = self.record["settings"]
        return (
            f"Head(kind={settings['kind']!r}, task={settings['task']!r}, "
            f"labels={list(self.labels)}, backbone={self.embedder.options.model!r})"
        )


def fit_settings(**arguments: Any) -> dict[str, Any]:
    """Check arguments of `TrainedHead.fit`; return the settings to record with a head, by name."""
    weight = arguments["class_weight"]
    settings = arguments | {
        "balanced": arguments["balanced"] or weight == "balanced",
        "class_weight": None if weight == "balanced" else by_label(weight),
        "hidden_size": arguments["hidden_size"] if arguments["kind"] == "mlp" else None,
    }
    _check_fit(settings)
    return settings


def _check_record(record: Mapping[str, Any], file: Path) -> None:
    backbone, settings = record["backbone"], record["settings"]
    if not (
        isinstance(backbone["model"], str)
        and backbone.keys() <= {field.name for field in fields(Backbone)}
        and record["reading"].keys() <= {*_READING}
        and settings["task"] in TASKS
        and settings["kind"] in ACTIVATIONS
    ):
        raise CheckpointError(
            f"{file} is not what Head.save() wrote: it has settings that no head has. Copy the "
            "directory again"
        )


Head = TrainedHead  # its public name, which documentation and pickles show
TrainedHead.__name__ = TrainedHead.__qualname__ = "Head"


def _fit(
    task: Task,
    embedder: Embedder,
    labelled: LabelledRows,
    settings: dict[str, Any],
    validation: LabelledRows | None,
) -> TrainedHead:
    """Split rows, train, and evaluate on the test part or by cross-validation.

    Cross-validation is used if the test part has fewer than 400 rows, and each fold's train part
    has all labels. `settings` are from `fit_settings`. `validation` rows replace the validation
    part of `labelled`, which is then used for training, too.
    """
    labels = task.read(labelled.labels)
    outputs = task.outputs(labels)
    targets = task.targets(labels, outputs)
    task.check(targets, outputs)
    refuse_rare(task, targets, outputs)
    strata = task.strata(targets)
    parts = split(strata, labelled.groups, settings["seed"])
    refuse_small(parts, labelled.groups)
    refuse_untrained(task, targets[parts["train"]], outputs)
    rows, vectors, all_targets, all_strata = len(targets), labelled.vectors, targets, strata
    if validation is not None:
        vectors = np.vstack([vectors, validation.vectors])
        own_targets = task.targets(task.read(validation.labels), outputs)
        all_targets = np.concatenate([targets, own_targets])
        all_strata = np.concatenate([strata, task.strata(own_targets, targets)])
    weights = row_weights(all_strata, task.strata_names(targets, outputs), rows, settings)
    examples = Examples(vectors, all_targets, weights)
    backbone = _backbone_of(embedder)

    def with_validation(parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if validation is None:
            return parts
        train = np.sort(np.concatenate([parts["train"], parts["validation"]]))
        return {**parts, "train": train, "validation": np.arange(rows, len(all_targets))}

    def trained(parts: Mapping[str, np.ndarray]) -> tuple[HeadNetwork, dict[str, Any]]:
        train, held_out = (examples.take(parts[name]) for name in ("train", "validation"))
        fit = Fit(task, outputs, train, held_out, settings)
        network = HeadNetwork(
            tuple(fit.layers(embedder)),
            task.problem_type,
            outputs,
            hidden_activation=ACTIVATIONS[settings["kind"]],
            backbone=backbone,
        )
        return network, fit.record

    parts = with_validation(parts)
    network, training = trained(parts)
    reading = {name: getattr(embedder.options, name) for name in _READING}
    record = {
        "settings": settings,
        "data": {
            **{name: len(rows) for name, rows in parts.items()},
            "has_own_validation": validation is not None,
            "groups": len(np.unique(labelled.groups)),
            "null_texts": labelled.null_texts,
            "null_labels": labelled.null_labels,
        },
        "labels": list(outputs),
        "examples": task.examples(targets, outputs),
        "grades": grades_of(targets) if task.name == "regression" else None,
        "training": training,
        "backbone": asdict(backbone),
        "reading": {k: v for k, v in reading.items() if v != getattr(Embedder.Options, k)},
        "versions": {"gpuclassify": __version__} | installed_versions(*PACKAGES),
    }
    head = TrainedHead(network, embedder, record)
    judged_rows, tries = parts["test"], []
    if len(judged_rows) < ENOUGH_ROWS:
        tries = list(map(with_validation, folds(strata, labelled.groups, settings["seed"])))
    if tries and all(not untrained(task, targets[fold["train"]], outputs) for fold in tries):
        tested = [trained(fold)[0].apply(labelled.vectors[fold["test"]]) for fold in tries]
        judged_rows = np.concatenate([fold["test"] for fold in tries])
        judged_outputs = np.vstack(tested)
    else:  # enough rows, or a label is missing in a train part
        tries, judged_outputs = [], network.apply(labelled.vectors[judged_rows])
    judged = head._judge(
        judged_outputs,
        targets[judged_rows],
        labelled.groups[judged_rows],
        folds=len(tries) or None,
    ).as_dict()
    record["evaluation"] = {name: value for name, value in judged.items() if name != "about"}
    return head


def _about(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return tables about a head, "Data", "Settings" and "Versions": values by name, by title."""
    named = {name: value for name, value in record["settings"].items() if value is not None}
    trained = {name: value for name, value in record["training"].items() if name != "losses"}
    return {
        "Data": dict(record["data"]),
        "Settings": {"backbone": record["backbone"]["model"]} | named | trained,
        "Versions": dict(record["versions"]),
    }


def _check_fit(settings: Mapping[str, Any]) -> None:
    """Raise an error if arguments of `TrainedHead.fit` are invalid, or libraries are missing."""
    check_values(
        TrainedHead.fit, {name: value for name, value in settings.items() if name != "seed"}
    )
    check_seed(settings["seed"], below=1 << 64)  # the limit of torch
    if settings["kind"] == "mlp" and settings["hidden_size"] is None:
        raise ValueError('hidden_size=None: kind="mlp" needs a width, such as 256')
    rate = settings["learning_rate"]
    if rate is not None and not 0 < rate < float("inf"):
        raise ValueError(f"learning_rate={rate!r} must be above 0, such as 0.001")
    weights = settings["class_weight"]
    numbers = weights.values() if isinstance(weights, Mapping) else [None]
    is_sound = all(
        isinstance(number, (int, float)) and 0 <= number < float("inf") for number in numbers
    )
    if weights is not None and (settings["balanced"] or not is_sound):
        raise ValueError(
            f'class_weight={weights!r}: pass "balanced" or numbers from 0 on by label, such as '
            '{"spam": 5}, and not balanced= with them'
        )
    unusable = [name for name in ("epochs", "learning_rate") if settings[name] is not None]
    if unusable and settings["kind"] == "linear":
        raise ValueError(
            f'{" and ".join(unusable)} have no meaning for kind="linear", which is not trained in '
            "epochs: leave them out"
        )
    require_libraries("Head.fit")


def by_label(weights: object) -> Any:
    """Convert the labels of class weights to texts; weights that are no mapping are unchanged."""
    if not isinstance(weights, Mapping):
        return weights
    return {f"{k:g}" if isinstance(k, float) else str(k): number for k, number in weights.items()}


def check_directory(directory: StrPath, kind: Kind) -> Path:
    """Return the path of the directory to save a head in. It need not exist.

    An interrupted save there is finished first. Raises FileExistsError if another model is there.
    """
    folder = Path(os.fspath(directory)).expanduser()
    finish_saving(folder)
    if kind != "pooler":
        refuse_other_model(folder)
    elif exists(folder / CONFIG) and not exists(folder / RECORD):
        raise FileExistsError(f"{folder} holds another model: name another directory")
    return folder


def _embedder_of(backbone: StrPath | Embedder, kind: str) -> Embedder:
    if not isinstance(backbone, (str, os.PathLike, Embedder)):
        raise TypeError(f"backbone={backbone!r}: pass a Hub name, a directory, or an Embedder")
    if not isinstance(backbone, Embedder):
        backbone = os.fspath(backbone)
    elif backbone.options.text_template is not None:
        raise ValueError(
            f"text_template={backbone.options.text_template!r} reads several columns, and training "
            "reads one: make a column of the filled template, and name it as text_field="
        )
    if kind == "pooler":
        return pooler_embedder(backbone)
    return backbone if isinstance(backbone, Embedder) else Embedder(model=backbone)


def _backbone_of(embedder: Embedder) -> Backbone:
    identity, sentence = embedder.model.identity, sentence_model(embedder.model.checkpoint)
    return Backbone(
        model=identity.name,
        revision=None if identity.is_directory else identity.revision,
        pooling=sentence.pooling,
        # Truncated embeddings have to be normalized again.
        normalize=embedder.options.normalize if sentence.truncate_dim else sentence.is_normalized,
        prompt=embedder.model.prompt,
        max_seq_length=embedder.options.max_seq_length,
        truncate_dim=sentence.truncate_dim,
    )
