"""Each benchmark runs in its smallest form, and its result has its fields."""

import numpy as np
import pytest
from matplotlib import image

from benchmarks import BASELINE, SUBJECT, deduplication, plots, safety, suite, throughput
from benchmarks.harness import noise
from benchmarks.ways import choose_ways

WAYS = {
    "throughput": [
        BASELINE,
        "pipeline per partition",
        f"{BASELINE}, batch 256",
        "sorted batches of 32",
        "Curator's stages, batch 256",
        "Curator's stages, batch 32",
        "Curator's stages, best batch",
        "crossfit-original",
        "loader=crossfit",
        SUBJECT,
    ],
    "deduplication": list(deduplication.OURS),
    "fasttext": ["the library", SUBJECT, "1 worker", "2 workers"],
    "heads": ["one head", "several heads", "a pass for each"],
    "jobs": ["frame", "job"],
    "safety": [*safety.BASELINES, safety.SUBJECT],
    "training": ["embedding, mean", "linear", "mlp", "embedding, cls", "pooler"],
    "workers": ["1 worker", "2 workers"],
}
OPTIONS = {
    "throughput": ("--peers", "--lengths", "short"),
    "deduplication": ("--peers", "nowhere"),
    "workers": ("--workers", "1", "2"),
}
# Where the variants stand in a result.
PARTS = {"throughput": ("corpora", "short"), "deduplication": ("corpora", "14x8")}
PARTS["jobs"] = ("overhead",)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("question", sorted(WAYS))
def test_a_smoke_run_writes_a_complete_result(smoke_run, question):
    result, _, _ = smoke_run(question, *OPTIONS.get(question, ()))
    found = result
    for part in PARTS.get(question, ()):
        found = found[part]
    assert list(found["variants"]) == WAYS[question]
    medians = {}
    for name, times in found["variants"].items():
        assert len(times["seconds"]) == len(times["other_cores"]) == result["settings"]["repeats"]
        assert times["median_seconds"] == pytest.approx(np.median(times["seconds"]))
        medians[name] = times["median_seconds"]
    subject = safety.SUBJECT if question == "safety" else SUBJECT
    for ratio in found.get("speed_up", {}).values():
        expected = medians[ratio["against"]] / medians[subject]
        assert ratio["ratio_of_medians"] == pytest.approx(expected)
    assert result["noisy"] == bool(noise(result))
    CHECKS.get(question, lambda result: None)(result)


def check_throughput(result):
    corpus = result["corpora"]["short"]
    assert 0 <= corpus["largest_difference"] <= result["settings"]["tolerance"]
    assert corpus["pipeline_padded_tokens"] > corpus["real_tokens"]
    for found in corpus["variants"].values():
        share = corpus["operations"] / found["median_seconds"]
        assert found["share_of_peak"] == pytest.approx(share / corpus["peak_operations_per_second"])
        assert 0 < found["share_of_peak"] < 1
    assert all(found["batch_size"] == 16 for found in corpus["searches"].values())
    assert corpus["tokenizer"]["tokens"] == corpus["real_tokens"]
    for found in corpus["footprints"].values():
        assert 0 < found["resident_bytes_before"] < found["peak_resident_bytes"]
        assert min(found["first_seconds"], found["first_run_seconds"]) > 0


def check_deduplication(result):
    plain, verified = result["corpora"]["14x8"]["variants"].values()
    assert plain["recall_of_planted"]["exact 0"] == verified["recall_of_planted"]["exact 0"] == 1
    assert 250 < plain["kept"] <= verified["kept"] < 298
    recall = result["recall"]["14x8"]
    assert all(bins["recall"][-1]["found"] == 1 for bins in recall.values())
    words = [recall[way]["precision"]["words"]["0.7"] for way in deduplication.OURS]
    assert words[0] <= words[1]
    assert [step["documents"] for step in result["growth"]] == [200, 300]
    assert len(result["settings"]["left_out"]) == 5


def check_jobs(result):
    assert [found["parts"] for found in result["growth"]] == [4, 8]


def check_safety(result):
    variants = dict(result["variants"])
    aegis = variants.pop("AegisClassifier")
    for found in variants.values():
        assert found["tokens_run"] > result["prompt_tokens"] > aegis["tokens_run"]
    assert sum(result["labels"].values()) == result["documents"]


def check_fasttext(result):
    assert result["largest_difference"] < 1e-6
    one, two = (found["model_bytes"] for found in result["memory"])
    assert two < 1.8 * one


CHECKS = {
    "throughput": check_throughput,
    "deduplication": check_deduplication,
    "jobs": check_jobs,
    "safety": check_safety,
    "fasttext": check_fasttext,
}


def test_a_smoke_run_of_scale_notes_time_and_memory_of_each_part(smoke_run, tmp_path):
    result, path, _ = smoke_run("scale")
    assert [one["rows"] for one in result["samples"]] == [*range(500, 6_500, 500)]
    assert len(result["pace"]["seconds"]) == len(result["pace"]["yardstick_seconds"]) == 6
    last = result["samples"][-1]
    assert min(last["client_bytes"], *last["workers_bytes"], last["model_bytes"]) > 2**20
    (picture,) = plots.main([str(path), "--output", str(tmp_path)])
    assert is_drawn(picture)


def is_drawn(path):
    """Whether a picture has light paper and dark ink, and nothing runs over its edges."""
    pixels = image.imread(path)[..., :3].mean(axis=2)
    edges = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    return path.stat().st_size > 10_000 and pixels.min() < 0.2 and edges.min() == 1


def test_results_are_drawn_and_the_suite_ends_with_a_short_table(smoke_run, tmp_path):
    results = [smoke_run(name, *OPTIONS[name]) for name in ("throughput", "deduplication")]
    paths = plots.main([*(str(path) for _, path, _ in results), "--output", str(tmp_path)])
    assert [path.stem.rpartition("-")[2] for path in paths] == [
        *("ratios", "peak"),
        *("ratios", "recall", "growth"),
    ]
    assert all(map(is_drawn, paths))
    head, line = suite.summary([results[0][0]]).splitlines()
    assert "other way" in head
    assert line.split()[:4] == ["bert", "short,", "12", "documents"]


@pytest.mark.parametrize("form", sorted(suite.FORMS))
def test_every_command_of_the_suite_can_be_given(form, tiny_model):
    for question, *arguments in suite.FORMS[form]:
        assert question == "throughput"
        options = throughput.parse_options(arguments)
        names = [way.name for way in choose_ways(options, tiny_model).ways]
        assert set(options.variants) <= set(names)
