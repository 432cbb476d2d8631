"""Random rows with their annotations: the same ones however the files are read."""

import json

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from gpuclassify import AnnotationWriter, Pipeline, Select
from gpuclassify.commands.cli import main
from gpuclassify.corpus.scores.sampling import draw_rows
from gpuclassify.jobs.input.readers import FileReader

ROWS = 600


def with_rank(frame):
    return frame.assign(rank=frame["id"].astype("Int64"))


@pytest.fixture(params=["parquet", "jsonl"])
def corpus(request, tmp_path):
    (tmp_path / "crawl").mkdir()
    for number in range(3):
        ids = range(number * ROWS // 3, (number + 1) * ROWS // 3)
        frame = pd.DataFrame({"id": ids, "text": [f"text of {row}" for row in ids]})
        path = tmp_path / f"crawl/{number}.{request.param}"
        if request.param == "parquet":
            frame.to_parquet(path, row_group_size=20, index=False)
        else:
            frame.to_json(path, orient="records", lines=True)
    stages = [FileReader(str(tmp_path / "crawl")), with_rank]
    Pipeline([*stages, AnnotationWriter(str(tmp_path / "notes"))]).run(report=lambda *_: None)
    return tmp_path


def drawn(corpus, rows, seed, where=None, **options):
    reader = FileReader(str(corpus / "crawl"), annotations=str(corpus / "notes"), **options)
    frame = draw_rows(reader, rows, seed, Select(where) if where else None)
    assert (frame["text"] == [f"text of {row}" for row in frame["id"]]).all()
    assert (frame["rank"] == frame["id"]).all()
    return frame["id"].tolist()


@pytest.mark.parametrize("where", [None, "rank != 7", "rank >= 300", "id < 50"])
def test_rows_do_not_depend_on_parts(corpus, where):
    whole = drawn(corpus, 9, 1, where)
    assert whole == drawn(corpus, 9, 1, where, part_bytes=500)
    assert whole == drawn(corpus, 9, 1, where, files_per_partition=3)
    if where and "id" in where:
        assert len(whole) == 9 and max(whole) < 50


def test_seeds_draw_other_rows_and_all_are_as_likely(corpus):
    assert drawn(corpus, 9, 1) != drawn(corpus, 9, 2)
    assert drawn(corpus, ROWS + 5, 1) == list(range(ROWS))
    means = [np.mean(drawn(corpus, 40, seed)) for seed in range(25)]
    # The mean of 1,000 draws of 0 to 599 has a standard deviation of 5.5.
    assert abs(np.mean(means) - (ROWS - 1) / 2) < 25


def test_the_command_prints_texts_with_annotations(corpus):
    words = ["show", str(corpus / "notes"), "--input", str(corpus / "crawl"), "-n", "3"]
    result = CliRunner().invoke(main, [*words, "--where", "rank < 100"])
    assert result.exit_code == 0 and result.output.count("text of ") == 3
    lines = CliRunner().invoke(main, [*words, "--json"]).stdout.splitlines()
    assert [*json.loads(lines[0])] == ["id", "text", "rank"] and len(lines) == 3
    wrong = CliRunner().invoke(main, [*words, "--where", "rnk < 3"])
    assert wrong.exit_code == 2 and "Did you mean 'rank'" in wrong.output
