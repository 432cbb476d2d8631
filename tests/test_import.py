"""Importing the package is inert."""

import pytest

pytestmark = pytest.mark.contract


def test_import_loads_no_framework_writes_no_environment_and_is_quick(run_python):
    probe = """
import os, sys, time
before, started = dict(os.environ), time.perf_counter()
import gpuclassify
elapsed_seconds = time.perf_counter() - started
assert dict(os.environ) == before, set(os.environ) ^ set(before)
heavy = {"torch", "transformers", "cudf", "rmm", "dask", "pandas", "distributed", "numpy"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import gpuclassify.cluster, gpuclassify.hub
heavy |= {"huggingface_hub", "pynvml", "dask_cuda"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert dict(os.environ) == before
print(elapsed_seconds)
"""
    assert min(float(run_python(probe)) for _ in range(3)) < 0.2


def test_classifiers_are_declared_and_repr_printed_without_a_framework(run_python):
    run_python("""
import os, sys
before = dict(os.environ)
import gpuclassify
from gpuclassify import DomainClassifier
repr(DomainClassifier(filter_by=["Games"]))
assert dict(os.environ) == before
assert not {"torch", "transformers", "cudf", "rmm"} & set(sys.modules)
""")


@pytest.mark.parametrize(
    ("words", "frameworks"),
    [
        (["annotate", "--classifier", "patterns"], set()),
        (["annotate", "--classifier", "tokens", "--model", "{model}"], {"transformers"}),
        (["dedup", "--method", "exact"], {"dask.dataframe"}),
        (["select", "--where", "text != ''"], set()),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_small_command_imports_no_framework_it_does_without(
    run_python, checkpoint, tmp_path, words, frameworks
):
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    words = [word.format(model=checkpoint("domain")) for word in words]
    command = [words[0], str(tmp_path / "in.jsonl"), str(tmp_path / "out"), *words[1:]]
    run_python(f"""
import sys
from gpuclassify.commands.cli import main
main({command!r}, standalone_mode=False)
heavy = {{"torch", "transformers", "distributed", "dask.dataframe", "numba", "sklearn"}}
assert heavy & set(sys.modules) == {frameworks!r}, heavy & set(sys.modules)
""")
    assert (tmp_path / "out/_SUCCESS").exists()


@pytest.mark.parametrize("family", ["domain", "fineweb-edu"])
def test_a_lazy_call_is_planned_without_a_framework(run_python, checkpoint, family):
    spent = run_python(f"""
import sys, time
import pandas as pd, dask.dataframe as dd
from gpuclassify.classifiers import FAMILIES
ddf = dd.from_pandas(pd.DataFrame({{"text": ["a text"]}}), npartitions=1)
started = time.process_time()
planned = FAMILIES[{family!r}](model={str(checkpoint(family))!r})(ddf)
print(time.process_time() - started)
assert len(planned.columns) > 1
assert not {{"torch", "transformers", "cudf", "rmm"}} & set(sys.modules)
""")
    assert float(spent) < 1


def test_no_public_name_is_hidden_by_a_module_of_the_same_name(run_python):
    run_python("""
import importlib, pkgutil, gpuclassify
for module in pkgutil.iter_modules(gpuclassify.__path__):
    assert module.name not in gpuclassify.__all__, module.name
""")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("DomianClassifier", "DomainClassifier"),
        ("get_clint", "get_client"),
        ("read_file", "read_files"),
    ],
)
def test_a_misspelt_name_is_told_the_nearest(name, meant):
    import gpuclassify

    with pytest.raises(AttributeError, match=rf"has no '{name}'\. Did you mean '{meant}'"):
        getattr(gpuclassify, name)
    assert not hasattr(gpuclassify, "nothing_like_it")
