"""The page of a job's report in a real browser."""

import json
import subprocess

import matplotlib.pyplot as plt
import numpy as np
import pytest

from gpuclassify import DomainClassifier, FineWebEduClassifier
from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.testing import sample_texts

pytestmark = pytest.mark.system
BLUE = np.array([0x2F, 0x6F, 0xDE]) / 255  # of bars
WIDTH, HEIGHT = 1200, 1600  # in pixels


def test_the_page_opens_in_a_browser_without_a_network(tmp_path, checkpoint):
    records = [{"id": row, "text": text} for row, text in enumerate(sample_texts(50, seed=4))]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    stages = [
        JsonlReader(f"{tmp_path}/in.jsonl", part_bytes=800),
        DomainClassifier(model=checkpoint("domain"), confidence_field="sure", autocast=False),
        FineWebEduClassifier(model=checkpoint("fineweb-edu"), autocast=False),
        ParquetWriter(f"{tmp_path}/out"),
    ]
    Pipeline(stages).run()
    picture = tmp_path / "page.png"
    browse(tmp_path / "out/_report/report.html", picture)
    pixels = plt.imread(picture)[:, :, :3]
    assert pixels.shape[:2] == (HEIGHT, WIDTH)
    is_bar = (np.abs(pixels - BLUE) < 0.02).all(axis=2)
    assert is_bar.mean() > 0.005
    assert is_bar[:, : WIDTH // 2].any()
    assert is_bar[:, WIDTH // 2 :].any()  # in both columns


def browse(page, picture):
    """Save what a browser without a network shows of the page."""
    command = [
        *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--proxy-server=127.0.0.1:9", f"--window-size={WIDTH},{HEIGHT}"),
    ]
    subprocess.run(
        [*command, f"--screenshot={picture}", page.as_uri()],
        check=True,
        capture_output=True,
        timeout=120,
    )
