"""Labelled documents that every installation has: the docstrings of installed Python packages."""

import ast
import inspect
import re
import sys
import sysconfig
import tokenize
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path

import numpy as np

AREAS: dict[str, tuple[str, ...]] = {
    "Command_Line": (
        *("argparse", "click", "cmd", "getopt", "huggingface_hub.cli", "optparse"),
        *("pip._internal.cli", "rich", "tornado.options", "tqdm", "transformers.cli", "typer"),
    ),
    "Concurrency": (
        *("anyio", "asyncio", "concurrent", "dask.local", "dask.multiprocessing", "dask.threaded"),
        *("distributed", "locket", "multiprocessing", "queue", "sched", "selectors", "signal"),
        *("subprocess", "threading", "torch.distributed.rpc", "torch.futures"),
        *("torch.multiprocessing", "tornado.concurrent", "tornado.gen", "tornado.ioloop"),
        *("tornado.locks", "tornado.platform", "tornado.process", "tornado.queues"),
    ),
    "Data_Tables": ("dask.array", "dask.bag", "dask.dataframe", "numpy", "pandas", "pyarrow"),
    "Machine_Learning": (
        *("functorch", "torch.amp", "torch.ao", "torch.nn", "torch.optim", "torch.quantization"),
        "transformers",
    ),
    "Mathematics": (
        *("_pydecimal", "dask.array.linalg", "fractions", "graphlib", "mpmath", "networkx"),
        *("numpy.fft", "numpy.linalg", "numpy.polynomial", "random", "statistics", "sympy"),
        "torch.distributions",
    ),
    "Networking": (
        *("anyio._core._sockets", "anyio.abc._sockets", "anyio.streams.tls", "distributed.comm"),
        *("email", "ftplib", "h11", "http", "httpcore2", "httpx2", "huggingface_hub.utils._http"),
        *("idna", "imaplib", "ipaddress", "mailbox", "nntplib", "pip._vendor.cachecontrol"),
        *("pip._vendor.requests", "pip._vendor.urllib3", "poplib", "smtpd", "smtplib", "socket"),
        *("socketserver", "ssl", "telnetlib", "tornado.auth", "tornado.curl_httpclient"),
        *("tornado.http1connection", "tornado.httpclient", "tornado.httpserver"),
        *("tornado.httputil", "tornado.iostream", "tornado.netutil", "tornado.routing"),
        *("tornado.simple_httpclient", "tornado.tcpclient", "tornado.tcpserver", "tornado.web"),
        *("tornado.websocket", "tornado.wsgi", "truststore", "urllib", "wsgiref", "xmlrpc"),
    ),
    "Packaging": (
        *("distutils", "ensurepip", "importlib.metadata", "importlib_metadata", "packaging"),
        *("pip", "setuptools", "venv"),
    ),
}
"""Area to the module name prefixes that belong to it; of nested prefixes the longest decides."""

MINIMUM_CHARACTERS = 80
_OPENING_CHARACTERS = 100
_DEALS = 2000
# Tests speak of anything, and copies of another project would stand in both halves.
_SKIPPED_PARTS = frozenset(
    {"_click", "_distutils", "_testing", "_vendor", "conftest", "distutils", "test", "testing"}
    | {"tests"}
)
_AREA_OF_PREFIX = {prefix: area for area, prefixes in AREAS.items() for prefix in prefixes}


@dataclass(frozen=True)
class Document:
    """A docstring, the subject area of its module, and that module's dotted name."""

    text: str
    area: str
    module: str

    @property
    def package(self) -> str:
        """The top-level package, which stands in one half of a split as a whole."""
        return self.module.partition(".")[0]


def collect_documents(*, max_documents: int = 3500) -> list[Document]:
    """Read the docstrings of the modules named in `AREAS`, without importing any of them.

    Docstrings of modules, classes and functions of at least 80 characters count. The packages of
    an area take turns, so that a small one is whole before a large one fills what is left. A
    package that is not installed contributes nothing.

    Parameters
    ----------
    max_documents : int
        An upper bound, shared equally by the areas.

    Returns
    -------
    list of Document
        The same list in the same order wherever the same packages are installed; no two
        documents open with the same words.

    Raises
    ------
    ValueError
        `max_documents` allows less than one document per area.
    """
    allowance = max_documents // len(AREAS)
    if allowance < 1:
        raise ValueError(
            f"max_documents={max_documents} is less than one for each of the {len(AREAS)} areas; "
            f"pass at least {len(AREAS)}."
        )
    seen: set[str] = set()
    documents: list[Document] = []
    for area, prefixes in AREAS.items():
        packages = dict.fromkeys(prefix.partition(".")[0] for prefix in prefixes)
        streams = [_package_documents(package, area) for package in packages]
        documents.extend(islice(_first_of_each_opening(_take_turns(streams), seen), allowance))
    return documents


def split_documents(
    documents: list[Document], seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Deal whole top-level packages into a training and a held-out half.

    Of many random deals the one is kept whose areas are divided most evenly. A held-out document
    that opens like a training document is dropped, so that no text stands in both halves.

    Parameters
    ----------
    documents : list of Document
        What to deal; the order is kept inside each half.
    seed : int
        Chooses the deals that are tried.

    Returns
    -------
    tuple of two lists of Document
        The training half and the held-out half.

    Raises
    ------
    ValueError
        The documents come from fewer than two packages.
    """
    packages = sorted({document.package for document in documents})
    if len(packages) < 2:
        raise ValueError(
            f"{len(documents)} documents come from the packages {packages}; a split holds whole "
            "packages out and needs at least two."
        )
    training_packages = _most_even_deal(documents, packages, seed)
    training = [document for document in documents if document.package in training_packages]
    return training, hold_out(documents, training)


def hold_out(documents: Iterable[Document], training: Sequence[Document]) -> list[Document]:
    """Return the documents of other packages than the training documents', that open otherwise."""
    packages = {document.package for document in training}
    openings = {_opening(document.text) for document in training}
    return [
        document
        for document in documents
        if document.package not in packages and _opening(document.text) not in openings
    ]


def _most_even_deal(documents: list[Document], packages: list[str], seed: int) -> set[str]:
    areas = sorted({document.area for document in documents})
    counts = Counter((document.package, document.area) for document in documents)
    table = np.array([[counts[package, area] for area in areas] for package in packages])
    deals = np.random.default_rng(seed).random((_DEALS, len(packages))) < 0.5
    is_proper = deals.any(axis=1) & ~deals.all(axis=1)
    training_share = deals @ table / table.sum(axis=0)
    unevenness = np.where(is_proper, np.abs(training_share - 0.5).max(axis=1), np.inf)
    chosen = deals[unevenness.argmin()]
    return {package for package, is_training in zip(packages, chosen, strict=True) if is_training}


def _take_turns(streams: list[Iterator[Document]]) -> Iterator[Document]:
    while streams:
        unfinished = []
        for stream in streams:
            document = next(stream, None)
            if document is not None:
                yield document
                unfinished.append(stream)
        streams = unfinished


def _first_of_each_opening(documents: Iterable[Document], seen: set[str]) -> Iterator[Document]:
    for document in documents:
        opening = _opening(document.text)
        if opening not in seen:
            seen.add(opening)
            yield document


def _opening(text: str) -> str:
    """Return the first words without case and punctuation, in which near copies are equal."""
    return " ".join(re.findall(r"\w+", text.casefold()))[:_OPENING_CHARACTERS]


def _package_documents(package: str, area: str) -> Iterator[Document]:
    for module, path in _source_files(package, area):
        for text in _docstrings(path):
            yield Document(text, area, module)


def _source_files(package: str, area: str) -> list[tuple[str, Path]]:
    # The stdlib comes first: a stray queue.py in the working directory is not the one meant.
    spec = PathFinder.find_spec(package, [sysconfig.get_path("stdlib"), *sys.path])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return []
    origin = Path(spec.origin)
    is_package = spec.submodule_search_locations is not None
    paths = origin.parent.rglob("*.py") if is_package else [origin]
    root = origin.parents[1] if is_package else origin.parent
    named = [(_module_name(path.relative_to(root)), path) for path in paths]
    chosen = [(module, path) for module, path in named if _area_of(module) == area]
    # An order that ignores the alphabet lets a bounded take reach all over a large package.
    return sorted(chosen, key=lambda pair: (zlib.crc32(pair[0].encode()), pair[0]))


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _area_of(module: str) -> str | None:
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        area = _AREA_OF_PREFIX.get(".".join(parts[:count]))
        if area is not None:
            return None if _SKIPPED_PARTS.intersection(parts[count:]) else area
    return None


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings(), tokenize.open(path) as file:
            warnings.simplefilter("ignore")  # another project's invalid escapes
            tree = ast.parse(file.read())
    except (OSError, RecursionError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
            if len(text) >= MINIMUM_CHARACTERS and _is_writable(text):
                yield text


def _is_writable(text: str) -> bool:
    """Tell whether the text can be stored as JSON and read back (no lone surrogate, no NUL)."""
    return "\0" not in text and not re.search("[\ud800-\udfff]", text)
