"""Whole jobs of deduplication: what stays, going on after a kill, and what is refused."""

import contextlib
import functools
import json
import pickle
import shutil
import signal
from pathlib import Path

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from job_faults import in_process, run_until_link

from gpuclassify.classifiers.embedder import Embedder
from gpuclassify.corpus.dedup.exact import ExactDuplicates
from gpuclassify.corpus.dedup.fuzzy import FuzzyDuplicates
from gpuclassify.corpus.dedup.job import Deduplicate
from gpuclassify.corpus.dedup.semantic import SemanticDuplicates
from gpuclassify.corpus.dedup.summary import TooManyDuplicatesError
from gpuclassify.jobs.input.readers import JsonlReader, ParquetReader
from gpuclassify.jobs.ledger.manifest import JobChangedError
from gpuclassify.jobs.output.writers import JsonlWriter, ParquetWriter
from gpuclassify.jobs.report.report import report_of
from gpuclassify.jobs.stores.local import LocalStore
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import UnreadableInputError
from tests.processes import local_client

EXACT = ExactDuplicates(id_field="id", keep_by=["score"], source_field="source")
FUZZY_WAY = functools.partial(
    FuzzyDuplicates, char_ngrams=5, bands=8, rows=3, bands_per_pass=4, min_similarity=0.4
)
FUZZY = FUZZY_WAY(id_field="id")


@pytest.fixture(scope="module")
def documents():
    """Texts of ten words, most of them twice or with one word changed, and null and empty ones."""
    words = [[f"w{row % 40}x{place}" for place in range(10)] for row in range(150)]
    for row in range(0, 150, 7):
        words[row][row % 10] = f"changed{row}"
    texts = [" ".join(each) for each in words]
    texts[10:130:30] = ["", None, "", None]
    columns = {"id": range(150), "text": texts, "score": [row % 11 for row in range(150)]}
    return pd.DataFrame(columns | {"source": ["web", "books", "web"] * 50})


@pytest.fixture
def folder(tmp_path, documents):
    """Three files of JSON lines, some eight parts of `job`."""
    (tmp_path / "in").mkdir()
    for number in range(3):
        rows = documents[number * 50 : (number + 1) * 50]
        rows.to_json(tmp_path / f"in/{number}.jsonl", orient="records", lines=True)
    return tmp_path


def job(folder, duplicates=EXACT, out="out", **options):
    reader = JsonlReader(f"{folder}/in/*.jsonl", part_bytes=3_000)
    return Deduplicate(reader, duplicates, ParquetWriter(f"{folder}/{out}"), **options)


def files(out):
    """The content of every Parquet file below a directory, by name."""
    found = sorted(Path(out).rglob("*.parquet"))
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def best_ids(documents):
    """What stays of equal texts: the largest score, then the smallest id."""
    has_text = documents["text"].fillna("") != ""
    ranked = documents[has_text].sort_values(["score", "id"], ascending=[False, True])
    return sorted([*ranked.drop_duplicates("text")["id"], *documents[~has_text]["id"]])


def test_the_best_of_equal_texts_stay_and_a_finished_job_is_left_as_it_is(folder, documents):
    summary = job(folder).run()
    kept = pd.read_parquet(folder / "out")
    assert kept["id"].tolist() == best_ids(documents)
    assert summary.duplicates.duplicates == 150 - len(kept)
    assert (summary.removal.rows_read, summary.removal.rows_written) == (150, len(kept))
    assert summary.duplicates.sources["web"][0] == 100
    assert list(summary.steps)[:3] == ["ids", "signatures", "components"]
    assert {path.name for path in (folder / "out/_dedup").iterdir()} == {
        *("decisions", "duplicates", "removed", "summary.json")
    }

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}
    seen = []
    again = job(folder).run(report=stop_at("", seen))
    assert {*seen} == {"duplicates", "removed", "removal"}  # neither ids nor decisions
    assert again.duplicates == summary.duplicates
    assert again.removal.resumed_parts == again.removal.parts
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")} == before


SEMANTIC = SemanticDuplicates(id_field="id", embedding_field="vector", n_clusters=1)


@pytest.mark.parametrize("duplicates", [EXACT, FUZZY, SEMANTIC], ids=["exact", "fuzzy", "semantic"])
def test_a_job_gives_what_a_call_gives(tmp_path, documents, duplicates):
    generator = np.random.default_rng(5)
    vectors = generator.normal(size=(40, 8))[np.arange(150) % 40]
    vectors += generator.normal(size=vectors.shape, scale=0.01)
    documents = documents.assign(vector=[*vectors.astype(np.float32)])
    documents.to_parquet(tmp_path / "in.parquet", row_group_size=40)
    reader = ParquetReader(f"{tmp_path}/in.parquet", part_bytes=1)
    Deduplicate(reader, duplicates, ParquetWriter(f"{tmp_path}/out")).run()
    called = duplicates(documents).sort_values("id", ignore_index=True)
    assert 20 < len(called) < 150
    pd.testing.assert_frame_equal(listing(tmp_path / "out"), called, check_dtype=False)
    stays = duplicates.remove(documents)["id"].tolist()
    assert pd.read_parquet(tmp_path / "out")["id"].tolist() == stays


@pytest.mark.parametrize("way", [ExactDuplicates, FUZZY_WAY], ids=["exact", "fuzzy"])
def test_normalize_is_part_of_what_a_job_is_and_of_no_text(tmp_path, documents, way):
    breaks = pd.Series(["\n", "\n\n", " \n"] * 50)
    texts = [
        text.replace(" ", between)
        for text, between in zip(documents.text.fillna(""), breaks, strict=True)
    ]
    documents = documents.assign(text=texts)
    documents.to_parquet(tmp_path / "in.parquet", row_group_size=40)

    def make(normalize):
        reader = ParquetReader(f"{tmp_path}/in.parquet", part_bytes=1)
        duplicates = way(id_field="id", normalize=normalize)
        return Deduplicate(reader, duplicates, ParquetWriter(f"{tmp_path}/out"))

    make("basic").run()
    kept = pd.read_parquet(tmp_path / "out")
    stays = way(id_field="id", normalize="basic").remove(documents)
    assert kept["text"].tolist() == stays["text"].tolist()
    assert len(kept) < len(way(id_field="id").remove(documents)) or way is FUZZY_WAY
    with pytest.raises(JobChangedError, match=r"normalize was \['unicode', .* and is None"):
        make(None).run()
    with pytest.raises(JobChangedError, match="normalize is new"):
        make(str.split).run()


def test_code_of_a_function_that_normalizes_is_part_of_what_a_job_is(folder):
    def make(count):
        return job(folder, ExactDuplicates(id_field="id", normalize=lambda text: text[:count]))

    make(5).run()
    assert make(5).run().removal.resumed_parts
    with pytest.raises(JobChangedError, match="normalize has other code") as caught:
        make(4).run()
    assert "accept_changed_code=True" in str(caught.value)
    code = report_of(open_store(str(folder / "out")))["code"]
    assert "normalize=" in code


def test_the_embedder_is_part_of_what_a_job_is(folder, sequence_classifier):
    semantic = [
        SemanticDuplicates(
            id_field="id", embedder=Embedder(model=sequence_classifier(), max_chars=chars)
        )
        for chars in (10, 20)
    ]
    keys = [job(folder, each).prepare().manifest.key for each in semantic]
    assert keys[0] != keys[1]
    assert keys[0] == job(folder, semantic[0]).prepare().manifest.key


def test_parquet_and_json_lines_and_columns_that_are_read(folder, documents):
    documents.to_parquet(folder / "in.parquet", row_group_size=30)
    reader = ParquetReader(f"{folder}/in.parquet", part_bytes=1)
    planned = Deduplicate(reader, EXACT, JsonlWriter(f"{folder}/out")).prepare()
    corpus = planned.recipe.corpus(planned, planned.recipe.duplicates, planned.documents())
    read = corpus.dataset[["score"]].simplify().to_delayed(optimize_graph=False)
    assert [list(part.compute(scheduler="sync").columns) for part in read] == [["score"]] * 5
    planned.run()
    lines = [line for path in sorted(folder.glob("out/*.jsonl")) for line in path.open()]
    assert [json.loads(line)["id"] for line in lines] == best_ids(documents)


@pytest.mark.slow
@pytest.mark.parametrize(("duplicates", "links"), [(EXACT, 17), (FUZZY, 45)])
def test_a_job_that_is_killed_again_and_again_ends_as_an_undisturbed_one(folder, duplicates, links):
    job(folder, duplicates, out="whole").run()
    deaths = 0
    while True:
        process = in_process(run_until_link, job(folder, duplicates), links, False)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        deaths += 1
    assert deaths > 1
    whole, found = files(folder / "whole"), files(folder / "out")
    assert [path.rpartition("-")[0] for path in found] == [p.rpartition("-")[0] for p in whole]
    assert list(found.values()) == list(whole.values())


def stop_at(step, seen):
    """A report that interrupts the job when a step is done."""

    def report(name, done, of, summary):
        seen.append(name)
        if name == step and done == of:
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize("at", ["", "signatures", "removal"], ids=["finished", "begun", "decided"])
def test_a_restart_that_is_interrupted_while_it_removes_steps_goes_on(folder, monkeypatch, at):
    job(folder, out="whole").run()
    with contextlib.suppress(KeyboardInterrupt):
        job(folder).run(report=stop_at(at, []))
    (folder / "out/mine.txt").write_text("mine")

    def remove_metadata(store, name):
        for path in [*Path(store.path(name)).rglob("_gpuclassify")]:
            shutil.rmtree(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LocalStore, "remove_folder", remove_metadata)
        job(folder).run(restart=True)
    assert [*(folder / "out/_dedup").rglob("*.parquet")]
    job(folder).run()
    whole, found = files(folder / "whole"), files(folder / "out")
    assert [path.rpartition("-")[0] for path in found] == [p.rpartition("-")[0] for p in whole]
    assert list(found.values()) == list(whole.values())
    assert (folder / "out/mine.txt").read_text() == "mine"


def test_a_job_goes_on_with_a_cluster_and_finished_steps_stay(folder):
    job(folder, FUZZY, out="whole").run()
    with pytest.raises(KeyboardInterrupt):
        job(folder, FUZZY).run(report=stop_at("edges-004", []))
    signatures = files(folder / "out/_dedup/signatures")
    assert len(signatures) > 5
    seen = []
    with local_client(2) as client:
        with pytest.raises(KeyboardInterrupt):
            job(folder, FUZZY).run(client, report=stop_at("decisions", seen))
        assert files(folder / "out/_dedup/signatures") == signatures
        job(folder, FUZZY).run(client, report=stop_at("", seen))
    assert "ids" not in seen  # noted as done by the first run
    assert list(files(folder / "out").values()) == list(files(folder / "whole").values())


def test_other_settings_and_input_are_refused(folder):
    job(folder).run()
    other = ExactDuplicates(id_field="id")
    with pytest.raises(JobChangedError, match=r"keep_by was .* and is"):
        job(folder, other).run()
    with pytest.raises(JobChangedError, match="on_error was 'raise' and is 'quarantine'"):
        job(folder, on_error="quarantine").run()
    job(folder, other).run(restart=True)
    with (folder / "in/2.jsonl").open("a") as file:
        file.write('{"id": 150, "text": "new", "score": 1, "source": "web"}\n')
    with pytest.raises(JobChangedError, match=r"input files changed: 1 .*2\.jsonl"):
        job(folder, other).run()
    assert job(folder, other).run(restart=True).duplicates.documents == 151


@pytest.mark.parametrize(
    "way",
    [ExactDuplicates, pytest.param(FUZZY_WAY, marks=pytest.mark.slow)],
    ids=["exact", "fuzzy"],
)
def test_a_second_column_never_goes_on_with_what_the_first_one_left(tmp_path, way):
    """Copies are equal or have no word in common, so that pandas says what any way must find."""
    generator = np.random.default_rng(7)
    words = [" ".join(f"{n}x{place}" for place in range(9)) for n in range(70)]
    drawn = [generator.integers(0, most, size=120) for most in (70, 40)]
    columns = {"title": [words[n] for n in drawn[0]], "body": [words[n][::-1] for n in drawn[1]]}
    frame = pd.DataFrame({"id": range(120), **columns})
    first = frame.drop_duplicates("title")
    both = first.drop_duplicates("body")
    only_body = frame.drop_duplicates("body")
    assert len({len(frame), len(first), len(both), len(only_body)}) == 4
    frame.to_parquet(tmp_path / "in.parquet", row_group_size=60)

    def run(column, source, out, **options):
        reader = ParquetReader(f"{tmp_path}/{source}", part_bytes=1)
        settings = way(id_field="id", text_field=column)
        made = Deduplicate(reader, settings, ParquetWriter(f"{tmp_path}/{out}"))
        made.run(**options)
        return pd.read_parquet(tmp_path / out)["id"].tolist()

    assert run("title", "in.parquet", "out") == first["id"].tolist()
    with pytest.raises(JobChangedError, match=r"text_field was 'title' and is 'body'.*another dir"):
        run("body", "in.parquet", "out")
    assert pd.read_parquet(tmp_path / "out")["id"].tolist() == first["id"].tolist()
    assert run("body", "out", "clean") == both["id"].tolist()  # the survivors' other column
    with pytest.raises(KeyboardInterrupt):
        run("title", "in.parquet", "out", restart=True, report=stop_at("signatures", []))
    with pytest.raises(JobChangedError, match="text_field was 'title' and is 'body'"):
        run("body", "in.parquet", "out")
    assert run("body", "in.parquet", "out", restart=True) == only_body["id"].tolist()

    lazy = dd.from_pandas(frame, npartitions=3)
    for column in columns:
        lazy = way(id_field="id", text_field=column).remove(lazy)
    assert lazy["id"].compute(scheduler="sync").tolist() == both["id"].tolist()


def test_alarms_refuse_before_anything_is_removed(folder):
    limited = ExactDuplicates(id_field="id", max_removed_share=0.1)
    with pytest.raises(TooManyDuplicatesError, match="max_removed_share") as caught:
        job(folder, limited).run()
    assert "report.html" in caught.value.__notes__[0]
    assert not list((folder / "out").glob("*.parquet"))
    report = json.loads((folder / "out/_report/report.json").read_text())
    assert report["parts_done"] == 0
    assert report["deduplication"]["duplicates"]["largest"][0]["size"] > 1
    seen = []
    job(folder, ExactDuplicates(id_field="id")).run(report=stop_at("", seen))
    assert {*seen} == {"duplicates", "removed", "removal"}


@pytest.mark.parametrize("duplicates", [EXACT, FUZZY], ids=["exact", "fuzzy"])
def test_lines_that_cannot_be_read_are_left_out(folder, documents, duplicates):
    path = folder / "in/0.jsonl"
    lines = path.read_text().splitlines()
    # One that only a reader of all columns finds wrong, before most rows that are to be removed.
    lines[3:3] = ["{broken", '{"id": 999, "text": "x", "score": "many", "source": "web"}']
    path.write_text("\n".join(lines) + "\n")
    summary = job(folder, duplicates, on_error="quarantine").run()
    assert summary.removal.left_out == {"line": 2}
    assert (folder / "out/_quarantine").is_dir()
    stays = duplicates.remove(documents)["id"].tolist()
    assert pd.read_parquet(folder / "out")["id"].tolist() == stays


def test_an_earlier_corpus_stays_and_removes(folder, documents):
    (folder / "earlier").mkdir()
    documents[:60].assign(id=range(1_000, 1_060)).to_parquet(folder / "earlier/0.parquet")
    earlier = ParquetReader(f"{folder}/earlier")
    job(folder, against=earlier).run()
    kept = pd.read_parquet(folder / "out")
    known = set(documents["text"][:60].dropna()) - {""}
    assert not known & set(kept["text"].dropna())
    assert kept["id"].tolist() == [
        row for row in best_ids(documents) if documents["text"][row] not in known
    ]
    listed = pd.read_parquet(folder / "out/_dedup/duplicates")
    assert listed[listed["is_earlier"]]["id"].min() >= 1_000
    with pytest.raises(JobChangedError, match="against is gone"):
        job(folder).run()


@pytest.mark.parametrize("damaged", [slice(None), slice(4, 200)], ids=["at once", "when read"])
def test_an_earlier_corpus_is_read_whole_or_not_at_all(folder, documents, damaged):
    path = folder / "earlier.parquet"
    documents.to_parquet(path)
    content = bytearray(path.read_bytes())
    content[damaged] = b"\xff" * len(content[damaged])
    path.write_bytes(content)
    earlier = ParquetReader(str(path))
    with pytest.raises(UnreadableInputError, match=r"earlier\.parquet.* leave it out of against="):
        job(folder, against=earlier, on_error="quarantine").run()
    assert not list((folder / "out").glob("*.parquet"))


def test_a_frame_keeps_its_index_and_positions_name_documents(tmp_path, documents):
    frame = documents.drop(columns="id").set_index(pd.Index(range(500, 650), name="row"))
    lazy = dd.from_pandas(frame, npartitions=4)
    settings = ExactDuplicates()
    Deduplicate(lazy, settings, ParquetWriter(f"{tmp_path}/out")).run()
    kept = pd.read_parquet(tmp_path / "out")
    pd.testing.assert_frame_equal(kept, settings.remove(lazy).compute(scheduler="sync"))
    listed = pd.read_parquet(tmp_path / "out/_dedup/duplicates")
    assert (listed["id"] // 2**40).max() == 3
    assert len(Deduplicate(lazy, settings, ParquetWriter(f"{tmp_path}/out")).run().steps) == 7


def test_storage_options_are_written_nowhere(folder):
    import fsspec

    store = fsspec.filesystem("memory")
    store.put(f"{folder}/in", "/dedup-in", recursive=True)
    options = {"key": "hunter2"}
    made = Deduplicate(
        JsonlReader("memory://dedup-in/*.jsonl", storage_options=options),
        EXACT,
        ParquetWriter("memory://dedup-out", storage_options=options),
    )
    planned = made.prepare()
    corpus = made.corpus(planned, made.duplicates, planned.documents())
    assert b"hunter2" not in pickle.dumps(corpus.dataset.expr)
    assert made.run().duplicates.duplicates > 20
    contents = [store.cat_file(path) for path in store.find("/dedup-out")]
    assert contents
    assert not any(b"hunter2" in content for content in contents)


def test_what_is_no_job_is_refused(folder):
    with pytest.raises(TypeError, match="pass settings such as ExactDuplicates"):
        Deduplicate(JsonlReader("in"), "exact", ParquetWriter("out"))
    with pytest.raises(ValueError, match="no column 'url'"):
        job(folder, ExactDuplicates(id_field="url")).run()
    assert not (folder / "out").exists()


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def swap(path):
    """Exchange a file with the next one of its kind, in its folder or in that of another step."""
    near = [p for p in sorted(path.parent.iterdir()) if p.suffix == path.suffix and p.is_file()]
    far = sorted(path.parents[1].glob(f"*/{path.name}")) or sorted(
        path.parents[2].glob(f"*/{path.parent.name}/{path.name}")
    )
    others = [other for other in (*near, *far) if other != path]
    if others:
        mine, theirs = path.read_bytes(), others[0].read_bytes()
        path.write_bytes(theirs)
        others[0].write_bytes(mine)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, swap])
@pytest.mark.parametrize("step", ["", "decisions"], ids=["finished", "at decisions"])
def test_a_damaged_file_of_a_step_is_done_again_or_named(folder, step, damage):
    """Of an exact job; `tests.faults` tries other damage, and the steps of the others."""
    whole = job(folder, out="whole").run()
    with contextlib.suppress(KeyboardInterrupt):
        job(folder, out="begun").run(report=stop_at(step, []))
    state = [path for path in (folder / "begun/_dedup").rglob("*") if path.is_file()]
    assert len(state) > 15
    for path in state:
        shutil.rmtree(folder / "out", ignore_errors=True)
        shutil.copytree(folder / "begun", folder / "out")
        damage(folder / "out" / path.relative_to(folder / "begun"))
        try:
            found = job(folder).run()
        except FileExistsError as err:
            assert "files that no job wrote" in str(err)
            continue
        assert found.duplicates == whole.duplicates, path
        parts, wanted = (
            {part.name: part.read_bytes() for part in (folder / out).glob("part-*")}
            for out in ("out", "whole")
        )
        assert parts == wanted, path
        pd.testing.assert_frame_equal(listing(folder / "out"), listing(folder / "whole"))


def listing(out, by="id"):
    return pd.read_parquet(out / "_dedup/duplicates").sort_values(by, ignore_index=True)


@pytest.mark.parametrize("ids", ["same", "null"])
def test_ids_that_do_not_tell_documents_apart_give_way_to_positions(tmp_path, documents, ids):
    own = {"same": [7] * 150, "null": [None, *map(str, range(149))]}[ids]
    documents.assign(id=pd.array(own)).to_parquet(tmp_path / "in.parquet", row_group_size=40)

    def make(**settings):
        reader = ParquetReader(f"{tmp_path}/in.parquet", part_bytes=1)
        settings = ExactDuplicates(keep_by=["score"], **settings)
        return Deduplicate(reader, settings, ParquetWriter(f"{tmp_path}/out"))

    with pytest.raises(KeyboardInterrupt):
        make().run(report=stop_at("signatures", []))
    make().run()  # which knows it of the run before
    listed = listing(tmp_path / "out", by="position")
    assert {*listed.columns} == {"position", "group", "keep", "partitions"}
    gone = listed[~listed["keep"]]["position"]
    rows = sorted(gone // 2**40 * 40 + gone % 2**40)
    assert rows == sorted({*range(150)} - {*best_ids(documents)})
    with pytest.raises(ValueError, match=r"'id' must tell documents apart, and .*rename this one"):
        make(id_field="id").run(restart=True)
