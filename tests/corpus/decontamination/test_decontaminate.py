"""Decontaminate against brute force on sets of n-grams, whatever the settings and the company."""

import gzip
import io
import json
import pickle
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gpuclassify import Decontaminate, DecontaminateFiles, ParquetReader, ParquetWriter
from gpuclassify.corpus.decontamination.index import ItemIndex, item_words, open_index
from gpuclassify.corpus.decontamination.matching import match_items
from gpuclassify.jobs.stores.opening import open_store
from tests.corpus.decontamination import oracle

LETTERS = [
    "a",
    "b",
    "C",
    "é",
    "e\u0301",
    "ﬁ",
    "ß",
    "İ",
    "ς",
    "1",
    "١",
    "２",
    "½",
    "漢",
    "か\u3099",
    "\u3099",
]
MARKS = [
    " ",
    "\n",
    ".",
    "**",
    "\u200d",
    "\u00ad",
    "-",
    "\t",
    "ﷺ",
    "🙂",
    "\u0301\u0327",
    "ไ",
    "\x00",
]


@pytest.fixture
def index_dir(tmp_path):
    return tmp_path / "indexes"


def random_text(draw, vocabulary, least=0, most=60):
    gaps = [" ", " ", "\n", ", ", " **", "\u00a0", " - "]
    chosen = draw.choices(vocabulary, k=draw.randint(least, most))
    return "".join(word + draw.choice(gaps) for word in chosen)


def corpus(seed, docs=300, items=60, vocabulary=40):
    """Random texts, with pieces of items among them, in other case; and nulls."""
    draw = random.Random(seed)
    known = ["".join(draw.choices(LETTERS, k=draw.randint(1, 4))) for _ in range(vocabulary)]
    tests = [random_text(draw, known, 0, 30) for _ in range(items)]
    tests += [None, "", tests[3], f"{tests[4]} {tests[5]}"]
    texts = []
    for _ in range(docs):
        parts = [random_text(draw, known, 0, 20)]
        for item in draw.sample(tests, 2):
            cut = draw.randint(0, len(item or ""))
            parts += [(item or "")[cut // 2 :].swapcase(), random_text(draw, known, 0, 9)]
        texts.append(draw.choice(["\n", " ", ""]).join(parts))
    return [*texts, None, "", " \n"], tests


def frame_of(texts):
    return pd.DataFrame({"text": pd.Series(texts, dtype="str")})


def assert_is_brute_force(result, docs, items, **settings):
    expected = oracle.decontaminate(docs, items, **settings)
    for row, wanted in zip(result.itertuples(), expected, strict=True):
        if wanted is None:
            assert pd.isna([row.contaminated, row.contamination, row.contaminated_by]).all()
            continue
        share, name, names, passages = wanted
        assert row.contaminated == (share >= settings.get("threshold", 0.2))
        assert np.float32(row.contamination) == np.float32(share)
        assert (None if pd.isna(row.contaminated_by) else row.contaminated_by) == name
        assert list(row.all_items) == names
        assert [(each["start"], each["end"]) for each in row.passages] == passages


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ngram": 3, "min_words": 2, "max_items": 3},
        {"ngram": 5, "min_words": 5, "max_items": 1000, "threshold": 1.0},
        {"ngram": 2, "min_words": 1, "max_items": 2, "threshold": 0.5},
        {"ngram": 4, "min_words": 2, "max_items": 20, "ignore": True},
    ],
)
def test_all_columns_are_those_of_brute_force(index_dir, settings):
    docs, tests = corpus(len(settings))
    if settings.get("ignore"):
        settings = settings | {"ignore": tuple(text for text in tests[:5] if text)}
    items = [(f"frame#{row}", text) for row, text in enumerate(tests)]
    mapper = Decontaminate(
        against=pd.DataFrame({"question": tests}),
        items_field="all_items",
        passages_field="passages",
        index_dir=index_dir,
        **settings,
    )
    result = mapper(frame_of(docs))
    assert_is_brute_force(result, docs, items, **settings)
    assert result["contaminated"].sum() > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_50_000_documents_against_2_000_items_are_those_of_brute_force(index_dir):
    docs, tests = corpus(7, docs=50_000, items=2_000, vocabulary=3_000)
    items = [(f"frame#{row}", text) for row, text in enumerate(tests)]
    mapper = Decontaminate(
        against=pd.DataFrame({"question": tests}),
        items_field="all_items",
        passages_field="passages",
        index_dir=index_dir,
    )
    result = mapper(dd.from_pandas(frame_of(docs), npartitions=9)).compute()
    assert_is_brute_force(result, docs, items)
    assert result["contaminated"].sum() > 10_000


@pytest.mark.parametrize("bits", [0, 1, 0xFF, 0xFFFFFFFF00000000])
def test_keys_that_are_equal_find_nothing_that_is_not_there(bits):
    docs, tests = corpus(9, docs=60)
    table = pa.table(
        {"source": ["a"] * len(tests), "id": [str(i) for i in range(len(tests))], "text": tests},
        schema=pa.schema([(name, pa.large_string()) for name in ("source", "id", "text")]),
    )
    texts = pa.array(docs, pa.large_string())
    settings = {"ngram": 3, "min_words": 2, "max_items": 5}
    whole, few = (ItemIndex.build(table, **settings, key_bits=b) for b in (2**64 - 1, bits))
    matches = [match_items(index, index.hits(texts)) for index in (whole, few)]
    assert len(matches[0].shares) > 50
    for one, other in zip(*matches, strict=True):
        np.testing.assert_array_equal(one, other)
    assert few.about == whole.about


def test_words_are_those_of_plain_python_and_stay_as_they_are():
    draw = random.Random(5)
    odd = [chr(draw.choice([*range(0x20, 0xD800), *range(0xE000, 0x30000)])) for _ in range(900)]
    pool = LETTERS * 20 + MARKS * 20 + [c for c in odd if c != "\u0345" and oracle.fold(c)]
    texts = ["".join(draw.choices(pool, k=draw.randint(0, 60))) for _ in range(3000)]
    found, counts = item_words(pa.array(texts, pa.large_string()))
    for text, words, count in zip(texts, found.to_pylist(), counts, strict=True):
        expected = [word for word, _, _ in oracle.words(text)]
        assert words == "".join(f"{word} " for word in expected), ascii(text)
        assert count == len(expected)
    assert item_words(found)[0].equals(found)


@pytest.mark.parametrize(
    "text",
    [
        "The QUICK brown\nfox, jumps **over** the\r\n\tlazy_dog",
        "the quick brown fox jumps over the lazy dog",
        "Ｔｈｅ quick—brown “fox” jumps\u00a0over\u2028the # lazy 🙂 dog",
        "the qu\u00adick brown f\u200dox jumps over the lazy dog",
    ],
)
def test_wrapped_lines_markdown_and_forms_of_characters_hide_nothing(index_dir, text):
    item = "The quick brown fox jumps over the lazy dog"
    mapper = Decontaminate(against=pd.DataFrame({"question": [item]}), index_dir=index_dir)
    result = mapper(frame_of([f"x {text} y", text.replace("lazy", "idle")]))
    assert result["contaminated"].tolist() == [True, False]


def test_partitions_and_company_change_nothing(index_dir):
    docs, tests = corpus(3)
    frame = frame_of(docs)
    mapper = Decontaminate(
        against=pd.DataFrame({"question": tests}),
        ngram=3,
        min_words=2,
        items_field="all",
        passages_field="where",
        cut=True,
        cut_margin=3,
        index_dir=index_dir,
    )
    whole = mapper(frame)
    for parts in (1, 2, 7, 50):
        lazy = mapper(dd.from_pandas(frame, npartitions=parts, sort=False))
        found = lazy.compute().drop(columns="text")  # Dask has other types of strings
        pd.testing.assert_frame_equal(found, whole.drop(columns="text"), check_dtype=False)
    order = np.random.default_rng(0).permutation(len(frame))
    shuffled = mapper(frame.iloc[order]).sort_index()
    pd.testing.assert_frame_equal(shuffled, whole)


def test_a_cut_text_lacks_passages_and_margins_and_nothing_else(index_dir):
    docs, tests = corpus(4)
    settings = {"against": pd.DataFrame({"question": tests}), "ngram": 3, "min_words": 2}
    mapper = Decontaminate(**settings, passages_field="where", cut=True, cut_margin=2,
                           index_dir=index_dir)  # fmt: skip
    result = mapper(frame_of(docs))
    for row in result.dropna(subset="text").itertuples():
        gone = np.zeros(len(row.text) + 1, bool)
        for span in row.where:
            gone[max(0, span["start"] - 2) : span["end"] + 2] = True
        edges = np.flatnonzero(np.diff(np.append(True, gone[:-1]).astype(int)))
        kept = "".join(c for c, is_gone in zip(row.text, gone, strict=False) if not is_gone)
        assert row.kept_text.replace("\n", "") == kept.replace("\n", ""), edges
    assert result["kept_text"].isna().tolist() == result["text"].isna().tolist()
    again = mapper(result[["kept_text"]].rename(columns={"kept_text": "text"}))
    whole = result["contaminated"].fillna(False).sum()
    assert again["contaminated"].fillna(False).sum() < whole / 4

    replaced = Decontaminate(**settings, cut=True, cut_margin=2, kept_text_field="text",
                             index_dir=index_dir)  # fmt: skip
    assert replaced(frame_of(docs))["text"].equals(result["kept_text"].rename("text"))
    lazy = replaced(dd.from_pandas(frame_of(docs), npartitions=3))
    assert lazy[["text"]].compute()["text"].tolist()[:-4] == result["kept_text"].tolist()[:-4]


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("keep_field", [None, "keep"])
def test_filters_keep_rows_with_a_label_and_never_null_ones(index_dir, is_kept, keep_field):
    docs, tests = corpus(6)
    settings = {"against": pd.DataFrame({"question": tests}), "ngram": 3, "min_words": 2}
    plain = Decontaminate(**settings, index_dir=index_dir)(frame_of(docs))
    mapper = Decontaminate(
        **settings, filter_by=is_kept, keep_field=keep_field, index_dir=index_dir
    )
    result = mapper(frame_of(docs))
    expected = (plain["contaminated"] == is_kept).fillna(False).astype(bool)
    if keep_field is None:
        pd.testing.assert_frame_equal(result, plain[expected])
    else:
        assert result["keep"].tolist() == expected.tolist()
        assert result["keep"].dtype == bool


def test_a_text_of_50_mb_an_item_of_one_word_and_a_million_equal_items(index_dir):
    item = "one two three four five six seven eight nine ten"
    items = pd.DataFrame({"question": ["word", *[item] * 1_000_000]})
    mapper = Decontaminate(against=items, passages_field="where", index_dir=index_dir)
    text = "lorem ipsum dolor " * 2_900_000 + item.upper()
    result = mapper(frame_of([text, "word"]))
    assert len(text) > 50_000_000
    assert result["contaminated"].tolist() == [True, False]
    (span,) = result["where"][0]
    assert text[span["start"] : span["end"]] == item.upper()
    assert result["contaminated_by"][0] == "frame#1"
    about = mapper.index.about
    assert about["sources"] == {"frame": {"items": 1_000_001, "distinct": 1, "too_short": 1}}


def test_files_of_several_formats_fields_and_ids(tmp_path, index_dir):
    first = [f"alpha beta gamma delta {n} epsilon zeta eta theta" for n in range(3)]
    lines = [{"question": text, "answer": f"{text} answer", "key": f"k{n}"}
             for n, text in enumerate(first)]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pd.DataFrame({"question": first[:1], "id": [7]}).to_parquet(tmp_path / "b.parquet")
    paths = [str(tmp_path / "*.jsonl"), tmp_path / "b.parquet"]
    docs = frame_of([first[0], f"{first[1]} answer", "nothing"])

    apart = Decontaminate(against=paths, against_field=["question", "answer"],
                          items_field="all", index_dir=index_dir)  # fmt: skip
    found = apart(docs)["all"].tolist()
    assert [list(each) for each in found] == [
        ["a.jsonl#0/question", "b.parquet#7"],
        ["a.jsonl#1/question", "a.jsonl#1/answer"],
        [],
    ]
    joined = Decontaminate(against=paths[:1], against_field=["question", "answer"],
                           join_fields=True, against_id="key", index_dir=index_dir)  # fmt: skip
    assert joined(frame_of([f"{first[2]} {first[2]} answer"]))["contaminated_by"][0] == "a.jsonl#k2"


def test_an_index_is_saved_once_and_read_from_its_folder(tmp_path, index_dir, monkeypatch):
    docs, tests = corpus(8)
    mapper = Decontaminate(against=pd.DataFrame({"question": tests}), index_dir=index_dir)
    expected = mapper(frame_of(docs))
    (folder,) = index_dir.iterdir()
    monkeypatch.setattr(Decontaminate, "build", None)
    equal = Decontaminate(against=pd.DataFrame({"question": tests}), index_dir=index_dir)
    pd.testing.assert_frame_equal(equal(frame_of(docs)), expected)
    pd.testing.assert_frame_equal(Decontaminate(against=folder)(frame_of(docs)), expected)
    index = open_index(open_store(folder))
    assert index.nbytes < 64 * len(index.ngrams.keys) + 20_000

    with pytest.raises(ValueError, match=r"index of ngram=13, not 12: pass ngram=13"):
        Decontaminate(against=folder, ngram=12)(frame_of(docs))
    (folder / "keys.npy").unlink()
    open_index.__globals__["_opened"].cache_clear()
    with pytest.raises(ValueError, match=r"lacks keys.npy"):
        Decontaminate(against=folder)(frame_of(docs))


def random_items(draw, folder):
    """Write two files of items, and return settings that read them, with the items they make."""
    known = ["".join(draw.choices(LETTERS, k=draw.randint(1, 3))) for _ in range(25)]
    columns = draw.sample(["question", "answer", "body", "id"], draw.randint(2, 4))
    row_ids = draw.choice([None, None, *columns])
    fields = draw.sample(columns, draw.randint(1, len(columns)))
    is_joined, items = draw.random() < 0.5, []
    for name in ("a.jsonl", "b.jsonl"):
        rows = [
            {
                column: draw.choice([None, random_text(draw, known, 0, 12)])
                if column not in ("id", row_ids)
                else random_text(draw, known, 0, 12)
                for column in columns
            }
            for _ in range(draw.randint(1, 20))
        ]
        rows.insert(0, dict.fromkeys(columns, "one text of each column"))
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        key = row_ids or ("id" if "id" in columns and "id" not in fields else None)
        for number, row in enumerate(rows):
            item = f"{name}#{number if key is None else row[key]}"
            texts = [row[field] for field in fields]
            if is_joined:
                items.append((item, "\n".join(text for text in texts if text)))
            else:
                ends = [f"/{field}" if len(fields) > 1 else "" for field in fields]
                items += [(item + end, text) for end, text in zip(ends, texts, strict=True)]
    settings = {"against_field": fields, "join_fields": is_joined, "against_id": row_ids}
    return settings, items


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 400))]
)
def test_random_settings_find_the_same_in_new_items_and_in_their_index(tmp_path, seed):
    draw = random.Random(seed)
    fields, items = random_items(draw, tmp_path)
    ngram = draw.randint(1, 7)
    counting = {
        "ngram": ngram,
        "min_words": draw.randint(1, ngram),
        "max_items": draw.choice([1, 2, 5, 100]),
    }
    threshold = draw.choice([0.01, 0.2, 0.5, 1.0])
    docs = [
        " and ".join(text or "" for _, text in draw.choices(items, k=draw.randint(1, 3))).swapcase()
        for _ in range(20)
    ]
    index_dir = tmp_path / "indexes"
    shown = {"items_field": "all_items", "passages_field": "passages", "threshold": threshold}
    fresh = Decontaminate(
        against=str(tmp_path / "*.jsonl"), index_dir=index_dir, **fields, **counting, **shown
    )
    found = fresh(frame_of(docs))
    assert_is_brute_force(found, docs, items, threshold=threshold, **counting)
    (saved,) = index_dir.iterdir()
    again = Decontaminate(against=saved, **fields, **counting, **shown)
    pd.testing.assert_frame_equal(again(frame_of(docs)), found)


@pytest.mark.parametrize(
    "change",
    [
        {"against_field": "answer"},
        {"against_field": ["question", "answer"]},
        {"against_field": ["answer", "question"], "join_fields": True},
        {"join_fields": True},
        {"against_id": "key"},
        {"ngram": 12},
        {"min_words": 7},
        {"max_items": 9},
    ],
)
def test_an_index_refuses_settings_that_it_was_not_made_with(tmp_path, change):
    item = "one two three four five six seven eight nine"
    items = pd.DataFrame({"question": [item], "answer": [item], "key": [3]})
    Decontaminate(against=items, index_dir=tmp_path).prepare()
    (saved,) = tmp_path.iterdir()
    mapper, docs = Decontaminate(against=saved, **change), frame_of([item])
    name = next(iter(change))
    reader, writer = ParquetReader(str(tmp_path / "docs.parquet")), ParquetWriter(tmp_path / "out")
    docs.to_parquet(tmp_path / "docs.parquet")
    for call in (
        lambda: mapper(docs),
        lambda: mapper(dd.from_pandas(docs, npartitions=1)),
        DecontaminateFiles([reader, mapper, writer]).run,
    ):
        with pytest.raises(ValueError, match=rf"is an index of {name}=.*: pass {name}="):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("query", ["?sig=abc", "?a/b=c&sig=*", ""])
@pytest.mark.parametrize("name", ["items.jsonl", "items.jsonl.gz", "items.parquet"])
def test_a_signed_url_of_items_is_a_file_and_not_asked_for_as_an_index(index_dir, name, query):
    item = "one two three four five six seven eight nine"
    frame, content = pd.DataFrame({"question": [item]}), io.BytesIO()
    if name.endswith("parquet"):
        frame.to_parquet(content)
    else:
        frame.to_json(content, orient="records", lines=True)
    data = content.getvalue()
    data = gzip.compress(data) if name.endswith("gz") else data
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)  # whatever is asked for, as some object stores do
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{name}{query}"
        mapper = Decontaminate(against=url, index_dir=index_dir)
        assert mapper(frame_of([item]))["contaminated_by"].tolist() == [f"{name}#0"]
        server.shutdown()
    assert {*asked} == {f"/{name}{query}"}


def test_an_index_elsewhere_is_copied_once(index_dir):
    import fsspec

    docs, tests = corpus(2, docs=40)
    url = "memory://indexes"
    expected = Decontaminate(against=pd.DataFrame({"question": tests}), index_dir=index_dir)
    away = Decontaminate(against=pd.DataFrame({"question": tests}), index_dir=url)
    pd.testing.assert_frame_equal(away(frame_of(docs)), expected(frame_of(docs)))
    assert fsspec.filesystem("memory").find("/indexes")


def test_equal_settings_are_equal_and_pickles_hold_no_items(index_dir):
    tests = [f"one two three four five six seven eight {n}" for n in range(20_000)]
    items = pd.DataFrame({"question": tests})
    one, other = (Decontaminate(against=items, index_dir=index_dir) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert dask.base.tokenize(one) == dask.base.tokenize(other)
    changed = Decontaminate(against=items, threshold=0.3, index_dir=index_dir)
    assert dask.base.tokenize(changed) != dask.base.tokenize(one)
    one.prepare()
    assert len(pickle.dumps(one)) < 20_000
    restored = pickle.loads(pickle.dumps(one))
    assert restored == one
    assert restored(frame_of([tests[3]]))["contaminated_by"][0] == "frame#3"


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"against": 3}, TypeError, "against=3 is a int: pass files of test items"),
        ({"against": dd.from_pandas(frame_of(["a"]), npartitions=1)}, TypeError, "ddf.compute"),
        ({"against": []}, TypeError, "pass files of test items"),
        ({"against": [""]}, TypeError, "holds what is no path"),
        ({"ngram": 5}, ValueError, "min_words=8 and ngram=5: pass 1 <= min_words <= ngram"),
        ({"ngram": 300}, ValueError, "<= 255"),
        ({"threshold": 0}, ValueError, "would call every document contaminated"),
        ({"threshold": 2}, ValueError, "not from 0 to 1"),
        ({"kept_text_field": "k"}, ValueError, "pass cut=True"),
        ({"keep_field": "k"}, ValueError, "has no decision to write"),
        ({"against_field": []}, ValueError, "names no column"),
        ({"filter_by": "no"}, TypeError, "pass True or False"),
        ({"cut_margin": -1}, ValueError, "at least 0"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings, error, words):
    with pytest.raises(error, match=words):
        Decontaminate(**{"against": "items.jsonl", **settings})


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"text_field": "body"}, ValueError, "no text column 'body'"),
        ({"label_field": "text"}, ValueError, "is a column that is read"),
        ({"label_field": "n"}, ValueError, "already has"),
        ({"against_field": "quest"}, ValueError, "has none of the columns .*Did you mean"),
        ({"against_id": "key"}, ValueError, "has no column of ids 'key'"),
        ({"min_words": 10}, ValueError, "none of the 1 test items has 10 words, .* longest has 9"),
        ({"text_field": "n"}, TypeError, "not strings"),
    ],
)
def test_wrong_columns_are_refused_at_the_call(index_dir, settings, error, words):
    items = pd.DataFrame({"question": ["a b c d e f g h i"], "number": [1]})
    mapper = Decontaminate(against=items, index_dir=index_dir, **settings)
    with pytest.raises(error, match=words):
        mapper(frame_of(["a text"]).assign(n=1))


def test_a_worker_that_does_not_reach_the_index_says_what_to_do(index_dir):
    import shutil

    items = pd.DataFrame({"question": ["a b c d e f g h i"]})
    lazy = Decontaminate(against=items, index_dir=index_dir)(
        dd.from_pandas(frame_of(["a text"]), npartitions=1)
    )
    shutil.rmtree(index_dir)
    with pytest.raises(FileNotFoundError, match="pass index_dir="):
        lazy.compute(scheduler="sync")
