"""From JSON lines of a crawl to a training set: ``python examples/corpus.py CRAWL EVALS FOLDER``.

The first run labels documents, and draws some for people to label. Write their answers, true or
false, into the column ``is_good`` of FOLDER/labelled.jsonl, and run it again for the training set.
Settings may follow, such as ``quality=DIRECTORY``. A run that is killed continues where it was.
"""

import sys
from pathlib import Path

from gpuclassify import (  # noqa: I001
    AnnotationWriter, ApplyThresholds, Decontaminate, DecontaminateFiles, Deduplicate,
    ExactDuplicates, FileReader, FineWebEduClassifier, FuzzyDuplicates, LanguageIdentifier, Mix,
    ParquetWriter, Pipeline, QualityClassifier, Select, Signals, Thresholds, TokenCounter, sample,
)  # fmt: skip

SETTINGS = {
    "language": "cis-lmu/glotlid",
    "tokenizer": "Qwen/Qwen3-8B",
    "quality": "nvidia/quality-classifier-deberta",
    "education": "HuggingFaceFW/fineweb-edu-classifier",
    "tokens": "1e9",  # of the mixture
}
KEPT = """
    not exact_is_duplicate and not near_is_duplicate and not contaminated and quality_pred != 'Low'
    and gopher_words >= 50 and gopher_mean_word_length >= 3 and gopher_mean_word_length <= 10
    and gopher_alphabetic_word_share >= 0.8
"""


def main(crawl: str, evals: str, folder: str, *changes: str) -> str:
    """Take the steps that are left, and return a text that says what comes next."""
    settings = SETTINGS | dict(change.split("=", 1) for change in changes)
    crawl_files, skip = FileReader(crawl), {"on_error": "quarantine"}  # unreadable lines are listed
    names = ("labels", "exact=exact_", "near=near_", "evals")
    labels, exact, near, found = (
        AnnotationWriter(f"{folder}/notes/{name.partition('=')[0]}") for name in names
    )
    stages = [
        LanguageIdentifier(model=settings["language"]),  # FineWeb2, HPLT
        TokenCounter(model=settings["tokenizer"]),
        Signals("gopher"),  # MassiveText, FineWeb
        QualityClassifier(model=settings["quality"]),  # Nemotron-CC
        FineWebEduClassifier(model=settings["education"]),  # FineWeb-Edu
    ]
    Pipeline([crawl_files, *stages, labels], **skip).run()
    Deduplicate(crawl_files, ExactDuplicates(), exact, **skip).run()  # C4, Dolma
    Deduplicate(crawl_files, FuzzyDuplicates(threshold=0.7), near, **skip).run()  # FineWeb
    DecontaminateFiles([crawl_files, Decontaminate(against=evals), found], **skip).run()  # GPT-3

    annotated = FileReader(crawl, annotations=[f"{folder}/notes/{name}" for name in names])
    labelled = Path(folder, "labelled.jsonl")
    if not labelled.exists():
        drawn = sample(annotated, 200, by="quality_pred", **skip)  # as many of each label
        drawn.to_json(Path(folder, "drawn.jsonl"), orient="records", lines=True)
        return f"{len(drawn)} documents to label: {folder}/drawn.jsonl, as {labelled}"
    columns = {"score": "fineweb-edu-score-float", "label": "is_good", "weight": "weight"}
    thresholds = Thresholds.fit(FileReader(str(labelled)), **columns, precision=0.8)  # FineWeb2-HQ
    rules = [Select(" ".join(KEPT.split())), ApplyThresholds(thresholds)]
    corpus = ParquetWriter(f"{folder}/corpus", partition_by="language")
    Pipeline([annotated, *rules, corpus], **skip).run()
    chosen = FileReader(f"{folder}/corpus")
    mix = Mix.plan(chosen, by="language", tokens=float(settings["tokens"]))  # Dolma 3
    mix.save(f"{folder}/mix.json")
    return f"{mix}\nThe training set: {folder}/corpus, with the epochs in {folder}/mix.json"


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
