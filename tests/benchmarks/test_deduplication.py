"""The deduplication benchmark plants what it says, and counts what is there."""

import itertools
import subprocess
import sys
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from benchmarks import deduplication, plots, recall
from benchmarks.deduplicators import character_ngrams, components, groups_of, word_ngrams
from benchmarks.planted import BANNER, BLANKS, PLANTED, edit_words, write_corpus
from tests.benchmarks.checks import check_times
from tests.benchmarks.test_plots import is_drawn

DOCUMENTS = 400


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), DOCUMENTS, rows_per_file=150)


@pytest.fixture(scope="module")
def frame(corpus):
    return pd.concat(map(pd.read_parquet, sorted(corpus.iterdir()))).set_index("id")


def test_documents_are_distinct_numbered_and_of_web_like_lengths(corpus, frame):
    assert frame.index.tolist() == list(range(DOCUMENTS))
    assert [len(pd.read_parquet(path)) for path in sorted(corpus.iterdir())] == [150, 150, 98, 2]
    planted = pd.read_parquet(corpus.parent / PLANTED)
    texts = frame["text"].drop(planted["second"]).iloc[:-2]
    assert texts.is_unique
    assert texts.str.len().between(300, 4_000).all()
    assert 700 < texts.str.len().median() < 1_300
    assert pd.read_parquet(corpus / BLANKS)["text"].fillna("null").tolist() == ["null", ""]


def test_copies_are_edited_as_much_as_the_list_says(corpus, frame):
    planted = pd.read_parquet(corpus.parent / PLANTED)
    assert not planted[["first", "second"]].stack().duplicated().any()
    assert planted["kind"].value_counts().to_dict() == {"words": 40, "exact": 4, "prefix": 4}
    for row in planted.itertuples():
        first, second = frame.loc[[row.first, row.second], "text"]
        if row.kind == "words":
            words = Counter(first.split())
            lost = words - Counter(second.split())  # a word that is put in loses none
            assert lost.total() <= max(1, round(row.edit_share * words.total()))
            assert first != second
        else:
            assert second == (BANNER + first if row.kind == "prefix" else first)


def test_edits_leave_white_space_and_change_as_many_words_as_asked():
    text = "  ".join(f"w{number}" for number in range(200))
    edited = edit_words(text, 0.1, ["new"], np.random.default_rng(3))
    kept = [word for word in edited.split() if word != "new"]
    assert 180 <= len(kept) < 200
    assert edited.count("new") + (200 - len(kept)) >= 20
    assert edited.count("  ") == text.count("  ")


def test_a_corpus_is_the_same_again_and_grows_beyond_the_installed_text(
    corpus, tmp_path, monkeypatch
):
    again = write_corpus(tmp_path / "again", DOCUMENTS, rows_per_file=150)
    for path in sorted(corpus.iterdir()):
        pd.testing.assert_frame_equal(pd.read_parquet(path), pd.read_parquet(again / path.name))
    lines = [f"line {number} of a file that is the only one there is" for number in range(500)]
    monkeypatch.setattr("benchmarks.planted.file_sources", lambda rng: iter([("one", lines)]))
    grown = write_corpus(tmp_path / "grown", 200)
    sources = pd.concat(map(pd.read_parquet, grown.iterdir()))["source"]
    assert set(sources) == {"one", "shuffled", "blank"}
    assert len(sources) == 200


def test_ngrams_are_runs_of_characters_and_of_words():
    assert character_ngrams("abc") == {"abc"}
    assert character_ngrams("a" * 24 + "bc") == {"a" * 24, "a" * 23 + "b", "a" * 22 + "bc"}
    assert word_ngrams("One two\nthree four five six") == {
        "one two three four five",
        "two three four five six",
    }


def test_components_and_groups_are_those_of_networkx():
    networkx = pytest.importorskip("networkx")
    edges = np.random.default_rng(0).integers(0, 300, (150, 2)).tolist()
    groups = components(edges)
    expected = {
        frozenset(members)
        for members in networkx.connected_components(networkx.Graph(edges))
        if len(members) > 1
    }
    found = groups.groupby("group")["id"].agg(frozenset)
    assert set(found) == expected
    assert all(name == min(members) for name, members in found.items())
    assert groups.loc[groups["keep"], "id"].tolist() == groups.loc[groups["keep"], "group"].tolist()
    assert groups_of(np.empty((0, 2), int)).empty


@pytest.fixture(scope="module")
def some_texts_and_pairs(frame):
    texts = frame["text"].iloc[:200]
    sets = [character_ngrams(text) for text in texts]
    similarity = {
        (i, j): len(sets[i] & sets[j]) / len(sets[i] | sets[j])
        for i, j in itertools.combinations(range(len(sets)), 2)
    }
    return texts, similarity


def test_similar_pairs_are_those_of_brute_force(some_texts_and_pairs, monkeypatch):
    texts, similarity = some_texts_and_pairs
    monkeypatch.setattr(recall, "BLOCK_ROWS", 150)  # two blocks
    pairs = recall.similar_pairs(recall.character_sets(texts))
    found = {(row.first, row.second): row.similarity for row in pairs.itertuples(index=False)}
    expected = {pair: value for pair, value in similarity.items() if value >= recall.ALIKE}
    assert len(expected) > 5
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected)


def test_recall_counts_pairs_in_their_bins_and_knows_what_to_expect():
    rng = np.random.default_rng(1)
    similarity = np.append(rng.uniform(0.4, 1, 3_000), 1.0)
    firsts = np.arange(len(similarity)) * 2
    pairs = pd.DataFrame({"first": firsts, "second": firsts + 1, "similarity": similarity})
    is_caught = rng.random(len(pairs)) < 1 - (1 - similarity**8) ** 14
    caught = pairs[is_caught]
    groups = groups_of(
        np.concatenate([caught[["first", "first"]], caught[["second", "first"]]]).reshape(-1, 2)
    )
    bins = recall.recall_by_similarity(groups, pairs, 14, 8)
    assert sum(each["pairs"] for each in bins) == (similarity >= 0.5).sum()
    assert sum(each["interval"][0] <= each["found"] <= each["interval"][1] for each in bins) >= 9
    for each in bins:
        inside = (similarity >= each["from"]) & (
            (similarity < each["to"]) | (each["to"] == 1) & (similarity == 1)
        )
        assert each["found"] == pytest.approx(is_caught[inside].mean())
    # Facts of the bands that FineWeb and NeMo Curator use.
    assert recall.band_probability(0.8, 14, 8) == pytest.approx(0.924, abs=5e-4)
    assert recall.band_probability(0.8, 20, 13) == pytest.approx(0.677, abs=5e-4)


def test_precision_compares_what_goes_with_what_stays():
    texts = ["a b c d e f", "a b c d e g", "x y z a b", "p q r s"]
    sets = {"words": recall.word_sets(texts)}
    groups = pd.DataFrame({"id": [0, 1, 2], "group": [0, 0, 0], "keep": [True, False, False]})
    found = recall.precision(groups, sets)
    assert found["removed"] == 2
    assert found["words"] == {"0.5": 0.5, "0.7": 0.0, "0.8": 0.0}


# A process that holds 100 MB and starts one that holds as much.
HOLDING = """
import subprocess, sys, time
held = bytearray(100_000_000)
if len(sys.argv) < 2:
    subprocess.run([sys.executable, __file__, "child"], check=True)
else:
    deadline = time.perf_counter() + 1
    while time.perf_counter() < deadline:
        pass
"""


def test_memory_and_time_are_those_of_all_processes(tmp_path):
    script = tmp_path / "holding.py"
    script.write_text(HOLDING)
    used = deduplication._child_seconds()
    process = subprocess.Popen([sys.executable, script])
    peak = deduplication._peak_bytes(process)
    assert process.returncode == 0
    assert 200e6 < peak < 300e6
    assert 0.3 < deduplication._child_seconds() - used < 3


def test_the_last_words_of_a_failed_process_are_told(corpus):
    options = deduplication.parse_options(["--peers", sys.executable])
    with pytest.raises(RuntimeError, match=r"'text-dedup' ended with 1: (.|\n)*No module named"):
        deduplication.run_way("text-dedup", corpus, "14x8", options)


def test_peers_that_are_not_installed_are_left_out():
    options = deduplication.parse_options(["--peers", "nowhere"])
    ways, left_out = deduplication.available_ways(options)
    assert ways == list(deduplication.OURS)
    assert len(left_out) == 5
    assert all("nowhere is missing" in reason for reason in left_out.values())
    assert deduplication.peer_versions("nowhere") == {}


@pytest.mark.slow
def test_a_smoke_run_writes_a_complete_result(smoke_run, tmp_path):
    result, path, printed = smoke_run("deduplication", "--peers", "nowhere")
    corpus = result["corpora"]["14x8"]
    assert list(corpus["variants"]) == list(deduplication.OURS)
    for found in corpus["variants"].values():
        check_times(found, result["settings"])
        assert found["documents_per_second"] == pytest.approx(300 / found["median_seconds"])
        assert found["recall_of_planted"]["exact 0"] == 1
        assert 250 < found["kept"] < 298
        assert found["peak_resident_bytes"] > 100e6
    plain, verified = (corpus["variants"][way] for way in deduplication.OURS)
    assert plain["kept"] <= verified["kept"]
    found = result["recall"]["14x8"]
    assert all(bins["recall"][-1]["found"] == 1 for bins in found.values())
    words = [found[way]["precision"]["words"]["0.7"] for way in deduplication.OURS]
    assert words[0] <= words[1]
    assert [step["documents"] for step in result["growth"]] == [200, 300]
    assert "datatrove is left out: nowhere is missing" in printed
    pictures = plots.main([str(path), "--output", str(tmp_path)])
    assert len(pictures) == 3
    assert all(map(is_drawn, pictures))
