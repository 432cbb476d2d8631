"""How cores and a device's memory are divided, and the arguments that Dask's clusters get."""

import functools
import sys
from types import ModuleType

import dask.system
import pytest

from gpuclassify.cluster import sizing
from gpuclassify.cluster.sizing import (
    choose_gpus,
    cpu_cluster_options,
    missing_for_gpu,
    parse_size,
    usable_cores,
)
from gpuclassify.workers.nvml import Gpu, GpuSurvey

DEVICE_BYTES = 100_000_000_000
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


@pytest.mark.parametrize("value", [0, -1, 0.0, -0.2, 1.5, "1.5", "many", "8 bananas", "", "nan"])
def test_a_size_that_is_none_is_refused_with_the_forms_that_are(value):
    with pytest.raises(ValueError, match=r"rmm_pool_size.*as bytes.*\"8GB\".*share"):
        parse_size(value, "rmm_pool_size")


@pytest.mark.parametrize("value", [True, [1], {}])
def test_a_size_of_another_type_is_refused(value):
    with pytest.raises(TypeError, match="is no size"):
        parse_size(value, "rmm_pool_size")


@pytest.mark.parametrize("device_bytes", [None, DEVICE_BYTES])
def test_with_pandas_frames_torch_has_the_device_for_itself(device_bytes):
    options, torch_fraction = sizing.gpu_cluster_options(device_bytes=device_bytes)
    assert options == {"rmm_async": False, "enable_cudf_spill": False}
    assert torch_fraction == 0.9
    llama_bytes = 7e9 * 2  # in bfloat16
    assert llama_bytes < 24e9 * torch_fraction
    assert llama_bytes > 24e9 * gpu_cluster_options()[1]


@pytest.mark.parametrize("asked", [{"rmm_pool_size": 0.2}, {"rmm_async": True}])
def test_rmm_gets_a_share_beside_pandas_frames_where_it_is_asked_for(asked):
    options, torch_fraction = sizing.gpu_cluster_options(**asked, device_bytes=DEVICE_BYTES)
    assert options["rmm_maximum_pool_size"] == 50_000_000_000
    assert options.get("rmm_pool_size") == (None if "rmm_async" in asked else 20_000_000_000)
    assert torch_fraction == 0.45


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"backend": "polars"}, "backend='polars' is not one of 'pandas', 'cudf'"),
        ({"rmm_maximum_pool_size": 0.4}, 'give rmm_pool_size or backend="cudf" too'),
    ],
)
def test_what_makes_no_sense_for_the_frames_is_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        sizing.gpu_cluster_options(**asked)


def test_defaults_become_bytes_of_the_device():
    options, torch_fraction = gpu_cluster_options(device_bytes=DEVICE_BYTES)
    assert options == {
        "rmm_pool_size": 30_000_000_000,
        "rmm_maximum_pool_size": 50_000_000_000,
        "rmm_async": False,
        "enable_cudf_spill": False,
        "device_memory_limit": 40_000_000_000,
    }
    assert torch_fraction == 0.45


def test_shares_are_passed_on_where_the_device_is_unknown():
    options, _ = gpu_cluster_options()
    assert options["rmm_pool_size"] == 0.3
    assert options["rmm_maximum_pool_size"] == 0.5
    assert options["device_memory_limit"] == pytest.approx(0.4)
    assert all(type(size) is float for name, size in options.items() if "size" in name)


def test_the_asynchronous_allocator_replaces_the_pool_and_keeps_its_bound():
    options, _ = gpu_cluster_options(rmm_async=True, device_bytes=DEVICE_BYTES)
    assert "rmm_pool_size" not in options
    assert options["rmm_async"] is True
    assert options["rmm_maximum_pool_size"] == 50_000_000_000


@pytest.mark.parametrize("size", [0.3, "8GB", 1000])
def test_a_pool_beside_the_asynchronous_allocator_is_refused(size):
    with pytest.raises(ValueError, match=r"rmm_async=True replaces the pool.*leave it out"):
        gpu_cluster_options(rmm_async=True, rmm_pool_size=size)


def test_a_pool_is_never_started_above_its_maximum():
    options, _ = gpu_cluster_options(rmm_maximum_pool_size="10GB", device_bytes=DEVICE_BYTES)
    assert options["rmm_pool_size"] == options["rmm_maximum_pool_size"] == 10_000_000_000
    with pytest.raises(ValueError, match=r"rmm_pool_size=0\.6 is above"):
        gpu_cluster_options(rmm_pool_size=0.6)
    with pytest.raises(ValueError, match=r"rmm_pool_size='60GB' is above"):
        gpu_cluster_options(rmm_pool_size="60GB", device_bytes=DEVICE_BYTES)


def test_without_a_pool_rmm_is_left_alone():
    options, torch_fraction = gpu_cluster_options(rmm_pool_size=None)
    assert options == {"rmm_async": False, "enable_cudf_spill": False}
    assert torch_fraction == 0.9
    with pytest.raises(ValueError, match="there is none"):
        gpu_cluster_options(rmm_pool_size=None, rmm_maximum_pool_size=0.5)


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


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, "0.4", True, float("nan")])
def test_a_torch_fraction_that_is_no_share_is_refused(fraction):
    with pytest.raises(ValueError, match="not a share of the device"):
        gpu_cluster_options(torch_memory_fraction=fraction)


@pytest.mark.parametrize("libraries", ["torch", "cupy, torch", ["torch"]])
def test_torch_on_rmm_has_no_fraction_of_its_own(libraries):
    asked = {"rmm_allocator_external_lib_list": libraries}
    options, torch_fraction = gpu_cluster_options(asked, rmm_maximum_pool_size=0.9)
    assert torch_fraction is None
    assert options["rmm_allocator_external_lib_list"] == libraries
    with pytest.raises(ValueError, match="gives torch to RMM"):
        gpu_cluster_options(asked, torch_memory_fraction=0.3)


def test_a_device_memory_limit_of_the_caller_wins():
    options, _ = gpu_cluster_options({"device_memory_limit": 0.2}, device_bytes=DEVICE_BYTES)
    assert options["device_memory_limit"] == 0.2


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
        cores=cores, n_workers=n_workers, memory_bytes=memory_bytes
    )
    assert options == {"n_workers": expected_workers, "threads_per_worker": 1}
    assert torch_threads == expected_threads


def test_other_options_are_passed_on():
    options, _ = cpu_cluster_options({"memory_limit": "1GB"}, n_workers=2, threads_per_worker=3)
    assert options == {"n_workers": 2, "threads_per_worker": 3, "memory_limit": "1GB"}


def test_one_process_is_one_worker():
    options, torch_threads = cpu_cluster_options({"processes": False}, cores=4, memory_bytes=64e9)
    assert (options["n_workers"], torch_threads) == (1, 4)


def test_the_default_is_told_in_words(monkeypatch):
    monkeypatch.setattr(sizing, "usable_cores", lambda: 2)
    monkeypatch.setattr(sizing, "usable_memory", lambda: 24 * 2**30)
    assert sizing.shown_cpu_cluster() == "2 workers with 1 core and 12.00 GiB each"
    monkeypatch.setattr(sizing, "usable_memory", lambda: 4 * 2**30)
    assert sizing.shown_cpu_cluster() == "1 worker with 2 cores and 4.00 GiB"


def test_usable_cores_are_those_that_dask_counts():
    assert usable_cores() == dask.system.cpu_count()
