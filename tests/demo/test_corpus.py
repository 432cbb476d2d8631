import json
import subprocess
import sys
import textwrap
from collections import Counter

import pytest

from examples.demo import corpus
from examples.demo.corpus import AREAS, Document, collect_documents, split_documents


@pytest.fixture(scope="module")
def documents():
    return collect_documents(max_documents=700)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `samples` of known files, the only one of the area Samples."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(corpus, "AREAS", {"Samples": ("samples",)})
    monkeypatch.setattr(corpus, "_AREA_OF_PREFIX", {"samples": "Samples"})
    root = tmp_path / "samples"
    root.mkdir()
    (root / "__init__.py").write_text("")
    return root


def sentence(word):
    return (
        f"A sentence about {word}, which goes on until {word} has filled eighty characters or so."
    )


def test_two_processes_collect_the_same_documents_in_the_same_order(documents):
    program = (
        "import json; from examples.demo.corpus import collect_documents;"
        "print(json.dumps([[d.text, d.area, d.module] for d in"
        " collect_documents(max_documents=700)]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert json.loads(output) == [[d.text, d.area, d.module] for d in documents]


def test_every_area_contributes_its_equal_share(documents):
    assert Counter(d.area for d in documents) == dict.fromkeys(AREAS, 700 // len(AREAS))


def test_documents_are_long_enough_cleaned_and_storable(documents):
    for document in documents:
        assert len(document.text) >= 80
        assert document.text == document.text.strip()
        document.text.encode()


def test_modules_belong_to_their_area(documents):
    for document in documents:
        assert document.module.startswith(AREAS[document.area])


def test_the_longest_prefix_decides_the_area():
    assert corpus._area_of("numpy.ma.core") == "Data_Tables"
    assert corpus._area_of("numpy.linalg._linalg") == "Mathematics"
    assert corpus._area_of("numpyro") is None


def test_tests_and_vendored_copies_are_left_out_unless_named():
    assert corpus._area_of("pandas.tests.frame") is None
    assert corpus._area_of("pip._vendor.rich.console") is None
    assert corpus._area_of("pip._vendor.requests.api") == "Networking"


def test_docstrings_of_modules_classes_and_functions_count_without_an_import(package):
    source = f'''
        """{sentence("modules")}"""
        raise RuntimeError("imported")
        class Sample:
            """{sentence("classes")}"""
            def short(self):
                """Too short."""
        async def run():
            """
            {sentence("functions")}

                indented
            """
    '''
    (package / "all.py").write_text(textwrap.dedent(source))
    found = collect_documents()
    assert {d.module for d in found} == {"samples.all"}
    assert [d.text for d in found] == [
        sentence("modules"),
        sentence("classes"),
        sentence("functions") + "\n\n    indented",
    ]


def test_unreadable_files_and_unstorable_texts_are_passed_over(package):
    (package / "broken.py").write_text("def (")
    (package / "binary.py").write_bytes(b"\xff\xfe\x00")
    (package / "surrogate.py").write_text(f'"""{sentence("x")} \\ud800"""')
    (package / "good.py").write_text(f'"""{sentence("good files")}"""')
    assert [d.module for d in collect_documents()] == ["samples.good"]


def test_documents_that_open_alike_are_collected_once(package):
    (package / "one.py").write_text(f'"""{sentence("copies")}"""')
    (package / "two.py").write_text(f'"""{sentence("copies").upper().replace(",", " -")}"""')
    assert len(collect_documents()) == 1


def test_a_missing_package_contributes_nothing(package, monkeypatch):
    monkeypatch.setattr(corpus, "AREAS", {"Samples": ("no_such_package", "samples")})
    (package / "one.py").write_text(f'"""{sentence("presence")}"""')
    assert len(collect_documents()) == 1


def test_too_small_a_bound_is_refused():
    with pytest.raises(ValueError, match="max_documents=3 is less than one for each"):
        collect_documents(max_documents=3)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_package_and_no_text_stands_in_both_halves(documents, seed):
    training, held_out = split_documents(documents, seed)
    assert not {d.package for d in training} & {d.package for d in held_out}
    assert not {d.text for d in training} & {d.text for d in held_out}
    assert len(training) + len(held_out) == len(documents)


def test_both_halves_hold_every_area_about_evenly(documents):
    training, held_out = split_documents(documents)
    for area in AREAS:
        share = [d.area for d in training].count(area) / (700 // len(AREAS))
        assert 0.3 < share < 0.7
    assert {d.area for d in held_out} == set(AREAS)


def test_a_held_out_copy_of_a_training_text_is_dropped():
    documents = [
        Document("The same words, everywhere.", "A", "one.module"),
        Document("the same WORDS everywhere", "A", "two.module"),
    ]
    training, held_out = split_documents(documents)
    assert len(training) == 1
    assert held_out == []


def test_the_seed_decides_the_split(documents):
    assert split_documents(documents, 1) == split_documents(documents, 1)
    assert split_documents(documents, 1) != split_documents(documents, 2)


def test_one_package_cannot_be_split():
    with pytest.raises(ValueError, match=r"\['one'\].*needs at least two"):
        split_documents([Document("text", "A", "one.a"), Document("text", "B", "one.b")])
