"""What users see of a class before they call it: in an editor, in help() and in dir()."""

import inspect
import pydoc
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from mypy import api

import gpuclassify
from gpuclassify import DomainClassifier, Embedder, ExactDuplicates, ModelMapper
from gpuclassify.classifiers import FAMILIES
from gpuclassify.dedup.duplicates import Duplicates
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.settings.options import ModelOptions

PUBLIC = [getattr(gpuclassify, name) for name in gpuclassify.__all__ if name != "Deberta"]
CLASSES = [kind for kind in PUBLIC if isinstance(kind, type)]
WITH_SETTINGS = [kind for kind in CLASSES if issubclass(kind, (TextMapper, Duplicates))]
TWO_SCREENS = 140  # lines of 80 columns: explanations, and after them the methods
ROOT = Path(__file__).parents[2]
CALLS = """
from pathlib import Path
from gpuclassify import *

DomainClassifier()
DomainClassifier(model=Path("a"), filter_by=["Games"], min_score={"Games": 0.5}, token="t")
MultilingualDomainClassifier(filter_by="Games", engine="packed", max_chars=None)
QualityClassifier(filter_by={"High"}, labels=("Low", "High"), min_score=1)
ContentTypeClassifier(confidence_field="sure", min_confidence=0.5, score_format="struct")
FineWebEduClassifier(int_score_field="whole")
FineWebMixtralEduClassifier(dtype="bfloat16", device="cuda:1")
FineWebNemotronEduClassifier(long_text="windows", window_overlap=8)
AegisClassifier(template=Path("a"), categories_field="c")
InstructionDataGuardClassifier(filter_by=False, adapter="a")
PromptTaskComplexityClassifier(batch_size=8)
DistributedDataClassifier(model="a", problem_type="regression")
Embedder(pooling="cls", prompt="query: ")
HeadClassifier(heads={"a": Path("a"), "b": "o/b"}, backbone="m", min_score={"a": 3, "b": {"x": 1}})
ModelMapper(model="a", unpack_inference_batch=False)
ExactDuplicates(id_field="id", keep_by=["quality"])
FuzzyDuplicates(keep_by="quality", measure="containment")
SemanticDuplicates(embedder=Embedder(), threshold=0.9)


class Mine(DistributedDataClassifier):
    new_columns = {"one": "float32"}


Mine(filter_by=["a"])
Mine(filterby=["a"])  # call-arg
DomainClassifier(filterby="Games")  # call-arg
DomainClassifier("nvidia/domain-classifier")  # call-arg
DomainClassifier(int_score_field="whole")  # call-arg
DomainClassifier(batch_size="8")  # arg-type
DomainClassifier(engine="paked")  # arg-type
MultilingualDomainClassifier(filter_by=3)  # arg-type
QualityClassifier(min_score={"High": "much"})  # dict-item
FineWebEduClassifier(int_score_field=5)  # arg-type
AegisClassifier(score_field="s")  # call-arg
InstructionDataGuardClassifier(filter_by="False")  # arg-type
PromptTaskComplexityClassifier(filter_by="a")  # call-arg
DistributedDataClassifier(problem_type="regresion")  # arg-type
Embedder(label_field="a")  # call-arg
HeadClassifier()  # call-arg
HeadClassifier(heads={"a": 3})  # dict-item
Embedder(normalize="yes")  # arg-type
ModelMapper(label_field="a")  # call-arg
ExactDuplicates(threshold=0.5)  # call-arg
FuzzyDuplicates(measure="cosine")  # arg-type
SemanticDuplicates(embedder=3)  # arg-type
"""


def test_type_checkers_know_every_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # where mypy's settings and its cache are
    calls = tmp_path / "calls.py"
    calls.write_text(CALLS)
    report, broken, _ = api.run([str(calls)])
    assert not broken
    found = re.findall(r"calls.py:(\d+): error: .*\[([\w-]+)\]", report)
    lines = enumerate(CALLS.splitlines(), 1)
    expected = [(str(n), line.rpartition("# ")[2]) for n, line in lines if "  # " in line]
    assert found == expected, report


@pytest.mark.parametrize("kind", WITH_SETTINGS, ids=lambda kind: kind.__name__)
def test_help_explains_every_argument_on_two_screens(kind):
    shown = pydoc.plain(pydoc.render_doc(kind))
    for name in inspect.signature(kind).parameters:
        (explained,) = re.findall(rf"^ \|  {name}(?: \(.*\))?: +\S.+$", shown, re.M)
        assert len(explained) <= 80
    assert sum(-(-len(line) // 80) or 1 for line in shown.splitlines()) <= TWO_SCREENS


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_no_constructor_hides_its_arguments(kind):
    kinds = {parameter.kind for parameter in inspect.signature(kind).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_what_a_class_says_of_an_argument_stands_in_place_of_the_shared_words():
    class Said(DomainClassifier):
        """Said.

        Parameters
        ----------
        max_chars : int
            Only the first ones.

        Raises
        ------
        ValueError
            Never.
        """

    explained, _, raises = Said.__doc__.partition("Raises\n------\n")
    assert "max_chars: Only the first ones.\n" in explained
    assert "text_field: Column of the text.\n" in explained
    assert raises == "ValueError\n    Never."
    assert "max_chars: Only" not in DomainClassifier.__doc__


def test_a_class_without_a_docstring_has_that_of_its_base():
    class Silent(DomainClassifier):
        pass

    assert inspect.getdoc(Silent) == inspect.getdoc(DomainClassifier)


def test_dir_shows_public_names_alone():
    assert dir(gpuclassify) == sorted(gpuclassify.__all__)
    mapper = ["describe", "labels", "options", "published_labels", "schema", "setup", "teardown"]
    for kind in (*FAMILIES.values(), Embedder, ModelMapper):
        assert dir(kind) == mapper
        assert dir(kind(model="owner/model")) == mapper
    assert dir(ExactDuplicates) == ["remove", "summarize"]
    settings = list(inspect.signature(ExactDuplicates).parameters)
    assert dir(ExactDuplicates()) == sorted(["remove", "summarize", *settings])


def test_dir_of_ones_own_class_shows_its_own_names_too():
    class Own(ModelMapper):
        new_columns = {"one": "float32"}

        def columns(self, outputs):
            return {"one": outputs[:, 0]}

    assert set(dir(Own)) - set(dir(ModelMapper)) == {"columns", "new_columns"}


@pytest.mark.parametrize("use_jedi", [False, True])
def test_tab_completion_offers_the_public_names(use_jedi):
    shell = InteractiveShell()
    shell.Completer.use_jedi = use_jedi
    shell.user_ns["classifier"] = classifier = DomainClassifier()
    with provisionalcompleter():
        offered = [each.text.lstrip(".") for each in shell.Completer.completions("classifier.", 11)]
    assert sorted(offered) == dir(classifier)


def test_every_public_name_is_there():
    for kind in WITH_SETTINGS:
        needed = set(kind.public_names) - {"options"}  # of objects alone
        assert all(hasattr(kind, name) for name in needed)


def test_settings_of_ones_own_are_shown_beside_the_shared_ones():
    @dataclass(frozen=True, kw_only=True)
    class OwnOptions(ModelOptions):
        """Own.

        Attributes
        ----------
        threshold : float
            Where it begins.
        """

        threshold: float = 0.5

    class Own(ModelMapper):
        """Own."""

        Options = OwnOptions

    shown = inspect.signature(Own).parameters
    assert list(shown)[:2] == ["model", "threshold"]
    assert shown["threshold"].annotation is float
    assert "threshold: Where it begins.\n" in Own.__doc__
    assert Own(model="owner/model", threshold=0.7).options.threshold == 0.7


def test_a_token_is_an_argument_that_no_settings_hold():
    options = DomainClassifier(token="hf_secret").options
    assert "hf_secret" not in repr(options) + repr(vars(options))
