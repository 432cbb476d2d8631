"""Origin of columns and rows: in job.json, the report, the card, Parquet files and the command."""

import json
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from huggingface_hub import DatasetCard
from test_foreign_sets import rewrite

from gpuclassify import (
    AnnotationWriter,
    ParquetReader,
    ParquetWriter,
    PatternSpans,
    Pipeline,
    Select,
    published,
)
from gpuclassify.classifiers.category import DomainClassifier
from gpuclassify.commands.cli import main
from gpuclassify.jobs.input.annotation_reader import AnnotationError
from gpuclassify.jobs.ledger.manifest import DamagedMetadataError
from gpuclassify.jobs.provenance import MOST_METADATA_BYTES, Maker, Provenance, with_section
from gpuclassify.jobs.report.report import read_provenance, write_report
from gpuclassify.jobs.stores.opening import open_store

QUIET = {"report": lambda *_: None}
ROWS = 60


def with_rank(frame):
    return frame.assign(rank=frame["id"].astype("Int64"))


def with_share(frame):
    return frame.assign(share=(frame["id"] / ROWS).astype("float32"))


@pytest.fixture
def crawl(tmp_path):
    """Three Parquet files; each is a part, and the parts become one file."""
    (tmp_path / "crawl").mkdir()
    for number in range(3):
        ids = range(number * ROWS // 3, (number + 1) * ROWS // 3)
        frame = pd.DataFrame({"id": ids, "text": [f"text of {row}" for row in ids]})
        frame.to_parquet(tmp_path / f"crawl/{number}.parquet", index=False)
    return f"{tmp_path}/crawl/*.parquet"


def annotate(crawl, path, *stages):
    writer = AnnotationWriter(str(path))
    Pipeline([ParquetReader(crawl, files_per_partition=1), *stages, writer]).run(**QUIET)
    return str(path)


def select(crawl, path, *sets, where="rank < 30", **options):
    reader = ParquetReader(crawl, annotations=list(sets), files_per_partition=1)
    Pipeline([reader, Select(where), ParquetWriter(str(path), **options)]).run(**QUIET)


def metadata_by_duckdb(pattern):
    """The values of our key in each file."""
    found = duckdb.sql(f"select file_name, key, value from parquet_kv_metadata('{pattern}')")
    return {
        name: json.loads(value) for name, key, value in found.fetchall() if key == b"gpuclassify"
    }


@pytest.mark.contract
@pytest.mark.parametrize("options", [{}, {"output_bytes": 0}, {"partition_by": "rank"}])
def test_a_selection_names_sets_models_and_condition_everywhere(crawl, domain, tmp_path, options):
    classifier = domain()
    sets = [annotate(crawl, tmp_path / "domains", classifier)]
    sets.append(annotate(crawl, tmp_path / "ranks", with_rank, with_share))
    select(crawl, tmp_path / "final", *sets, **options)
    known = json.loads((tmp_path / "final/_gpuclassify/job.json").read_text())["provenance"]
    assert known["conditions"] == ["rank < 30"]
    digests = {entry["name"]: entry["digest"] for entry in known["annotations"]}
    assert digests.keys() == {"domains", "ranks"}
    by_column = {name: maker for maker in known["columns"] for name in maker["columns"]}
    made = by_column["domain_pred"]
    assert (made["class"], made["annotations"]) == ("DomainClassifier", "domains")
    assert made["commit"] == classifier.model.identity.revision
    assert made["model"] == Path(classifier.options.model).name  # no path of this machine
    usual = {"max_chars": 2000, "max_seq_length": 512, "label_field": "domain_pred"}
    assert made["settings"] == {**usual, "autocast": False}
    assert (by_column["rank"]["class"], by_column["share"]["class"]) == ("with_rank", "with_share")
    report = json.loads((tmp_path / "final/_report/report.json").read_text())
    assert report["provenance"] == known
    page = (tmp_path / "final/_report/report.html").read_text()
    assert all(digest in page for digest in digests.values()) and "rank &lt; 30" in page
    files = [*map(str, (tmp_path / "final").rglob("part-*.parquet"))]
    read = metadata_by_duckdb(f"{tmp_path}/final/**/part-*.parquet")
    assert len(read) == len(files) > 0
    for found in read.values():
        assert found["annotations"] == known["annotations"]
        assert found["conditions"] == known["conditions"]
        short = [{n: v for n, v in m.items() if n != "settings"} for m in known["columns"]]
        assert found["columns"] == short
    assert json.loads(pq.read_metadata(files[0]).metadata[b"gpuclassify"]) in read.values()
    card = DatasetCard.load(tmp_path / "final/_report/README.md")
    assert card.data.tags == ["gpuclassify"]
    written = pd.concat(map(pd.read_parquet, files))
    for label, rows in written["domain_pred"].value_counts().items():
        assert f"| {label} | {rows} | {rows / len(written):.1%} |".replace("_", r"\_") in card.text
    printed = CliRunner().invoke(main, ["show", "--provenance", str(tmp_path / "final")])
    assert printed.exit_code == 0 and "condition: rank < 30" in printed.output
    assert all(digest in printed.output for digest in digests.values())


def test_rules_have_a_version_and_shares_of_all_rows(tmp_path):
    texts = ["write to ada@example.org", "nobody", "or to bob@example.org", "none", "no", "nil"]
    pd.DataFrame({"text": texts}).to_parquet(tmp_path / "in.parquet")
    notes = annotate(f"{tmp_path}/in.parquet", tmp_path / "notes", PatternSpans())
    card = (tmp_path / "notes/_report/README.md").read_text()
    assert "| email | 2 | 33.3% |\n" in card
    assert "licence" not in card and "commit" not in card and '"version": "2"' in card
    printed = CliRunner().invoke(main, ["show", "--provenance", notes]).output
    assert printed.startswith(f"{notes}:\npattern_spans\n    class        PatternSpans\n")


def test_the_digest_of_a_set_changes_with_its_content_alone(crawl, tmp_path):
    def digest(name, *stages):
        path = annotate(crawl, tmp_path / name, *stages)
        result = CliRunner().invoke(main, ["show", "--provenance", path, "--json"])
        return json.loads(result.stdout)["annotations"][0]["digest"]

    first = digest("a", with_rank)
    assert first == digest("b", with_rank) != digest("c", with_rank, with_share)


def test_facts_on_published_models_are_of_those_models_alone():
    commit = "0" * 40
    own = DomainClassifier(labels=["a", "b"], revision=commit).origin()
    assert own["model"] == "nvidia/domain-classifier" and own["licence"] == "Apache-2.0"
    assert own["citation"] == "https://huggingface.co/nvidia/domain-classifier"
    other = DomainClassifier(model="acme/other", labels=["a", "b"], revision=commit).origin()
    assert other["model"] == "acme/other" and "licence" not in other
    listed = published("finemath", labels=["0"], revision=commit)
    assert listed.origin()["licence"] == "MIT"
    assert listed.origin()["citation"] == "arXiv:2502.02737"
    assert (
        "licence"
        not in published("finemath", model="acme/other", labels=["0"], revision=commit).origin()
    )


EVIL = (
    "<script>alert(1)</script> [x](javascript:y) | `z` \x1b]0;t\x07 <!-- end of gpuclassify k -->"
)


def test_values_of_strangers_are_shown_as_text(crawl, tmp_path):
    notes = annotate(crawl, tmp_path / "notes", with_rank)

    def forge(job):
        job["provenance"]["columns"][0] |= {"class": EVIL, "licence": EVIL, "citation": EVIL}

    rewrite(Path(notes, "_gpuclassify/job.json"), forge)
    select(crawl, tmp_path / "final", notes)
    page = (tmp_path / "final/_report/report.html").read_text()
    card = (tmp_path / "final/_report/README.md").read_text()
    for text in (page, card):
        assert "alert(1)" in text and "<script" not in text and "<!-- end" not in text
    assert "\x1b" not in card and "](javascript:" not in card
    printed = CliRunner().invoke(main, ["show", "--provenance", notes, str(tmp_path / "final")])
    assert "alert(1)" in printed.output and "\x1b" not in printed.output
    card = with_section("# Mine\n", card, "k")
    assert with_section(card, card, "k").startswith("# Mine\n\n<!-- gpuclassify k -->\n")


FORGED = {
    "a number": lambda known: 7,
    "no list of columns": lambda known: known | {"columns": {"a": 1}},
    "a column that is a number": lambda known: known | {"columns": [{"columns": [7]}]},
    "settings that are a list": lambda known: (
        known | {"columns": [{"columns": [], "settings": []}]}
    ),
    "a class that is a list": lambda known: known | {"columns": [{"class": []}]},
    "a long text": lambda known: known | {"conditions": ["x" * 100_000]},
    "many conditions": lambda known: known | {"conditions": [""] * 100_000},
    "a set without a name": lambda known: known | {"annotations": [{"digest": "sha256:0"}]},
    "a set that is a text": lambda known: known | {"annotations": ["sha256:0"]},
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED.keys())
def test_a_forged_provenance_is_refused(crawl, tmp_path, change):
    notes = annotate(crawl, tmp_path / "notes", with_rank)
    path = Path(notes, "_gpuclassify/job.json")
    rewrite(path, lambda job: job.update(provenance=change(job["provenance"])))
    with pytest.raises(AnnotationError, match=r"job\.json is not what was written, its provenance"):
        select(crawl, tmp_path / "final", notes)
    for read in (read_provenance, write_report):
        with pytest.raises(DamagedMetadataError, match="its provenance has"):
            read(open_store(notes))
    result = CliRunner().invoke(main, ["show", "--provenance", notes])
    assert result.exit_code == 2 and "its provenance has" in result.output


def test_a_set_without_provenance_is_read(crawl, tmp_path):
    notes = annotate(crawl, tmp_path / "notes", with_rank)
    rewrite(Path(notes, "_gpuclassify/job.json"), lambda job: job.pop("provenance"))
    select(crawl, tmp_path / "final", notes)
    known = read_provenance(open_store(str(tmp_path / "final")))
    assert not known.makers and known.conditions == ("rank < 30",)
    assert [name for name, _ in known.annotations] == ["notes"]


def test_columns_have_the_prefix_of_their_set(crawl, tmp_path):
    notes = annotate(crawl, tmp_path / "notes", with_rank)
    select(crawl, tmp_path / "final", f"{notes}=old_", where="old_rank < 30")
    known = read_provenance(open_store(str(tmp_path / "final")))
    assert known.makers == (Maker(("old_rank",), "with_rank", annotations="notes"),)


def test_metadata_of_files_stays_small():
    makers = tuple(Maker((f"column_{n}",), "Class", model="m" * 500) for n in range(1_000))
    sets = (("notes", "sha256:0"),)
    for known in (
        Provenance(makers, (), sets, ("a > 1",)),
        Provenance(makers, (), sets * 9_000, ("a > 1",)),
    ):
        [content] = known.metadata().values()
        assert len(content) <= MOST_METADATA_BYTES
        assert json.loads(content)["conditions"] == ["a > 1"]
    assert Provenance().metadata() == {}


def test_what_a_job_writes_can_be_read_however_much_it_is():
    makers = tuple(Maker((f"column_{n}",), "Class") for n in range(2_000))
    sets = tuple((f"notes_{n}", "sha256:0") for n in range(20_000))
    written = Provenance(makers, sets, sets, tuple(f"a > {n}" for n in range(20_000))).as_dict()
    read = Provenance.parse(json.loads(json.dumps(written)))
    assert read.as_dict() == written
    assert read.makers == makers[:1_000] and read.conditions[-1] == "a > 9999"


def test_names_beyond_the_limits_are_left_out(crawl, tmp_path):
    def with_many(frame):
        more = {f"c{n}": 1 for n in range(3)} | {"n" * 2_000: 1}
        return frame.assign(**more)

    select(
        crawl, tmp_path / "final", annotate(crawl, tmp_path / "notes", with_many), where="id > 3"
    )
    [maker] = read_provenance(open_store(str(tmp_path / "final"))).makers
    assert maker.columns == ("c0", "c1", "c2")


def test_show_says_what_is_missing(crawl, tmp_path):
    notes = annotate(crawl, tmp_path / "notes", with_rank)
    for words, message in (
        ([], "Missing argument 'ANNOTATIONS...'"),
        ([notes], "Missing option '--input'"),
        (["--provenance", str(tmp_path / "crawl")], "is no output of a job"),
    ):
        result = CliRunner().invoke(main, ["show", *words])
        assert result.exit_code == 2 and message in result.output
