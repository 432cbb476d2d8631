"""Settings that are declared once: all that follows from a field of a class."""

import inspect
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from dask.tokenize import tokenize

from gpuclassify import Decontaminate, ExactDuplicates, FuzzyDuplicates, Select
from gpuclassify.commands.options import option_of
from gpuclassify.corpus.scores.buckets import ScoreBuckets, ScoreEdges
from gpuclassify.frames import backend_of
from gpuclassify.mapping.partition_map import RowWiseMap
from gpuclassify.settings.declared import Declared, declared, setting
from gpuclassify.settings.options import StrPath


def lower(text):
    return text.lower()


def upper(text):
    return text.upper()


@declared
class Marked(Declared, RowWiseMap):
    """Mapper that marks rows of some length.

    Parameters
    ----------
    text_field : str
        Column of the text.
    least : int
        Minimum length of a text, in characters. Those of marks count too.
    overwrite : bool
        Replace columns that are there.
    """

    text_field: str = setting(kw_only=False)
    least: int = setting(default=3, least=0, metavar="CHARACTERS", group="Columns and rows")
    overwrite: bool = setting(default=False, changes_results=False)

    def schema(self):
        return pa.schema([("is_long", pa.bool_())])

    def check(self, frame):
        pass

    def meta(self, frame):
        return self.map_frame(frame.iloc[:0])

    def map_frame(self, frame, meta_dtypes=None):
        marks = pa.array(frame[self.text_field].str.len() >= self.least)
        return backend_of(frame).with_columns(frame, {"is_long": marks}, self.schema(), None)


def test_a_setting_of_a_mapper_is_declared_in_one_place():
    mapper = Marked("text", least=5)
    assert str(inspect.signature(Marked)) == (
        "(text_field: str, *, least: int = 3, overwrite: bool = False) -> None"
    )
    assert repr(mapper) == "Marked('text', least=5)" and eval(mapper.code()) == mapper
    assert mapper.describe() == {"text_field": "text", "least": 5}
    assert tokenize(mapper) != tokenize(replace(mapper, least=6))
    assert tokenize(mapper) == tokenize(pickle.loads(pickle.dumps(mapper)))
    with pytest.raises(ValueError, match=r"least=-1 must be at least 0"):
        Marked("text", least=-1)
    with pytest.raises(FrozenInstanceError):
        mapper.least = 6
    frame = pd.DataFrame({"text": ["long enough", "not"]})
    assert mapper(frame)["is_long"].tolist() == [True, False]

    option = option_of(Marked, "least")
    assert option.opts == ["--least"] and option.group == "Columns and rows"
    assert option.metavar == "CHARACTERS"
    assert option.help == "Minimum length of a text, in characters. Default: 3."


@declared
class Settings(Declared):
    """Settings of every kind."""

    path: StrPath | None = None
    number: float = setting(default=0.5, is_share=True)
    names: str | Sequence[str] = setting(default="a", is_tuple=True, what="a name, or several")
    kind: Literal["one", "other"] = "one"
    weights: Mapping[str, float] = setting(factory=dict, is_hashed=False)
    function: Any = None
    label: Any = setting(default=None, convert=lambda label: label and str(label))
    condition: str | None = setting(default=None, what="a condition", least=1)
    token: str | None = setting(default=None, is_secret=True)
    limit: int | None = setting(default=None, changes_results=False)


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("path", Path("a/b"), "a/b"),
        ("number", np.float32(0.25), 0.25),
        ("names", "b", ("b",)),
        ("names", np.array(["b", "c"]), ("b", "c")),
        ("names", pd.Series(["b"]), ("b",)),
        ("kind", np.str_("other"), "other"),
        ("weights", {np.str_("a"): np.int64(1)}, {"a": 1}),
        ("label", np.int64(3), "3"),
        ("limit", np.uint8(3), 3),
    ],
)
def test_equal_values_of_numpy_and_paths_are_equal_settings(name, given, kept):
    one, other = Settings(**{name: given}), Settings(**{name: kept})
    assert getattr(one, name) == kept and type(getattr(one, name)) is type(kept)
    assert one == other and hash(one) == hash(other) and repr(one) == repr(other)
    assert tokenize(one) == tokenize(other) and one.describe() == other.describe()


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("number", 2, "number=2 is not from 0 to 1"),
        ("number", "2", "number='2' is a str: pass a number from 0 to 1"),
        ("names", {"b", "c"}, "is a set without order: pass a list"),
        ("names", ["b", 5], "names=5 is not a name, or several"),
        ("names", 5, "names=5 is not a name, or several"),
        ("kind", "others", "kind='others' is not one of 'one', 'other'. Did you mean 'other'?"),
        ("condition", "", "condition='' is not a condition"),
        ("condition", 5, "condition=5 is not a condition"),
        ("path", "", "path='' is not a name or a path: leave it out for none"),
        ("limit", True, "limit=True is a bool: pass a whole number, or leave it out"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name, wrong, message):
    with pytest.raises((TypeError, ValueError)) as told:
        Settings(**{name: wrong})
    assert message in str(told.value)


def test_a_frame_stays_as_it_is():
    frame = pd.DataFrame({"a": [1]})
    assert Settings(function=frame).function is frame


def test_defaults_are_not_shown_whichever_form_they_have():
    assert repr(Settings(names=("a",), number=np.float64(0.5))) == "Settings()"
    assert repr(Settings(names=["a", "b"])) == "Settings(names=('a', 'b'))"
    assert repr(Settings(function=lower)) == "Settings(function=lower)"
    long = Settings(condition="x" * 200)
    assert len(repr(long)) < 200 < len(long.code()) and eval(long.code()) == long


def test_a_secret_is_part_of_nothing_that_is_shown_or_kept():
    bare, secret = Settings(), Settings(token="hf_secret")
    assert secret.token == "hf_secret" and repr(secret) == repr(bare)
    assert tokenize(secret) == tokenize(bare)
    assert secret.settings() == bare.settings() and secret.describe() == bare.describe()
    assert "secret" not in str([secret, secret.code(), secret.settings(), secret.describe()])


def test_results_depend_on_all_settings_but_those_that_say_otherwise():
    bare, limited = Settings(), Settings(limit=3)
    assert tokenize(limited) == tokenize(bare) and limited.identity() == bare.identity()
    assert limited.settings() != bare.settings() and limited != bare
    others = [
        *({"path": "a"}, {"number": 0.25}, {"names": ["b"]}, {"kind": "other"}, {"label": 3}),
        *({"weights": {"a": 1}}, {"function": lower}, {"function": upper}, {"condition": "a"}),
    ]
    assert len({tokenize(Settings(**other)) for other in ({}, *others)}) == len(others) + 1
    assert len({str(Settings(**other).describe()) for other in others}) == len(others)


ANOTHER_PROCESS = """
from dask.tokenize import tokenize
from gpuclassify import ExactDuplicates, Select
from gpuclassify.settings.declared import Declared, declared, setting

def way(text):
    return text.{way}()

@declared
class Own(Declared):
    '''Settings of a script.'''

    weights: dict = setting(default=None)
    function: object = setting(default=way)

    def apply(self, number):
        return number + {added}

print([tokenize(mapper) for mapper in (
    Own(weights={{"a": 1}}), Select("a > 1"), ExactDuplicates(normalize=way, max_group_size=9))])
"""


def test_tokens_are_those_of_another_process_and_know_code():
    def tokens(seed, **code):
        words = [sys.executable, "-c", ANOTHER_PROCESS.format(**code)]
        environment = {"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": ":".join(sys.path)}
        made = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        return eval(made.stdout)

    first = tokens("1", way="lower", added=1)
    assert first == tokens("2", way="lower", added=1)
    own, select, duplicates = tokens("1", way="lower", added=2)
    assert own != first[0] and [select, duplicates] == first[1:]
    assert [token == known for token, known in zip(
        tokens("1", way="upper", added=1), first, strict=True
    )] == [False, True, False]  # fmt: skip


def test_limits_of_a_recipe_are_no_part_of_its_identity(tmp_path):
    strict, plain = FuzzyDuplicates(max_removed_share=0.5, max_group_size=9), FuzzyDuplicates()
    assert tokenize(strict) == tokenize(plain) and strict.describe() == plain.describe()
    assert "max_group_size=9" in repr(strict)
    assert tokenize(ExactDuplicates()) != tokenize(ExactDuplicates(normalize="basic"))
    items = tmp_path / "items.jsonl"
    items.write_text('{"question": "one two three four five six seven eight nine"}\n')
    near = Decontaminate(against=str(items))
    far = Decontaminate(against=str(items), index_dir=tmp_path / "index", overwrite=True)
    assert tokenize(near) == tokenize(far) and near.describe() == far.describe()
    assert str(tmp_path / "index") not in repr(far)
    assert tokenize(near) != tokenize(Decontaminate(against=str(items), ngram=14))


def test_a_condition_is_shown_in_full():
    where = " and ".join(f"a{number} > {number}" for number in range(40))
    assert eval(repr(Select(where))) == Select(where) == eval(Select(where).code())
    assert Select(where).describe() == {"where": where}


def test_mappers_with_dicts_among_their_settings_are_equal_and_have_a_hash():
    edges = {"score": {"null": [0.5]}}
    one, same = ScoreBuckets(ScoreEdges(2, edges)), ScoreBuckets(ScoreEdges(2, dict(edges)))
    assert one == same and hash(one) == hash(same) and tokenize(one) == tokenize(same)
    assert one != replace(one, combine="min") and one != one.with_edges(ScoreEdges(3, {"a": {}}))
