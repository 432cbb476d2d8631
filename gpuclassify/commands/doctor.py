"""Command ``gpuclassify doctor``: check the installation and GPUs, and name fixes."""

import json
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpuclassify._version import __version__
from gpuclassify.hub.calls import ask
from gpuclassify.settings.checks import install
from gpuclassify.workers.machine import usable_cores
from gpuclassify.workers.nvml import GpuSurvey, survey_gpus

Status = Literal["ok", "warning", "missing", "problem"]

REQUIRED = ("dask", "distributed", "pandas", "pyarrow", "transformers", "huggingface-hub")
RAPIDS = ("cudf", "dask-cudf", "dask-cuda", "rmm")
RAPIDS_WHEEL = re.compile(r"(?P<base>cudf|dask-cudf|dask-cuda|rmm|pylibcudf)(-cu(?P<cuda>\d+))?")
# Uses of the extras. Their packages are in the metadata; those for GPUs are checked separately.
EXTRAS = {
    "crossfit": "loader='crossfit'",
    "fasttext": "FastTextClassifier and LanguageIdentifier",
    "safety": "LoRA adapters, as of AegisClassifier and InstructionDataGuardClassifier",
    "signals": "Signals",
    "dedup": "deduplication",
    "sentencepiece": "tokenizers with only a SentencePiece file",
    "train": "training heads",
    "s3": "paths that begin with s3://",
    "slurm": "clusters of Slurm",
    "coiled": "clusters of Coiled",
}
# Instructions, by torch's names, that speed up models in bfloat16 and int8.
INSTRUCTIONS = {
    "amx_bf16": "AMX for bfloat16",
    "amx_int8": "AMX for int8",
    "avx512_bf16": "AVX512-BF16",
    "avx512_vnni": "AVX512-VNNI",
    "avx_vnni": "AVX-VNNI",
    "bf16": "bfloat16 (Arm)",
}
# Variables that s3fs' client reads for credentials, region and endpoint; AWS_REGION is not read.
S3_VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"),
    *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"),
    *("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"),
)
S3_OPTIONS = "FSSPEC_S3_"  # prefix of variables for s3fs, such as FSSPEC_S3_ENDPOINT_URL
LOW_DISK_BYTES = 5_000_000_000  # size of a large checkpoint with its other files
TORCH_PROBE_SECONDS = 120
KNOWN_MODEL, HUB_SECONDS = "nvidia/domain-classifier", 5.0
TORCH_PROBE = """
import json, torch
available = torch.cuda.is_available()
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda,
                  "devices": torch.cuda.device_count() if available else 0,
                  "threads": torch.get_num_threads(),
                  "cpu": dict(getattr(torch.cpu, "get_capabilities", dict)())}))
"""

Distributions = Mapping[str, metadata.Distribution]


@dataclass(frozen=True)
class Check:
    """Result of one check of this machine: name, status, details, and advice for fixing a problem.

    The status ``"missing"`` means that an optional part is not installed, and ``"problem"`` that
    something which is installed does not work.
    """

    name: str
    status: Status
    found: str
    cure: str = ""


@dataclass(frozen=True)
class Findings:
    """Results of all checks of this machine, in the order of printing."""

    checks: tuple[Check, ...]

    @property
    def has_problems(self) -> bool:
        """Whether any check has the status ``"problem"``; other statuses do not count."""
        return any(check.status == "problem" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return ``has_problems`` and the list of ``checks`` as plain values, ready for JSON."""
        checks = [asdict(check) for check in self.checks]
        return {"has_problems": self.has_problems, "checks": checks}


def examine() -> Findings:
    """Check this environment and machine, in about the time that importing torch takes.

    torch is imported in another process, so that no CUDA context is created here. One request is
    sent to the Hugging Face Hub, without a token. Nothing is printed, downloaded or changed.
    """
    installed = installed_distributions()
    survey, torch_probe = survey_gpus(), probe_torch()
    return Findings((
        *package_checks(installed),
        *leftover_checks(),
        torch_check(torch_probe, survey),
        cpu_check(torch_probe),
        *gpu_checks(survey),
        *rapids_checks(
            {name: one.version for name, one in installed.items()}, survey, torch_probe.get("cuda")
        ),
        *optional_checks(installed),
        requirement_check(),
        *hub_checks(),
    ))  # fmt: skip


def installed_distributions() -> dict[str, metadata.Distribution]:
    """Return the installed packages by normalised name; the first one on Python's path wins."""
    by_name: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        if name := distribution.metadata["Name"]:
            by_name.setdefault(canonicalize_name(name), distribution)
    return by_name


def probe_torch(script: str = TORCH_PROBE) -> dict[str, Any]:
    """Run `script` in a new Python process, to import torch and return facts about it.

    The dict is the JSON on the last line that `script` prints. If the import fails, or takes more
    than 120 seconds, the dict has only ``error``, the reason.
    """
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", script], timeout=TORCH_PROBE_SECONDS, **options
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as err:
        return {"error": (err.stderr.strip().splitlines() or [f"exit code {err.returncode}"])[-1]}
    except subprocess.TimeoutExpired:
        return {"error": f"importing it took more than {TORCH_PROBE_SECONDS} seconds"}
    except (ValueError, IndexError) as err:
        return {"error": f"its answer cannot be read ({err})"}


def rapids_checks(
    versions: Mapping[str, str], survey: GpuSurvey, torch_cuda: str | None = None
) -> Iterator[Check]:
    """Check that the installed RAPIDS wheels fit each other, the driver and torch.

    `versions` are of installed packages, by name; `torch_cuda` is torch's CUDA version ("13.0").
    """
    wheels = {name: match for name in versions if (match := RAPIDS_WHEEL.fullmatch(name))}
    cure = install(extra_for(survey)) if survey.gpus else ""
    for base in RAPIDS:
        detail = [
            f"{name} {versions[name]}" for name, wheel in wheels.items() if wheel["base"] == base
        ]
        reason = "not installed" if survey.gpus else "not installed (only GPUs need it)"
        yield (
            Check(base, "ok", ", ".join(detail)) if detail else Check(base, "missing", reason, cure)
        )
    majors = {int(wheel["cuda"]) for wheel in wheels.values() if wheel["cuda"]}
    if len(majors) > 1:
        names = " and ".join(f"CUDA {major}" for major in sorted(majors))
        cure = f"uninstall them all, then {install(extra_for(survey))}"
        yield Check("RAPIDS and CUDA", "problem", f"wheels for {names} side by side", cure)
    elif majors and survey.cuda_version:
        (major,), driver = majors, survey.cuda_version
        both = f"wheels for CUDA {major}, driver for CUDA {driver[0]}.{driver[1]}"
        if major <= driver[0]:
            yield Check("RAPIDS and CUDA", "ok", both)
        else:
            cure = f"update the NVIDIA driver, or {install('gpu-cu12')} instead"
            yield Check("RAPIDS and CUDA", "problem", both, cure)
    if len(majors) == 1 and torch_cuda:
        (major,) = majors
        both = f"wheels for CUDA {major}, torch for CUDA {torch_cuda}"
        if torch_cuda.startswith(f"{major}."):
            yield Check("RAPIDS and torch", "ok", both)
        else:  # each extra installs torch for its CUDA version
            cure = f"{install('gpu-cu12' if major == 12 else 'gpu')}, or the other RAPIDS wheels"
            yield Check("RAPIDS and torch", "warning", both, cure)


def extra_for(survey: GpuSurvey) -> str:
    """Return the extra of this package to install for the driver's CUDA version, such as "gpu"."""
    is_older = survey.cuda_version is not None and survey.cuda_version < (13, 0)
    return "gpu-cu12" if is_older else "gpu"


def is_for(requirement: Requirement, extra: str) -> bool:
    """Return whether a package requirement applies to this Python with `extra` ("" for none)."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def requirement_check() -> Check:
    """Check by ``pip check`` that the requirements of all installed packages are met."""
    command = [sys.executable, "-P", "-m", "pip", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Check("requirements", "ok", "all are met, says pip check")
    if unmet := done.stdout.splitlines():
        cure = "install the versions that are required"
        return Check("requirements", "warning", " ".join(unmet), cure)
    return Check("requirements", "missing", "not checked: pip is not installed", "uv pip check")


def package_checks(installed: Distributions) -> Iterator[Check]:
    """Check Python, this package and the packages that it requires."""
    python = f"{platform.python_version()} ({sys.executable})"
    yield Check("Python", "ok", python)  # older ones cannot install gpuclassify
    yield Check("gpuclassify", "ok", __version__)
    for name in REQUIRED:
        if name in installed:
            yield Check(name, "ok", installed[name].version)
        else:
            yield Check(name, "problem", "not installed", f"pip install {name}")


def leftover_checks(folders: Sequence[str] | None = None) -> Iterator[Check]:
    """Find folders of this package without its files, which an uninstallation has left behind.

    Python imports such a folder as an empty package, in place of an editable installation.
    """
    if folders is None:
        folders = site.getsitepackages()
        folders += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    for folder in dict.fromkeys(folders):
        left = Path(folder, "gpuclassify")
        if left.is_dir() and not Path(left, "__init__.py").exists():
            detail = f"{left} has no __init__.py: Python may import it as an empty package"
            cure = f"remove it: rm -r {quote(str(left))}"
            yield Check("leftover folder", "problem", detail, cure)


def torch_check(probe: Mapping[str, Any], survey: GpuSurvey) -> Check:
    """Check that torch can be imported, and uses the GPUs of this machine."""
    if "error" in probe:
        cure = "pip install --force-reinstall torch"
        return Check("torch", "problem", f"does not import: {probe['error']}", cure)
    build = f"built for CUDA {probe['cuda']}" if probe["cuda"] else "built without CUDA"
    detail = f"{probe['version']}, {build}, sees {probe['devices']} GPUs"
    if probe["devices"] or not survey.gpus:
        return Check("torch", "ok", detail)
    if probe["cuda"]:
        cure = (
            f"driver {survey.driver_version} may be too old for this build: update it, or "
            f"{install(extra_for(survey))}, with a torch for its CUDA"
        )
        return Check("torch", "problem", detail, cure)
    cure = "install a CUDA build of torch; until then models run on the CPU"
    return Check("torch", "warning", detail, cure)


def cpu_check(probe: Mapping[str, Any]) -> Check:
    """Report the cores, torch's threads and the CPU's instructions, which affect speed."""
    detail = [f"{usable_cores()} cores may be used"]
    if "threads" in probe:
        detail.append(f"{probe['threads']} threads of torch")
    if capabilities := probe.get("cpu"):
        has = [name for key, name in INSTRUCTIONS.items() if capabilities.get(key)]
        detail.append(", ".join(has) or "no instructions for bfloat16 or int8")
    return Check("CPU", "ok", "; ".join(detail))


def gpu_checks(survey: GpuSurvey) -> Iterator[Check]:
    """Check the NVIDIA driver and the C compiler, and report each GPU."""
    if not survey.gpus:
        detail = f"no GPU: CPU will be used ({survey.absent_because})"
        if survey.has_gpu:
            cure = "pip install nvidia-ml-py, and check that nvidia-smi lists the GPU"
            yield Check("GPU", "warning", detail, cure)
        else:
            yield Check("GPU", "ok", detail)
        return
    major, minor = survey.cuda_version or (0, 0)
    driver = f"{survey.driver_version}, runs CUDA up to {major}.{minor}"
    if major >= 12:
        yield Check("NVIDIA driver", "ok", driver)
    else:
        yield Check("NVIDIA driver", "problem", driver, "update it: RAPIDS needs CUDA 12 or newer")
    for gpu in survey.gpus:
        size = f"{gpu.memory_bytes / 2**30:.1f} GiB" if gpu.memory_bytes else "the host's memory"
        yield Check(f"GPU {gpu.visible_name}", "ok", f"{gpu.name}, {size}")
    yield compiler_check()


def compiler_check() -> Check:
    """Check that Triton can compile GPU kernels here, such as DeBERTa's fused attention.

    Triton needs a C compiler (CC, gcc or clang) and Python's header files. Without them, everything
    else works.
    """
    named = os.environ.get("CC")
    compiler = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if compiler and header.is_file():
        return Check("C compiler", "ok", f"{compiler}, and {header}")
    detail = f"no {header}" if compiler else f"no {named}" if named else "no gcc or clang"
    cure = "apt install gcc python3-dev, or conda install gcc, for DeBERTa's fused attention"
    return Check("C compiler", "missing", detail, cure)


def optional_checks(installed: Distributions) -> Iterator[Check]:
    """Check the packages of each optional extra, S3 variables, and Dask's dashboard."""
    ours = installed.get("gpuclassify")
    if ours is None:
        detail = "unknown, as gpuclassify runs from a checkout that is not installed"
        yield Check("extras", "missing", detail, "pip install -e . there")
    declared = [] if ours is None else list(map(Requirement, ours.requires or ()))
    for extra, use in EXTRAS.items() if declared else ():
        needed = [one for one in declared if is_for(one, extra) and not is_for(one, "")]
        names = [canonicalize_name(one.name) for one in needed]
        if absent := [name for name in names if name not in installed]:
            cure = f"{install(extra)} for {use}"
            yield Check(f"extra {extra}", "missing", f"{', '.join(absent)} not installed", cure)
        elif names:
            detail = ", ".join(f"{name} {installed[name].version}" for name in names)
            yield Check(f"extra {extra}", "ok", detail)
        else:
            others = (one for one in declared if f'extra == "{extra}"' in str(one.marker))
            ranges = {
                f"{one.name} ({str(one.marker).partition(' and extra')[0]})" for one in others
            }
            detail = f"not for Python {platform.python_version()}: {', '.join(sorted(ranges))}"
            yield Check(f"extra {extra}", "missing", detail, f"do without {use}")
    if "s3fs" in installed:
        yield storage_check()
    if "bokeh" in installed:
        yield Check("Dask dashboard", "ok", f"bokeh {installed['bokeh'].version}")
    else:
        cure = "pip install bokeh, for the page that client.dashboard_link names"
        yield Check("Dask dashboard", "missing", "bokeh is not installed", cure)


def storage_check(environment: Mapping[str, str] = os.environ) -> Check:
    """Name the environment variables for S3 storage that are set, and all that s3fs reads."""
    found = [name for name in S3_VARIABLES if environment.get(name)]
    found += sorted(name for name in environment if name.startswith(S3_OPTIONS))
    read = ", ".join((*S3_VARIABLES, f"{S3_OPTIONS}..."))
    detail = f"set: {', '.join(found) or 'none'}; read: {read}"
    return Check("S3 variables", "ok", detail)


def hub_checks(token_path: str | Path | None = None) -> Iterator[Check]:
    """Check that a Hub token exists, that the Hub answers, and that the Hub's cache is usable."""
    from huggingface_hub import constants

    variables = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    file = Path(token_path or constants.HF_TOKEN_PATH)
    if name := next((name for name in variables if os.environ.get(name, "").strip()), None):
        yield Check("Hub token", "ok", f"yes, in {name}")
    elif file.is_file() and file.stat().st_size:
        yield Check("Hub token", "ok", "yes, from a login")
    else:
        cure = "hf auth login, or set HF_TOKEN, for gated models"
        yield Check("Hub token", "missing", "no (public models need none)", cure)
    yield access_check()
    yield cache_check(Path(constants.HF_HUB_CACHE))


def access_check() -> Check:
    """Check that the Hub answers a request, unless HF_HUB_OFFLINE is set."""
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode():
        detail = "offline (HF_HUB_OFFLINE=1): only models in the cache and local directories"
        return Check("Hub access", "ok", detail)
    api = HfApi(token=False)
    try:
        ask(KNOWN_MODEL, lambda: api.model_info(KNOWN_MODEL, timeout=HUB_SECONDS), tries=1)
    except (OSError, RuntimeError, ValueError, TypeError) as err:  # a proxy may answer anything
        cure = (
            "check the network, HTTPS_PROXY and HF_ENDPOINT; without it, models in the cache and "
            "local directories work with HF_HUB_OFFLINE=1"
        )
        return Check("Hub access", "warning", f"no answer from {api.endpoint}: {err}", cure)
    return Check("Hub access", "ok", f"online: {api.endpoint} answers")


def cache_check(directory: Path, low_bytes: int = LOW_DISK_BYTES) -> Check:
    """Check that the Hub's cache directory is writable, with at least `low_bytes` of free space."""
    root = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    free_bytes = shutil.disk_usage(root).free
    detail = f"{directory}, {free_bytes / 1e9:.1f} GB free"
    cure = "set HF_HOME to a directory with room that you may write to"
    if not root.is_dir() or not os.access(root, os.W_OK):
        return Check("Hub cache", "problem", f"{detail}, not writable", cure)
    if free_bytes < low_bytes:
        return Check("Hub cache", "warning", detail, cure)
    return Check("Hub cache", "ok", detail)
