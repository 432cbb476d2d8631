"""Files that cannot be read from the middle: several parts of one, each with a share of it."""

import gzip
import json
from itertools import pairwise

import pandas as pd
import pytest

from gpuclassify import FileReader, JsonlReader, ParquetWriter, Pipeline
from gpuclassify.jobs.input import parts

ROWS = 2_000
TEXTS = [f"{row} " + "word " * (row % 90) for row in range(ROWS)]


def write(folder, kind):
    folder.mkdir()
    frame = pd.DataFrame({"id": range(ROWS), "text": TEXTS})
    if kind == "parquet":
        frame.to_parquet(folder / "in.parquet")
        return
    content = frame.to_json(orient="records", lines=True).encode()
    path = folder / f"in.{kind}"
    path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)


def parts_of(folder, **options):
    return FileReader(folder, **options).find_parts(needed=("text",)).parts


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_small_input_of_one_file_is_many_parts_that_are_the_whole_in_order(
    tmp_path, monkeypatch, kind
):
    monkeypatch.setattr("gpuclassify.jobs.input.part_finder.SMALLEST_PART_BYTES", 4_000)
    write(tmp_path / "in", kind)
    found = FileReader(tmp_path / "in").find_parts(needed=("text",))
    assert len(found.parts) > 5
    frames = [parts.read_part(part, found.schema) for part in found.parts]
    assert max(map(len, frames)) < ROWS / 4
    assert pd.concat(frames)["id"].tolist() == list(range(ROWS))
    assert len({str(part) for part in found.parts}) == len(found.parts)


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
@pytest.mark.parametrize("options", [{"part_bytes": 1 << 20}, {"files_per_partition": 1}])
def test_parts_of_a_size_that_was_asked_for_are_not_shared_out(tmp_path, kind, options):
    write(tmp_path / "in", kind)
    assert len(parts_of(tmp_path / "in", **options)) == 1


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
@pytest.mark.parametrize("reading", [{}, {"needed": ("text",), "is_slow": False}])
def test_files_that_no_model_reads_are_not_shared_out(tmp_path, monkeypatch, kind, reading):
    monkeypatch.setattr("gpuclassify.jobs.input.part_finder.SMALLEST_PART_BYTES", 4_000)
    write(tmp_path / "in", kind)
    assert len(FileReader(tmp_path / "in").find_parts(**reading).parts) == 1


@pytest.mark.parametrize("ends", [[1], [1, 2, 3], [1, 2, 4, 8, 13], [7, 9]])
@pytest.mark.parametrize("content", [b"", b"a\n", b"a", b"a\nbb\n\nccc\ndd", b"\n\n\n"])
def test_shares_of_lines_add_up_to_all(ends, content):
    pieces = []
    for first, end in pairwise([0, *ends]):
        part = parts.Part("in.jsonl.gz", share=(first, end, ends[-1]))
        lines = parts.Lines(part, 0, content, cut="cut").in_share()
        assert lines.offset == sum(map(len, pieces))
        assert (lines.cut is not None) == (end == ends[-1])
        pieces.append(lines.content)
    assert b"".join(pieces) == content
    assert all(piece.endswith(b"\n") for piece in pieces[:-1] if piece)


def test_what_cannot_be_read_is_told_once_by_its_line_and_its_share(tmp_path, monkeypatch):
    monkeypatch.setattr("gpuclassify.jobs.input.part_finder.SMALLEST_PART_BYTES", 200)
    lines = [json.dumps({"id": row, "text": f"{row * 7**40} text"}) for row in range(300)]
    lines[7] = '{"id": 7, "text": "' + "x" * 5_000 + '"}'
    lines[250] = "{broken"
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    reader = JsonlReader(f"{tmp_path}/in.jsonl.gz", max_line_bytes=1_000)
    found = reader.find_parts("quarantine", needed=("text",))
    assert len(found.parts) > 5
    read = [parts.read_table(part, found.schema, "quarantine") for part in found.parts]
    ids = [number for table, _, _ in read for number in table["id"].to_pylist()]
    assert ids == [row for row in range(300) if row not in (7, 250)]
    reasons = [problem.reason for _, problems, _ in read for problem in problems]
    assert len(reasons) == 2
    assert reasons[0].startswith("line 8: ")
    offsets = [problem.offset for _, problems, _ in read for problem in problems]
    assert offsets == [len("\n".join(lines[:row])) + 1 for row in (7, 250)]


def test_a_job_that_is_interrupted_goes_on_within_a_file(tmp_path, monkeypatch, checkpoint):
    from gpuclassify import QualityClassifier

    monkeypatch.setattr("gpuclassify.jobs.input.part_finder.SMALLEST_PART_BYTES", 20_000)
    write(tmp_path / "in", "jsonl.gz")
    classifier = QualityClassifier(model=checkpoint("quality"), max_seq_length=16)

    def run(reader, out, report=None):
        return Pipeline([reader, classifier, ParquetWriter(f"{tmp_path}/{out}")]).run(report=report)

    def stop(done, of, summary):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(FileReader(tmp_path / "in"), "out", stop)
    summary = run(FileReader(tmp_path / "in"), "out")
    assert summary.resumed_parts == 2
    whole = run(FileReader(tmp_path / "in", part_bytes=1 << 30), "whole")
    assert (summary.rows_read, whole.parts) == (ROWS, 1)
    one, other = (pd.read_parquet(tmp_path / folder) for folder in ("out", "whole"))
    assert one.equals(other)
