"""Which devices count as visible, and what an empty machine tells."""

import importlib.util

import pytest
import torch

from gpuclassify.workers import nvml
from gpuclassify.workers.device_report import nvml_source, watched
from gpuclassify.workers.nvml import Gpu, select_visible, survey_gpus
from gpuclassify.workers.run_context import RunStats

FIRST = Gpu(0, "GPU-aaaa-1", "H200", 150_000_000_000)
SLICES = (
    Gpu(1, "MIG-bbbb-1", "H200", 18_000_000_000),
    Gpu(1, "MIG-bbbb-2", "H200", 36_000_000_000),
)
LAST = Gpu(2, "GPU-cccc-1", "H200", 150_000_000_000)
DEVICES = (FIRST, *SLICES, LAST)


@pytest.mark.parametrize(
    ("visible_devices", "expected"),
    [
        (None, DEVICES),
        ("", ()),
        ("-1", ()),
        ("0", (FIRST,)),
        ("2,0", (LAST, FIRST)),
        (" 2 , 0 ", (LAST, FIRST)),
        ("0,9,2", (FIRST,)),
        ("1", (SLICES[0],)),
        ("MIG-bbbb-2", (SLICES[1],)),
        ("GPU-cccc", (LAST,)),
        ("GPU-cccc-1,MIG-bbbb-1", (LAST, SLICES[0])),
        ("banana", ()),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible_devices, expected):
    assert select_visible(DEVICES, visible_devices) == expected


def test_a_slice_is_named_by_uuid_and_a_whole_gpu_by_index():
    assert [gpu.visible_name for gpu in DEVICES] == ["0", "MIG-bbbb-1", "MIG-bbbb-2", "2"]


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_not_there(hidden):
    survey = survey_gpus(hidden)
    assert survey.gpus == ()
    assert not survey.has_gpu
    assert survey.absent_because


has_no_gpu = pytest.mark.skipif(survey_gpus().has_gpu, reason="is about machines without a GPU")


@has_no_gpu
def test_without_the_package_or_the_library_the_driver_is_said_to_be_missing():
    has_package = importlib.util.find_spec("pynvml") is not None
    with pytest.raises(
        nvml.DriverError, match="NVML Shared Library Not Found" if has_package else "nvidia-ml-py"
    ):
        nvml.open_nvml()


@has_no_gpu
@pytest.mark.rapids
def test_where_nvidias_library_is_missing_a_run_is_not_sampled_and_goes_on():
    """The package is the real one; its library comes with a nvml."""
    stats = RunStats()
    with pytest.raises(nvml.DriverError, match="NVML Shared Library Not Found"):
        nvml_source(torch.device("cuda"))
    with watched(torch.device("cuda"), stats):
        pass
    assert stats == RunStats()


@pytest.mark.gpu
def test_a_gpu_is_listed_with_its_memory_and_without_a_cuda_context(run_python):
    """In a process of its own, because other tests make a context in this one."""
    run_python(
        """
import torch
from gpuclassify.workers.nvml import survey_gpus
survey = survey_gpus()
assert not torch.cuda.is_initialized()
assert survey.has_gpu
assert survey.absent_because == ""
assert survey.driver_version
assert survey.cuda_version >= (12, 0)
assert len(survey.gpus) == torch.cuda.device_count()
torch_bytes = torch.cuda.get_device_properties(0).total_memory
assert abs(survey.gpus[0].memory_bytes / torch_bytes - 1) < 0.05
"""
    )
