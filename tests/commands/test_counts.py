"""Each count of a job is the same number in the terminal, page, JSON and summary, and in pandas."""

import gzip
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from gpuclassify.commands import client
from gpuclassify.commands.cli import main
from tests.replicas import write_checkpoint

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("one_torch_thread")]
ITEM = "what is the name of the old river that flows through the quiet town of ashford"
TEXT = "the river flows past a mill and green hills while birds sing over quiet water"
NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"  # a text that no folder can have
BROKEN = ['{"id": broken', '{"id": 3, "text": "cut of', "[1, 2]"]
EMPTY = {"zero.jsonl", "zero.jsonl.gz", "nothing.jsonl.gz", "blank.jsonl"}
DOMAIN = ("--classifier", "domain", "--model", "model", "--max-chars", "40")
SELECTED = "id >= 30"


def documents():
    """Rows that can be read: nulls, copies, near copies, addresses and a test item among them."""
    random = np.random.default_rng(0)
    texts = [" ".join([*random.choice(TEXT.split(), 30), str(n)]) for n in range(90)]
    for n in range(0, 90, 5):
        texts[n] += f" mail a{n}@site.org and b{n}@site.org" + " or c@site.org" * (n % 2)
    texts[7:60:10] = [texts[1]] * 6
    texts[72] = texts[71] + " again"
    texts[44] = f"{texts[44]} {ITEM.upper()}"
    frame = pd.DataFrame({"id": range(90), "text": texts, "s": random.normal(size=90)})
    frame["lang"] = np.where(frame["id"] % 3 == 0, "en", "de")
    frame.loc[[9, 19, 29], "text"] = None
    frame.loc[[50], "lang"] = NULL_FOLDER
    return frame


@pytest.fixture(scope="module")
def crawl(tmp_path_factory):
    """A dirty crawl of JSON lines, one of Parquet files, a model, test items, and annotations."""
    folder = tmp_path_factory.mktemp("counts")
    (folder / "in").mkdir()
    (folder / "parquet").mkdir()
    frame = documents()
    lines = frame.to_json(orient="records", lines=True).splitlines()
    whole = "\n".join(["", *lines[:40], BROKEN[0], "", BROKEN[1]]) + "\n"
    (folder / "in/a.jsonl.gz").write_bytes(gzip.compress(whole.encode()))
    (folder / "in/b.jsonl").write_text("\n".join([*lines[40:], BROKEN[2]]))
    (folder / "in/broken.jsonl.gz").write_bytes(b"no gzip")
    for name in EMPTY:
        (folder / "in" / name).touch()
    (folder / "in/nothing.jsonl.gz").write_bytes(gzip.compress(b""))
    (folder / "in/blank.jsonl").write_text("\n \n")
    vectors = np.random.default_rng(1).normal(size=(90, 8))
    vectors[72] = vectors[71]
    table = frame.assign(embedding=[*vectors])
    table[:50].to_parquet(folder / "parquet/a.parquet")
    table[50:].to_parquet(folder / "parquet/b.parquet")
    table[:0].to_parquet(folder / "parquet/rowless.parquet")
    (folder / "parquet/zero.parquet").touch()
    write_checkpoint(folder / "model", "domain")
    (folder / "evals.jsonl").write_text(json.dumps({"question": ITEM}) + "\n")
    return folder


@pytest.fixture(autouse=True)
def here(crawl, monkeypatch):
    monkeypatch.chdir(crawl)
    monkeypatch.setattr(client, "open_client", lambda *_: None)
    yield
    for name in ("out", "notes", "labels"):
        shutil.rmtree(crawl / name, ignore_errors=True)


class Page(HTMLParser):
    """Tiles of a report's page by name, its bars by their title, and all of its text."""

    def __init__(self, content):
        super().__init__()
        self.tiles, self.bars, self.texts = {}, {}, []
        self._tags, self._value = [], ""
        self.feed(content)
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag, attrs):
        self._tags.append((tag, dict(attrs).get("class") or "", dict(attrs).get("title")))

    def handle_endtag(self, tag):
        while self._tags and self._tags.pop()[0] != tag:
            pass

    def handle_data(self, data):
        kinds = [kind for _, kind, _ in self._tags]
        if "style" not in (tag for tag, *_ in self._tags):
            self.texts.append(data)
        if any(kind.startswith("tile") for kind in kinds):
            if self._tags[-1][0] == "b":
                self._value = data
            elif self._tags[-1][0] == "span":
                self.tiles[data] = self._value
        if "bars" in kinds and data.strip():
            if kinds[-1] == "name":
                self._name = data
            else:
                self.bars[self._name] = data


class Done:
    """A finished job: what its command printed, its page and report, and the summary's values."""

    def __init__(self, words):
        first = CliRunner().invoke(main, words)
        assert first.exit_code in (0, 3), first.output
        self.terminal, self.out = first.stdout, words[2]
        # The same command does nothing more, and prints the summary.
        again = CliRunner().invoke(main, [*words, "--json"])
        assert again.exit_code == first.exit_code, again.output
        self.summary = json.loads(again.stdout)
        self.report = json.loads(Path(f"{self.out}/_report/report.json").read_text())
        self.page = Page(Path(f"{self.out}/_report/report.html").read_text())

    @property
    def job(self):
        """The summary of the documents."""
        return self.summary.get("removal", self.summary)

    def printed(self, name):
        """The number before these words on the terminal."""
        (number,) = re.findall(rf"([\d,]+) {name}\b", self.terminal)
        return int(number.replace(",", ""))

    def tile(self, name):
        """The number on the tile whose name begins so."""
        (number,) = [v for n, v in self.page.tiles.items() if re.match(rf"{name}\b", n)]
        return int(number.replace(",", ""))

    def written(self):
        """The rows of the output, by pandas."""
        return pd.read_parquet(self.out)

    def agree(self, read, written, left_out, empty):
        """Every surface has these numbers of rows, of what is left out, and the empty files."""
        for found in (self.report, self.job):
            assert (found["rows_read"], found["rows_written"]) == (read, written)
            assert found["left_out"] == left_out
            assert {path.rpartition("/")[2] for path in found["empty_files"]} == {*empty}
        for show in (self.printed, self.tile):
            assert (show("rows read"), show("rows written")) == (read, written)
        said = ", ".join(f"{n} {kind}{'s' * (n != 1)}" for kind, n in sorted(left_out.items()))
        assert f"Left out: {said}; see" in self.terminal
        assert f"Left out: {said} ." in self.page.text or f"Left out: {said}." in self.page.text
        for kind, count in left_out.items():
            assert self.tile(f"{kind}s? left out") == count
        noun = "1 empty file: " if len(empty) == 1 else f"{len(empty)} empty files: "
        for text in (self.terminal, self.page.text):
            assert noun in text
            assert all(name in text for name in empty)


JSONL = {"empty": EMPTY, "left_out": {"line": 3, "file": 1}}
PARQUET = {"empty": {"rowless.parquet"}, "left_out": {"file": 1}}
QUARANTINE = ("--on-error", "quarantine")


def label_counts(done, column, labels, written=None):
    """Every surface has the rows labelled, those of each label, and their share."""
    labelled, counts = int(labels.notna().sum()), labels.value_counts().to_dict()
    (stage,) = [stage for stage in done.report["stages"].values() if column in stage["labels"]]
    assert (stage["labelled"][column], stage["labels"][column]) == (labelled, counts)
    assert done.job["stages"] == done.report["stages"]
    kept = counts if written is None else written.value_counts().to_dict()
    assert done.report["labels"][column] == kept == done.job["columns"][column]
    assert f"hares are of {labelled} rows labelled" in done.terminal
    assert f"hares are of {labelled} rows labelled" in done.page.text
    for label, count in counts.items():
        shown = [f"{count}", f"{count / labelled:.1%}"]
        bar = "{} ({})".format(*shown)
        if written is not None:
            shown.append(f"{kept.get(label, 0)}")
            bar += f", {kept.get(label, 0)}"
        assert re.search(rf"│ {label} +│ {' +│ '.join(shown)} +│", done.terminal), done.terminal
        assert done.page.bars[label] == bar


def classify():
    """With a filter, a row that cannot be written, and rows by source."""
    every = Done(["annotate", "in", "labels", *DOMAIN, *QUARANTINE])
    notes, rows = pd.read_parquet("labels"), documents()
    lost = notes["_left_out"].notna()
    assert (lost.sum(), len(notes)) == (3, 93)
    every.agree(90, int((~lost).sum()), **JSONL)
    assert every.page.text.count("Annotated texts") == 1
    labels = notes.loc[~lost, "domain_pred"]
    label_counts(every, "domain_pred", labels)
    label = labels.iloc[50]  # of the row that cannot be written
    words = ["classify", "in", "out", *DOMAIN, "--filter-by", label, "--source-field", "lang"]
    done = Done([*words, "--partition-by", "lang", *QUARANTINE])
    known = rows.assign(label=labels.to_numpy())[rows["lang"] != NULL_FOLDER]
    kept = known[known["label"] == label]
    assert len(done.written()) == len(kept) > 0
    done.agree(90, len(kept), {"line": 3, "row": 1, "file": 1}, EMPTY)
    label_counts(done, "domain_pred", known["label"], done.written()["domain_pred"])
    nulls, others = int(known["label"].isna().sum()), int((known["label"] != label).sum())
    dropped = {"null": nulls, "label": others - nulls}
    (stage,) = done.report["stages"].values()
    assert stage["dropped"] == dropped
    assert f"dropped {others} of 89 rows (null {nulls}, label {others - nulls})" in done.terminal
    assert f"{nulls} without text" in done.page.text
    assert [step["rows"] for step in done.report["funnel"]] == [90, 89, len(kept)]
    assert done.page.bars["other stages, left out"] == "89 of 90"
    for name, own in rows.groupby("lang"):
        counts = {"read": len(own), "written": int((kept["lang"] == name).sum())}
        assert done.report["sources"]["lang"][name] == counts
        assert done.page.bars[name] == f"{counts['written']} of {counts['read']}"


def redact():
    """Spans and rows with spans are two numbers."""
    words = ["classify", "in", "out", "--classifier", "patterns", "--set", "redact=[{label}]"]
    done = Done([*words, *QUARANTINE])
    rows = done.written()
    done.agree(90, len(rows), **JSONL)
    found = rows["text"].dropna().str.count("@site.org")
    spans, labelled, own = int(found.sum()), len(found), int((found > 0).sum())
    assert spans > own
    share = f"{own / labelled:.1%}"
    (stage,) = done.report["stages"].values()
    column = done.report["spans"]["pattern_spans"]
    for kind, number in (("labelled", labelled), ("labels", {"email": own})):
        assert stage[kind]["pattern_spans"] == number == column[kind]
    assert stage["occurrences"]["pattern_spans"] == {"email": spans} == column["spans"]
    assert done.summary["columns"] == done.report["labels"] == {"pattern_spans": {"email": own}}
    assert re.search(rf"email +│ {spans} +│ {own} +│ {share}", done.terminal)
    assert re.search(rf"email {spans} {own} {share}", done.page.text)
    for text in (done.terminal, done.page.text):
        assert f"hares are of {labelled} rows labelled" in text


def select():
    """Rows that meet a condition on annotations and the input."""
    Done(["annotate", "in", "notes", "--classifier", "patterns", *QUARANTINE])
    where = f"{SELECTED} and text is not None"
    done = Done(["select", "in", "out", "--annotations", "notes", "--where", where, *QUARANTINE])
    rows = documents()
    kept = rows[(rows["id"] >= 30) & rows["text"].notna()]
    assert done.written()["id"].tolist() == kept["id"].tolist()
    done.agree(90, len(kept), **JSONL)
    assert "Selected texts" in done.page.text
    assert [step["rows"] for step in done.report["funnel"]] == [90, 60, len(kept)]
    assert done.page.bars[f"Select {SELECTED}"] == "60 of 90"


def copy_all():
    """Without a condition all rows are written, and no step is called Chain."""
    Done(["annotate", "in", "notes", "--classifier", "patterns", *QUARANTINE])
    words = ["select", "in", "out", "--annotations", "notes", *QUARANTINE]
    done = CliRunner().invoke(main, words)
    assert "Writing rows: 100%" in done.stderr and "Chain" not in done.output
    done = Done(words)
    assert len(done.written()) == 90
    done.agree(90, 90, **JSONL)
    assert "Written texts" in done.page.text


def duplicates(done, found, word):
    share = found / 90
    assert done.printed(f"duplicates? {word}") == found == done.tile(f"duplicates? {word}")
    assert f"{word} ({share:.1%})" in done.terminal
    assert f"duplicates {word}, {share:.1%}" in done.page.tiles
    for counts in (done.summary["duplicates"], done.report["deduplication"]["duplicates"]):
        assert (counts["documents"], counts["duplicates"]) == (90, found)
        assert counts["duplicate_share"] == pytest.approx(share)
    other = {"removed": "marked", "marked": "removed"}[word]
    for text in (done.terminal, done.page.text):
        assert other not in text and "that stay" not in text


def dedup_exact():
    done = Done(["dedup", "in", "out", "--method", "exact", *QUARANTINE])
    found = int(documents()["text"].dropna().duplicated().sum())
    assert len(done.written()) == 90 - found
    done.agree(90, 90 - found, **JSONL)
    duplicates(done, found, "removed")
    assert "Deduplicated texts" in done.page.text


def dedup_marks():
    """Annotations remove no row."""
    done = Done(["dedup", "in", "out", "--method", "exact", "--annotate", *QUARANTINE])
    rows = done.written()
    marked = rows[rows["_left_out"].isna()]
    found = int(documents()["text"].dropna().duplicated().sum())
    assert (len(marked), marked["is_duplicate"].sum()) == (90, found)
    done.agree(90, 90, **JSONL)
    duplicates(done, found, "marked")
    assert "Annotated texts" in done.page.text


def dedup_fuzzy():
    """Equal texts, and one with a word more."""
    done = Done(["dedup", "in", "out", "--method", "fuzzy", *QUARANTINE])
    found = int(documents()["text"].dropna().duplicated().sum()) + 1
    assert len(done.written()) == 90 - found
    done.agree(90, 90 - found, **JSONL)
    duplicates(done, found, "removed")
    compared = done.summary["duplicates"]["compared"]
    assert done.printed("candidates? compared") == compared == done.tile("candidates? compared")


def dedup_semantic():
    words = ["dedup", "parquet", "out", "--method", "semantic", *QUARANTINE]
    done = Done([*words, "--set", "embedding_field=embedding"])
    rows = done.written()
    assert len(rows) == 89 and not {71, 72} <= {*rows["id"]}
    done.agree(90, 89, **PARQUET)
    duplicates(done, 1, "removed")


def decontaminate():
    words = ["decontaminate", "in", "out", "--against", "evals.jsonl", *QUARANTINE]
    done = Done([*words, "--against-field", "question"])
    texts = documents()["text"]
    found = int(texts.str.contains(ITEM, case=False).sum())
    nulls = int(texts.isna().sum())
    assert len(done.written()) == 90 - found - nulls
    done.agree(90, 90 - found - nulls, **JSONL)
    assert done.printed("contaminated") == found == done.report["contamination"]["documents"]
    assert f"{found} contaminated ({found / 90:.2%})" in done.terminal
    assert f"{found} of 90 documents ({found / 90:.4%})" in done.page.text
    assert f"dropped {found + nulls} of 90 rows (null {nulls}, label {found})" in done.terminal
    assert "Decontaminated texts" in done.page.text
    assert "NFKD" in done.page.text and "NFKC" not in done.page.text


def buckets():
    words = ["buckets", "in", "out", "--score", "s", "--n", "3", "--weight", "none", *QUARANTINE]
    done = Done(words)
    rows = done.written()
    done.agree(90, 90, **JSONL)
    assert len(rows) == 90
    counts = {str(bucket): int(n) for bucket, n in rows["bucket"].value_counts().items()}
    assert done.report["labels"]["bucket"] == counts == done.job["columns"]["bucket"]
    assert done.report["labelled"]["bucket"] == 90 == done.job["labelled"]["bucket"]
    for bucket, count in counts.items():
        assert re.search(rf"│ {bucket} +│ {count} +│ {count / 90:.1%} +│", done.terminal)
    assert "hares are of 90 rows labelled" in done.page.text


def buckets_of_a_model():
    """Classifiers read the input, and the last pass reads what they wrote."""
    Path("buckets.yaml").write_text(
        "classifiers: [{classifier: domain, model: model, confidence_field: sure}]\n"
    )
    words = ["buckets", "in", "out", "--config", "buckets.yaml", "--score", "sure", "--n", "3"]
    done = Done([*words, *QUARANTINE])
    assert len(done.written()) == 90
    done.agree(90, 90, **JSONL)
    assert CliRunner().invoke(main, ["report", "out"]).exit_code == 0
    assert json.loads(Path("out/_report/report.json").read_text())["left_out"] == JSONL["left_out"]


def mixture():
    """What was selected of each cell, next to what was planned and asked."""
    words = ["--token-field", "id", *QUARANTINE]
    plan = ["mix", "in", "mix.json", "--by", "lang", "--tokens", "12000", "--max-epochs", "2"]
    assert CliRunner().invoke(main, [*plan, *words]).exit_code == 0
    done = Done(["select", "in", "out", "--where", SELECTED, "--partition-by", "lang", *QUARANTINE])
    compare = ["mix", "out", "mix.json", "--compare", *words]
    shown = CliRunner().invoke(main, compare)
    cells = json.loads(CliRunner().invoke(main, [*compare, "--json"]).stdout)["cells"]
    rows, written = documents(), done.written()
    assert len(written) == 59
    done.agree(90, 59, {"line": 3, "row": 1, "file": 1}, EMPTY)
    assert len(cells) == rows["lang"].nunique() == 3
    for name, own in rows.groupby("lang"):
        cell, selected = cells[json.dumps([name])], written[written["lang"] == name]
        asked = 12_000 * own["id"].sum() / rows["id"].sum()
        numbers = (len(own), len(selected), selected["id"].sum())
        assert (cell["planned_rows"], cell["rows"], cell["tokens"]) == numbers
        assert cell["asked"] == pytest.approx(asked)
        assert cell["given"] == pytest.approx(2 * selected["id"].sum())
        assert cell["missing"] == pytest.approx(asked - cell["given"])
        line = next(line for line in shown.stdout.splitlines() if line.startswith(f"{name} "))
        assert line.split()[1:3] == [f"{len(own)}", f"{len(selected)}"]
    refused = CliRunner().invoke(main, [*compare, "--max-epochs", "3"])
    assert refused.exit_code == 2 and "leave out --max-epochs" in refused.output
    refused = CliRunner().invoke(main, ["mix", "in", "mix.json", *words])
    assert refused.exit_code == 2 and "Missing option '--by'" in refused.output


CASES = (
    *(classify, redact, select, copy_all, dedup_exact, dedup_marks, dedup_fuzzy, dedup_semantic),
    *(decontaminate, buckets, buckets_of_a_model, mixture),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_counts_agree_on_every_surface(case):
    case()
