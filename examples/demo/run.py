"""From docstrings to a trained model to the main job: JSONL in, classify, Parquet out."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.demo.corpus import Document, collect_documents, hold_out, split_documents
from examples.demo.training import cached_model, is_cached, trained_on
from gpuclassify.pages import readable_time

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from gpuclassify.jobs.report.progress import JobProgress
    from gpuclassify.jobs.report.summary import JobSummary

INPUT_FILES = 4
ENOUGH_SHARE = 0.1  # of the training, after which the time that is left can be told


@dataclass(frozen=True)
class DemoResult:
    """Result of the demonstration.

    Attributes
    ----------
    job : JobSummary
    accuracy : float
        Share of held-out documents whose label is their area.
    majority_share : float
        What always giving the most frequent area would reach.
    areas : int
    trained_on : int
        Documents that the model was trained on.
    model, output : str
        Directories.
    """

    job: JobSummary
    accuracy: float
    majority_share: float
    areas: int
    trained_on: int
    model: str
    output: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain values by name, for JSON."""
        return {**vars(self), "job": self.job.as_dict()}


def load_demo(max_documents: int | None = None) -> tuple[Path, pd.DataFrame]:
    """Return the demonstration's model and the documents that it has not seen.

    The model is trained on the first call, for half a minute on two cores, and kept for the user.

    Parameters
    ----------
    max_documents : int, optional
        Most documents to use, those of the training included.

    Returns
    -------
    model : Path
        The directory of a checkpoint for `DomainClassifier`.
    documents : pandas.DataFrame
        Columns ``text``, ``module`` and ``area``, which is the right label.

    Raises
    ------
    ValueError
        Too few documents to learn from.
    """
    import pandas as pd

    limit = {} if max_documents is None else {"max_documents": max_documents}
    documents = collect_documents(**limit)
    model = cached_model(split_documents(documents)[0], max_documents=max_documents)
    return model, pd.DataFrame(map(asdict, hold_out(documents, trained_on(model))))


def run_demo(
    directory: str | Path,
    console: Console,
    *,
    model: str | Path = "demo",
    max_documents: int | None = None,
) -> DemoResult:
    """Train on one half of the documents, classify the other, and count what is right.

    Parameters
    ----------
    directory : str or Path
        Gets ``input/*.jsonl`` and ``output/*.parquet``.
    console : rich.console.Console
        Shows progress.
    model : str or Path
        The directory that gets the model, which is cached for the user, too.
    max_documents : int, optional
        Most documents to use, both halves together.

    Raises
    ------
    ValueError
        Too few documents to learn from.
    """
    from gpuclassify.jobs.report.progress import JobProgress

    directory = Path(directory)
    limit = {} if max_documents is None else {"max_documents": max_documents}
    with JobProgress("", console) as progress:
        progress.waiting("collecting docstrings")
        documents = collect_documents(**limit)
        training, _ = split_documents(documents)
        trained = _train(training, max_documents, progress)
        # Times stay: as long as the model is the same, so is the identity that jobs continue by.
        shutil.copytree(trained, model, dirs_exist_ok=True)
        training = trained_on(trained)
        held_out = hold_out(documents, training)
        write_documents(held_out, directory / "input")
        progress.waiting("starting a worker")
        labels = sorted({document.area for document in training})
        job = _classify(model, labels, directory, progress)
    areas = Counter(document.area for document in held_out)
    return DemoResult(
        job=job,
        accuracy=measure_accuracy(directory / "output"),
        majority_share=max(areas.values()) / len(held_out),
        areas=len(areas),
        trained_on=len(training),
        model=str(model),
        output=str(directory / "output"),
    )


def _train(training: list[Document], max_documents: int | None, progress: JobProgress) -> Path:
    """Train the classifier unless it is cached, showing progress, and return its directory."""
    began: list[tuple[float, float]] = []  # of the first step: before it, a tokenizer is trained
    title = f"training on {len(training):,} docstrings"

    def show(share: float, loss: float) -> None:
        began.append((time.monotonic(), share))
        (start, first), rest = began[0], ""
        if share - first > ENOUGH_SHARE:
            seconds = (time.monotonic() - start) * (1 - share) / (share - first)
            rest = f", about {readable_time(seconds)} left"
        progress.share(share, f"loss {loss:.2f}{rest}")

    if not is_cached(max_documents):
        progress.waiting(title)
    return cached_model(training, max_documents=max_documents, on_progress=show)


def _classify(
    model: str | Path, labels: list[str], directory: Path, progress: JobProgress
) -> JobSummary:
    """Run the main job: JSON lines in, Parquet out."""
    from gpuclassify.classifiers import DomainClassifier
    from gpuclassify.cluster import get_client
    from gpuclassify.jobs.input.readers import JsonlReader
    from gpuclassify.jobs.output.writers import ParquetWriter
    from gpuclassify.jobs.pipeline import Pipeline

    classifier = DomainClassifier(model=str(model), labels=labels, score_field="domain_scores")
    reader, writer = JsonlReader(str(directory / "input")), ParquetWriter(str(directory / "output"))
    planned = Pipeline([reader, classifier, writer]).prepare(restart=True)
    with get_client() as client:
        progress.watch("DomainClassifier", client, "loading the model")
        return planned.run(client, progress.parts)


def write_documents(documents: Sequence[Document], directory: Path) -> None:
    """Write documents as JSON lines, dealt over a few files."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(INPUT_FILES):
        with (directory / f"{number}.jsonl").open("w", encoding="utf-8") as file:
            for document in documents[number::INPUT_FILES]:
                file.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")


def measure_accuracy(output: Path) -> float:
    """Return the share of the rows in the Parquet files of `output` whose label is their area."""
    import pandas as pd

    frame = pd.read_parquet(output, columns=["area", "domain_pred"])
    return float((frame["area"] == frame["domain_pred"]).mean())
