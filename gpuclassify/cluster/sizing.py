"""Checks and defaults of cluster options: names, sizes, cores per worker, shares of a GPU."""

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpuclassify._version import installed_versions
from gpuclassify.settings.checks import BACKENDS, check_choice, check_count, check_names
from gpuclassify.workers.machine import usable_cores, usable_memory
from gpuclassify.workers.nvml import Gpu, GpuSurvey

Size = int | float | str

# Models of the size of BERT and MiniLM are about as fast in one worker as in two. For smaller
# models, Python's share of the work matters, and a second process helps, but each process loads its
# own models; see `benchmarks.workers`.
CORES_PER_WORKER = 8
FEWEST_WORKERS = 2
BYTES_PER_WORKER = 8e9
# Memory of a worker process with torch and transformers imported, but no model.
WORKER_BYTES = 400_000_000
MAXIMUM_SHARE = 0.95  # the rest is for CUDA's context, kernels and libraries
SPILL_SHARE = 0.8  # Dask moves stored frames to the host before RMM's pool is full
AUTO = "auto"  # default shares of a device, below
POOL_SHARE, MAXIMUM_POOL_SHARE = 0.3, 0.5  # initial and maximum size of RMM's pool
TORCH_SHARE, TORCH_ALONE_SHARE = 0.45, 0.9  # torch's share with RMM's pool, and without one
# Options that get_client sets itself, or that only asynchronous clients have.
MANAGED_OPTIONS = {"self", "asynchronous", "loop", "start", "ip", "nthreads", "services"}

# Units of the numbers in sbatch(1)'s --time, after days and a dash, or by count without days.
AFTER_DAYS = (3_600, 60, 1)
WITHOUT_DAYS = {1: (60,), 2: (60, 1), 3: (3_600, 60, 1)}


class ImpossibleClusterError(RuntimeError):
    """Error raised before a cluster starts if this machine cannot run it."""


def check_options(
    options: Iterable[str], targets: Sequence[Any], also_near: Iterable[str] = ()
) -> None:
    """Raise TypeError if an option of `get_client` is not a parameter of any of the `targets`.

    `targets` are the classes that options are passed on to, such as LocalCluster. Their parameters
    in `MANAGED_OPTIONS` are refused, too. Names in `also_near` are accepted.
    """
    accepted = {name for target in targets for name in names_of(target)} - MANAGED_OPTIONS
    owner = targets[0].__name__
    known = sorted(accepted | {*also_near})
    check_names(f"get_client() and {owner} have", "option", options, known, f"See {owner}.")


def names_of(target: Any) -> list[str]:
    """Return the names of a function's or class's parameters, without ``**kwargs``."""
    parameters = inspect.signature(target).parameters.values()
    return [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]


def parse_walltime(walltime: str) -> int | None:
    """Convert a time limit of Slurm, such as "1-12:00", to seconds; None for "unlimited"."""
    text = str(walltime).strip().lower()
    if text in ("infinite", "unlimited"):
        return None
    days, dash, rest = text.rpartition("-")
    numbers = rest.split(":")
    units = AFTER_DAYS if dash else WITHOUT_DAYS.get(len(numbers), ())
    seconds = 0
    if len(numbers) <= len(units) and all(map(str.isdecimal, [*numbers, days if dash else "0"])):
        seconds = sum(int(number) * unit for number, unit in zip(numbers, units, strict=False))
        seconds += 86_400 * int(days or 0)
    if seconds <= 0:
        raise ValueError(
            f'walltime={walltime!r} is no time limit of Slurm\'s: give minutes ("30"), '
            '"hours:minutes:seconds" or "days-hours:minutes:seconds"'
        )
    return seconds


def one_for_each_gpu(option: str, gpus: int, **workers: int | None) -> None:
    """Raise ValueError if a Slurm job or node has GPUs, and another number of workers.

    `option` is the name of the option that sets `gpus`. `workers` are the numbers of workers that
    other options ask for, None if they are not set.
    """
    for name, count in workers.items():
        if gpus and count not in (None, gpus):
            raise ValueError(
                f"{name}={count} with {option}={gpus}: each GPU has one worker; leave {name} out"
            )


def memory_shares(n_workers: int) -> dict[str, int]:
    """Return ``{"memory_limit": bytes}`` for each of `n_workers`; {} if Dask finds it by itself.

    Dask reads only the machine's memory and the limit of the topmost control group (cgroup).
    """
    from distributed.system import MEMORY_LIMIT

    memory_bytes = usable_memory()
    return {"memory_limit": memory_bytes // n_workers} if memory_bytes < MEMORY_LIMIT else {}


def refuse_crowd(n_workers: int) -> None:
    """Raise ImpossibleClusterError if `n_workers` is above 1 and too many for the memory here."""
    memory_bytes = usable_memory()
    most = max(1, int(memory_bytes // WORKER_BYTES))
    if n_workers > most:
        raise ImpossibleClusterError(
            f"n_workers={n_workers:,} is more than this machine has memory for: a worker takes "
            f"{WORKER_BYTES / 1e9:g} GB before it has loaded a model, and {memory_bytes / 1e9:.3g} "
            f"GB are here. Pass at most {most}; {usable_cores()} cores are here"
        )


def cpu_cluster_options(
    options: Mapping[str, Any] | None = None,
    *,
    n_workers: int | None = None,
    threads_per_worker: int | None = None,
    cores: int | None = None,
    memory_bytes: float | None = None,
) -> tuple[dict[str, Any], int]:
    """Return the arguments of ``LocalCluster`` for a CPU cluster, and the torch threads per worker.

    `options` override the arguments made here. By default, there is one worker per 8 cores, but at
    least two, fewer if memory or cores are short, and one with ``processes=False``. `cores` and
    `memory_bytes` default to those that this process may use.
    """
    cores = usable_cores() if cores is None else cores
    if n_workers is None and (options or {}).get("processes") is False:
        n_workers = 1  # models of one process take turns
    elif n_workers is None:
        memory_bytes = usable_memory() if memory_bytes is None else memory_bytes
        by_cores = max(cores // CORES_PER_WORKER, min(cores, FEWEST_WORKERS))
        n_workers = max(1, min(by_cores, int(memory_bytes // BYTES_PER_WORKER)))
    tasks = tasks_per_worker(threads_per_worker, False, "pandas")
    workers = {"n_workers": n_workers, "threads_per_worker": tasks, **memory_shares(n_workers)}
    return workers | dict(options or {}), max(1, cores // n_workers)


def tasks_per_worker(requested: int | None, is_gpu: bool, backend: str) -> int:
    """Return the number of tasks that a worker runs at a time: `requested`, or a default if None.

    The default is two on a GPU with pandas frames, so that one task reads and tokenizes while the
    other one runs the model. It is one with cudf frames, which take GPU memory, and on CPUs.
    """
    check_count("threads_per_worker", requested, may_be_none=True)
    return requested or (2 if is_gpu and backend == "pandas" else 1)


def parse_size(
    value: Size | None, name: str, device_bytes: int | None = None
) -> int | float | None:
    """Convert a size of GPU memory to a number of bytes (int) or a share of the device (float).

    `value` is a number of bytes, ``8_000_000_000`` or ``"8GB"``, or a share, ``0.3`` or ``"0.3"``;
    None is returned unchanged. If `device_bytes` (the device's memory) is passed, a share is
    converted to bytes.
    """
    from dask.utils import parse_bytes

    if value is None:
        return None
    cure = f'give {name} as bytes (8_000_000_000), as text ("8GB") or as a share (0.3)'
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{name}={value!r} is no size; {cure}")
    text = str(value).strip()
    is_share = isinstance(value, float) or ("." in text and text.replace(".", "", 1).isdecimal())
    try:
        size = float(value) if is_share else parse_bytes(value)
    except ValueError as err:
        raise ValueError(f"{name}={value!r} cannot be read as a size; {cure}") from err
    if not text or not size > 0 or (is_share and size > 1):
        raise ValueError(f"{name}={value!r} is not above zero, or is a share above 1; {cure}")
    return int(size * device_bytes) if is_share and device_bytes else size


def gpu_cluster_options(
    options: Mapping[str, Any] | None = None,
    *,
    backend: str = "pandas",
    rmm_pool_size: Size | None = AUTO,
    rmm_maximum_pool_size: Size | None = AUTO,
    rmm_async: bool = False,
    torch_memory_fraction: float | str | None = AUTO,
    enable_cudf_spill: bool = False,
    device_bytes: int | None = None,
) -> tuple[dict[str, Any], float | None]:
    """Return the arguments of ``LocalCUDACluster``, and torch's share of the GPU's memory or None.

    `options` are other arguments of ``LocalCUDACluster`` and become part of the result. With
    `device_bytes`, the memory of the smallest GPU in use, shares of RMM are converted to bytes,
    because dask-cuda would apply them to GPU 0, and to the whole GPU for a MIG slice. The remaining
    parameters are explained at `get_client`.
    """
    options = dict(options or {})
    check_choice("backend", backend, BACKENDS)
    is_sized, is_bounded = (
        size not in (None, AUTO) for size in (rmm_pool_size, rmm_maximum_pool_size)
    )
    if rmm_async and is_sized:
        raise ValueError(
            f"rmm_async=True replaces the pool, so that rmm_pool_size={rmm_pool_size!r} has no "
            "effect; leave it out (rmm_maximum_pool_size still bounds what RMM takes)"
        )
    is_shared = rmm_async or is_sized or (rmm_pool_size == AUTO and backend == "cudf")
    torch_fraction = _torch_fraction(torch_memory_fraction, options, is_shared)
    settings: dict[str, Any] = {"rmm_async": rmm_async, "enable_cudf_spill": enable_cudf_spill}
    if _is_torch_on_rmm(options):  # otherwise the pool's free memory is unknown
        settings["rmm_track_allocations"] = True
    if not is_shared:
        if is_bounded:
            raise ValueError(
                f"rmm_maximum_pool_size={rmm_maximum_pool_size!r} bounds a pool, but there is "
                'none: give rmm_pool_size or backend="cudf" too, or rmm_async=True'
            )
        if _is_torch_on_rmm(options):
            raise ValueError(
                "rmm_allocator_external_lib_list gives torch to RMM, which without a pool asks the "
                'driver for every tensor: give rmm_pool_size or backend="cudf" too, or '
                "rmm_async=True"
            )
        return settings | options, torch_fraction
    pool = rmm_pool_size if is_sized else POOL_SHARE
    maximum = rmm_maximum_pool_size if rmm_maximum_pool_size != AUTO else MAXIMUM_POOL_SHARE
    start = parse_size(None if rmm_async else pool, "rmm_pool_size", device_bytes)
    limit = parse_size(maximum, "rmm_maximum_pool_size", device_bytes)
    if start is not None and type(start) is type(limit) and start > limit:
        if is_sized:
            raise ValueError(
                f"rmm_pool_size={pool!r} is above rmm_maximum_pool_size={maximum!r}; raise the "
                "maximum or start with a smaller pool"
            )
        start = limit
    _check_shares(limit, torch_fraction, device_bytes)
    if start is not None:
        settings["rmm_pool_size"] = start
    if limit is not None:
        settings["rmm_maximum_pool_size"] = limit
        settings["device_memory_limit"] = type(limit)(limit * SPILL_SHARE)
    return settings | options, torch_fraction


def choose_gpus(gpus: Sequence[Gpu], n_workers: int | None) -> tuple[Gpu, ...]:
    """Return the GPUs that get a worker each: all visible ones, or the first `n_workers`."""
    if n_workers is not None and n_workers > len(gpus):
        raise ValueError(
            f"n_workers={n_workers}, but {len(gpus)} GPUs are visible and each takes one worker; "
            "lower n_workers or widen CUDA_VISIBLE_DEVICES"
        )
    selected = tuple(gpus[:n_workers])
    slices = [gpu for gpu in selected if gpu.is_slice]
    if 0 < len(slices) < len(selected):  # dask-cuda sorts their names, numbers and UUIDs
        raise ValueError(
            f"of {len(selected)} visible devices {len(slices)} are MIG slices, and a cluster has "
            "either slices or whole GPUs: name one kind in CUDA_VISIBLE_DEVICES, for example "
            f"CUDA_VISIBLE_DEVICES={','.join(gpu.visible_name for gpu in slices)}"
        )
    return selected


def missing_for_gpu(survey: GpuSurvey) -> list[str]:
    """Return a phrase for each requirement of a local GPU cluster that this machine lacks."""
    missing = [survey.absent_because] if survey.absent_because else []
    for module in ("dask_cuda", "rmm"):
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as err:
            missing.append(f"{module} does not import ({err})")
    torch_version = installed_versions("torch").get("torch")
    if torch_version is None:
        missing.append("torch is not installed")
    elif torch_version.endswith("+cpu"):
        missing.append(f"torch {torch_version} is built without CUDA")
    return missing


def _torch_fraction(
    fraction: float | str | None, options: Mapping[str, Any], is_shared: bool
) -> float | None:
    if _is_torch_on_rmm(options):
        if fraction not in (None, AUTO):
            raise ValueError(
                f"torch_memory_fraction={fraction!r} limits torch's allocator, but "
                "rmm_allocator_external_lib_list gives torch to RMM; leave one of them out"
            )
        return None
    if fraction is None:
        return None
    if fraction == AUTO:
        return TORCH_SHARE if is_shared else TORCH_ALONE_SHARE
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(
            f"torch_memory_fraction={fraction!r} is not a share of the device in (0, 1]; "
            "give for example 0.9, or None to leave torch unbounded"
        )
    return float(fraction)


def _is_torch_on_rmm(options: Mapping[str, Any]) -> bool:
    libraries = options.get("rmm_allocator_external_lib_list") or []
    if isinstance(libraries, str):
        libraries = [name.strip() for name in libraries.split(",")]
    return "torch" in libraries


def _check_shares(
    maximum: int | float | None, torch_fraction: float | None, device_bytes: int | None
) -> None:
    """Raise ValueError if the limits of RMM and torch sum to more than 0.95 of the GPU.

    `maximum` limits RMM, in bytes (int; not checked without `device_bytes`) or as a share (float).
    Without a limit, RMM counts as 1, and torch as 0.
    """
    if maximum is None:
        rmm_share = 1.0
    elif isinstance(maximum, float):
        rmm_share = maximum
    elif device_bytes:
        rmm_share = maximum / device_bytes
    else:  # bytes, if the device's size is unknown
        return
    total = rmm_share + (torch_fraction or 0.0)
    if total > MAXIMUM_SHARE + 1e-9:
        raise ValueError(
            f"RMM may take {rmm_share:.2f} of the device and torch {torch_fraction or 0:.2f}: "
            f"together {total:.2f}, above {MAXIMUM_SHARE}, so that one starves the other. Lower "
            f"rmm_maximum_pool_size or torch_memory_fraction to a sum of {MAXIMUM_SHARE}."
        )
