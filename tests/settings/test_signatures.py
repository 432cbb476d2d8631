"""What users see of a class before they call it: in an editor, in help() and in dir()."""

import inspect
import pydoc
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import gpuclassify
from gpuclassify import (
    DomainClassifier,
    Embedder,
    ExactDuplicates,
    ModelMapper,
    PatternSpans,
    PromptClassifier,
    Qwen3GuardClassifier,
    Signals,
    TaxonomyClassifier,
    ZeroShotClassifier,
)
from gpuclassify.classifiers import FAMILIES
from gpuclassify.corpus.dedup.duplicates import Duplicates
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.settings.options import ModelOptions

PUBLIC = [getattr(gpuclassify, name) for name in gpuclassify.__all__ if name != "Deberta"]
CLASSES = [kind for kind in PUBLIC if isinstance(kind, type)]
WITH_SETTINGS = [kind for kind in CLASSES if issubclass(kind, (TextMapper, Duplicates))]
# Lines of 80 columns: one of the signature for each argument, and the explanations. How help() lays
# out a signature and the methods below differs between versions of Python.
TWO_SCREENS = 130
THREE_SCREENS = 195  # for questions, which have twenty settings more
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
PromptClassifier(model="a", prompt="{text}", answers=["b", "c"], max_new_tokens=9)
Qwen3GuardClassifier(filter_by="Safe", confidences=True)
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
PromptClassifier(model="a", prompts="{text}")  # call-arg
Qwen3GuardClassifier(confidences="yes")  # arg-type
Embedder(label_field="a")  # call-arg
HeadClassifier()  # call-arg
HeadClassifier(heads={"a": 3})  # dict-item
Embedder(normalize="yes")  # arg-type
ModelMapper(label_field="a")  # call-arg
ExactDuplicates(threshold=0.5)  # call-arg
FuzzyDuplicates(measure="cosine")  # arg-type
SemanticDuplicates(embedder=3)  # arg-type
"""


@pytest.mark.slow
def test_type_checkers_know_every_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # where mypy's settings and its cache are
    calls = tmp_path / "calls.py"
    calls.write_text(CALLS)
    command = [
        sys.executable,
        "-m",
        "mypy",
        calls,
    ]  # in this process it changes the recursion limit
    done = subprocess.run(command, capture_output=True, text=True)
    report, broken = done.stdout, done.stderr
    assert not broken
    found = re.findall(r"calls.py:(\d+): error: .*\[([\w-]+)\]", report)
    lines = enumerate(CALLS.splitlines(), 1)
    expected = [(str(n), line.rpartition("# ")[2]) for n, line in lines if "  # " in line]
    assert found == expected, report


@pytest.mark.parametrize("kind", WITH_SETTINGS, ids=lambda kind: kind.__name__)
def test_help_explains_every_argument_on_few_screens(kind):
    names, explanations = inspect.signature(kind).parameters, inspect.getdoc(kind)
    shown = pydoc.plain(pydoc.render_doc(kind)).splitlines()
    for name in names:
        (explained,) = re.findall(rf"^{name}(?: \(.*\))?: +\S.+$", explanations, re.M)
        assert f" |  {explained}" in shown
        assert len(f" |  {explained}") <= 80
    most = THREE_SCREENS if issubclass(kind, PromptClassifier) else TWO_SCREENS
    assert len(names) + sum(-(-len(line) // 76) or 1 for line in explanations.splitlines()) <= most


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_no_constructor_hides_its_arguments(kind):
    kinds = {parameter.kind for parameter in inspect.signature(kind).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_long_settings_of_questions_are_shown_as_far_as_they_tell_something():
    asks = PromptClassifier(model="o/m", prompt="An ad?\n\n{text}", answers=["yes", "no"])
    assert repr(asks) == (
        "PromptClassifier(model='o/m', prompt='An ad?\\n\\n{text}', answers=('yes', 'no'))"
    )
    assert repr(TaxonomyClassifier()) == "TaxonomyClassifier(model='EssentialAI/eai-distill-0.5b')"
    harms = {**dict(Qwen3GuardClassifier().options.fields), "qwen3guard_safety": ["a", "b"]}
    assert len(repr(Qwen3GuardClassifier(fields=harms))) < 200
    for kind in (TaxonomyClassifier, Qwen3GuardClassifier):
        assert "fields: 'Any' = Ellipsis" in str(inspect.signature(kind))
        assert len(kind()._repr_html_()) < 2_500


def test_dir_shows_public_names_alone():
    assert dir(gpuclassify) == sorted(gpuclassify.__all__)
    mapper = ["describe", "labels", "options", "published_labels", "schema", "setup", "teardown"]
    for kind in (*FAMILIES.values(), Embedder, ModelMapper):
        assert dir(kind) == mapper
        asked = {} if kind in (PatternSpans, Signals) else {"model": "owner/model"}
        if kind is PromptClassifier:
            asked |= {"prompt": "{text}", "answers": ["a", "b"]}
        if kind is ZeroShotClassifier:
            asked["labels"] = ["a", "b"]
        assert dir(kind(**asked)) == mapper
    assert dir(ExactDuplicates) == ["remove", "summarize"]
    settings = list(inspect.signature(ExactDuplicates).parameters)
    assert dir(ExactDuplicates()) == sorted(["remove", "summarize", *settings])


@pytest.mark.parametrize("use_jedi", [False, True])
def test_tab_completion_offers_the_public_names(use_jedi):
    shell = InteractiveShell()
    shell.Completer.use_jedi = use_jedi
    shell.user_ns["classifier"] = classifier = DomainClassifier()
    with provisionalcompleter():
        offered = [each.text.lstrip(".") for each in shell.Completer.completions("classifier.", 11)]
    assert sorted(offered) == dir(classifier)


def test_settings_and_words_of_ones_own_stand_beside_the_shared_ones():
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
        """Own.

        Parameters
        ----------
        max_chars : int
            Only the first ones.
        """

        Options = OwnOptions
        new_columns = {"one": "float32"}

        def columns(self, outputs):
            return {"one": outputs[:, 0]}

    class Silent(Own):
        pass

    shown = inspect.signature(Own).parameters
    assert list(shown)[:2] == ["model", "threshold"]
    assert shown["threshold"].annotation is float
    assert "threshold: Where it begins.\n" in Own.__doc__
    assert "max_chars: Only the first ones.\n" in Own.__doc__
    assert "text_field: Column of the text.\n" in Own.__doc__
    assert "max_chars: Only" not in ModelMapper.__doc__
    assert inspect.getdoc(Silent) == inspect.getdoc(Own)
    assert Own(model="owner/model", threshold=0.7).options.threshold == 0.7
    assert set(dir(Own)) - set(dir(ModelMapper)) == {"Options", "columns", "new_columns"}
