"""Annotation sets that grow: what is read is what plain pandas makes of the files there."""

import json
import os
import random
import shutil

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuclassify import AnnotationWriter, FileReader, Pipeline, read_files
from gpuclassify.jobs.input.annotation_reader import AnnotationError
from gpuclassify.jobs.stores import local


class InterruptedRunError(Exception):
    """Stands for whatever ends a run early."""


def measure(frame):
    at = os.environ.get("INTERRUPT_AT")
    if at is not None and at in frame["text"].tolist():
        raise InterruptedRunError
    return frame.assign(length=frame["text"].str.len().astype("Int64"), twice=frame["n"] * 2)


def annotate(root, notes, stage=measure, accept_changed_code=False, **options):
    writer = AnnotationWriter(str(notes), redo_changed=True)
    job = Pipeline([FileReader(str(root), part_bytes=60, **options), stage, writer])
    return job.run(report=lambda *_: None, accept_changed_code=accept_changed_code)


# Random sequences of changes, against brute force.


class Corpus:
    """Files that change at random, and what they hold by plain pandas and json."""

    def __init__(self, root, kind, seed):
        self.root, self.kind, self.random = root, kind, random.Random(seed)
        self.clock, self.past = 10**18, {}  # past: contents and times of each file
        root.mkdir()
        self.write("first", ["one", "three"], [1, 2])

    @property
    def names(self):
        return sorted(path.stem for path in self.root.iterdir())

    def path(self, name):
        return self.root / f"{name}.{self.kind}"

    def write(self, name, texts, numbers, has_n=True):
        path = self.path(name)
        if self.kind == "jsonl":
            rows = [
                {"text": text, **({"n": number} if has_n else {})}
                for text, number in zip(texts, numbers, strict=True)
            ]
            lines = [json.dumps(row) + "\n" * self.random.choice((1, 1, 2)) for row in rows]
            path.write_text("".join(lines) or self.random.choice(("", "\n", " \n\n")))
        else:
            frame = pd.DataFrame({"text": pd.Series(texts, dtype=object)})
            if has_n:
                whole = all(number is None or isinstance(number, int) for number in numbers)
                kind = "Int64" if whole and texts else None
                frame["n"] = pd.Series(numbers, dtype=kind)
            frame.to_parquet(path, row_group_size=2, index=False)
        self.clock += 10**9
        os.utime(path, ns=(self.clock, self.clock))
        self.past.setdefault(name, []).append((path.read_bytes(), self.clock))

    def write_some(self, name):
        count = self.random.choice((0, 0, 1, 3, 5))
        texts = [self.random.choice("abcd") * self.random.randint(0, 9) for _ in range(count)]
        kinds = ([1, 2, None], [None], [1.0, 2.0], [0.5, 1])
        values = self.random.choices(kinds, weights=(6, 2, 1, 1))[0]
        numbers = [self.random.choice(values) for _ in range(count)]
        self.write(name, texts, numbers, has_n=self.random.random() < 0.7)

    def change(self):
        """Change one file, or two."""
        names = [name for name in self.names if name != "first"]
        for _ in range(self.random.choice((1, 1, 2))):
            name = self.random.choice(names) if names else "f0"
            act = self.random.choice(
                ("add", "add", "change", "revert", "revert", "empty", "remove")
            )
            if act == "add" or not names:
                self.write_some(f"f{self.random.randrange(9)}")
            elif act == "change":
                self.write_some(name)
            elif act == "empty":
                self.write(name, [], [], has_n=self.random.random() < 0.5)
            elif act == "revert":
                content, clock = self.random.choice(self.past[name])
                self.path(name).write_bytes(content)
                os.utime(self.path(name), ns=(clock, clock))
            elif self.path(name).exists():
                self.path(name).unlink()

    def rows(self, name):
        """Texts and numbers of a file."""
        if self.kind == "jsonl":
            lines = [line for line in self.path(name).read_text().split("\n") if line.strip()]
            rows = [json.loads(line) for line in lines]
            return [(row["text"], row.get("n")) for row in rows]
        frame = pd.read_parquet(self.path(name))
        if "n" not in frame:
            frame["n"] = None
        return [(row.text, None if pd.isna(row.n) else row.n) for row in frame.itertuples()]

    def expected(self):
        """What the set says of each row, file by file."""
        return [
            (len(text), None if number is None else number * 2)
            for name in self.names
            for text, number in self.rows(name)
        ]

    def fractions(self):
        """Names of files with a number that is no integer, as their format has types."""
        return [
            name
            for name in self.names
            if any(isinstance(number, float) for _, number in self.rows(name))
        ]


def check_growth(folder, kind, seed, steps):
    corpus, notes = Corpus(folder / "crawl", kind, seed), folder / "notes"
    annotate(corpus.root, notes)
    for step in range(steps):
        corpus.change()
        try:
            if corpus.random.random() < 0.4:
                texts = [text for name in corpus.names for text, _ in corpus.rows(name)]
                os.environ["INTERRUPT_AT"] = corpus.random.choice(texts)
            annotate(corpus.root, notes)
        except InterruptedRunError:
            del os.environ["INTERRUPT_AT"]
            continue  # and something else changes before the next run
        except AnnotationError as err:
            # The set has integers: fractions are refused before anything is written.
            assert "'twice' as double" in str(err), (seed, step, err)
            assert corpus.fractions(), (seed, step, err)
            for name in corpus.fractions():
                corpus.path(name).unlink()
            annotate(corpus.root, notes)
        os.environ.pop("INTERRUPT_AT", None)
        expected = corpus.expected()
        gone = {"annotations_complete": False}  # files that are gone leave their rows in the set
        frame = read_files(str(corpus.root), annotations=str(notes), part_bytes=90, **gone)
        beside, alone = frame.compute(), frame[["twice", "length"]].compute()
        for found in (beside, alone):
            pairs = zip(found["length"], found["twice"], strict=True)
            found = [(length, None if pd.isna(number) else number) for length, number in pairs]
            assert found == expected, (seed, step)
        assert beside["text"].str.len().tolist() == beside["length"].tolist(), (seed, step)
        assert annotate(corpus.root, notes).run_rows == 0, (seed, step)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("seed", range(3))
def test_a_set_is_what_brute_force_says_of_the_files(tmp_path, kind, seed):
    check_growth(tmp_path, kind, seed, steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("seed", range(100, 112))
def test_many_sets_are_what_brute_force_says_of_the_files(tmp_path, kind, seed):
    check_growth(tmp_path, kind, seed, steps=20)


# Types of new columns.


def copied(frame):
    return frame.assign(copy=frame["value"])


def copied_as_float(frame):
    return frame.assign(copy=frame["value"].astype("float64"))


# The same stage, in which code has changed.
copied_as_float.__name__ = copied_as_float.__qualname__ = "copied"


INT, DOUBLE, TEXT = pa.int64(), pa.float64(), pa.string()
US, MS = pa.timestamp("us"), pa.timestamp("ms")
ONE, TWO = pa.struct({"a": INT}), pa.struct({"a": INT, "b": INT})
FITS = [
    *((DOUBLE, INT), (INT, pa.int32()), (INT, pa.null()), (TEXT, pa.null()), (US, MS), (TWO, ONE)),
    *((DOUBLE, pa.null()), (pa.list_(DOUBLE), pa.list_(INT)), (INT, INT), (TEXT, pa.string_view())),
    *((TWO, pa.null()), (DOUBLE, pa.float32()), (pa.bool_(), pa.null())),
]
REFUSED = [
    *((INT, DOUBLE), (MS, US), (ONE, TWO), (INT, TEXT), (TEXT, INT), (pa.bool_(), INT)),
    *((pa.list_(INT), pa.list_(DOUBLE)), (INT, ONE), (pa.int32(), INT)),
]


def values_of(kind):
    """Three values of a type, one of them null."""
    if pa.types.is_null(kind):
        return [None] * 3
    if pa.types.is_struct(kind):
        return [{field.name: 1 for field in kind}, None, {field.name: 2 for field in kind}]
    if pa.types.is_list(kind):
        return [values_of(kind.value_type), None, []]
    if pa.types.is_timestamp(kind):
        return [pd.Timestamp("2024-03-01"), None, pd.Timestamp("2025-01-01")]
    if pa.types.is_boolean(kind):
        return [True, None, False]
    return ["x", None, "y"] if kind in (TEXT, pa.string_view()) else [1, None, 2]


def write_values(path, kind):
    path.parent.mkdir(exist_ok=True)
    values = pa.array(values_of(kind), kind)
    pq.write_table(pa.table({"text": ["a", "b", "c"], "value": values}), path)


def as_plain(values):
    """Values with fields that are null left out, and no difference of 1 and 1.0."""
    if isinstance(values, dict):
        return {name: as_plain(value) for name, value in values.items() if value is not None}
    return [*map(as_plain, values)] if isinstance(values, list) else values


def times_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def copies(root, notes):
    frame = read_files(str(root), fields=["copy"], annotations=str(notes)).compute()
    return as_plain(pa.Table.from_pandas(frame)["copy"].to_pylist())


@pytest.mark.parametrize(("held", "new"), FITS, ids=str)
def test_values_that_a_set_can_hold_get_its_type(tmp_path, held, new):
    root, notes = tmp_path / "crawl", tmp_path / "notes"
    write_values(root / "a.parquet", held)
    annotate(root, notes, copied)
    write_values(root / "b.parquet", new)
    annotate(root, notes, copied)
    assert copies(root, notes) == as_plain(values_of(held) + values_of(new))
    assert pq.read_table(notes).num_rows == 6  # other readers see one type
    assert annotate(root, notes, copied).run_rows == 0
    for path in notes.glob("more-00001/part-*"):  # done again with the same type
        path.unlink()
    assert annotate(root, notes, copied).run_rows == 3
    assert copies(root, notes) == as_plain(values_of(held) + values_of(new))


@pytest.mark.parametrize(("held", "new"), REFUSED, ids=str)
def test_values_that_a_set_cannot_hold_are_refused_before_anything_is_written(tmp_path, held, new):
    root, notes = tmp_path / "crawl", tmp_path / "notes"
    write_values(root / "a.parquet", held)
    annotate(root, notes, copied)
    before = times_of(notes)
    write_values(root / "b.parquet", new)
    (tmp_path / "apart").mkdir()
    shutil.move(root / "a.parquet", tmp_path / "apart")  # whose columns the set has noted
    with pytest.raises(AnnotationError, match=r"b\.parquet would give 'copy' as .*: cast"):
        annotate(root, notes, copied)
    assert times_of(notes) == before


def mixed(tmp_path, held, new):
    """A set whose folders have two types, as earlier versions wrote it."""
    root, notes = tmp_path / "crawl", tmp_path / "notes"
    for name, kind in (("a", held), ("b", new)):
        write_values(root / f"{name}.parquet", kind)
        part = tmp_path / name
        reader = FileReader(str(root / f"{name}.parquet"), part_bytes=60)
        Pipeline([reader, copied, AnnotationWriter(str(part))]).run(report=lambda *_: None)
    shutil.move(tmp_path / "a", notes)
    shutil.move(tmp_path / "b", notes / "more-00001")
    return root, notes


@pytest.mark.parametrize(
    ("held", "new"), [(INT, DOUBLE), (INT, pa.null()), (MS, US), (ONE, TWO), (TWO, ONE)], ids=str
)
def test_a_set_of_several_types_is_read_with_the_one_that_holds_all(tmp_path, held, new):
    root, notes = mixed(tmp_path, held, new)
    assert copies(root, notes) == as_plain(values_of(held) + values_of(new))


def test_a_set_of_types_that_contradict_each_other_can_be_mended(tmp_path):
    root, notes = mixed(tmp_path, DOUBLE, TEXT)
    with pytest.raises(AnnotationError, match=r"more-00001/.*, and double in files before it: rem"):
        read_files(str(root), annotations=str(notes))
    shutil.rmtree(notes / "more-00001")
    write_values(root / "b.parquet", INT)
    write_values(root / "c.parquet", INT)
    annotate(root, notes, copied_as_float, accept_changed_code=True)
    assert copies(root, notes) == values_of(INT) * 3


# Runs at once.


@pytest.mark.parametrize("number", range(1, 16))
def test_another_run_may_finish_while_a_file_is_published(tmp_path, monkeypatch, number):
    """Whoever finishes removes the private files of attempts, those of other runs, too."""
    corpus, notes = Corpus(tmp_path / "crawl", "parquet", seed=0), tmp_path / "notes"
    annotate(corpus.root, notes)
    corpus.write("second", ["a", "bb", "ccc"], [1, 2, 3])
    link, calls = os.link, []

    def link_late(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            monkeypatch.setattr(local.os, "link", link)
            annotate(corpus.root, notes)
        link(*arguments)

    monkeypatch.setattr(local.os, "link", link_late)
    annotate(corpus.root, notes)
    frame = read_files(str(corpus.root), annotations=str(notes)).compute()
    assert frame["length"].tolist() == frame["text"].str.len().tolist() == [3, 5, 1, 2, 3]
    assert not [*notes.glob("more-00001/_gpuclassify/attempts/*")]
