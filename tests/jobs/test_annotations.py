"""Annotations: what stands beside the input is what a rewrite has, however both are cut."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuclassify import DomainClassifier, QualityClassifier, Select
from gpuclassify.corpus.scores.sampling import draw_rows
from gpuclassify.jobs.input.annotation_reader import AnnotationError
from gpuclassify.jobs.input.parts import read_part
from gpuclassify.jobs.input.readers import FileReader, ParquetReader, frame_of, read_files
from gpuclassify.jobs.ledger.manifest import DamagedMetadataError, JobChangedError, manifest_of
from gpuclassify.jobs.output.writers import AnnotationWriter, ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stores.local import LocalStore
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import UnreadableInputError
from gpuclassify.mapping.runners import NonFiniteOutputError
from tests.replicas import sample_texts, write_checkpoint

pytestmark = pytest.mark.usefixtures("one_torch_thread")
KINDS = ("parquet", "jsonl", "jsonl.gz", "jsonl.zst")
BROKEN = b'{"id": 7, "text": "never ends\n'


def with_length(frame):
    return frame.assign(length=frame["text"].str.len().astype("Int64"))


def with_last(frame):
    return frame.assign(last=frame["text"].str[-1:])


def with_lists(frame):
    lists = [[float(row), None] for row in frame["id"]]
    kind = pd.ArrowDtype(pa.list_(pa.float32()))
    return frame.assign(lists=pd.array(lists, kind), is_odd=(frame["id"] % 2 == 1).astype(bool))


STAGES = (with_length, with_last, with_lists)


def write_file(path, rows, *, broken=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        schema = pa.schema({"id": pa.int64(), "text": pa.string()})
        pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=7)
        return
    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    if broken:
        lines[3:3] = [BROKEN, b"\n", b"  \n"]
    content = b"".join(lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".zst":
        path.write_bytes(
            pa.compress(content, "zstd", asbytes=True) if not content else zstd(content)
        )
    else:
        path.write_bytes(content)


def zstd(content):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def crawl(tmp_path):
    """Writes files of 50, none, one and 20 rows, in folders that are a column."""

    def write(kind="parquet", folder="crawl", broken=False):
        texts = [*sample_texts(68, seed=3), None, "", "天気 🙂"]
        rows = [{"id": row, "text": text} for row, text in enumerate(texts)]
        root = tmp_path / folder
        write_file(root / f"lang=de/a.{kind}", rows[:50], broken=broken)
        write_file(root / f"lang=de/b.{kind}", [])
        write_file(root / f"lang=en/c.{kind}", rows[50:51])
        write_file(root / f"lang=en/d.{kind}", rows[51:])
        return root

    return write


def annotate(crawl, notes, *stages, on_error="raise", redo_changed=False, **reading):
    writer = AnnotationWriter(str(notes), redo_changed=redo_changed)
    reader = FileReader(str(crawl), **reading)
    return Pipeline([reader, *stages, writer], on_error=on_error).run(report=lambda *_: None)


def rewrite(crawl, out, *stages, on_error="raise", **reading):
    job = Pipeline(
        [FileReader(str(crawl), **reading), *stages, ParquetWriter(str(out))], on_error=on_error
    )
    job.run(report=lambda *_: None)
    return in_order(read_files(str(out)).compute())


def rewrite_rows(crawl, out, *stages, **reading):
    job = Pipeline([FileReader(str(crawl), **reading), *stages, ParquetWriter(str(out))])
    job.run(report=lambda *_: None)
    return read_files(str(out)).compute()


def in_order(frame):
    return frame.sort_values("id", ignore_index=True)


# The frame of text and annotations is the rewrite.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(None, None), (300, 900), (900, 300), (10**6, 200)])
def test_the_frame_is_the_rewrite(crawl, tmp_path, kind, sizes):
    root, (written, read) = crawl(kind), sizes
    expected = rewrite(root, tmp_path / "out", *STAGES)
    for number, stage in enumerate(STAGES):
        annotate(root, tmp_path / f"notes/{number}", stage, part_bytes=written)
    notes = [str(tmp_path / f"notes/{number}") for number in range(len(STAGES))]
    found = in_order(read_files(str(root), annotations=notes, part_bytes=read).compute())
    pd.testing.assert_frame_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_what_is_left_out_is_null_and_named(crawl, tmp_path, kind):
    root = crawl(kind, broken=True)
    expected = rewrite(root, tmp_path / "out", with_length, on_error="quarantine")
    summary = annotate(root, tmp_path / "notes", with_length, on_error="quarantine", part_bytes=400)
    assert summary.left_out == {"line": 1}
    notes = pq.read_table(tmp_path / "notes").to_pandas()
    (lost,) = notes[notes["_left_out"].notna()].to_dict("records")
    assert lost["_left_out"] == "line" and pd.isna(lost["length"])
    assert lost["_file"].endswith(f"a.{kind}")
    assert len(notes) == len(expected) + 1
    reader = FileReader(str(root), annotations=str(tmp_path / "notes"), part_bytes=900)
    job = Pipeline([reader, ParquetWriter(str(tmp_path / "zipped"))], on_error="quarantine")
    job.run(report=lambda *_: None)
    found = in_order(read_files(str(tmp_path / "zipped")).compute())
    pd.testing.assert_frame_equal(found, expected)
    plan = reader.find_parts("quarantine")
    alone = pd.concat(read_part(part, plan.schema, ["length"]) for part in plan.parts)
    assert alone["length"].isna().sum() == 1  # of the text that is null
    assert len(alone) == len(expected)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_pandas_alone_finds_the_rows_by_file_and_place(crawl, tmp_path, kind):
    root = crawl(kind)
    annotate(root, tmp_path / "notes", with_length, part_bytes=300)
    notes = pq.read_table(tmp_path / "notes").to_pandas()
    path = root / f"lang=de/a.{kind}"
    mine = notes[notes["_file"] == str(path)].sort_values("_place")
    if kind == "parquet":
        texts = pd.read_parquet(path)["text"]
        assert mine["_place"].tolist() == list(range(50))
    else:
        content = path.read_bytes()
        texts = pd.Series(
            json.loads(content[place:].partition(b"\n")[0])["text"] for place in mine["_place"]
        )
    assert mine["length"].tolist() == texts.str.len().tolist()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_classifiers_write_no_text_and_drop_no_row(crawl, tmp_path, kind):
    root = crawl(kind)
    model = write_checkpoint(tmp_path / "quality", "quality")
    filtered = QualityClassifier(model=str(model), filter_by="High", score_field="score")
    kept = QualityClassifier(
        model=str(model), filter_by="High", score_field="score", keep_field="keep"
    )
    annotate(root, tmp_path / "notes", filtered)
    notes = pq.read_table(tmp_path / "notes")
    assert notes.column_names[:3] == ["_file", "_place", "_left_out"]
    assert "text" not in notes.column_names
    found = in_order(read_files(str(root), annotations=str(tmp_path / "notes")).compute())
    pd.testing.assert_frame_equal(found, rewrite(root, tmp_path / "out", kept))
    identity = manifest_of(open_store(str(tmp_path / "notes"))).identity
    assert identity["stage 1 QualityClassifier"]["model_revision"]
    assert len(identity["input file"]) == 4


def test_annotations_may_stand_beside_annotations(crawl, tmp_path):
    root, notes = crawl(), str(tmp_path / "notes")
    annotate(root, notes, with_length)

    def with_double(frame):
        return frame.assign(double=frame["length"] * 2)

    annotate(root, tmp_path / "more", with_double, annotations=notes)
    both = [notes, str(tmp_path / "more")]
    frame = read_files(str(root), annotations=both).compute()
    assert (frame["double"].dropna() == 2 * frame["length"].dropna()).all()


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_plan_draws_rows_with_their_annotations(crawl, tmp_path, kind):
    root = crawl(kind)
    annotate(root, tmp_path / "notes", with_length)

    def checked(frame):
        there = frame.dropna(subset="length")
        assert there["length"].tolist() == there["text"].str.len().tolist()
        return frame

    reader = FileReader(str(root), annotations=str(tmp_path / "notes"), part_bytes=400)
    plan = Pipeline([reader, checked]).plan(sample_rows=60, trial_seconds=0.1)
    assert plan.sample_rows == 60 or plan.rows == pytest.approx(71, abs=15)


def test_ten_sets_of_many_rows(tmp_path):
    rows = [{"id": row, "text": f"text {row}"} for row in range(2_000)]
    for part in range(3):
        write_file(tmp_path / f"crawl/{part}.parquet", rows[part * 600 : (part + 1) * 600])
    sets = [str(tmp_path / f"notes/{number}") for number in range(10)]
    for number, notes in enumerate(sets):
        annotate(tmp_path / "crawl", notes, with_length, part_bytes=500 * (number + 1))
    named = [f"{notes}=n{number}_" for number, notes in enumerate(sets)]
    frame = in_order(read_files(str(tmp_path / "crawl"), annotations=named).compute())
    for number in range(10):
        assert frame[f"n{number}_length"].tolist() == frame["text"].str.len().tolist()


# Only what is asked for is read.


@pytest.fixture
def opened(monkeypatch):
    """Names of files that are opened from now on."""
    from gpuclassify.jobs.stores.store import Store

    names, reading = [], Store.reading

    def noted(self, *arguments):
        names.append(Path(self.root))
        return reading(self, *arguments)

    monkeypatch.setattr(Store, "reading", noted)
    return names


@pytest.mark.parametrize("kind", KINDS[:3])
def test_annotations_alone_open_no_file_of_the_input(crawl, tmp_path, opened, kind):
    root = crawl(kind)
    annotate(root, tmp_path / "a", with_length)
    annotate(root, tmp_path / "b", with_last, part_bytes=300)
    frame = read_files(str(root), annotations=[str(tmp_path / "a"), str(tmp_path / "b")])
    expected = in_order(frame.compute())
    opened.clear()
    found = frame[["last", "length"]].compute()
    assert opened and not [name for name in opened if name.is_relative_to(root)]
    assert found["length"].sum() == expected["length"].sum()
    opened.clear()
    assert len(frame[["length"]].compute()) == len(expected)
    assert {name.parent for name in opened} == {tmp_path / "a"}
    opened.clear()
    reading = {"annotations": str(tmp_path / "a"), "fields": ["length"]}
    alone = read_files(str(root), **reading).compute()["length"]
    assert (len(alone), alone.sum()) == (len(expected), expected["length"].sum())
    if kind != "parquet":  # whose footers tell how to cut it into parts
        assert not [name for name in opened if name.is_relative_to(root)]


# It refuses what would be untrue.


def missing(root, notes):
    write_file(root / "lang=en/e.parquet", [{"id": 99, "text": "new"}])
    return "e.parquet is not annotated"


def changed(root, notes):
    write_file(root / "lang=en/d.parquet", [{"id": 99, "text": "new"}])
    return "d.parquet changed since"


def gone(root, notes):
    (root / "lang=en/c.parquet").unlink()
    return "c.parquet is gone"


def other(root, notes):
    shutil.move(root / "lang=en/c.parquet", root / "c.parquet")
    for folder in ("lang=de", "lang=en"):
        shutil.rmtree(root / folder)
    return "annotates other files"


def unfinished(root, notes):
    (notes / "_SUCCESS").unlink()
    return "is not finished"


def part_gone(root, notes):
    next(notes.glob("part-*")).unlink()
    return "is gone"


def part_cut(root, notes):
    part = next(notes.glob("part-*"))
    part.write_bytes(part.read_bytes()[:-10])
    return "bytes of"


def record_damaged(root, notes):
    path = notes / "_gpuclassify/manifest.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"rows_in": 50', b'"rows_in": 51'))
    return "nor is its record"


def no_set(root, notes):
    shutil.rmtree(notes / "_gpuclassify")
    return "is no output of a job"


REFUSED = (missing, changed, gone, other, unfinished, part_gone, part_cut, record_damaged, no_set)


@pytest.mark.parametrize("damage", REFUSED)
def test_it_refuses_at_the_call(crawl, tmp_path, damage):
    root, notes = crawl(), tmp_path / "notes"
    annotate(root, notes, with_length)
    message = damage(root, notes)
    with pytest.raises((AnnotationError, FileNotFoundError), match=message):
        read_files(str(root), annotations=str(notes))


def test_rows_of_a_job_are_no_annotations(crawl, tmp_path):
    root = crawl()
    rewrite(root, tmp_path / "out")
    with pytest.raises(AnnotationError, match="no annotations"):
        read_files(str(root), annotations=str(tmp_path / "out"))


def test_flipped_bits_show_when_they_are_read(crawl, tmp_path):
    root, notes = crawl(), tmp_path / "notes"
    annotate(root, notes, with_length)
    frame = read_files(str(root), annotations=str(notes))
    part = max(notes.glob("part-*"), key=lambda path: path.stat().st_size)
    column = pq.ParquetFile(part).metadata.row_group(0).column(3)
    content = bytearray(part.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 2] ^= 0xFF
    part.write_bytes(bytes(content))
    with pytest.raises(AnnotationError, match="run the command that wrote it again"):
        frame.compute()
    annotate(root, notes, with_length)  # which redoes it
    assert frame.compute()["length"].notna().sum() == 70


def test_what_is_missing_is_null_where_that_is_asked_for(crawl, tmp_path):
    root, notes = crawl(), tmp_path / "notes"
    annotate(root, notes, with_length)
    missing(root, notes)
    frame = read_files(str(root), annotations=str(notes), annotations_complete=False)
    found = frame.compute().set_index("id")["length"]
    assert pd.isna(found[99]) and found.notna().sum() == 70
    assert len(frame[["length"]].compute()) == 72


def test_a_column_that_is_there_twice_needs_a_prefix(crawl, tmp_path):
    root, names = crawl(), [str(tmp_path / "a"), str(tmp_path / "b")]
    for name in names:
        annotate(root, name, with_length)
    with pytest.raises(UnreadableInputError, match=r"'length' is in .*/a and .*=b_"):
        read_files(str(root), annotations=names)
    frame = read_files(str(root), annotations=[names[0], f"{names[1]}=b_"])
    assert {"length", "b_length"} <= {*frame.columns}
    fields = ["id", "length"]
    annotate(root, tmp_path / "c", lambda frame: frame.assign(path=1), fields=fields[:1])
    clash = {"path_field": "path", "annotations": str(tmp_path / "c")}
    with pytest.raises(UnreadableInputError, match="'path' is in the input"):
        read_files(str(root), **clash)


def drops(frame):
    return frame[frame["id"] % 2 == 0]


def adds_nothing(frame):
    return frame


@pytest.mark.parametrize(
    ("stages", "options", "error", "message"),
    [
        ([drops, with_length], {}, ValueError, "dropped, made or moved rows"),
        ([adds_nothing], {}, ValueError, "no stage adds a column"),
        ([lambda f: f.assign(_place=1)], {}, ValueError, "choose another name"),
        ([with_length], {"path_field": "path"}, ValueError, "path_field="),
        ([Select("id > 3"), with_length], {}, ValueError, "Select would: .* .gpuclassify select"),
    ],
)
def test_jobs_that_cannot_annotate(crawl, tmp_path, stages, options, error, message):
    with pytest.raises(error, match=message):
        annotate(crawl(), tmp_path / "notes", *stages, **options)


def lookup(frame, step=1):
    """A table of lengths by id, in another order if `step` is negative."""
    return pd.DataFrame({"id": frame["id"], "length": frame["text"].str.len()})[::step]


MOVING = {
    "outer join": lambda f: f.assign(id=f["id"].astype(str)).merge(
        lookup(f).assign(id=f["id"].astype(str)), how="outer", on="id"
    ),
    "right join": lambda f: f.merge(lookup(f, -1), how="right", on="id"),
    "sorted": lambda f: with_length(f).sort_values("text", ignore_index=True),
    "reversed": lambda f: with_length(f)[::-1].reset_index(drop=True),
    "shuffled": lambda f: with_length(f).sample(frac=1, random_state=0, ignore_index=True),
    "two rows": lambda f: with_length(f).sort_values("id", ignore_index=True, key=lambda i: i ^ 1),
    "ids alone": lambda f: with_length(f)[::-1].reset_index(drop=True)[["id", "length"]],
    "texts alone": lambda f: with_length(f)[::-1].reset_index(drop=True)[["text", "length"]],
    "stripped": lambda f: (
        with_length(f)[::-1].reset_index(drop=True).assign(text=lambda g: g["text"].str.upper())
    ),
}
STAYING = {
    "left join": lambda f: f.merge(lookup(f, -1), how="left", on="id"),
    "nothing kept": lambda f: with_length(f)[["length"]].reset_index(drop=True),
    "upper case": lambda f: with_length(f).assign(text=f["text"].str.upper()),
    "upper case alone": lambda f: with_length(f).assign(text=f["text"].str.upper())[
        ["text", "length"]
    ],
    "next ids": lambda f: with_length(f).assign(id=f["id"] + 1),
    "masked": lambda f: with_length(f).assign(text=f["text"].where(f["id"] % 2 == 0)),
    "other types": lambda f: with_length(f).assign(id=f["id"].astype("float64"), lang=0),
}


def expected_lengths(root):
    """The length of each id's text, which pandas reads from the lines."""
    files = [
        pd.read_json(path, lines=True) for path in root.rglob("*.jsonl") if path.stat().st_size
    ]
    texts = pd.concat(files).set_index("id")["text"]
    return texts.map(len, na_action="ignore").to_dict()


@pytest.mark.parametrize("stage", MOVING.values(), ids=MOVING)
def test_rows_that_a_stage_moves_are_refused(crawl, tmp_path, stage):
    with pytest.raises(ValueError, match="dropped, made or moved rows"):
        annotate(crawl("jsonl"), tmp_path / "notes", stage)


@pytest.mark.parametrize("on_error", ["raise", "quarantine"])
@pytest.mark.parametrize("stage", STAYING.values(), ids=STAYING)
def test_rows_that_a_stage_renumbers_or_changes_keep_their_annotations(
    crawl, tmp_path, stage, on_error
):
    def fails(frame):  # so that the rows of a part are mapped in pieces
        if (frame["length"] == 3).any():
            raise NonFiniteOutputError("a row of length 3")
        return frame

    root, stages = crawl("jsonl"), [stage] if on_error == "raise" else [stage, fails]
    annotate(root, tmp_path / "notes", *stages, on_error=on_error)
    found = read_files(str(root), annotations=str(tmp_path / "notes")).compute()
    lengths = found.set_index("id")["length"].astype(object)
    expected = expected_lengths(root)
    if on_error == "quarantine":
        expected = {row: None if length == 3 else length for row, length in expected.items()}
    assert lengths.where(lengths.notna(), None).to_dict() == {
        row: None if pd.isna(length) else length for row, length in expected.items()
    }


def test_a_frame_has_no_places(crawl, tmp_path):
    with pytest.raises(TypeError, match="begin with a ParquetReader"):
        Pipeline(
            [read_files(str(crawl())), with_length, AnnotationWriter(str(tmp_path / "n"))]
        ).run()


def test_two_filters_need_names_for_their_decisions(crawl, tmp_path):
    quality = write_checkpoint(tmp_path / "quality", "quality")
    domain = write_checkpoint(tmp_path / "domain", "domain")
    stages = [
        QualityClassifier(model=str(quality), filter_by="High"),
        DomainClassifier(model=str(domain), filter_by="Games"),
    ]
    with pytest.raises(ValueError, match=r"QualityClassifier, DomainClassifier.*keep_field="):
        annotate(crawl(), tmp_path / "notes", *stages)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("name", ["_file", "_place", "_left_out"])
@pytest.mark.parametrize("value", ["x", 7])
def test_columns_of_an_input_may_have_the_names_of_a_set(tmp_path, kind, name, value):
    root, notes = tmp_path / "crawl", tmp_path / "notes"
    root.mkdir()
    frame = pd.DataFrame({name: [value, None, value], "text": ["a", "bb", ""]})
    if kind == "parquet":
        frame.to_parquet(root / "a.parquet")
    else:
        frame.to_json(root / "a.jsonl", orient="records", lines=True)
    if name != "_left_out":
        with pytest.raises(ValueError, match=rf"the input has columns \['{name}'\].*fields="):
            annotate(root, notes, with_length)
    annotate(root, notes, with_length, fields=["text"])
    found = read_files(str(root), annotations=str(notes), part_bytes=20).compute()
    assert found[name].dropna().tolist() == [value, value] and found[name].isna().tolist()[1]
    assert found["length"].tolist() == [1, 2, 0]
    chosen = Select(f"`{name}` is None or length == 1")
    rows = rewrite_rows(root, tmp_path / "out", chosen, annotations=str(notes))
    assert sorted(rows["text"]) == ["a", "bb"]
    shown = draw_rows(FileReader(str(root), annotations=str(notes)), 2, seed=1)
    assert len(shown) == 2 and {*shown["text"]} < {"a", "bb", ""}


# New files only.


def test_a_second_run_does_new_files_alone(crawl, tmp_path, caplog):
    root, notes = crawl(), tmp_path / "notes"
    annotate(root, notes, with_length)
    before = {path: path.read_bytes() for path in notes.glob("part-*")}
    write_file(root / "lang=en/e.parquet", [{"id": 99, "text": "new"}])
    write_file(root / "lang=en/f.parquet", [{"id": 100, "text": "newer"}])
    summary = annotate(root, notes, with_length)
    assert summary.rows_read == 2 and "4 of the files: 2 are new" in caplog.text
    assert {path: path.read_bytes() for path in notes.glob("part-*")} == before
    frame = read_files(str(root), annotations=str(notes)).compute()
    assert frame["length"].dropna().tolist() == frame["text"].dropna().str.len().tolist()
    assert len(frame) == 73
    assert annotate(root, notes, with_length).run_rows == 0


def test_two_crawls_and_two_generations_read_as_one(crawl, tmp_path):
    roots = [crawl(), crawl(folder="later")]
    annotate(roots[0], tmp_path / "a", with_length)
    both = [str(root) for root in roots]
    for stage, name in ((with_length, "a"), (with_last, "b")):
        writer = AnnotationWriter(str(tmp_path / name))
        Pipeline([ParquetReader(both), stage, writer]).run(report=lambda *_: None)
    sets = [str(tmp_path / "a"), str(tmp_path / "b")]
    frame = read_files(both, annotations=sets).compute()
    assert len(frame) == 142
    assert frame["length"].dropna().tolist() == frame["text"].dropna().str.len().tolist()
    assert frame["last"].tolist()[:71] == frame["last"].tolist()[71:]
    one = read_files(both[1], annotations=sets).compute()  # a set may be of more files
    assert len(one) == 71


def test_changed_files_are_refused_and_redone_alone(crawl, tmp_path):
    root, notes = crawl(), tmp_path / "notes"
    annotate(root, notes, with_length)
    changed(root, notes)
    with pytest.raises(AnnotationError, match=r"d\.parquet changed since.*redo_changed=True"):
        annotate(root, notes, with_length)
    summary = annotate(root, notes, with_length, redo_changed=True)
    assert summary.rows_read == 1
    frame = read_files(str(root), annotations=str(notes)).compute()
    assert frame["length"].dropna().tolist() == frame["text"].dropna().str.len().tolist()
    annotate(root, notes, with_length, redo_changed=True)


def test_a_file_that_is_as_before_again_has_its_rows_once(crawl, tmp_path):
    root, notes = crawl(), tmp_path / "notes"
    annotate(root, notes, with_length)
    path = root / "lang=en/d.parquet"
    content, stamp = path.read_bytes(), path.stat()
    changed(root, notes)
    annotate(root, notes, with_length, redo_changed=True)
    path.write_bytes(content)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    annotate(root, notes, with_length, redo_changed=True)
    frame = read_files(str(root), annotations=str(notes)).compute()
    assert len(frame) == len(read_files(str(root), annotations=str(notes))[["length"]]) == 71
    assert frame["length"].dropna().tolist() == frame["text"].dropna().str.len().tolist()


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("sizes", ["2", "21", "2121", "22122", "0202"])
def test_a_file_may_return_to_earlier_states(tmp_path, kind, sizes):
    """Two jobs then have one key: settings and input are the same."""
    path, notes = tmp_path / f"crawl/a.{kind}", tmp_path / "notes"
    write_file(tmp_path / f"crawl/b.{kind}", [{"id": -1, "text": "other"}])
    for size in map(int, sizes):
        write_file(path, [{"id": row, "text": "x" * row} for row in range(size)])
        os.utime(path, ns=(10**18 + size, 10**18 + size))
        annotate(tmp_path / "crawl", notes, with_length, redo_changed=True)
        frame = read_files(str(tmp_path / "crawl"), annotations=str(notes))
        assert frame.compute()["length"].tolist() == [*range(size), 5]
        assert frame[["length"]].compute()["length"].tolist() == [*range(size), 5]


def test_files_that_are_gone_are_named_and_kept(crawl, tmp_path, caplog):
    root, notes = crawl(), tmp_path / "notes"
    annotate(root, notes, with_length)
    gone(root, notes)
    write_file(root / "lang=en/e.parquet", [{"id": 99, "text": "new"}])
    annotate(root, notes, with_length)
    assert "files that are gone" in caplog.text and "c.parquet" in caplog.text
    frame = read_files(str(root), annotations=str(notes), annotations_complete=False)
    assert frame.compute()["length"].notna().sum() == 70


def test_a_job_without_new_files_is_finished_although_a_file_is_gone(crawl, tmp_path, caplog):
    root, notes = crawl(), tmp_path / "notes"
    annotate(root, notes, with_length)
    gone(root, notes)
    before = {path: path.read_bytes() for path in notes.rglob("*") if path.is_file()}
    caplog.clear()
    job = Pipeline([FileReader(str(root)), with_length, AnnotationWriter(str(notes))]).prepare()
    assert not job.needs_workers()
    summary = job.run()
    assert (summary.output, summary.rows_read, summary.files) == (str(notes), 0, [])
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "files that are gone" in warning and "c.parquet" in warning
    assert {path: path.read_bytes() for path in notes.rglob("*") if path.is_file()} == before
    with pytest.raises(JobChangedError, match="with_last"):
        annotate(root, notes, with_last)


def test_other_settings_are_refused_for_new_files(crawl, tmp_path):
    root, notes = crawl(), tmp_path / "notes"
    annotate(root, notes, with_length)
    missing(root, notes)
    with pytest.raises(JobChangedError, match="with_last"):
        annotate(root, notes, with_last)


def test_rewrites_refuse_new_files_and_name_what_does_them(crawl, tmp_path):
    root = crawl()
    rewrite(root, tmp_path / "out", with_length)
    missing(root, None)
    with pytest.raises(JobChangedError, match="annotations of new files are written alone"):
        rewrite(root, tmp_path / "out", with_length)


def test_a_start_over_leaves_one_generation(crawl, tmp_path):
    root, notes = crawl(), tmp_path / "notes"
    annotate(root, notes, with_length)
    missing(root, notes)
    annotate(root, notes, with_length)
    assert (notes / "more-00001").is_dir()
    job = Pipeline([FileReader(str(root)), with_last, AnnotationWriter(str(notes))])
    job.run(restart=True, report=lambda *_: None)
    assert not (notes / "more-00001").exists()
    assert len(read_files(str(root), annotations=str(notes)).compute()) == 72


def test_a_restart_that_is_interrupted_while_it_removes_generations_goes_on(
    crawl, tmp_path, monkeypatch
):
    root, notes = crawl(), tmp_path / "notes"
    annotate(root, notes, with_length)
    missing(root, notes)
    annotate(root, notes, with_length)

    def remove_metadata(store, name):
        shutil.rmtree(Path(store.path(name), "_gpuclassify"))
        raise KeyboardInterrupt

    job = Pipeline([FileReader(str(root)), with_length, AnnotationWriter(str(notes))])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LocalStore, "remove_folder", remove_metadata)
        job.run(restart=True, report=lambda *_: None)
    job.run(report=lambda *_: None)
    frame = read_files(str(root), annotations=str(notes)).compute()
    assert frame["length"].dropna().tolist() == frame["text"].dropna().str.len().tolist()
    assert len(frame) == 72


def test_an_unfinished_generation_is_finished_before_new_files(crawl, tmp_path):
    root, notes = crawl(), tmp_path / "notes"

    def fails(frame):
        if len(frame) == 20:
            raise RuntimeError("stopped")
        return with_length(frame)

    with pytest.raises(RuntimeError, match="stopped"):
        annotate(root, notes, fails)
    assert not (notes / "_SUCCESS").exists()
    missing(root, notes)
    job = Pipeline([FileReader(str(root)), with_length, AnnotationWriter(str(notes))])
    job.run(restart=True, report=lambda *_: None)
    (notes / "_SUCCESS").unlink()
    for path in [*notes.glob("part-*"), *notes.glob("_gpuclassify/records/part-*")]:
        path.unlink()
    write_file(root / "lang=en/f.parquet", [{"id": 100, "text": "newer"}])
    assert annotate(root, notes, with_length).rows_read == 1
    assert len(read_files(str(root), annotations=str(notes)).compute()) == 73


# Damage of any file of a set shows, or does not matter.


@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_no_damage_of_a_file_changes_what_is_read(crawl, tmp_path, damage):
    root, notes = crawl("jsonl"), tmp_path / "notes"
    annotate(root, notes, with_length)
    write_file(root / "lang=en/e.jsonl", [{"id": 99, "text": "new"}])
    annotate(root, notes, with_length)
    expected = read_files(str(root), annotations=str(notes)).compute()
    outcomes = set()
    for path in sorted(path for path in notes.rglob("*") if path.is_file()):
        content = path.read_bytes()
        middle = len(content) // 2
        if damage == "remove":
            path.unlink()
        elif damage == "cut":
            path.write_bytes(content[:middle])
        else:
            flipped = bytes([content[middle] ^ 0x20]) if content else b"x"
            path.write_bytes(content[:middle] + flipped + content[middle + 1 :])
        try:
            found = read_files(str(root), annotations=str(notes)).compute()
        except (UnreadableInputError, DamagedMetadataError, FileNotFoundError) as err:
            assert str(notes) in str(err)
            outcomes.add(path.name.partition("-")[0])
        else:
            pd.testing.assert_frame_equal(found, expected)
        path.write_bytes(content)
    # A bit of a page that is not read does not matter.
    assert {"job.json", "manifest.jsonl"} | ({"part"} if damage != "flip" else set()) <= outcomes


@pytest.mark.contract
@pytest.mark.parametrize("kind", KINDS[:2])
def test_each_of_many_files_in_a_part_gets_its_own_annotations(tmp_path, kind):
    """More files than Arrow keeps in order when it groups rows."""
    root = tmp_path / "crawl"
    root.mkdir()
    for number in range(200):
        frame = pd.DataFrame({"text": [f"{number} {row}" for row in range(3)]})
        if kind == "parquet" and number:
            frame.to_parquet(root / f"part-{number:03}.parquet")
        else:
            frame.to_json(root / f"part-{number:03}.jsonl", orient="records", lines=True)
    with (root / "part-000.jsonl").open("a") as file:
        file.write("a broken line\n")
    notes = str(tmp_path / "notes")
    stages = [lambda frame: frame.assign(same=frame["text"]), AnnotationWriter(notes)]
    reader = FileReader(str(root), part_bytes=10**9)
    Pipeline([reader, *stages], on_error="quarantine").run()
    found = frame_of(FileReader(str(root), annotations=notes)).compute()
    assert len(found) == 600
    assert found["same"].tolist() == found["text"].tolist()
