"""Checkpoints and frames that many tests share."""

import contextlib
import functools
import importlib
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from dask import config

from gpuclassify.settings.checks import warn_once
from tests.golden import read_cases
from tests.processes import search_path
from tests.replicas import (
    write_checkpoint,
    write_gte,
    write_safety_models,
    write_sequence_classifier,
    write_token_classifier,
)

# For clusters that tests make themselves, here and in processes of their own: see `NO_GIL_MONITOR`.
os.environ["DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__GIL__ENABLED"] = "False"
config.refresh()

with contextlib.suppress(ImportError):  # a machine without it runs the other tests
    from hypothesis import HealthCheck, settings

    # The same examples in every run, however long one takes: what fails is the code, not the draw
    # or the machine.
    settings.register_profile(
        "steady",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("steady")


def pytest_addoption(parser):
    parser.addoption("--golden", metavar="FILE", help="cases for tests marked needs_weights")


def pytest_generate_tests(metafunc):
    """One test for each case of the file that the user names."""
    if "golden_case" not in metafunc.fixturenames:
        return
    path = metafunc.config.getoption("golden")
    cases = read_cases(path) if path else [None]
    names = [f"{case.classifier}-{number}" for number, case in enumerate(cases, 1) if case]
    metafunc.parametrize("golden_case", cases, ids=names or ["no-file"], indirect=True)


@pytest.fixture
def golden_case(request):
    if request.param is None:
        pytest.fail("name the file of cases: pytest -m needs_weights --golden=FILE", pytrace=False)
    return request.param


@pytest.fixture(autouse=True)
def warnings_are_new():
    """What an earlier test was warned of is said again."""
    warn_once.cache_clear()


@pytest.fixture(autouse=True)
def variables_stay():
    """Undo what a test changed in the environment; later tests' workers would inherit it."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def one_torch_thread():
    """Tiny models are slower with more threads than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The directory of a published layout's small copy, by family; each is written once."""

    @functools.cache
    def write(family):
        folder = tmp_path_factory.mktemp("family") / family
        if family in ("topic", "format"):
            from gpuclassify.classifiers import FAMILIES  # imports Dask, as below

            return write_gte(folder, FAMILIES[family].published_labels)
        return write_checkpoint(folder, family)

    return write


@pytest.fixture
def domain(checkpoint):
    """Makes a DomainClassifier of a small copy, with these options."""
    from gpuclassify import DomainClassifier  # imports Dask, which not every machine has

    def make(**options):
        return DomainClassifier(**{"model": checkpoint("domain"), "autocast": False, **options})

    return make


@pytest.fixture(scope="session")
def sequence_classifier(tmp_path_factory):
    """The directory of a small sequence classifier, by its settings; each is written once."""

    @functools.cache
    def write(architecture="bert", **settings):
        folder = tmp_path_factory.mktemp("sequence") / architecture
        return write_sequence_classifier(folder, architecture, **settings)

    return write


@pytest.fixture(scope="session")
def token_classifier(tmp_path_factory):
    """The directory of a small token classifier, by its settings; each is written once."""

    @functools.cache
    def write(architecture="bert", **settings):
        folder = tmp_path_factory.mktemp("tokens") / architecture
        return str(write_token_classifier(folder, architecture, **settings))

    return write


@pytest.fixture(scope="session")
def safety_models(tmp_path_factory):
    """Small copies of the safety models: a decoder, two adapters and a guard."""
    return write_safety_models(tmp_path_factory.mktemp("safety") / "models")


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """The directory of a small decoder with a chat template, by its architecture."""
    from tests.replicas.chat_models import write_chat_model

    return functools.cache(lambda name: write_chat_model(tmp_path_factory.mktemp("chat"), name))


@pytest.fixture(scope="session")
def fasttext_model(tmp_path_factory):
    """The file of a small classifier, by how fastText trains it; each is trained once."""
    from tests.fasttext_models import train_fasttext  # imports fastText, as above

    return functools.cache(functools.partial(train_fasttext, tmp_path_factory.mktemp("fasttext")))


@pytest.fixture(params=["pandas", pytest.param("cudf", marks=pytest.mark.gpu)])
def frames(request):
    """Makes frames of one backend: `plain` and `lazy` from pandas, and `to_pandas` back."""
    import dask.dataframe as dd  # a machine without it runs the tests of models on their own
    import pandas as pd

    library = importlib.import_module(request.param)

    def plain(frame):
        return frame if library is pd else library.from_pandas(frame)

    def lazy(frame, npartitions=3, **options):
        return dd.from_pandas(plain(frame), npartitions=npartitions, **options)

    def to_pandas(frame):
        computed = frame.compute(scheduler="sync") if isinstance(frame, dd.DataFrame) else frame
        return computed if library is pd else computed.to_pandas()

    return SimpleNamespace(
        name=request.param,
        frame_type=library.DataFrame,
        plain=plain,
        lazy=lazy,
        to_pandas=to_pandas,
    )


@pytest.fixture(scope="session")
def run_python():
    """Runs code in a fresh interpreter that sees this checkout, and returns what it printed."""

    def run(body, **environment):
        result = subprocess.run(
            [sys.executable, "-c", body],
            env={**os.environ, "PYTHONPATH": search_path(), **environment},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
