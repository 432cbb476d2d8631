"""The pages of a job's report and of an evaluation in a real browser."""

import html
import json
import re
import subprocess

import matplotlib.pyplot as plt
import numpy as np
import pytest

from gpuclassify import DomainClassifier, FineWebEduClassifier
from gpuclassify.corpus.training.evaluation import evaluate
from gpuclassify.corpus.training.tasks import TASKS
from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.report.report import page
from tests.replicas import sample_texts

pytestmark = pytest.mark.system
BLUE = np.array([0x2F, 0x6F, 0xDE]) / 255  # of bars
WIDTH, HEIGHT = 1200, 1600  # in pixels
LONG_NAMES = ("a_label_without_any_blank_" * 8, "漢字の長い名前" * 20, "Ω" * 200, "W" * 60)
# What a report counts in rows or texts.
COUNTED = (
    "rows_read", "rows_written", "texts", "truncated_texts", "labels", "labelled", "stages",
    "funnel", "agreements", "sources", "scores", "text_lengths", "throughput", "busy_seconds",
    "rows_per_second", "tokens", "tokens_per_second", "worker_seconds", "tokenize_seconds",
)  # fmt: skip
# Every text of a picture that is not within it, and every box that is wider than its place.
OUTSIDE = """
<script>
const outside = [], room = 0.5;
for (const text of document.querySelectorAll("svg text")) {
  const own = text.getBoundingClientRect(), all = text.closest("svg").getBoundingClientRect();
  if (own.left < all.left - room || own.right > all.right + room
      || own.top < all.top - room || own.bottom > all.bottom + room)
    outside.push(text.textContent);
}
for (const box of document.querySelectorAll("section, .tile, .bars, .count, pre, html"))
  if (box.scrollWidth > box.clientWidth) outside.push(box.className + box.tagName);
for (const bar of document.querySelectorAll(".bars i")) {
  const own = bar.getBoundingClientRect(), place = bar.parentElement.getBoundingClientRect();
  if (own.right > place.right + room) outside.push("bar");
}
const seen = document.querySelectorAll("svg text, .bars span").length;
document.title = JSON.stringify({outside, seen, width: innerWidth});
</script>
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory, checkpoint):
    """The output of a job with filters, a source and examples."""
    folder = tmp_path_factory.mktemp("job")
    texts = enumerate(sample_texts(50, seed=4))
    records = [{"id": row, "text": text, "host": f"host {row % 4}"} for row, text in texts]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    stages = [
        JsonlReader(f"{folder}/in.jsonl", part_bytes=800),
        DomainClassifier(
            model=checkpoint("domain"), confidence_field="sure", autocast=False, min_confidence=0.2
        ),
        FineWebEduClassifier(model=checkpoint("fineweb-edu"), autocast=False),
        ParquetWriter(f"{folder}/out"),
    ]
    Pipeline(stages, source_field="host").run()
    return folder / "out"


@pytest.mark.parametrize("width", [500, 1200])
@pytest.mark.parametrize("factor", [1, 10**3, 10**6, 2 * 10**7])
def test_no_text_leaves_its_picture(output, tmp_path, factor, width):
    report = json.loads((output / "_report/report.json").read_text())
    large = {name: scaled(report[name], factor) for name in COUNTED}
    large["labels"]["long"] = {name: 10**9 // n for n, name in enumerate(LONG_NAMES, 1)}
    large["labelled"]["long"] = 3 * 10**9
    large["agreements"]["long"] = dict.fromkeys(LONG_NAMES, large["labels"]["long"])
    large["text_lengths"]["long"] = [[2**n, 2 ** (n + 1), 10**9 // (n + 1)] for n in range(31)]
    large["command"] = f"gpuclassify classify {' '.join(LONG_NAMES)} --classifier domain" * 2
    assert_all_is_inside(page({**report, **large}), tmp_path / "page.html", width, 100)


@pytest.mark.parametrize("width", [500, 1200])
@pytest.mark.parametrize("task", ["classes", "regression"])
def test_no_text_leaves_the_pictures_of_an_evaluation(tmp_path, task, width):
    random = np.random.default_rng(0)
    scores = random.normal(size=(5_000, len(LONG_NAMES)), scale=1e5).astype(np.float32)
    labels, targets = LONG_NAMES, random.integers(0, len(LONG_NAMES), 5_000)
    if task == "regression":
        scores, targets = scores[:, :1], targets.astype(np.float32)
    about = {"Settings": {"backbone": LONG_NAMES[0], "label_field": LONG_NAMES[3]}}
    found = evaluate(TASKS[task]("label"), scores, targets, labels, bounds=(0, 3), about=about)
    assert_all_is_inside(found.html(), tmp_path / "page.html", width, 12)


def assert_all_is_inside(content, path, width, least):
    """Every text is within its picture, every box within its place, and there are that many."""
    path.write_text(content.replace("</body>", f"{OUTSIDE}</body>"))
    dom = browse(path, "--dump-dom", width)
    found = json.loads(html.unescape(re.search("<title>(.*?)</title>", dom, re.DOTALL)[1]))
    assert found["outside"] == [], found
    assert found["width"] == width
    assert found["seen"] > least


def scaled(value, factor):
    """Counts times the factor; the edges of bins, which come before their counts, stay."""
    if isinstance(value, dict):
        return {name: scaled(each, factor) for name, each in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], int | float):
        return [*value[:-1], scaled(value[-1], factor)]
    if isinstance(value, list):
        return [scaled(each, factor) for each in value]
    return value if isinstance(value, str) else value * factor


def test_the_page_opens_in_a_browser_without_a_network(output, tmp_path):
    picture = tmp_path / "page.png"
    browse(output / "_report/report.html", f"--screenshot={picture}")
    pixels = plt.imread(picture)[:, :, :3]
    assert pixels.shape[:2] == (HEIGHT, WIDTH)
    is_bar = (np.abs(pixels - BLUE) < 0.02).all(axis=2)
    assert is_bar.mean() > 0.005
    assert is_bar[:, : WIDTH // 2].any()
    assert is_bar[:, WIDTH // 2 :].any()  # in both columns


def browse(page, action, width=WIDTH):
    """What a browser without a network prints when it opens the page."""
    command = [
        *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--proxy-server=127.0.0.1:9", f"--window-size={width},{HEIGHT}"),
    ]
    done = subprocess.run(
        [*command, action, page.as_uri()], check=True, capture_output=True, text=True, timeout=120
    )
    return done.stdout
