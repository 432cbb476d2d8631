"""Run fastText models in one host process per node, and convert predictions to columns."""

from __future__ import annotations

import contextlib
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gpuclassify import hub
from gpuclassify.classifiers.fasttext.host import HostClient, check_library
from gpuclassify.classifiers.fasttext.model_file import FastTextModel
from gpuclassify.frames import Texts
from gpuclassify.mapping.heads import SCORES, Columns, named_columns, named_fields
from gpuclassify.mapping.label_heads import LabelHead, label_array
from gpuclassify.mapping.lines import LineOutputs, TextLines
from gpuclassify.mapping.runners import NonFiniteOutputError, Outputs, Runner
from gpuclassify.mapping.token_lengths import TokenLengths
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError, some_of
from gpuclassify.models.tokenizer_backend import load_backend, panics_as_errors
from gpuclassify.workers.machine import threads_in, usable_cores
from gpuclassify.workers.run_context import RunStats, advance

# Maximum texts, and characters, per request, to limit the memory of copies.
BLOCK_TEXTS, BLOCK_CHARS = 4_096, 4_000_000
# Blocks per thread, and minimum characters per block, so that running one takes longer than
# sending it.
BLOCKS_PER_THREAD, SMALLEST_BLOCK_CHARS = 4, 100_000
_TEXTS_AT_A_TIME = 256  # texts tokenized at a time, to limit memory
PREFIX = "__label__"
# The word </s>, which ends a line for the library, between the library's separators.
_LINE_END = re.compile(r"(?<![^ \n\r\t\v\f\0])</s>(?![^ \n\r\t\v\f\0])")
# Type of the column `label_shares_field`.
_LABEL_SHARE = pa.struct([("label", pa.string()), ("share", pa.float32())])
# Codes of frequent languages in ISO 639-1 and ISO 639-3, including codes of single languages that
# models use for a group, such as Mandarin for Chinese.
_TWO_AND_THREE_LETTERS = """
af=afr am=amh ar=ara,arb as=asm az=aze,azj be=bel bg=bul bn=ben bs=bos ca=cat cs=ces cy=cym da=dan
de=deu el=ell en=eng eo=epo es=spa et=est,ekk eu=eus fa=fas,pes fi=fin fr=fra ga=gle gl=glg gu=guj
he=heb hi=hin hr=hrv hu=hun hy=hye id=ind is=isl it=ita ja=jpn jv=jav ka=kat kk=kaz km=khm kn=kan
ko=kor ku=kur,kmr ky=kir la=lat lo=lao lt=lit lv=lav,lvs mg=mlg,plt mk=mkd ml=mal mn=mon,khk mr=mar
ms=msa,zsm mt=mlt my=mya ne=nep,npi nl=nld nn=nno no=nor,nob or=ori,ory pa=pan pl=pol ps=pus,pbt
pt=por ro=ron ru=rus sd=snd si=sin sk=slk sl=slv so=som sq=sqi,als sr=srp sv=swe sw=swa,swh ta=tam
te=tel tg=tgk th=tha tr=tur tt=tat ug=uig uk=ukr ur=urd uz=uzb,uzn vi=vie yi=yid,ydd yo=yor
zh=zho,cmn
"""
_THREE_LETTERS = {pair[:2]: pair[3:].split(",") for pair in _TWO_AND_THREE_LETTERS.split()}


class FastTextRunner(Runner):
    """Runner that sends texts to the host process of the node, which calls the fastText library.

    Outputs are a record per text: ``label``, int32 (k,), has the ids of the most probable labels,
    or -1 if the library returns fewer, and ``probability``, float32 (k,), the library's
    probabilities, which are 1e-5 too large, or NaN. k is the number of all labels if a setting
    needs the probability of `score_label`, else `top_k`, or 1.
    """

    model: FastTextModel

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of packages whose versions may change outputs, installed or not."""
        tokenizers = ("tokenizers",) if self.options.preprocess == "ultra-fineweb" else ()
        return ("fasttext-community", "fasttext-predict", "fasttext", *tokenizers)

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Find the most probable labels of distinct texts; outputs are records, (texts,)."""
        labels, options = self.model.checkpoint.labels, self.options
        k = len(labels) if options.needs_score else options.top_k or 1
        kinds = [("label", np.int32, (k,)), ("probability", np.float32, (k,))]
        values = np.empty(len(texts), dtype=kinds)
        lines = texts
        started = time.perf_counter()
        threads = compute_threads()
        blocks = [slice(*bounds) for bounds in _blocks(texts.char_counts, threads)]
        with (
            self.lease(*self.device_and_dtype()) as (host, words),
            ThreadPoolExecutor(threads) as pool,
        ):
            answers = pool.map(
                lambda part: host.predict(self._lines(lines[part], words), k), blocks
            )
            for block, predictions in zip(blocks, answers, strict=True):
                values["label"][block], values["probability"][block] = predictions
                advance(block.stop - block.start)
        stats.batches += len(blocks)
        stats.model_seconds += time.perf_counter() - started
        stats.windows += len(texts)
        failed = (values["label"] >= 0) & ~np.isfinite(values["probability"])
        for row in np.flatnonzero(failed.any(axis=1)):
            raise NonFiniteOutputError(
                f"{options.model} gives {values['probability'][row].tolist()} for "
                f"{name_text(int(row))}: take another model, or remove the row"
            )
        ones, all_read = np.ones(len(texts), np.int64), np.ones(len(texts), np.float32)
        return Outputs(values, ones, all_read)

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """Count the words of each text, separated by white space, after `preprocess`."""
        lines = self._lines(texts, self._token_words())
        words = np.array([len(line.encode().split()) for line in lines], dtype=np.int64)
        return TokenLengths(words, words, np.ones(len(texts), dtype=np.int64), None)

    @contextlib.contextmanager
    def lease(
        self, device: object, dtype: object
    ) -> Iterator[tuple[HostClient, TokenWords | None]]:
        """Yield a client of the host process, and a tokenizer or None, for a ``with`` block."""
        from gpuclassify.inference.residency import MODELS

        def load() -> tuple[HostClient, TokenWords | None]:
            path = hub.fetch_file(self.model.file, cache_dir=self.options.cache_dir)
            client = HostClient(path, self.model.checkpoint.identity.revision)
            client.warm_up()
            return client, self._token_words()

        with MODELS.lease((self.resident_key, str(device), str(dtype)), load) as loaded:
            yield loaded

    def device_and_dtype(self) -> tuple[Any, Any]:
        """Return "cpu" and NumPy's float32, without importing torch."""
        return "cpu", np.dtype(np.float32)

    def batch_bytes(self) -> int:
        """Return 0 as the bytes of the largest batch, because a block of texts is small."""
        return 0

    def check_weights(self) -> None:
        """Raise ModuleNotFoundError unless fastText is installed."""
        check_library()

    def _lines(self, texts: list[str], words: TokenWords | None) -> list[str]:
        """Return texts prepared as in training, each as a single line for the library.

        The word ``</s>``, which ends a line for the library, becomes a space.
        """
        if words is not None:
            texts = words(texts)
        elif self.options.preprocess == "dclm":
            texts = [" ".join(text.strip().splitlines()) for text in texts]
        elif self.options.preprocess == "lower":
            texts = [text.lower() for text in texts]
        elif self.options.preprocess == "openlid":
            texts = [words_of_openlid(text) for text in texts]
        lines = [text.replace("\n", " ") for text in texts]
        return [_LINE_END.sub(" ", line) if "</s>" in line else line for line in lines]

    def _token_words(self) -> TokenWords | None:
        path = self.model.fetch_tokenizer()
        return None if path is None else TokenWords(path)


def words_of_openlid(text: str) -> str:
    """Return a text in lower case, without digits, punctuation and symbols, as OpenLID-v3 expects.

    Underscores stay. Source: ``preprocess`` in the README of hplt-project/openlid.
    """
    import regex  # type: ignore[import-untyped]  # which transformers requires

    text = regex.sub(r"\s\s+", " ", text.strip().replace("\n", " ").lower())
    return regex.sub(r"[^\p{Word}\p{Zs}]|\d", "", text)


class TokenWords:
    """Converter of texts to lines of tokens, separated by spaces, for models trained on such lines.

    Lines are equal to the output of ``fasttext_preprocess_func`` of Ultra-FineWeb's classifiers.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer = load_backend(path, path)
        ids = range(max(self._tokenizer.get_vocab().values()) + 1)
        words = self._tokenizer.decode_batch(
            [[token_id] for token_id in ids], skip_special_tokens=False
        )
        escapes = str.maketrans({"\n": r"\n", "\r": r"\r", "\t": r"\t"})
        self._words = [word.translate(escapes) for word in words]

    @panics_as_errors()
    def __call__(self, texts: list[str]) -> list[str]:
        """Return a line of tokens for each text, in the order of the texts."""
        plain = [self._plain(text) for text in texts]
        lines = []
        for start in range(0, len(plain), _TEXTS_AT_A_TIME):
            block = plain[start : start + _TEXTS_AT_A_TIME]
            for encoding in self._tokenizer.encode_batch_fast(block, add_special_tokens=False):
                line = " ".join(map(self._words.__getitem__, encoding.ids))
                lines.append(re.sub(" {2,}", " ", line).strip())
        return lines

    def _plain(self, text: str) -> str:
        text = re.sub("\n{3,}", "\n\n", text).lower()
        if text.isascii():
            return text
        text = unicodedata.normalize("NFKD", text)
        for char in set(text):  # cheaper than looking at each position
            if unicodedata.category(char) == "Mn":
                text = text.replace(char, "")
        return text


def compute_threads() -> int:
    """Return torch's number of threads if it is imported, else OMP_NUM_THREADS or usable cores."""
    if (torch := sys.modules.get("torch")) is not None:
        return torch.get_num_threads()
    return threads_in("OMP_NUM_THREADS") or usable_cores()


def _blocks(char_counts: np.ndarray, threads: int) -> Iterator[tuple[int, int]]:
    """Yield start and end (exclusive) of blocks of texts, each for a request to the host.

    Few texts are divided into several blocks per thread, so that threads end together.
    """
    ends = np.cumsum(char_counts)
    share = int(ends[-1]) // (BLOCKS_PER_THREAD * threads) if len(ends) else 0
    most_chars = min(max(share, SMALLEST_BLOCK_CHARS), BLOCK_CHARS)
    start = 0
    while start < len(ends):
        before = ends[start - 1] if start else 0
        fitting = int(np.searchsorted(ends, before + most_chars, side="right"))
        stop = min(max(start + 1, fitting), start + BLOCK_TEXTS)
        yield start, stop
        start = stop


@dataclass(frozen=True)
class LineRecords:
    """Labels and probabilities of texts, aggregated from predictions for their lines.

    `records`, (texts,), have the fields ``label``, int32 (1,), the id of the label with the most
    characters, and ``probability``, float32 (1,), the mean over the lines with this label, weighted
    by characters; -1 and NaN if no line has a label. Shares are of the characters of all lines that
    are not blank. A text of only blank lines counts as one line that is not blank.
    """

    records: np.ndarray
    scores: np.ndarray  # mean probability of `score_label`, float32 (texts,), or (0,)
    lines: TextLines  # lines of the texts
    ids: np.ndarray  # label id of each line that is not blank, int32; -1 without a label
    # Arrays of pairs of a text and a label of its lines, (pairs,), sorted by text, then by share,
    # largest first.
    text_of: np.ndarray
    label_of: np.ndarray
    shares: np.ndarray

    @classmethod
    def of(cls, outputs: LineOutputs, scores: np.ndarray) -> LineRecords:
        """Aggregate predictions for lines to each text's label, its probability and label shares.

        `scores` are probabilities of `score_label` for the distinct lines, float32 (lines,); empty
        without that setting.
        """
        lines, found = outputs.lines, outputs.values[outputs.lines.positions]
        texts = np.repeat(np.arange(len(lines.counts)), lines.counts)
        chars = np.maximum(lines.distinct.char_counts, 1)[lines.positions]
        ids, known = found["label"][:, 0], found["label"][:, 0] >= 0
        whole = np.bincount(texts, chars)
        codes = texts[known] * (1 + ids.max(initial=0)) + ids[known]
        pairs, pair_of = np.unique(codes, return_inverse=True)
        sums = np.bincount(pair_of, chars[known])
        weighted = np.bincount(pair_of, chars[known] * found["probability"][known, 0])
        text_of, label_of = np.divmod(pairs, 1 + ids.max(initial=0))
        order = np.lexsort([label_of, -sums, text_of])
        text_of, label_of = text_of[order], label_of[order]
        records = np.zeros(len(whole), [("label", np.int32, (1,)), ("probability", "f4", (1,))])
        records["label"], records["probability"] = -1, np.nan
        labelled, first = np.unique(text_of, return_index=True)
        records["label"][labelled, 0] = label_of[first]
        records["probability"][labelled, 0] = (weighted / sums)[order[first]]
        if len(scores):
            own = np.bincount(texts[known], chars[known], len(whole))
            total = np.bincount(
                texts[known], chars[known] * scores[lines.positions][known], len(whole)
            )
            scores = np.divide(total, own, np.full(len(whole), np.nan), where=own > 0)
        shares = (sums[order] / whole[text_of]).astype(np.float32)
        return cls(records, scores.astype(np.float32), lines, ids, text_of, label_of, shares)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.records[name]

    def line_labels(self, labels: list[str]) -> pa.Array:
        """Return a list of line labels for each text, null for lines without a label."""
        ids = np.full(len(self.lines.is_run), -1, dtype=np.int32)
        ids[self.lines.is_run] = self.ids
        names = label_array(ids, labels).dictionary_decode()
        return pa.ListArray.from_arrays(self.lines.offsets, names)

    def label_shares(self, labels: list[str]) -> pa.Array:
        """Return a list of structs (label, share of characters) for each text, largest first."""
        offsets = np.searchsorted(self.text_of, np.arange(len(self) + 1)).astype(np.int32)
        names = label_array(self.label_of, labels).dictionary_decode()
        pairs = pa.StructArray.from_arrays([names, pa.array(self.shares)], fields=[*_LABEL_SHARE])
        return pa.ListArray.from_arrays(offsets, pairs)


class FastTextHead(LabelHead):
    """Head that writes a fastText model's most probable labels and probabilities to columns.

    Reads records of texts with the fields ``label`` (ids) and ``probability``, or `LineRecords`.
    """

    model: Any  # a FastTextModel, whose description is a FastTextFile

    @property
    def labels(self) -> list[str]:
        """Labels in the order of the model's file, from the settings or the file."""
        return list(self.options.labels or self.labels_of(self.model.checkpoint))

    def labels_of(self, file: Checkpoint) -> tuple[str, ...]:
        """Return the labels in a model's file, in its order and as they are written to rows."""
        return file.labels

    @property
    def list_size(self) -> int:
        """Maximum number of probabilities in each list: `top_k`, or 0 without lists."""
        return self.options.top_k or 0

    def fields(self) -> list[pa.Field]:
        """Return Arrow fields of the columns that the settings name."""
        options = self.options
        fields = named_fields(
            (self.label_field, pa.string()),
            (options.confidence_field, pa.float32()),
            (options.score_field, pa.float32()),
            (options.line_labels_field, pa.list_(pa.string())),
            (options.label_shares_field, pa.list_(_LABEL_SHARE)),
        )
        if options.top_k is not None:
            fields += [pa.field(options.top_labels_field, pa.list_(pa.string()))]
            fields += [pa.field(options.top_scores_field, SCORES)]
        return fields

    def values(self, outputs: Outputs) -> Any:
        """Return a record for each text; predictions for lines are aggregated to `LineRecords`."""
        if isinstance(outputs, LineOutputs):
            return LineRecords.of(outputs, self._scores(outputs.values))
        return super().values(outputs)

    def columns(self, values: Any) -> Columns:
        """Return the columns that the settings name, by name, from records or `LineRecords`."""
        options, ids = self.options, values["label"]
        columns = named_columns(
            (self.label_field, label_array(ids[:, 0], self.labels)),
            (options.confidence_field, pa.array(values["probability"][:, 0], from_pandas=True)),
            (options.score_field, pa.array(self._scores(values), from_pandas=True)),
        )
        if options.line_labels_field is not None:
            columns[options.line_labels_field] = values.line_labels(self.labels)
        if options.label_shares_field is not None:
            columns[options.label_shares_field] = values.label_shares(self.labels)
        if options.top_k is not None:
            ids, probabilities = ids[:, : options.top_k], values["probability"][:, : options.top_k]
            is_given = ids >= 0
            offsets = np.concatenate([[0], np.cumsum(is_given.sum(axis=1))]).astype(np.int32)
            names = label_array(ids[is_given], self.labels).dictionary_decode()
            columns[options.top_labels_field] = pa.ListArray.from_arrays(offsets, names)
            numbers = pa.array(probabilities[is_given])
            columns[options.top_scores_field] = pa.ListArray.from_arrays(offsets, numbers)
        return columns

    def passes(self, values: Any) -> dict[str, np.ndarray]:
        """Return a mask of the texts that pass, bool (texts,), for each filter that is set."""
        labels = np.asarray([*self.labels, None], dtype=object)[values["label"][:, 0]]
        passed = self.passes_label(labels) | self.passes_confidence(values["probability"][:, 0])
        return passed | self.passes_score(self._scores(values))

    def certainties(self, values: np.ndarray) -> np.ndarray:
        """Return the probability of each text's label, float32 (texts,); 0 without a label."""
        return np.nan_to_num(values["probability"][:, 0])

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if `labels` differ from the file's, or `top_k` is too large."""
        expected, labels = self.options.labels, self.labels_of(checkpoint)
        if expected not in (None, labels):
            raise CheckpointError(
                f"the {len(expected)} labels= are not those of {self.options.model}, which are "
                f"{some_of(labels, 60)}: pass all {len(labels)} in this order, or leave labels out"
            )
        wanted, there = self.options.top_k, len(labels)
        if wanted is not None and wanted > there:
            raise CheckpointError(
                f"top_k={wanted}, and {self.options.model} has {there} labels: pass at most {there}"
            )

    def check_settings(self) -> None:
        """Raise ValueError if the settings name a label that the model does not have."""
        super().check_settings()
        if self.options.score_label is not None:
            self.check_labels(self.options.score_label)

    def _scores(self, values: Any) -> np.ndarray:
        """Return the probability of `score_label` for each text or line; empty if it is not set.

        It is 0 if the library returns other labels only, and NaN if it returns none.
        """
        if isinstance(values, LineRecords):
            return values.scores
        if self.options.score_label is None:
            return np.zeros(0, dtype=np.float32)
        is_meant = values["label"] == self.labels.index(self.options.score_label)
        scores = np.where(is_meant, values["probability"], np.float32(0)).sum(axis=1)
        return np.where(values["label"][:, 0] >= 0, scores, np.float32(np.nan))


class LanguageHead(FastTextHead):
    """Head whose labels are languages: a fastText model's labels without ``__label__``."""

    def labels_of(self, file: Checkpoint) -> tuple[str, ...]:
        """Return the language codes in a model's file, in its order."""
        return tuple(label.removeprefix(PREFIX) for label in file.labels)

    def check_labels(self, *names: str) -> None:
        """Raise ValueError unless all `names` are language codes of the model."""
        for name in names:
            meant = same_language(name, self.labels)
            if meant and name not in self.labels:
                raise ValueError(
                    f"no language {name!r} in {self.owner}: {self.options.model} calls it "
                    f"{' and '.join(map(repr, meant))}, so pass that"
                )
        super().check_labels(*names)


def same_language(name: str, labels: Iterable[str]) -> list[str]:
    """Return the labels of the same language as `name`, such as ``deu_Latn`` for ``de``.

    Scripts are not compared. The result may contain `name` itself.
    """

    def codes(label: str) -> set[str]:
        code = label.partition("_")[0]
        return {code, *_THREE_LETTERS.get(code, ())}

    return [label for label in labels if codes(label) & codes(name)]
