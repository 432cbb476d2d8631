"""Mappers restart anywhere: equal keys, small pickles, one pinned model, and no secrets in any."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time

import cloudpickle
import dask.dataframe as dd
import pandas as pd
import pytest
from dask.tokenize import tokenize

from gpuclassify import DistributedDataClassifier, DomainClassifier, FineWebEduClassifier
from gpuclassify.hub import ModelChangedError, token_for
from gpuclassify.inference.residency import MODELS
from gpuclassify.settings.code_digest import value_digest
from tests.processes import search_path
from tests.replicas import sample_texts, write_checkpoint

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SECRET = "hf_" + "Secret0123456789"


def lazy_frame():
    return dd.from_pandas(pd.DataFrame({"text": sample_texts(8, seed=2)}), npartitions=2)


# 7. Everything is restartable.

KEYS = """
import json, runpy, pandas as pd, dask.dataframe as dd
from dask.tokenize import tokenize
from gpuclassify import (
    DistributedDataClassifier, DomainClassifier, FineWebEduClassifier, ModelMapper
)

NAMES = {{"b", "a", "c"}}

class Own(ModelMapper):
    new_columns = {{"r": "float32"}}
    def build_module(self, config):
        raise NotImplementedError
    def columns(self, outputs):
        return {{"r": outputs[:, len(NAMES & {{"x", "y"}})]}}

ddf = dd.from_pandas(pd.DataFrame({{"text": ["b", "a"]}}), npartitions=1)
mappers = [
    DomainClassifier(model={domain!r}, filter_by={{"Games", "Sports", "News", "Health"}}),
    FineWebEduClassifier(model={education!r}, min_score=3, filter_by={{"high_quality"}}),
    DistributedDataClassifier(
        model={sequence!r}, score_field="s", min_score={{"LABEL_2": 0.1, "LABEL_0": 0.2}}
    ),
]
keys = [
    [tokenize(m), m(ddf)._name, ddf.map_partitions(m)._name, sorted(map(str, m(ddf).dask))]
    for m in mappers
]
own = tokenize(Own(model={sequence!r}))
print(json.dumps([keys, own, runpy.run_path({script!r}, run_name="__main__")["before"]]))
"""


@pytest.mark.contract
def test_equal_settings_and_code_have_equal_keys_in_every_process_file_and_line(
    run_python, checkpoint, sequence_classifier, tmp_path
):
    models = {
        "domain": str(checkpoint("domain")),
        "education": str(checkpoint("fineweb-edu")),
        "sequence": str(sequence_classifier()),
    }
    found = []
    for number, head in enumerate(("", "import os  # another file\n\n# a comment\n")):
        script = tmp_path / f"script{number}.py"
        script.write_text(head + STAGES)
        body = KEYS.format(**models, script=str(script))
        found.append(json.loads(run_python(body, PYTHONHASHSEED=str(number))))
    assert found[0] == found[1]
    assert len(set(found[0][2].values())) == 8


def test_equal_settings_are_equal_however_they_are_spelt(domain, checkpoint):
    mappers = [
        domain(filter_by=["News", "Games"], score_field="p"),
        domain(filter_by=("Games", "News"), score_field="p"),
        domain(filter_by={"Games", "News"}, prob_column="p"),
        domain(model=str(checkpoint("domain")), filter_by=["Games", "News"], prob_column="p"),
    ]
    assert len(set(mappers)) == 1
    assert len({tokenize(mapper) for mapper in mappers}) == 1
    frame = lazy_frame()
    assert len({mapper(frame)._name for mapper in mappers}) == 1


def test_looking_and_computing_do_not_change_a_mappers_key(domain):
    untouched, used = domain(), domain()
    _ = used.labels
    used(lazy_frame()).compute(scheduler="sync")
    assert tokenize(used) == tokenize(untouched)
    assert used == untouched


@pytest.mark.contract
@pytest.mark.parametrize(
    "options",
    [
        {"filter_by": "Games"},
        {"max_chars": 100},
        {"text_field": "other"},
        {"dtype": "bfloat16"},
        {"overwrite": True},
        {"loader": "crossfit"},
        {"label_field": "label"},
        {"model": "other"},
    ],
)
def test_every_setting_counts_in_the_key(domain, sequence_classifier, tmp_path, options):
    if "model" in options:
        options = {"model": write_checkpoint(tmp_path / "other", "domain", seed=5)}
    assert tokenize(domain(**options)) != tokenize(domain())
    assert domain(**options) != domain()


def test_classes_with_the_same_settings_have_different_keys(checkpoint):
    settings = {"model": checkpoint("domain"), "label_field": "label", "max_chars": None}
    settings["max_seq_length"] = None
    classes = (DomainClassifier, DistributedDataClassifier)
    assert len({tokenize(kind(**settings)) for kind in classes}) == 2


def test_a_mapper_mapped_by_dask_itself_does_the_same(domain):
    frame = lazy_frame()
    expected = domain()(frame)
    mapped = frame.map_partitions(domain())
    pd.testing.assert_frame_equal(mapped._meta, expected._meta)
    pd.testing.assert_frame_equal(
        mapped.compute(scheduler="sync"), expected.compute(scheduler="sync")
    )


def test_a_subclass_with_its_own_constructor_is_a_mapper_too(checkpoint):
    class MyClassifier(DistributedDataClassifier):
        def __init__(self, cache_dir=None, label_field="my_pred", **settings):
            super().__init__(
                model_identifier=str(checkpoint("domain")),
                cache_dir=cache_dir,
                label_field=label_field,
                max_chars=3000,
                max_seq_length=512,
                **settings,
            )

    frame = lazy_frame()
    found = MyClassifier(autocast=False)(frame).compute(scheduler="sync")
    expected = DomainClassifier(model=checkpoint("domain"), autocast=False)(frame)
    assert list(found.my_pred) == list(expected.compute(scheduler="sync").domain_pred)
    assert tokenize(MyClassifier()) == tokenize(MyClassifier())


# 8. One identity.


@pytest.fixture
def own_model(checkpoint, tmp_path):
    """A copy of the domain checkpoint that a test may change; not resident in this process."""
    shutil.copytree(checkpoint("domain"), tmp_path / "own")
    yield tmp_path / "own"
    MODELS.evict()


def rewrite(model):
    shutil.rmtree(model)
    write_checkpoint(model, "domain", seed=9)


def touch_weights(model):
    later = time.time_ns() + 10**9
    os.utime(model / "model.safetensors", ns=(later, later))


@pytest.mark.parametrize("change", [rewrite, touch_weights])
def test_a_changed_directory_is_another_model_and_refused_by_what_was_planned(own_model, change):
    frame = lazy_frame()
    before = DomainClassifier(model=own_model, autocast=False)
    planned = before(frame)
    change(own_model)
    after = DomainClassifier(model=own_model, autocast=False)
    assert planned._name != after(frame)._name
    assert tokenize(before) != tokenize(after)
    with pytest.raises(ModelChangedError, match="build the classifier and its frame again"):
        planned.compute(scheduler="sync")


def test_a_mapper_stays_with_the_model_that_it_was_pinned_to(own_model):
    classifier = DomainClassifier(model=own_model, autocast=False)
    _ = classifier.labels
    rewrite(own_model)
    with pytest.raises(ModelChangedError, match="own"):
        classifier(lazy_frame())


def test_a_resident_model_serves_no_plan_whose_files_are_others(own_model):
    frame = lazy_frame()
    planned = DomainClassifier(model=own_model, score_field="s", autocast=False)(frame)
    before = planned.compute(scheduler="sync")
    rewrite(own_model)
    with pytest.raises(ModelChangedError, match=r"differs \(last written: "):
        planned.compute(scheduler="sync")
    fresh = DomainClassifier(model=own_model, score_field="s", autocast=False)(frame)
    assert not fresh.compute(scheduler="sync").s.equals(before.s)


# 9. Secrets stay secret.


@pytest.mark.contract
@pytest.mark.parametrize("spelling", ["token", "hf_token"])
def test_a_token_is_in_no_state_pickle_repr_graph_or_key(domain, checkpoint, spelling):
    frame = lazy_frame()
    mapper = domain(**{spelling: SECRET})
    assert token_for(str(checkpoint("domain"))) == SECRET
    lazy = mapper(frame)
    shown = [repr(mapper), str(vars(mapper)), str(mapper.options), repr(lazy), str(lazy.dask)]
    shown += [str(mapper.__dask_tokenize__()), str(mapper.__getstate__())]
    assert not any(SECRET in text for text in shown)
    for value in (mapper, lazy, dict(lazy.dask)):
        assert SECRET.encode() not in pickle.dumps(value)
    assert mapper == domain()
    assert tokenize(mapper) == tokenize(domain())
    assert lazy._name == domain()(frame)._name


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "/no/such/directory"},
        {"modle": "x"},
        {"hf_token": "another"},
        {"batch_size": 0},
        {"token": SECRET + "\nhttp header"},
    ],
)
def test_a_token_is_in_no_error(settings):
    with pytest.raises((OSError, TypeError, ValueError)) as caught:
        _ = FineWebEduClassifier(**{"token": SECRET, **settings}).model.checkpoint
    error = caught.value
    while error is not None:
        assert SECRET not in f"{error!r} {error}"
        error = error.__cause__ or error.__context__


def test_a_token_in_two_spellings_is_refused():
    with pytest.raises(TypeError, match="'token' twice: 'hf_token' is an older spelling"):
        DomainClassifier(token=SECRET, hf_token="another")


# 10. Code is known by what it does.

STAGES = """
import dataclasses, enum, functools, json, re, sys, threading

import numpy as np
import pandas as pd
from gpuclassify.settings.code_digest import value_digest

WORDS = {"b", "a", ("x", "y"), frozenset({"q", "r", "s"})}
PATTERN = re.compile("a+")


@dataclasses.dataclass(frozen=True)
class Rule:
    name: str
    pattern: re.Pattern = PATTERN
    call: object = len


class Color(enum.Enum):
    RED = "b"


class Base:
    def base(self, frame):
        return frame[frame["text"].isin(WORDS)]


class Clean(Base):
    def __init__(self, least):
        self.least, self.lock = least, threading.Lock()

    def __call__(self, frame):
        return super().base(frame)

    @functools.cached_property
    def slow(self):
        return 1


@functools.lru_cache
def helper(text):
    return text in {"p", "q", "r"}


def outer(least, numbers):
    def stage(frame, default=np.float32(2)):
        class Local:
            def words(self):
                return WORDS

        return frame.assign(x=[helper(text) + least for text in numbers], y=Local())

    return stage


def named(frame):
    return frame.assign(rule=RULE.name, color=Color.RED, at=__file__)


RULE = Rule("n", call=helper)
TABLE = pd.DataFrame({"a": ["x", None], "b": [1, 2]})
things = {
    "closure": outer(3, np.arange(5)),
    "function": named,
    "partial": functools.partial(named, words=WORDS),
    "lambda": lambda frame: frame.merge(TABLE),
    "instance": Clean(4),
    "bound method": Clean(3).base,
    "method of C": PATTERN.sub,
    "vectorized": np.vectorize(lambda text: text in WORDS),
}
before = {name: value_digest(thing) for name, thing in things.items()}
helper("p"), things["instance"].slow
assert before == {name: value_digest(thing) for name, thing in things.items()}
"""


def digests(code):
    known = {"__name__": "__main__", "__file__": "a.py"}
    exec(compile(code, "a.py", "exec"), known)
    return known["before"]


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ('{"b", "a",', '{"b", "c",',
         {"partial", "instance", "bound method", "closure", "vectorized"}),
        ('{"p", "q", "r"}', '{"p", "q"}', {"closure", "function", "partial"}),
        ('re.compile("a+")', 're.compile("b+")', {"function", "partial", "method of C"}),
        ("default=np.float32(2)", "default=np.float32(3)", {"closure"}),
        ("outer(3, np.arange(5))", "outer(3, np.arange(6))", {"closure"}),
        ("outer(3, ", "outer(4, ", {"closure"}),
        ("Clean(4)", "Clean(5)", {"instance"}),
        ('["x", None]', '["y", None]', {"lambda"}),
        ('RED = "b"', 'RED = "c"', {"function", "partial"}),
        ("frame[frame[", "frame[~frame[", {"instance", "bound method"}),
        ("lambda text: text in WORDS", "lambda text: text not in WORDS", {"vectorized"}),
        ("import dataclasses,", "import os as json2, dataclasses,", set()),
        ('def stage(frame, default=np.float32(2)):\n', 'def stage(frame, default=np.float32(2)):\n'
         '        "What it does."\n', set()),
    ],
)  # fmt: skip
def test_a_change_of_code_or_of_what_it_works_with_is_another(old, new, changed):
    assert STAGES.count(old) == 1
    before, after = digests(STAGES), digests(STAGES.replace(old, new))
    assert {name for name in before if before[name] != after[name]} == changed


def test_what_a_function_remembers_is_no_part_of_it():
    seen, loaded = 0, None

    def stage(frame):
        nonlocal seen, loaded
        seen, loaded = seen + 1, object()
        return frame

    before = value_digest(stage)
    stage(None)
    assert seen == 1
    assert value_digest(stage) == before
    assert value_digest(cloudpickle.loads(cloudpickle.dumps(stage))) == before


KINDS = """
import abc, dataclasses, enum, functools, typing
from gpuclassify.settings.code_digest import value_digest

T = typing.TypeVar("T")


@dataclasses.dataclass
class Rule:
    least: int = 3
    later: "Later | None" = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    least: float = 3.0


class Pair(typing.NamedTuple):
    one: int
    two: str = "x"


class Annotated:
    least: int

    def __init__(self):
        self.least = 2


class Color(enum.Enum):
    RED = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


class Base(abc.ABC):
    least: int = 1

    @abc.abstractmethod
    def call(self): ...


class Derived(Base):
    def call(self):
        return 1


class Box(typing.Generic[T]):
    item: T

    def __init__(self, item):
        self.item = item


class Cached:
    @functools.cached_property
    def slow(self) -> int:
        return 2

    @functools.lru_cache
    def remembered(self) -> int:
        return 3


class Empty:
    @functools.cached_property
    def slow(self):
        return 2


@functools.singledispatch
def dispatched(item: object) -> int:
    return 1


@dispatched.register
def _(item: str) -> int:
    return 2


def make():
    class Inner:
        least: int = 1
        if least:
            more: str = "s"

    return Inner()


def use(thing):
    for call in (
        repr, hash, vars, list, typing.get_type_hints, dataclasses.fields, dataclasses.asdict,
        pickle.dumps, copy.deepcopy, lambda x: x == x, lambda x: x.__annotations__,
        lambda x: type(x).__annotations__, lambda x: x.slow, lambda x: x.remembered(),
        lambda x: x.call(), lambda x: x("s"), lambda x: x(6), lambda x: x | Access.WRITE,
        lambda x: isinstance(1, x), lambda x: type("Other", (x,), {}),
    ):
        with contextlib.suppress(Exception):
            call(thing)


things = {
    "dataclass": Rule(), "its class": Rule, "slots": Slots(), "named tuple": Pair(1),
    "annotated": Annotated(), "enum": Color.RED, "flag": Access.READ, "flags": Access,
    "abstract": Base, "derived": Derived(), "generic": Box(1), "alias": Box[int],
    "cached": Cached(), "empty": Empty(), "dispatched": dispatched, "inner": make(),
}
before = {name: value_digest(thing) for name, thing in things.items()}
"""  # fmt: skip


def test_a_digest_is_the_same_at_every_call_and_after_use_and_in_every_process(tmp_path):
    script = "import contextlib, copy, json, pickle\n" + KINDS + (
        "second = {name: value_digest(thing) for name, thing in things.items()}\n"
        "for thing in things.values(): use(thing)\n"
        "third = {name: value_digest(thing) for name, thing in things.items()}\n"
        "print(json.dumps([before, second, third]))\n"
    )  # fmt: skip
    (tmp_path / "kinds.py").write_text(script)
    ways = []
    for seed in ("1", "2"):
        command = [sys.executable, "kinds.py"]
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": search_path()}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        ways += json.loads(done.stdout)
    for name in ways[0]:
        assert len({way[name] for way in ways}) == 1, name


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("least: int = 3", "least: bool = 3", {"dataclass", "its class"}),
        ("least: int = 3", "least: int = 4", {"dataclass", "its class"}),
        ("one: int", "one: bytes", {"named tuple"}),
        ("WRITE = 2", "WRITE = 8", {"flag", "flags"}),
        ("-> int:\n    return 2", "-> int:\n    return 5", {"dispatched"}),
    ],
)
def test_annotations_members_and_registered_functions_count(old, new, changed):
    assert KINDS.count(old) == 1
    before, after = digests(KINDS), digests(KINDS.replace(old, new))
    assert {name for name in before if before[name] != after[name]} == changed


HELPERS = """
import functools
from helpers_pkg.words import LIMIT, Rule, unread

def clean(text):
    "What it does."
    return cut(text)[:LIMIT]

@functools.lru_cache
def cut(text):
    return Rule().cut(text)
"""
WORDS = """
import json
LIMIT, CACHE = 3, {}

class Rule:
    def cut(self, text):
        return json.loads(text) and text + 'x'

def unread(text):
    return text + 'y'
"""
READERS = [
    "from helpers_pkg.text import clean\ndef stage(text): return clean(text)",
    "import helpers_pkg.text as h\ndef stage(text): return h.clean(text)",
    "import helpers_pkg.text\ndef stage(text): return helpers_pkg.text.clean(text)",
    "def stage(text):\n from helpers_pkg.text import clean\n return clean(text)",
    "def stage(text):\n import helpers_pkg.text as h\n return [h.clean(t) for t in text]",
    "def stage(text):\n from .text import clean\n return clean(text)",
    "def stage(text):\n " + "\n ".join(f"text += {n!r}" for n in map(float, range(300)))
    + "\n from helpers_pkg.text import clean\n return clean(text)",
    "def outer():\n import helpers_pkg.text as h\n return lambda text: h.clean(text)\n"
    "stage = outer()",
]  # fmt: skip


@pytest.fixture
def read_helpers(tmp_path, monkeypatch):
    """Returns the digest of a stage that calls helpers which lie in files."""
    folders = iter(range(10))

    def read(reader, *change):
        package = tmp_path / f"{next(folders)}/helpers_pkg"
        package.mkdir(parents=True)
        for name, text in ("__init__", ""), ("text", HELPERS), ("words", WORDS):
            (package / f"{name}.py").write_text(text.replace(*change) if change else text)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(package.parent)
            scope = {"__name__": "helpers_pkg.stages", "__package__": "helpers_pkg"}
            exec(reader, scope)
            digest = value_digest(scope["stage"])
        for name in [name for name in sys.modules if name.startswith("helpers_pkg")]:
            del sys.modules[name]
        return digest

    return read


@pytest.mark.parametrize("reader", READERS)
def test_helpers_in_the_users_modules_count_however_they_are_reached(read_helpers, reader):
    before = read_helpers(reader)
    for old, new in [("'x'", "'z'"), ("LIMIT, CACHE = 3", "LIMIT, CACHE = 4"), (")[:", ")[-1:")]:
        assert read_helpers(reader, old, new) != before
    for old, new in [("'y'", "'z'"), ("@functools", "# Why.\n@functools"), ("it does", "is done")]:
        assert read_helpers(reader, old, new) == before
