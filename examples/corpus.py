"""From JSON lines of a crawl to a training set: ``python examples/corpus.py CRAWL EVALS FOLDER``.

The first run labels documents, and draws some for people to label. Write their answers, true or
false, into the column ``is_good`` of FOLDER/labelled.jsonl, and run it again for the training set.
Settings may follow, such as ``quality=DIRECTORY``. A run that is killed continues where it was.
"""

import sys
from pathlib import Path

import gpuclassify as gpc

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
    files, skip = gpc.FileReader(crawl), {"on_error": "quarantine"}
    names = ("labels", "exact=exact_", "near=near_", "evals")
    labels, exact, near, found = (
        gpc.AnnotationWriter(f"{folder}/notes/{name.partition('=')[0]}") for name in names
    )
    stages = [
        gpc.LanguageIdentifier(model=settings["language"]),  # FineWeb2, HPLT
        gpc.TokenCounter(model=settings["tokenizer"]),
        gpc.Signals("gopher"),  # MassiveText, FineWeb
        gpc.QualityClassifier(model=settings["quality"]),  # Nemotron-CC
        gpc.FineWebEduClassifier(model=settings["education"]),  # FineWeb-Edu
    ]
    gpc.Pipeline([files, *stages, labels], **skip).run()
    gpc.Deduplicate(files, gpc.ExactDuplicates(), exact, **skip).run()  # C4, Dolma
    gpc.Deduplicate(files, gpc.FuzzyDuplicates(threshold=0.7), near, **skip).run()  # FineWeb
    items = gpc.Decontaminate(against=evals)  # GPT-3
    gpc.DecontaminateFiles([files, items, found], **skip).run()

    annotated = gpc.FileReader(crawl, annotations=[f"{folder}/notes/{name}" for name in names])
    labelled = Path(folder, "labelled.jsonl")
    if not labelled.exists():
        drawn = gpc.sample(annotated, 200, by="quality_pred", **skip)  # as many of each label
        drawn.to_json(Path(folder, "drawn.jsonl"), orient="records", lines=True)
        return f"{len(drawn)} documents to label: {folder}/drawn.jsonl, as {labelled}"
    columns = {"score": "fineweb-edu-score-float", "label": "is_good", "weight": "weight"}
    answers = gpc.FileReader(str(labelled))
    thresholds = gpc.Thresholds.fit(answers, **columns, precision=0.8)  # FineWeb2-HQ
    rules = [gpc.Select(" ".join(KEPT.split())), gpc.ApplyThresholds(thresholds)]
    corpus = gpc.ParquetWriter(f"{folder}/corpus", partition_by="language")
    gpc.Pipeline([annotated, *rules, corpus], **skip).run()
    chosen = gpc.FileReader(f"{folder}/corpus")
    mix = gpc.Mix.plan(chosen, by="language", tokens=float(settings["tokens"]))  # Dolma 3
    mix.save(f"{folder}/mix.json")
    return f"{mix}\nThe training set: {folder}/corpus, with the epochs in {folder}/mix.json"


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
