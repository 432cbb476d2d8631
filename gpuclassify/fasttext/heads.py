"""The labels of fastText, and their probabilities, as columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from gpuclassify.fasttext.model_file import FastTextFile
from gpuclassify.mapping.columns import SCORES
from gpuclassify.mapping.heads import Columns, LabelHead, named_columns, named_fields
from gpuclassify.models.checkpoint import CheckpointError, some_of

PREFIX = "__label__"
# Languages of which the web has much, by ISO 639-1, with their codes of ISO 639-3: also those of
# the one language of a group, such as Mandarin of Chinese, that models have labels for.
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


class FastTextHead(LabelHead):
    """The most probable label with its probability, that of a label by its name, and the first k.

    Reads the records of `FastTextRunner`. Where the library gives a text no label, because it knows
    none of its words, label and numbers are null, and the text passes no filter.
    """

    model: Any  # a FastTextModel, whose description is a FastTextFile

    @property
    def labels(self) -> list[str]:
        """The labels in the library's order: as given, or from the file."""
        return list(self.options.labels or self.labels_of(self.model.checkpoint))

    def labels_of(self, file: FastTextFile) -> tuple[str, ...]:
        """The labels of a file as rows get them: as the library has them."""
        return file.labels

    @property
    def list_size(self) -> int:
        """Probabilities in a list."""
        return self.options.top_k or 0

    def fields(self) -> list[pa.Field]:
        """Label, confidence, score and the first k, as far as they are asked for."""
        options = self.options
        fields = named_fields(
            (self.label_field, pa.string()),
            (options.confidence_field, pa.float32()),
            (options.score_field, pa.float32()),
        )
        if options.top_k is not None:
            fields += [pa.field(options.top_labels_field, pa.list_(pa.string()))]
            fields += [pa.field(options.top_scores_field, SCORES)]
        return fields

    def columns(self, values: np.ndarray) -> Columns:
        """Columns for records, (texts,)."""
        options, ids = self.options, values["label"]
        columns = named_columns(
            (self.label_field, self._texts(ids[:, 0])),
            (options.confidence_field, pa.array(values["probability"][:, 0], from_pandas=True)),
            (options.score_field, pa.array(self._scores(values), from_pandas=True)),
        )
        if options.top_k is not None:
            ids, probabilities = ids[:, : options.top_k], values["probability"][:, : options.top_k]
            is_given = ids >= 0
            offsets = np.concatenate([[0], np.cumsum(is_given.sum(axis=1))]).astype(np.int32)
            names = self._texts(ids[is_given]).dictionary_decode()
            columns[options.top_labels_field] = pa.ListArray.from_arrays(offsets, names)
            numbers = pa.array(probabilities[is_given])
            columns[options.top_scores_field] = pa.ListArray.from_arrays(offsets, numbers)
        return columns

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Which texts have a wanted label, confidence and score."""
        options = self.options
        passed = {}
        if options.filter_by is not None:
            wanted = [self.labels.index(label) for label in options.filter_by]
            passed["label"] = np.isin(values["label"][:, 0], wanted)
        if options.min_confidence is not None:
            passed["confidence"] = values["probability"][:, 0] >= np.float32(options.min_confidence)
        if options.min_score is not None:
            passed["score"] = self._scores(values) >= np.float32(options.min_score)
        return passed

    def certainties(self, values: np.ndarray) -> np.ndarray:
        """The probability of each text's label."""
        return np.nan_to_num(values["probability"][:, 0])

    def check_model(self, checkpoint: Any) -> None:
        """Raise CheckpointError if `labels` are not the file's, or fewer than `top_k`."""
        given, found = self.options.labels, self.labels_of(checkpoint)
        if given not in (None, found):
            raise CheckpointError(
                f"the {len(given)} labels= are not those of {self.options.model}, which are "
                f"{some_of(found, 60)}: pass all {len(found)} in this order, or leave labels out"
            )
        wanted, there = self.options.top_k, len(found)
        if wanted is not None and wanted > there:
            raise CheckpointError(
                f"top_k={wanted}, and {self.options.model} has {there} labels: pass at most {there}"
            )

    def check_settings(self) -> None:
        """Raise ValueError unless the labels that settings name exist."""
        super().check_settings()
        if self.options.score_label is not None:
            self._check_labels(self.options.score_label)

    def _texts(self, ids: np.ndarray) -> pa.DictionaryArray:
        codes = pa.array(ids, mask=ids < 0)
        return pa.DictionaryArray.from_arrays(codes, pa.array(self.labels, pa.string()))

    def _scores(self, values: np.ndarray) -> np.ndarray:
        """The probability of `score_label`, 0 where the library leaves it out as too small."""
        if self.options.score_label is None:
            return np.zeros(0, dtype=np.float32)
        is_meant = values["label"] == self.labels.index(self.options.score_label)
        scores = np.where(is_meant, values["probability"], np.float32(0)).sum(axis=1)
        return np.where(values["label"][:, 0] >= 0, scores, np.float32(np.nan))


class LanguageHead(FastTextHead):
    """As `FastTextHead`, with labels that are names of languages: without their prefix.

    Models name them by two letters of ISO 639-1, or by ISO 639-3 with a script (deu_Latn).
    """

    def labels_of(self, file: FastTextFile) -> tuple[str, ...]:
        """Languages, in the library's order."""
        return tuple(label.removeprefix(PREFIX) for label in file.labels)

    def _check_labels(self, *names: str) -> None:
        for name in names:
            meant = same_language(name, self.labels)
            if meant and name not in self.labels:
                raise ValueError(
                    f"no language {name!r} in {self.owner}: {self.options.model} calls it "
                    f"{' and '.join(map(repr, meant))}, so pass that"
                )
        super()._check_labels(*names)


def same_language(name: str, labels: Iterable[str]) -> list[str]:
    """The labels of the language with this name: ``deu_Latn`` of ``de``, and the other way."""

    def codes(label: str) -> set[str]:
        code = label.partition("_")[0]
        return {code, *_THREE_LETTERS.get(code, ())}

    return [label for label in labels if codes(label) & codes(name)]
