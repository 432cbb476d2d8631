"""How cores and a device's memory are divided, and the arguments that Dask's clusters get."""

import functools
import sys
from types import ModuleType

import pytest

from gpuclassify.cluster import sizing
from gpuclassify.cluster.sizing import (
    choose_gpus,
    cpu_cluster_options,
    missing_for_gpu,
    parse_size,
)
from gpuclassify.workers.nvml import Gpu, GpuSurvey

DEVICE_BYTES = 100_000_000_000
GB = 1_000_000_000
gpu_cluster_options = functools.partial(sizing.gpu_cluster_options, backend="cudf")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (8_000_000_000, 8_000_000_000),
        ("8GB", 8_000_000_000),
        ("1 GiB", 2**30),
        ("1000", 1000),
        (0.3, 0.3),
        (1.0, 1.0),
        ("0.3", 0.3),
        (".5", 0.5),
    ],
)
def test_sizes_are_bytes_or_a_share(value, expected):
    size = parse_size(value, "rmm_pool_size")
    assert size == expected
    assert type(size) is type(expected)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        *(
            (value, ValueError, r"rmm_pool_size.*as bytes.*\"8GB\".*share")
            for value in (0, -1, 0.0, -0.2, 1.5, "1.5", "many", "8 bananas", "", "nan")
        ),
        *((value, TypeError, "is no size") for value in (True, [1], {})),
    ],
)
def test_a_size_that_is_none_is_refused_with_the_forms_that_are(value, error, words):
    with pytest.raises(error, match=words):
        parse_size(value, "rmm_pool_size")


# Settings, RMM's pool at the start and at most, and torch's share.
@pytest.mark.parametrize(
    ("settings", "pool", "maximum", "torch_fraction"),
    [
        ({"backend": "pandas"}, None, None, 0.9),
        ({"backend": "pandas", "rmm_pool_size": 0.2}, 20 * GB, 50 * GB, 0.45),
        ({"backend": "pandas", "rmm_async": True}, None, 50 * GB, 0.45),
        ({}, 30 * GB, 50 * GB, 0.45),
        ({"device_bytes": None}, 0.3, 0.5, 0.45),
        ({"rmm_async": True}, None, 50 * GB, 0.45),
        ({"rmm_pool_size": None}, None, None, 0.9),
        ({"rmm_maximum_pool_size": "10GB"}, 10 * GB, 10 * GB, 0.45),
    ],
)
def test_a_device_is_divided_by_rmm_and_torch(settings, pool, maximum, torch_fraction):
    options, found = gpu_cluster_options(**{"device_bytes": DEVICE_BYTES, **settings})
    expected = {
        "rmm_async": settings.get("rmm_async", False),
        "enable_cudf_spill": False,
        **({"rmm_pool_size": pool} if pool else {}),
        **({"rmm_maximum_pool_size": maximum} if maximum else {}),
        **({"device_memory_limit": pytest.approx(0.8 * maximum)} if maximum else {}),
    }
    assert options == expected
    assert all(
        type(options[name]) is type(value) for name, value in expected.items() if "rmm" in name
    )
    assert found == torch_fraction
    assert gpu_cluster_options({"device_memory_limit": 0.2}, **settings)[0] == (
        gpu_cluster_options(**settings)[0] | {"device_memory_limit": 0.2}
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "polars"}, "backend='polars' is not one of 'pandas', 'cudf'"),
        (
            {"backend": "pandas", "rmm_maximum_pool_size": 0.4},
            'there is none: give rmm_pool_size or backend="cudf" too',
        ),
        ({"rmm_pool_size": None, "rmm_maximum_pool_size": 0.5}, "there is none"),
        *(
            (
                {"rmm_async": True, "rmm_pool_size": size},
                r"rmm_async=True replaces the pool.*leave it out",
            )
            for size in (0.3, "8GB", 1000)
        ),
        ({"rmm_pool_size": 0.6}, r"rmm_pool_size=0\.6 is above"),
        ({"rmm_pool_size": "60GB"}, r"rmm_pool_size='60GB' is above"),
        *(
            ({"torch_memory_fraction": fraction}, "not a share of the device")
            for fraction in (0, -0.1, 1.1, "0.4", True, float("nan"))
        ),
        *(
            (
                {
                    "options": {"rmm_allocator_external_lib_list": libraries},
                    "rmm_pool_size": None,
                },
                r'for every tensor: give rmm_pool_size or backend="cudf" too',
            )
            for libraries in ("torch", ["torch", "cupy"])
        ),
    ],
)
def test_what_makes_no_sense_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        gpu_cluster_options(**{"device_bytes": DEVICE_BYTES, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"rmm_maximum_pool_size": 0.51},
        {"torch_memory_fraction": 0.46},
        {"rmm_maximum_pool_size": "51GB"},
        {"rmm_maximum_pool_size": None},
        {"rmm_maximum_pool_size": 0.51, "rmm_async": True},
        {"rmm_maximum_pool_size": None, "rmm_async": True},
        {"rmm_maximum_pool_size": 0.96, "torch_memory_fraction": None},
    ],
)
def test_shares_above_the_device_are_refused_with_numbers_and_cure(settings):
    message = r"RMM may take \d\.\d\d .*torch \d\.\d\d: together .*above 0\.95.* Lower"
    with pytest.raises(ValueError, match=message):
        gpu_cluster_options(**settings, device_bytes=DEVICE_BYTES)


@pytest.mark.parametrize(
    ("settings", "maximum", "torch_fraction"),
    [
        ({"rmm_maximum_pool_size": 0.6, "torch_memory_fraction": 0.35}, 60_000_000_000, 0.35),
        ({"rmm_maximum_pool_size": 0.35, "torch_memory_fraction": 0.6}, 35_000_000_000, 0.6),
        ({"rmm_maximum_pool_size": "50GB"}, 50_000_000_000, 0.45),
        ({"rmm_maximum_pool_size": 0.95, "torch_memory_fraction": None}, 95_000_000_000, None),
    ],
)
def test_shares_up_to_the_limit_are_those_that_were_asked_for(settings, maximum, torch_fraction):
    options, found_fraction = gpu_cluster_options(**settings, device_bytes=DEVICE_BYTES)
    assert options["rmm_pool_size"] == min(30_000_000_000, maximum)
    assert options["rmm_maximum_pool_size"] == maximum
    assert options["device_memory_limit"] == pytest.approx(0.8 * maximum)
    assert found_fraction == torch_fraction


@pytest.mark.parametrize("libraries", ["torch", "cupy, torch", ["torch"]])
def test_torch_on_rmm_has_no_fraction_of_its_own(libraries):
    asked = {"rmm_allocator_external_lib_list": libraries}
    options, torch_fraction = gpu_cluster_options(asked, rmm_maximum_pool_size=0.9)
    assert torch_fraction is None
    assert options["rmm_allocator_external_lib_list"] == libraries
    with pytest.raises(ValueError, match="gives torch to RMM"):
        gpu_cluster_options(asked, torch_memory_fraction=0.3)


def test_each_worker_gets_a_gpu():
    gpus = [Gpu(i, f"GPU-{i}", "H200", DEVICE_BYTES) for i in range(3)]
    assert choose_gpus(gpus, None) == tuple(gpus)
    assert choose_gpus(gpus, 2) == tuple(gpus[:2])
    with pytest.raises(ValueError, match=r"n_workers=4, but 3 GPUs"):
        choose_gpus(gpus, 4)


def test_whole_gpus_and_slices_do_not_share_a_cluster():
    whole, slices = Gpu(0, "GPU-a", "H200", DEVICE_BYTES), Gpu(1, "MIG-b", "H200", DEVICE_BYTES)
    assert choose_gpus([whole, slices], 1) == (whole,)
    assert choose_gpus([slices, slices], None) == (slices, slices)
    with pytest.raises(ValueError, match=r"1 are MIG slices.*CUDA_VISIBLE_DEVICES=MIG-b"):
        choose_gpus([whole, slices], None)


def test_what_a_machine_lacks_is_named_in_full(monkeypatch, tmp_path):
    def install_torch(version):
        info = tmp_path / "torch-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")

    monkeypatch.syspath_prepend(tmp_path)
    install_torch("2.13.0+cpu")
    for name in ("dask_cuda", "rmm"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    missing = missing_for_gpu(GpuSurvey(absent_because="no driver here"))
    assert [text.split()[0] for text in missing] == ["no", "dask_cuda", "rmm", "torch"]
    assert missing[-1] == "torch 2.13.0+cpu is built without CUDA"

    install_torch("2.13.0+cu130")
    for name in ("dask_cuda", "rmm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert missing_for_gpu(GpuSurvey(has_gpu=True)) == []


@pytest.mark.parametrize(
    ("cores", "memory_bytes", "n_workers", "expected_workers", "expected_threads"),
    [
        (1, 64e9, None, 1, 1),
        (2, 15e9, None, 1, 2),
        (2, 16e9, None, 2, 1),
        (7, 64e9, None, 2, 3),
        (8, 8e9, None, 1, 8),
        (16, 64e9, None, 2, 8),
        (20, 64e9, None, 2, 10),
        (64, 64e9, None, 8, 8),
        (64, 33e9, None, 4, 16),
        (2, 1e9, None, 1, 2),
        (16, 1e9, 5, 5, 3),
        (2, 1e9, 4, 4, 1),
    ],
)
def test_workers_times_torch_threads_stay_within_the_cores(
    cores, memory_bytes, n_workers, expected_workers, expected_threads
):
    options, torch_threads = cpu_cluster_options(
        {"memory_limit": "1GB"}, cores=cores, n_workers=n_workers, memory_bytes=memory_bytes
    )
    expected = {"n_workers": expected_workers, "threads_per_worker": 1, "memory_limit": "1GB"}
    assert options == expected
    assert torch_threads == expected_threads
    options, torch_threads = cpu_cluster_options({"processes": False}, cores=cores)
    assert (options["n_workers"], torch_threads) == (1, cores)  # one process is one worker


def test_the_default_is_told_in_words(monkeypatch):
    monkeypatch.setattr(sizing, "usable_cores", lambda: 2)
    monkeypatch.setattr(sizing, "usable_memory", lambda: 24 * 2**30)
    assert sizing.shown_cpu_cluster() == "2 workers with 1 core and 12.00 GiB each"
    monkeypatch.setattr(sizing, "usable_memory", lambda: 4 * 2**30)
    assert sizing.shown_cpu_cluster() == "1 worker with 2 cores and 4.00 GiB"
