"""Read the labels of a fastText file without its matrices, and check that it is complete.

The library does not check files: a truncated one crashes the process that loads it. The format is
that of ``FastText::saveModel`` in fastText 0.9 (``src/fasttext.cc``, ``args.cc``,
``dictionary.cc``, ``densematrix.cc``, ``quantmatrix.cc``, ``productquantizer.cc``).
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gpuclassify import hub
from gpuclassify.hub import Identity, ModelFile
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError

PATTERNS = ("*.bin", "*.ftz")
MAGIC = 793712314
VERSIONS = (11, 12)
WORD_VECTORS, SUPERVISED = (1, 2), 3  # model types: cbow, skip-gram; classifier
CENTROIDS = 256  # centroids of a product quantizer
_ENTRY_TAIL = 9  # bytes after a word's zero byte: a count of 8 bytes, and a type of 1
_READ_BYTES = 2**20
TOKENIZER = "local_tokenizer/tokenizer.json"  # path in Ultra-FineWeb's repository


@dataclass(frozen=True)
class FastTextFile:
    """Description of a fastText classifier's file, pinned to a commit or a digest."""

    identity: Identity
    filename: str
    labels: tuple[str, ...]  # labels with prefix, in the library's order
    size_bytes: int
    tokenizer: Identity | None = None  # repository with TOKENIZER, if texts are tokenized


def read_fasttext(file: BinaryIO, model: ModelFile) -> FastTextFile:
    """Check a fastText file's header and length, and return its description.

    `file` must be seekable. Raises CheckpointError if it is no complete fastText classifier.
    """
    return _Reader(file, model).read()


class _Reader:
    """Sequential reader of the blocks of a fastText file: settings, dictionary and matrices."""

    def __init__(self, file: BinaryIO, model: ModelFile) -> None:
        self.file, self.model = file, model
        self.size_bytes = file.seek(0, 2)
        file.seek(0)

    def read(self) -> FastTextFile:
        head = self.file.read(8)
        magic, version = struct.unpack("<2i", head) if len(head) == 8 else (0, 0)
        if magic != MAGIC:
            cure = "; it is a Git LFS pointer: run `git lfs pull`" if head == b"version " else ""
            self._refuse(f"is no fastText model, which begins with other bytes{cure}")
        if version not in VERSIONS:
            self._refuse(
                f"has version {version} of the format, and versions {VERSIONS} can be read"
            )
        settings = self._numbers("12i", "settings")
        dim, word_ngrams, kind, bucket, max_chars = (settings[n] for n in (0, 5, 7, 8, 10))
        self._skip(8, "settings")  # a sampling threshold, float64
        if kind in WORD_VECTORS:
            self._refuse("holds word vectors, not a classifier: name a supervised model")
        has_ngrams = word_ngrams > 1 or max_chars > 0
        if kind != SUPERVISED or min(dim, bucket - has_ngrams) < 0:
            self._corrupt("settings")
        size, words, label_count, _tokens, pruned = self._numbers("3i2q", "dictionary")
        if min(words, label_count) < 0 or not size == words + label_count > words:
            self._corrupt("dictionary")
        labels = self._labels(words, label_count)
        self._skip(8 * max(pruned, 0), "dictionary")  # pairs of int32
        is_quantized = self._flag("input matrix")
        if pruned >= 0 and not is_quantized:
            self._corrupt("dictionary")
        ngrams = bucket if pruned < 0 else pruned
        self._skip_matrix("input matrix", words + ngrams, dim, is_quantized)
        is_output_quantized = self._flag("output matrix") and is_quantized
        self._skip_matrix("output matrix", label_count, dim, is_output_quantized)
        if rest := self.size_bytes - self.file.tell():
            self._refuse(f"has {rest:,} bytes more than its header announces: copy it again")
        return FastTextFile(*self.model, labels, self.size_bytes)

    def _labels(self, words: int, count: int) -> tuple[str, ...]:
        """Skip the dictionary's `words` words, and return the `count` labels after them."""
        data, start, labels = b"", 0, []
        for entry in range(words + count):
            end = data.find(b"\0", start)
            while end < 0 or len(data) < end + 1 + _ENTRY_TAIL:
                more = self.file.read(_READ_BYTES)
                if not more:
                    self._truncated("dictionary")
                if len(data) - start > _READ_BYTES:  # a word without an end
                    self._corrupt("dictionary")
                data, start = data[start:] + more, 0
                end = data.find(b"\0")
            is_label = entry >= words
            if data[end + _ENTRY_TAIL] != is_label:
                self._corrupt("dictionary")
            if is_label:
                labels.append(data[start:end])
            start = end + 1 + _ENTRY_TAIL
        self.file.seek(start - len(data), 1)
        try:
            return tuple(label.decode() for label in labels)
        except UnicodeDecodeError:
            self._corrupt("dictionary")

    def _skip_matrix(self, block: str, rows: int, columns: int, is_quantized: bool) -> None:
        has_norms = is_quantized and self._flag(block)
        shape = self._numbers("2q", block)
        if shape != (rows, columns):
            self._corrupt(block)
        if not is_quantized:
            self._skip(4 * rows * columns, block)
            return
        (code_bytes,) = self._numbers("i", block)
        parts = self._skip_codes(block, code_bytes, columns)
        if code_bytes != rows * parts:
            self._corrupt(block)
        if has_norms:
            self._skip_codes(block, rows, 1)

    def _skip_codes(self, block: str, code_bytes: int, columns: int) -> int:
        """Skip a quantized matrix's codes and quantizer; return the number of codes per row."""
        self._skip(max(code_bytes, 0), block)
        dim, parts, part, last = self._numbers("4i", block)
        if dim != columns or part < 1 or (parts, last) != (-(-dim // part), dim % part or part):
            self._corrupt(block)
        self._skip(4 * dim * CENTROIDS, block)
        return parts

    def _flag(self, block: str) -> bool:
        (value,) = self._numbers("B", block)
        if value > 1:
            self._corrupt(block)
        return bool(value)

    def _numbers(self, layout: str, block: str) -> tuple[Any, ...]:
        data = self.file.read(struct.calcsize(f"<{layout}"))
        try:
            return struct.unpack(f"<{layout}", data)
        except struct.error:
            self._truncated(block)

    def _skip(self, count: int, block: str) -> None:
        if self.file.tell() + count > self.size_bytes:
            self._truncated(block)
        self.file.seek(count, 1)

    def _truncated(self, block: str) -> NoReturn:
        self._refuse(f"ends within its {block}, at byte {self.size_bytes:,}: copy it again")

    def _corrupt(self, block: str) -> NoReturn:
        self._refuse(f"has a {block} that no classifier of fastText has: copy it again")

    def _refuse(self, reason: str) -> NoReturn:
        identity, filename = self.model
        raise CheckpointError(f"{filename} of {identity.name} {reason}")


class FastTextModel(PinnedModel):
    """Pinned fastText file: a path, or a file in a directory or in a Hub repository."""

    checkpoint: FastTextFile  # type: ignore[assignment]

    @property
    def repositories(self) -> list[str]:
        """Path or Hub name of the model in the settings, in a list."""
        return [self.options.model]

    @property
    def identity(self) -> Identity:
        """Hub repository and its commit, or directory of the file and the file's digest."""
        return self.checkpoint.identity

    @property
    def file(self) -> ModelFile:
        """Pinned repository or directory, and the name of the file in it."""
        return ModelFile(self.checkpoint.identity, self.checkpoint.filename)

    def read(self) -> FastTextFile:  # type: ignore[override]
        """Return a description of the file, from its header and labels, without its matrices."""
        options, cache_dir = self.options, self.options.cache_dir
        model = hub.resolve_file(
            options.model, options.file, PATTERNS, revision=options.revision, cache_dir=cache_dir
        )
        described = hub.read_file(
            model, lambda file: read_fasttext(file, model), cache_dir=cache_dir
        )
        if options.preprocess != "ultra-fineweb":
            return described
        identity = described.identity
        commit = None if identity.is_directory else identity.revision
        try:
            home, _ = hub.resolve_file(
                identity.name, TOKENIZER, (), revision=commit, cache_dir=cache_dir
            )
        except hub.ModelNotFoundError as err:
            raise hub.ModelNotFoundError(
                f'preprocess="ultra-fineweb" needs {TOKENIZER}, and {identity.name} has no such '
                "file: pass the whole repository or a copy of it as model=, and which of its "
                'models as file=, such as "classifiers/ultra_fineweb_en.bin"'
            ) from err
        return replace(described, tokenizer=home)

    def check(self, checkpoint: Checkpoint) -> None:
        """Do nothing, because `FastTextHead.check_model` checks the checkpoint's labels."""

    def check_directories(self) -> None:
        """Raise ModelChangedError if a local model file or its tokenizer has changed."""
        if self.checkpoint.identity.is_directory:
            self.fetch()

    def fetch(self) -> None:
        """Download file and tokenizer, if any; raise ModelChangedError if a local file changed."""
        hub.fetch_file(self.file, cache_dir=self.options.cache_dir)
        self.fetch_tokenizer()

    def fetch_tokenizer(self) -> Path | None:
        """Return the path of the tokenizer's file, downloaded if need be; None if there is none."""
        home = self.checkpoint.tokenizer
        if home is None:
            return None
        return hub.fetch_file(ModelFile(home, TOKENIZER), cache_dir=self.options.cache_dir)

    def describe(self) -> dict[str, Any]:
        """Return the pinned revisions of model and tokenizer, if there is one, for reports."""
        home = self.checkpoint.tokenizer
        return super().describe() | ({"tokenizer_revision": home.revision} if home else {})

    def weights_bytes(self, dtype: object) -> dict[str, int]:
        """Return the model file's bytes, by "name@revision/file"; {} if it cannot be reached."""
        with contextlib.suppress(hub.HubUnreachableError, hub.ModelNotFoundError):
            identity, filename = self.file
            return {f"{identity}/{filename}": self.checkpoint.size_bytes}
        return {}
