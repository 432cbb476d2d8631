"""Parts that are small at the beginning of an input, so that the first results show early."""

import bz2
import gzip
import json
import lzma
from itertools import accumulate, pairwise

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gpuclassify import AnnotationWriter, FileReader, ParquetWriter, Pipeline, QualityClassifier
from gpuclassify.jobs.input import jsonl, part_finder, parts, sample
from gpuclassify.jobs.ledger.quarantine import counts_by_kind

ROWS = 4_000
RANDOM = np.random.default_rng(0)
# Hexadecimal digits shrink to some half of their size.
FRAME = pd.DataFrame(
    {"id": range(ROWS), "text": [RANDOM.bytes(20 + row % 90).hex() for row in range(ROWS)]}
)
SMALLEST = 2_000
PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
KINDS = ["jsonl", *(f"jsonl.{name}" for name in PACKERS), "jsonl.zst", "parquet", "one-group"]


def packed(content, suffix):
    if suffix == "zst":
        return pa.compress(content, "zstd", asbytes=True)
    return PACKERS.get(suffix, bytes)(content)


def write(folder, kind, frame=FRAME, files=1):
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(len(frame)), files)):
        piece = frame.iloc[rows]
        if kind.startswith("jsonl"):
            content = piece.to_json(orient="records", lines=True).encode()
            (folder / f"{number:03}.{kind}").write_bytes(packed(content, kind[6:]))
        else:
            group_rows = {"row_group_size": 100} if kind == "parquet" else {}
            piece.to_parquet(folder / f"{number:03}.parquet", index=False, **group_rows)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sizes in proportion to an input of 1 MB, which is not small any more."""
    monkeypatch.setattr(part_finder, "SMALLEST_PART_BYTES", SMALLEST)
    monkeypatch.setattr(part_finder, "COLUMN_BYTES", 1)
    monkeypatch.setattr(part_finder, "SLOW_PART_BYTES", 20 * SMALLEST)
    monkeypatch.setattr(part_finder, "FEW_PARTS", 10)
    monkeypatch.setattr(part_finder, "SHARED_BYTES", 1_000)
    monkeypatch.setattr(jsonl, "CHUNK_BYTES", 500)


def find(folder, on_error="raise", **options):
    return FileReader(folder, **options).find_parts(on_error, needed=("text",))


@pytest.mark.parametrize("files", [1, 3, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_grow_from_the_first_and_are_the_rows_in_order(tmp_path, kind, files):
    write(tmp_path / "in", kind, files=files)
    found = find(tmp_path / "in")
    frames = [parts.read_part(part, found.schema) for part in found.parts]
    pd.testing.assert_frame_equal(
        pd.concat(frames, ignore_index=True), FRAME, check_dtype=False, check_index_type=False
    )
    sizes = [*map(len, frames)]
    before = [*accumulate(sizes)]
    assert 0 < sizes[0] < ROWS / 50
    # A part has about as many rows as all before it; a group of 100 rows may come on top.
    assert all(size <= 2 * rows + 100 for rows, size in zip(before, sizes[1:], strict=False))
    assert max(sizes) > 5 * sizes[0]
    assert len({str(part) for part in found.parts}) == len(found.parts)
    assert found == find(tmp_path / "in")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"part_bytes": 1 << 20}, {"files_per_partition": 1}])
def test_parts_that_the_user_cuts_do_not_grow(tmp_path, kind, options):
    write(tmp_path / "in", kind, files=3)
    found = find(tmp_path / "in", **options)
    sizes = [len(parts.read_part(part, found.schema)) for part in found.parts]
    assert sizes[0] > ROWS / 50
    assert "part_bytes" not in options or len(sizes) <= 3


def test_lines_of_a_large_file_double_up_to_the_usual_part(tmp_path):
    write(tmp_path / "in", "jsonl")
    lengths = [part.length for part in find(tmp_path / "in").parts]
    usual = 20 * SMALLEST
    early = [SMALLEST * 2**n for n in (0, 0, 1, 2, 3, 4)]
    assert lengths[: len(early)] == early
    assert {*lengths[len(early) : -1]} == {usual}
    fast = FileReader(tmp_path / "in").find_parts(is_slow=False)
    assert len(fast.parts) == 1


@pytest.mark.parametrize("text", ["a" * 400, None])
def test_ranges_of_compressed_lines_fit_whatever_they_unpack_to(tmp_path, text):
    """Lines that shrink to a hundredth, and lines that shrink to a half."""
    rng = np.random.default_rng(0)
    texts = [text or rng.bytes(300).hex() for _ in range(1_000)]
    frame = pd.DataFrame({"id": range(1_000), "text": texts})
    write(tmp_path / "in", "jsonl.gz", frame)
    found = find(tmp_path / "in")
    frames = [parts.read_part(part, found.schema) for part in found.parts]
    assert len(frames) > 1
    assert pd.concat(frames)["id"].tolist() == [*range(1_000)]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("most", [60, 1_000])
def test_a_range_of_a_compressed_file_is_the_range_of_the_plain_one(tmp_path, suffix, most):
    rng = np.random.default_rng(most)
    lengths = rng.integers(0, 120, 60)
    lines = [b'{"text": "%s"}' % (b"x" * length) for length in lengths]
    lines[10] = lines[11] = b""
    content = b"\n".join(lines)  # the last line has no end
    (tmp_path / "a.jsonl").write_bytes(content)
    name = tmp_path / f"a.jsonl.{suffix}"
    name.write_bytes(packed(content, suffix))
    kept, long_lines = [], []
    ends = sorted({*rng.integers(1, len(content), 25).tolist()})
    for start, end in pairwise([0, *ends, len(content) + 100]):
        ranges = []
        for path in (tmp_path / "a.jsonl", name):
            part = parts.Part(str(path), start=start, length=end - start, file_bytes=len(content))
            lines_read = parts.read_lines(part, {}, max_line_bytes=most)
            found = [line.offset for line in lines_read.long_lines]
            ranges.append((lines_read.content, found))
            if lines_read.content and not found:
                assert content[lines_read.offset :].startswith(lines_read.content)
        assert ranges[0] == ranges[1]
        kept.append(ranges[1][0])
        long_lines += ranges[1][1]
    whole = [line for line in content.splitlines(keepends=True) if len(line) <= most]
    assert b"".join(kept) == b"".join(whole)
    starts = accumulate(map(len, content.splitlines(keepends=True)), initial=0)
    lengths = map(len, content.splitlines(keepends=True))
    assert long_lines == [at for at, length in zip(starts, lengths, strict=False) if length > most]


@pytest.mark.parametrize("kept_share", [0.02, 0.3, 0.95])
@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.xz"])
def test_a_file_that_is_cut_off_is_a_single_problem(tmp_path, kind, kept_share):
    write(tmp_path / "in", kind)
    path = tmp_path / f"in/000.{kind}"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept_share * len(content))])
    found = find(tmp_path / "in", "quarantine")
    read = [parts.read_table(part, found.schema, "quarantine") for part in found.parts]
    ids = [number for table, _, _ in read for number in table["id"].to_pylist()]
    assert ids == [*range(len(ids))]
    assert 0 < len(ids) < ROWS
    problems = [problem for _, found, _ in read for problem in found]
    assert counts_by_kind(problems) == {"file": 1}


def test_a_broken_line_is_told_by_its_number_in_the_compressed_file(tmp_path):
    write(tmp_path / "in", "jsonl")
    lines = (tmp_path / "in/000.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "in/000.jsonl").unlink()
    bad = [7, 3_000]
    for row in bad:
        lines[row] = b"{broken\n"
    (tmp_path / "in/000.jsonl.gz").write_bytes(gzip.compress(b"".join(lines)))
    found = find(tmp_path / "in", "quarantine")
    read = [parts.read_table(part, found.schema, "quarantine") for part in found.parts]
    offsets = [problem.offset for _, problems, _ in read for problem in problems]
    assert offsets == [sum(map(len, lines[:row])) for row in bad]


@pytest.mark.parametrize("kind", ["jsonl.gz", "one-group"])
def test_annotations_of_early_parts_belong_to_their_rows(tmp_path, kind):
    def with_length(frame):
        return frame.assign(length=frame["text"].str.len())

    write(tmp_path / "in", kind)
    reader = EarlyReader(f"{tmp_path}/in")
    summary = Pipeline([reader, with_length, AnnotationWriter(f"{tmp_path}/notes")]).run()
    assert summary.parts > 5
    for options in ({}, {"part_bytes": 30_000}):
        known = EarlyReader(f"{tmp_path}/in", annotations=f"{tmp_path}/notes", **options)
        found = known.find_parts()
        frame = pd.concat([parts.read_part(part, found.schema) for part in found.parts])
        assert frame["id"].tolist() == [*range(ROWS)]
        assert (frame["length"] == frame["text"].str.len()).all()


class EarlyReader(FileReader):
    """Reader that finds the parts of a network for every job."""

    def find_parts(self, on_error="raise", needed=(), *, is_slow=True):
        return super().find_parts(on_error, needed=("text",), is_slow=True)


@pytest.mark.parametrize("kind", ["jsonl.gz", "one-group", "jsonl"])
def test_plans_estimate_rows_of_early_parts(tmp_path, kind):
    write(tmp_path / "in", kind)
    drawn, share = sample.sample_files(find(tmp_path / "in"), 100, 0, "raise")
    assert drawn.rows == pytest.approx(ROWS, rel=0.1)
    assert len(drawn.frame) == 100
    assert 0 < share <= 1


@pytest.mark.contract
@pytest.mark.parametrize("kind", ["jsonl.gz", "one-group", "jsonl"])
def test_a_job_that_stops_among_early_parts_goes_on_with_the_others(tmp_path, checkpoint, kind):
    write(tmp_path / "in", kind, FRAME.iloc[:600])
    classifier = QualityClassifier(model=checkpoint("quality"), max_seq_length=16)

    def run(out, report=None, **options):
        stages = [FileReader(tmp_path / "in", **options), classifier]
        return Pipeline([*stages, ParquetWriter(f"{tmp_path}/{out}")]).run(report=report)

    def stop(done, of, summary):
        if done == 2:
            assert 0 < summary.rows_read < 600 / 10
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("out", stop)
    summary = run("out")
    assert (summary.resumed_parts, summary.rows_read) == (2, 600)
    assert len(summary.files) == 1
    whole = run("whole", part_bytes=1 << 30)
    assert whole.parts == 1
    one, other = (pd.read_parquet(tmp_path / folder) for folder in ("out", "whole"))
    assert one["id"].tolist() == [*range(600)]
    assert one.drop(columns="probabilities", errors="ignore").equals(
        other.drop(columns="probabilities", errors="ignore")
    )
    record = json.loads((tmp_path / "out/_gpuclassify/job.json").read_text())
    assert record["identity"]["input"]["parts"] == summary.parts
