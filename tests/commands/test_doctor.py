"""What `examine` finds here, and how its parts judge other machines."""

import json
import platform
import subprocess
import sys
import sysconfig
from importlib import metadata

import dask
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from gpuclassify.commands import doctor
from gpuclassify.commands.cli import main
from gpuclassify.commands.doctor import Check, Findings
from gpuclassify.workers.nvml import Gpu, GpuSurvey
from tests.hub_server import HubServer
from tests.lowest import lowest, requirements

H200 = Gpu(0, "GPU-1", "NVIDIA H200", 150_000_000_000)
NO_GPU = GpuSurvey(absent_because="no NVIDIA GPU or driver is here")
GPU_CUDA_13 = GpuSurvey((H200,), True, "580.1", (13, 0))
GPU_CUDA_12 = GpuSurvey((H200,), True, "550.1", (12, 8))
SECRET = "hf_thisMustNeverBeShown"


EXAMINE = """
import json, sys
from gpuclassify.commands.doctor import examine
print(json.dumps([examine().as_dict(), "torch" in sys.modules]))
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a function that installs made-up distributions, and nothing else, on the path."""

    def install(**requirements: list[str]):
        for name_version, requires in requirements.items():
            name, version = name_version.rsplit("__", 1)
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            lines += [f"Requires-Dist: {text}" for text in requires]
            (folder / "METADATA").write_text("\n".join(lines) + "\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        return doctor.installed_distributions()

    return install


def by_name(checks) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_environment_is_reported_as_it_is_by_a_process_that_loads_no_torch():
    done = subprocess.run([sys.executable, "-c", EXAMINE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    told, has_torch = json.loads(done.stdout)
    checks = by_name(Check(**check) for check in told["checks"])
    assert not has_torch
    assert not told["has_problems"]
    assert len(checks) == len(told["checks"])
    assert checks["Python"].found.startswith(platform.python_version())
    assert checks["dask"] == Check("dask", "ok", dask.__version__)
    assert checks["torch"].found.startswith(torch.__version__)
    version = metadata.version("fasttext-community")
    assert checks["extra fasttext"].found == f"fasttext-community {version}"
    assert all(check.cure for check in checks.values() if check.status in ("warning", "problem"))


def test_a_token_is_found_and_never_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    checks = by_name(doctor.hub_checks())
    assert checks["Hub token"] == Check("Hub token", "ok", "yes, in HF_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    file = tmp_path / "token"
    assert by_name(doctor.hub_checks(file))["Hub token"].status == "missing"
    file.write_text(SECRET)
    checks = list(doctor.hub_checks(file))
    assert by_name(checks)["Hub token"] == Check("Hub token", "ok", "yes, from a login")
    assert SECRET not in repr(checks)


def test_offline_mode_is_told(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert by_name(doctor.hub_checks())["Hub access"].found.startswith("offline")


def test_online_means_that_the_hub_has_answered(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        assert doctor.access_check().status == "warning"  # it answers, but does not know the model
        server.add(doctor.KNOWN_MODEL, {"config.json": b"{}"})
        assert doctor.access_check() == Check("Hub access", "ok", f"online: {server.url} answers")
        assert not any(request.has_token for request in server.requests)
        server.is_failing = True
        assert "answered 503" in doctor.access_check().found
    check = doctor.access_check()
    assert (check.status, bool(check.cure)) == ("warning", True)
    assert check.found.startswith(f"no answer from {server.url}")


def test_a_cache_is_judged_by_its_nearest_existing_directory(tmp_path):
    deep = tmp_path / "not" / "there"
    check = doctor.cache_check(deep, low_bytes=0)
    assert check.status == "ok"
    assert check.found.startswith(str(deep))
    assert doctor.cache_check(deep, low_bytes=10**30).status == "warning"
    (tmp_path / "file").write_text("")
    assert doctor.cache_check(tmp_path / "file" / "cache").status == "problem"
    assert not deep.exists()


def test_unmet_requirements_are_those_of_pip_check(site, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    site(needy__1_0=["numpy<1"], other__2=["absent-package"])
    check = doctor.requirement_check()
    assert (check.status, bool(check.cure)) == ("warning", True)
    assert f"numpy<1, but you have numpy {np.__version__}" in check.found
    assert "absent-package" in check.found


@pytest.mark.parametrize(
    ("code", "status"), [("0", "ok"), ("'No module named pip'", "missing")], ids=str
)
def test_requirements_are_met_or_without_pip_unknown(monkeypatch, tmp_path, code, status):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "pip.py").write_text(f"import sys; sys.exit({code})")
    assert doctor.requirement_check().status == status


@pytest.mark.parametrize(
    ("versions", "survey", "status"),
    [
        ({"cudf-cu13": "26.10.2", "rmm-cu13": "26.10.0"}, GPU_CUDA_13, "ok"),
        ({"cudf-cu12": "26.10.2"}, GPU_CUDA_13, "ok"),
        ({"cudf-cu12": "26.10.2"}, GPU_CUDA_12, "ok"),
        ({"cudf-cu13": "26.10.2"}, GPU_CUDA_12, "problem"),
        ({"cudf-cu13": "26.10.2", "rmm-cu12": "26.10.0"}, GPU_CUDA_13, "problem"),
        ({"cudf-cu13": "26.10.2", "cudf-cu12": "26.10.2"}, NO_GPU, "problem"),
    ],
)
def test_rapids_wheels_must_fit_the_driver_and_each_other(versions, survey, status):
    check = by_name(doctor.rapids_checks(versions, survey))["RAPIDS and CUDA"]
    assert check.status == status
    assert bool(check.cure) is (status == "problem")


@pytest.mark.parametrize(
    ("wheels", "built", "cure"),
    [
        ("cu13", "13.0", None),
        ("cu12", "12.8", None),
        ("cu12", "13.0", "gpuclassify[gpu-cu12]'"),
        ("cu13", "12.8", "gpuclassify[gpu]'"),
    ],
)
def test_torch_and_rapids_must_be_for_one_cuda(wheels, built, cure):
    versions = {f"cudf-{wheels}": "26.10.2", f"rmm-{wheels}": "26.10.0"}
    checks = by_name(doctor.rapids_checks(versions, GPU_CUDA_13, built))
    assert checks["RAPIDS and torch"].status == ("warning" if cure else "ok")
    assert (cure or "") in checks["RAPIDS and torch"].cure
    assert "RAPIDS and torch" not in by_name(doctor.rapids_checks(versions, GPU_CUDA_13, None))


def test_each_set_for_gpus_has_the_torch_of_its_cuda():
    """As the package index has them: for CUDA 12 up to 2.10, for CUDA 13 from 2.11 on."""
    fitting = {"gpu": ["2.11.0", "2.15.0"], "gpu-cu12": ["2.9.0", "2.10.0"]}
    for extra, versions in fitting.items():
        ranges = [one.specifier for one in requirements([extra]) if one.name == "torch"]
        found = [v for v in ("2.9.0", "2.10.0", "2.11.0", "2.15.0") if all(v in r for r in ranges)]
        assert found == versions


def test_every_requirement_has_a_lowest_version_and_what_is_known_to_fail_is_out():
    found = {one.name: one for one in requirements()}
    assert all(map(lowest, found.values()))
    for name, version in {
        "dask": "2026.5.1",  # whose shuffle of 128 partitions loses rows
        "distributed": "2026.5.1",
        "peft": "0.19.1",  # which imports what an adapter's file names
        "tokenizers": "1.0.0rc3",  # which lacks what is called
    }.items():
        assert not found[name].specifier.contains(version, prereleases=True), name


def test_missing_rapids_names_the_extra_for_the_driver():
    for survey, extra in ((GPU_CUDA_13, "[gpu]"), (GPU_CUDA_12, "[gpu-cu12]")):
        checks = by_name(doctor.rapids_checks({}, survey))
        assert set(checks) == {"cudf", "dask-cudf", "dask-cuda", "rmm"}
        assert all(check.status == "missing" and extra in check.cure for check in checks.values())
    assert all(check.cure == "" for check in doctor.rapids_checks({}, NO_GPU))


@pytest.mark.parametrize(
    ("probe", "survey", "status"),
    [
        ({"version": "2.13.0+cpu", "cuda": None, "devices": 0}, NO_GPU, "ok"),
        ({"version": "2.13.0", "cuda": "13.0", "devices": 0}, NO_GPU, "ok"),
        ({"version": "2.13.0", "cuda": "13.0", "devices": 1}, GPU_CUDA_13, "ok"),
        ({"version": "2.13.0+cpu", "cuda": None, "devices": 0}, GPU_CUDA_13, "warning"),
        ({"version": "2.13.0", "cuda": "13.0", "devices": 0}, GPU_CUDA_12, "problem"),
        ({"error": "libcudart.so.13 not found"}, GPU_CUDA_13, "problem"),
    ],
)
def test_torch_must_see_the_gpus_that_are_there(probe, survey, status):
    check = doctor.torch_check(probe, survey)
    assert check.status == status
    assert bool(check.cure) is (status != "ok")


def test_gpus_are_told_with_their_memory():
    checks = by_name(doctor.gpu_checks(GPU_CUDA_13))
    assert checks["NVIDIA driver"].found == "580.1, runs CUDA up to 13.0"
    assert checks["GPU 0"].found == "NVIDIA H200, 139.7 GiB"


def test_a_gpu_needs_a_compiler_and_the_headers_of_python(tmp_path, monkeypatch):
    """As Triton's launcher does: without them DeBERTa's fused attention is left out silently."""
    include = tmp_path / "include"
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(include))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    def check():
        return by_name(doctor.gpu_checks(GPU_CUDA_13))["C compiler"]

    assert (check().status, "gcc" in check().found) == ("missing", True)
    for compiler in ("clang", "my-cc"):
        path = tmp_path / compiler
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        if compiler == "my-cc":
            (tmp_path / "clang").unlink()
            assert "gcc" in check().found
            monkeypatch.setenv("CC", str(path))
        assert (check().status, "Python.h" in check().found) == ("missing", True)
        assert "python3-dev" in check().cure
    monkeypatch.setenv("CC", "their-cc")
    assert check().found == "no their-cc"  # and Triton looks for no other
    monkeypatch.setenv("CC", str(path))
    include.mkdir()
    (include / "Python.h").write_text("")
    assert check() == Check("C compiler", "ok", f"{path}, and {include / 'Python.h'}")


def test_no_gpu_is_no_problem_but_one_that_cannot_be_listed_is_told():
    (check,) = doctor.gpu_checks(NO_GPU)
    assert check.status == "ok"
    assert "CPU will be used" in check.found
    (check,) = doctor.gpu_checks(GpuSurvey(has_gpu=True, absent_because="nvidia-ml-py is missing"))
    assert check.status == "warning"
    assert "nvidia-ml-py" in check.cure


def test_torch_that_does_not_import_is_told_with_its_error():
    assert "no libgomp here" in doctor.probe_torch("raise ImportError('no libgomp here')")["error"]
    assert "cannot be read" in doctor.probe_torch("print('hello')")["error"]


def test_extras_are_told_with_the_packages_that_the_metadata_declare(site):
    not_shown = {"gpu", "gpu-cu12", "docs", "dev", "ray"}  # Ray is the caller's own
    declared = metadata.metadata("gpuclassify").get_all("Provides-Extra")
    assert set(doctor.EXTRAS) == set(declared) - not_shown
    requires = [f'{name}; extra == "dedup"' for name in ("numba", "scikit-learn", "scipy>=1")]
    never = """crossfit==0.0.9; python_version < "3" and extra == "crossfit" """
    installed = site(**{"gpuclassify__1": [*requires, never], "scipy__1.13": [], "numba__1": []})
    checks = by_name(doctor.optional_checks(installed))
    dedup = checks["extra dedup"]
    assert (dedup.status, dedup.found) == ("missing", "scikit-learn not installed")
    assert dedup.cure == (
        "pip install 'gpuclassify[dedup]' (in a checkout '.[dedup]') for deduplication"
    )
    found = f'not for Python {platform.python_version()}: crossfit (python_version < "3")'
    assert (checks["extra crossfit"].status, checks["extra crossfit"].found) == ("missing", found)


def test_a_missing_package_is_a_problem_with_its_installation(site):
    checks = doctor.package_checks(site(dask__2026=[]))
    assert Findings(tuple(checks)).has_problems
    checks = by_name(doctor.package_checks(doctor.installed_distributions()))
    assert checks["dask"].status == "ok"
    assert checks["pandas"] == Check("pandas", "problem", "not installed", "pip install pandas")


@pytest.mark.parametrize(
    ("probe", "found"),
    [
        ({"error": "no torch"}, "cores may be used"),
        (
            {"threads": 3, "cpu": {"amx_bf16": True, "avx512_vnni": True, "sse": True}},
            "; 3 threads of torch; AMX for bfloat16, AVX512-VNNI",
        ),
        (
            {"threads": 3, "cpu": {"amx_bf16": False, "sse": True}},
            "; 3 threads of torch; no instructions for bfloat16 or int8",
        ),
    ],
)
def test_the_cpu_is_told_by_what_makes_models_fast(probe, found):
    check = doctor.cpu_check(probe)
    assert (check.name, check.status) == ("CPU", "ok")
    assert check.found.endswith(found)


def test_torch_tells_of_the_cpu_here():
    probe = doctor.probe_torch()
    assert probe["threads"] >= 1
    assert set(probe["cpu"]) & set(doctor.INSTRUCTIONS)


@pytest.mark.parametrize("columns", [None, 50, 120])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns)) if columns else monkeypatch.delenv("COLUMNS", False)
    cure = "pip install 'gpuclassify[dedup]' (in a checkout '.[dedup]') for deduplication"
    detail = "numba, scikit-learn, scipy [not a style] not installed " * 5
    found = Findings((Check("extra dedup", "missing", detail, cure), Check("dask", "ok", "1")))
    monkeypatch.setattr(doctor, "examine", lambda: found)
    printed = CliRunner().invoke(main, ["doctor"]).stdout
    assert max(map(len, printed.splitlines())) <= (columns or 80)
    words = f"missing extra dedup: {detail} to do: {cure} ok dask: 1"
    assert printed.split() == words.split()


def test_a_folder_that_an_uninstallation_left_is_found(tmp_path):
    assert not [*doctor.leftover_checks()]
    whole, empty, left = (tmp_path / name for name in ("whole", "empty", "left behind"))
    for folder in (whole / "gpuclassify", empty, left / "gpuclassify/corpus/__pycache__"):
        folder.mkdir(parents=True)
    (whole / "gpuclassify/__init__.py").write_text("")
    (check,) = doctor.leftover_checks([*map(str, (whole, empty, left, left))])
    assert (check.name, check.status) == ("leftover folder", "problem")
    assert str(left / "gpuclassify") in check.found
    subprocess.run(check.cure.removeprefix("remove it: "), shell=True, check=True)
    assert not [*doctor.leftover_checks([str(left)])]


def test_variables_of_s3_are_named_and_their_values_are_not():
    environment = {"AWS_SECRET_ACCESS_KEY": SECRET, "FSSPEC_S3_KEY": SECRET, "AWS_PROFILE": ""}
    found = doctor.storage_check(environment).found
    assert found.startswith("set: AWS_SECRET_ACCESS_KEY, FSSPEC_S3_KEY; read: AWS_ACCESS_KEY_ID")
    assert SECRET not in found
    # The client of s3fs takes each of them: with none set, there is no region and no endpoint.
    assert "AWS_REGION" not in doctor.S3_VARIABLES


LIVES = """
import atexit, gc
from gpuclassify.commands import cli
atexit.register(lambda: print("frozen" if gc.get_freeze_count() else "looked through"))
gc.callbacks.append(lambda phase, about: None if cli.main is None else passes.append(phase))
passes, before = [], gc.get_threshold()
cli.main(["models"], standalone_mode=False)
print(len(passes), gc.get_threshold() == before)
"""


def test_a_command_seldom_looks_through_its_objects_and_not_at_its_end():
    run = [sys.executable, "-c", LIVES]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    count, is_as_before, end = printed.split()[-3:]
    assert int(count) < 50 and is_as_before == "True" and end == "frozen", printed[-300:]
