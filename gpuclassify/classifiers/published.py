"""Catalogue of published checkpoints: the class that runs each one, and its settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuclassify.classifiers import FAMILIES
from gpuclassify.classifiers.checkpoint import DistributedDataClassifier
from gpuclassify.classifiers.education import FineWebEduClassifier
from gpuclassify.classifiers.fasttext.classifier import FastTextClassifier, LanguageIdentifier
from gpuclassify.classifiers.spans.classifier import SpanClassifier
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.models.checkpoint import CELADON_AXES, SCORE_AND_PROBABILITY, Checkpoint
from gpuclassify.settings.checks import HubName, nearest
from gpuclassify.settings.options import MULTI_LABEL, REGRESSION, SINGLE_LABEL, TextOptions

CHECKED = "the layout, on a small copy with random weights; the published weights were out of reach"
NOT_STATED, APACHE, _HUB = "not stated", "Apache-2.0", "https://huggingface.co/"


class EuroFilterModel(PinnedModel):
    """EuroFilter's checkpoint, whose ``config.json`` does not describe its two outputs."""

    def read(self) -> Checkpoint:
        """Read the checkpoint's description, and add the network's outputs."""
        outputs = ("educational_value", "is_educational")
        return replace(
            super().read(), layout=SCORE_AND_PROBABILITY, labels=outputs, problem_type=REGRESSION
        )


class EuroFilterClassifier(DistributedDataClassifier):
    """Classifier of educational value by EuroFilter: a score, and a probability."""

    model_type = EuroFilterModel


@dataclass(frozen=True)
class Published:
    """Entry of the catalogue: the class and settings for a published checkpoint, or for a family.

    A family is a group of checkpoints whose names differ by one word, such as a language.
    `variants` maps the word that users type for each checkpoint to the word in its name. In
    `model`, the text of `variant`, such as "LANGUAGE", stands for the word in the name. In
    `settings`, the arguments of the class `kind`, ``{}`` stands for the typed word. `variant` and
    `variants` are empty for a single checkpoint.
    """

    name: str
    kind: type[TextMapper]
    model: str
    purpose: str
    licence: str
    cite: str
    settings: Mapping[str, Any]
    note: str = ""  # advice for users
    is_gated: bool = False  # whether a token with access is needed
    variant: str = ""
    variants: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, **settings: object) -> TextMapper:
        """Build the classifier with the settings of this entry, which `settings` override.

        Raises ValueError for a family, because only one of its checkpoints can be run.
        """
        if self.variants:
            first, *_ = words = [*self.variants]
            raise ValueError(
                f"{self.name!r} stands for {len(words)} models: say which {self.variant}, as in "
                f"'{self.name}-{first}'. There are {', '.join(words)}"
            )
        declared = {"model": HubName(self.model), **self.settings}
        if "long_text" in settings:  # declared windows may not apply
            declared.pop("window_overlap", None)
        made = self.kind(**{**declared, **settings})
        if made.options.model == self.model:
            made.licence, made.cite = self.licence, self.cite
        return made

    @property
    def Options(self) -> type[TextOptions]:  # noqa: N802 - the name that classes have
        """Class of the classifier's settings."""
        return self.kind.Options

    @property
    def defaults(self) -> dict[str, Any]:
        """Default settings of the class by name, overridden by the settings of this entry.

        For a family, values may contain the placeholder `variant`, such as "LANGUAGE".
        """
        return {**self.kind.defaults, "model": self.model, **self._named(self.variant)}

    def of(self, variant: str) -> Published:
        """Return the entry for one checkpoint of a family, by its word in `variants`."""
        if variant not in self.variants:
            raise ValueError(
                f"{self.name} has no {variant!r}.{nearest(variant, self.variants)} "
                f"{self.variant} is one of {', '.join(self.variants)}"
            )
        return replace(
            self,
            name=f"{self.name}-{variant}",
            model=self.model.replace(self.variant, self.variants[variant]),
            settings=self._named(variant),
            variants={},
            variant="",
        )

    def _named(self, variant: str) -> dict[str, Any]:
        return {
            name: value.replace("{}", variant) if isinstance(value, str) else value
            for name, value in self.settings.items()
        }


def _same(words: str) -> dict[str, str]:
    return {word: word for word in words.split()}


def _scores(stem: str, **settings: object) -> dict[str, Any]:
    """Return `settings`, and settings for columns ``<stem>_score`` and ``<stem>_int_score``."""
    names = {"score_field": f"{stem}_score", "int_score_field": f"{stem}_int_score"}
    return {"label_field": None, **names, **settings}


def _regression(score_field: str, *labels: str, **settings: object) -> dict[str, Any]:
    """Return `settings`, and settings for a column of regression outputs, a struct if several."""
    form = {"score_format": "struct"} if len(labels) > 1 else {}
    named = {"problem_type": REGRESSION, "score_field": score_field, "labels": labels}
    return {**named, **form, **settings}


def _classes(stem: str, *labels: str, **settings: object) -> dict[str, Any]:
    """Return `settings`, and settings for the columns ``<stem>_label`` and ``<stem>_scores``."""
    names = {"label_field": f"{stem}_label", "score_field": f"{stem}_scores"}
    return {**names, "score_format": "struct", "labels": labels, **settings}


def _fasttext(score_field: str, label: str, **settings: object) -> dict[str, Any]:
    return {"label_field": None, "score_field": score_field, "score_label": label, **settings}


def _spans(stem: str, *labels: str, **settings: object) -> dict[str, Any]:
    """Return `settings`, and settings for the column ``<stem>_spans``; no `labels` means all."""
    named = {"labels": labels} if labels else {}
    return {"spans_field": f"{stem}_spans", **named, **settings}


_EDU, _ANY, _WORDS = FineWebEduClassifier, DistributedDataClassifier, FastTextClassifier
_PICKLED = "published as a pickle: save it as safetensors, and pass the directory as model="
# FinePDFs reads both ends of a document, and uses the higher score, according to its model cards.
_ENDS = {"max_seq_length": 2048, "long_text": "ends", "window_aggregation": "max"}
_FINEPDFS, _SMOLLM2 = "HuggingFaceFW/finepdfs_", "arXiv:2502.02737"
_FINEPDFS_CITE = f"{_HUB}datasets/HuggingFaceFW/finepdfs"
_NOT_EACH = "languages are those of its authors' list; not each of the models was seen"
_LANGUAGES = """
    eng_Latn deu_Latn jpn_Jpan fra_Latn spa_Latn ita_Latn rus_Cyrl por_Latn pol_Latn nld_Latn
    ces_Latn cmn_Hani ron_Latn swe_Latn hun_Latn slk_Latn ukr_Cyrl tha_Thai dan_Latn ind_Latn
    ell_Grek fin_Latn cat_Latn tur_Latn dag_Latn hrv_Latn fas_Arab bul_Cyrl nob_Latn kiu_Latn
    arb_Arab vie_Latn srp_Cyrl kor_Hang slv_Latn lit_Latn hin_Deva heb_Hebr bos_Latn zsm_Latn
    ekk_Latn lvs_Latn ben_Beng frp_Latn isl_Latn glk_Arab eus_Latn glg_Latn als_Latn mkd_Cyrl
    mar_Deva und_Hira npi_Deva kat_Geor lat_Latn pcm_Latn mlt_Latn cym_Latn vec_Latn hye_Armn
    nrm_Latn wuu_Hani anp_Deva bcc_Arab urd_Arab afr_Latn azj_Latn tam_Taml kaz_Cyrl nno_Latn
    guj_Gujr
"""
_CODE = "c cpp csharp go java javascript markdown php python ruby rust shell sql swift typescript"

# Licences, lengths and labels are from the models' cards, or from the code of their authors.
CATALOGUE = (
    Published("finepdfs-edu", _EDU, f"{_FINEPDFS}edu_classifier_LANGUAGE",
              "educational value of documents in one language, 0 to 5", APACHE, _FINEPDFS_CITE,
              _scores("finepdfs_edu", **_ENDS), _NOT_EACH,
              variant="LANGUAGE", variants=_same(_LANGUAGES)),
    Published("finepdfs-edu-v2", _EDU, f"{_FINEPDFS}edu_classifier_v2_eng_Latn",
              "educational value of English documents, research papers included, 0 to 5", APACHE,
              _FINEPDFS_CITE, _scores("finepdfs_edu_v2", **_ENDS)),
    Published("finepdfs-dclm", _EDU, f"{_FINEPDFS}dclm_classifier_eng_Latn",
              "how instructive English documents are, in the sense of DCLM, 0 to 5", APACHE,
              _FINEPDFS_CITE, _scores("finepdfs_dclm", **_ENDS)),
    Published("finepdfs-ocr-quality", _ANY, f"{_FINEPDFS}ocr_quality_classifier_eng_Latn",
              "how well the text of English documents was extracted, 0 to 3", APACHE,
              _FINEPDFS_CITE, _regression("finepdfs_ocr_quality_score", "score", **_ENDS)),
    Published("finemath", _EDU, "HuggingFaceTB/finemath-classifier",
              "mathematical reasoning of web pages, 0 to 5", "MIT", _SMOLLM2,
              _scores("finemath", max_seq_length=512)),
    Published("stack-edu", _EDU, "HuggingFaceTB/stack-edu-classifier-LANGUAGE",
              "educational value of code in one language, 0 to 5", NOT_STATED, _SMOLLM2,
              _scores("stack_edu", max_seq_length=1024), _NOT_EACH,
              variant="LANGUAGE", variants=_same(_CODE)),
    Published("multilingual-edu", _EDU, "Horizon-Labs/multilingual-edu-classifier-SIZE",
              "educational value of web pages in 66 languages, 0 to 5", APACHE,
              f"{_HUB}Horizon-Labs/multilingual-edu-classifier-base",
              _scores("multilingual_edu_{}", max_seq_length=512), variant="SIZE",
              variants=_same("base small")),
    Published("eurofilter", EuroFilterClassifier, "utter-project/EuroFilter-v1",
              "educational value of web pages in 15 languages, 0 to 5, and a probability", APACHE,
              f"{_HUB}utter-project/EuroFilter-v1",
              _regression("eurofilter_scores", "educational_value", "is_educational",
                          max_seq_length=512)),
    Published("mmbert-edu", _ANY, "tartuNLP/mmBERT-small-m-edu-classifier",
              "educational value of web pages in 93 languages, six labels", "MIT",
              f"{_HUB}tartuNLP/mmBERT-small-m-edu-classifier",
              {"label_field": "mmbert_edu_label", "confidence_field": "mmbert_edu_confidence",
               "problem_type": SINGLE_LABEL, "max_seq_length": 8192}),
    Published("web-register", _ANY, "TurkuNLP/multilingual-web-register-classification",
              "registers (genres) of web pages in a hundred languages, any number of labels",
              APACHE, "arXiv:2406.19892",
              {"label_field": None, "labels_field": "web_registers", "problem_type": MULTI_LABEL,
               "base_model": HubName("FacebookAI/xlm-roberta-large"), "max_seq_length": 512},
              "labels are abbreviations: MT, LY, SP, ID, NA, HI, IN, OP, IP, and their parts in "
              "small letters"),
    Published("meta-rater", _ANY, "opendatalab/meta-rater-QUALITY-rating",
              "one of the PRRC qualities of English text, a grade from 0 to 5",
              "not stated; that of its code is Apache-2.0", "arXiv:2504.14194",
              _classes("meta_rater_{}", *"012345", max_seq_length=4096),
              variant="QUALITY",
              variants=_same("professionalism readability reasoning cleanliness")),
    Published("qurater", _ANY, "princeton-nlp/QuRater-1.3B",
              "four qualities of English text, each a number without bounds", NOT_STATED,
              "arXiv:2402.09739",
              _regression("qurater_scores", "writing_style", "required_expertise",
                          "facts_and_trivia", "educational_value", max_seq_length=512,
                          long_text="windows", window_overlap=0, window_aggregation="tokens")),
    Published("celadon", _ANY, "PleIAs/celadon",
              "toxicity of text in nine languages along five axes, each a level from 0 to 3",
              NOT_STATED, "arXiv:2410.22587",
              _regression("celadon_scores", *CELADON_AXES, max_seq_length=512),
              "its authors add the five levels up"),
    Published("openlid", LanguageIdentifier, "HPLT/OpenLID-v3",
              "language of text, 194 languages, and zxx_Zxxx for text in no language",
              "GPL-3.0", "https://github.com/hplt-project/openlid",
              {"label_field": "openlid_language", "confidence_field": "openlid_confidence",
               "preprocess": "openlid"}),
    Published("gneissweb", _WORDS, "ibm-granite/GneissWeb.MODEL",
              "one part of GneissWeb's filter of English pages, a probability", APACHE,
              f"{_HUB}datasets/ibm-granite/GneissWeb",
              _fasttext("gneissweb_{}_score", "__label__hq"), variant="MODEL",
              variants={"quality": "Quality_annotator"}
              | {part.lower(): f"{part}_classifier" for part in ("Edu", "Sci", "Tech", "Med")}),
    Published("dclm", _WORDS, "mlfoundations/fasttext-oh-eli5",
              "likeness of English pages to instructions and explanations, a probability", "MIT",
              "arXiv:2406.11794", _fasttext("dclm_score", "__label__hq", preprocess="dclm")),
    Published("ultra-fineweb", _WORDS, "openbmb/Ultra-FineWeb-classifier",
              "quality of pages in one language, a probability", APACHE,
              f"{_HUB}openbmb/Ultra-FineWeb-classifier",
              _fasttext("ultra_fineweb_score", "__label__pos", preprocess="ultra-fineweb",
                        file="classifiers/ultra_fineweb_{}.bin"),
              variant="LANGUAGE", variants=_same("en zh")),
    Published("dolma3", _WORDS, "allenai/dolma3-fasttext-quality-classifier",
              "quality of English pages, a probability", NOT_STATED,
              f"{_HUB}allenai/dolma3-fasttext-quality-classifier",
              _fasttext("dolma3_score", "__label__1")),
    # Each label's highest probability among the windows. There is no label of the whole text,
    # because a single harmless window would make it harmless.
    Published("prompt-guard-2", _ANY, "meta-llama/Llama-Prompt-Guard-2-SIZE",
              "jailbreaks and injections in prompts", "Llama 4 Community License",
              f"{_HUB}meta-llama/Llama-Prompt-Guard-2-86M",
              _classes("prompt_guard_2_{}", "BENIGN", "MALICIOUS", label_field=None,
                       max_seq_length=512, long_text="windows", window_aggregation="max"),
              is_gated=True, variant="SIZE", variants={"86m": "86M", "22m": "22M"}),
    Published("granite-guardian-hap", _ANY, "ibm-granite/granite-guardian-hap-SIZE",
              "hate, abuse and profanity in English text", APACHE,
              f"{_HUB}ibm-granite/granite-guardian-hap-38m",
              _classes("hap_{}", "not_toxic", "toxic"), variant="SIZE", variants=_same("38m 125m")),
    Published("readability", _ANY, "agentlans/mdeberta-v3-base-readability",
              "years of school that a text asks of its readers, in many languages", "MIT",
              f"{_HUB}agentlans/mdeberta-v3-base-readability",
              _regression("readability_score", "score")),
    Published("text-quality", _ANY, "agentlans/deberta-v3-xsmall-quality-v2",
              "how legible, useful and free of spam English text is, a number without bounds",
              APACHE, f"{_HUB}agentlans/deberta-v3-xsmall-quality-v2",
              _regression("text_quality_score", "score")),
    Published("ner", SpanClassifier, "dslim/bert-SIZE-NER",
              "places, organisations, persons and other names in English text", "MIT",
              f"{_HUB}dslim/bert-base-NER", _spans("ner_{}", "LOC", "MISC", "ORG", "PER"),
              variant="SIZE", variants=_same("base large")),
    Published("multilingual-ner", SpanClassifier, "Davlan/xlm-roberta-SIZE-ner-hrl",
              "places, organisations and persons in text of ten languages", "AFL-3.0",
              f"{_HUB}Davlan/xlm-roberta-base-ner-hrl",
              _spans("multilingual_ner_{}", "LOC", "ORG", "PER"), variant="SIZE",
              variants=_same("base large")),
    Published("piiranha", SpanClassifier, "iiiorg/piiranha-v1-detect-personal-information",
              "17 kinds of personal data in text of six languages",
              "CC-BY-NC-ND-4.0: no commercial use",
              f"{_HUB}iiiorg/piiranha-v1-detect-personal-information",
              _spans("piiranha", max_seq_length=256)),
    Published("privacy-filter", SpanClassifier, "openai/privacy-filter",
              "eight kinds of personal data and secrets", APACHE, f"{_HUB}openai/privacy-filter",
              _spans("privacy_filter", "account_number", "private_address", "private_date",
                     "private_email", "private_person", "private_phone", "private_url", "secret",
                     max_seq_length=4096),
              "its authors choose labels by a search over the whole text, here each token's best"),
    Published("openmed-pii", SpanClassifier, "OpenMed/OpenMed-PII-SuperClinical-Large-434M-v1",
              "54 kinds of personal data in English text, clinical notes above all", APACHE,
              f"{_HUB}OpenMed/OpenMed-PII-SuperClinical-Large-434M-v1", _spans("openmed_pii")),
    Published("stanford-deidentifier", SpanClassifier, "StanfordAIMI/stanford-deidentifier-base",
              "what identifies patients, staff and hospitals in medical reports", "MIT",
              f"{_HUB}StanfordAIMI/stanford-deidentifier-base",
              _spans("stanford_deidentifier", "DATE", "HCW", "HOSPITAL", "ID", "PATIENT", "PHONE",
                     "VENDOR"), _PICKLED),
    Published("deid-i2b2", SpanClassifier, "obi/deid_ENCODER_i2b2",
              "what identifies patients, staff and places in medical notes", "MIT",
              f"{_HUB}obi/deid_roberta_i2b2", _spans("deid_i2b2_{}"), _PICKLED, variant="ENCODER",
              variants=_same("roberta bert")),
    Published("starpii", SpanClassifier, "bigcode/starpii",
              "names, addresses, keys and passwords in source code",
              "terms of use: for the removal of personal data alone, not to be shared",
              "arXiv:2305.06161", _spans("starpii"), _PICKLED, is_gated=True),
)  # fmt: skip


def published(name: str, **settings: object) -> TextMapper:
    """Build a published classifier by its name in ``gpuclassify models``.

    Parameters
    ----------
    name : str
        Name in the catalogue, such as "finemath", "finepdfs-edu-deu_Latn" or "stack-edu-python", or
        the short name of a class, such as "domain".
    **settings
        Settings of its class, which override the declared ones; `model` may be a directory.

    Raises
    ------
    ValueError
        The name is unknown, or several models share it, such as "stack-edu", and the last word is
        missing.

    Examples
    --------
    >>> mathematics = published("finemath", min_score=3)
    >>> ddf = ddf.pipe(mathematics)  # doctest: +SKIP
    """
    return find_published(name, FAMILIES)(**settings)


def find_published(name: str, classes: Mapping[str, Any]) -> Any:
    """Return the entry of the catalogue, or the class among `classes`, that is called `name`.

    `classes` are by short name, such as "domain"; `full_name` also finds other spellings. Raises
    ValueError for an unknown name.
    """
    known = {**classes, **{entry.name: entry for entry in CATALOGUE}}
    if (full := full_name(name, classes)) in known:
        return known[full]
    for entry in CATALOGUE:
        if entry.variants and str(name).startswith(f"{entry.name}-"):
            return entry.of(str(name).removeprefix(f"{entry.name}-"))
    hint = nearest(str(name), [*known, *(f"{e.name}-{v}" for e in CATALOGUE for v in e.variants)])
    raise ValueError(f"no classifier is called {name!r}.{hint} `gpuclassify models` lists all")


def full_name(name: str, classes: Mapping[str, Any]) -> str:
    """Return the key in `classes` for a class's name in any spelling, such as "DomainClassifier".

    Other names are returned unchanged.
    """
    spellings = {_letters(of.__name__): key for key, of in classes.items()}
    spellings |= {_letters(key): key for key in classes}
    return spellings.get(_letters(str(name)), name)


def _letters(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower().removesuffix("classifier")
