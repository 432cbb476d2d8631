"""Dataclasses of mappers' settings, made from the arguments of constructors.

They are frozen and normalized (sequences become tuples, paths strings), so that equal settings are
equal in every process and have equal Dask keys.
"""

from __future__ import annotations

import functools
import os
import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, InitVar, fields
from typing import Any, ClassVar, Literal, TypeVar

from gpuclassify.settings.checks import (
    check_names,
    check_share,
    check_text,
    label_tuple,
    numbers_by_label,
    plain_value,
    setting_names,
)
from gpuclassify.settings.declared import Declared, declared, setting
from gpuclassify.settings.signatures import short

Options = TypeVar("Options")

StrPath = str | os.PathLike[str]
Aggregation = Literal["mean", "max", "first", "tokens"]
Dtype = Literal["float32", "bfloat16", "float16"]
EncoderDtype = Literal["float32", "bfloat16", "float16", "float8"]
Engine = Literal["auto", "packed", "padded", "reference"]
Loader = Literal["sorted", "crossfit"]
LongText = Literal["truncate", "windows", "ends", "lines"]
PaddingSide = Literal["left", "right"]
PairTruncation = Literal["longest_first", "only_second"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
ScoreFormat = Literal["list", "struct"]
Surrogates = Literal["refuse", "replace"]  # only JSON lines have unpaired surrogates
SINGLE_LABEL: ProblemType = "single_label_classification"
MULTI_LABEL: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
END_CHARS = 10_000  # characters at each end of a document, as in FinePDFs
FLOAT8: EncoderDtype = "float8"
THRESHOLD = 0.5  # default threshold of a label in `labels_field`
DEVICE = r"auto|cpu|mps|cuda(:\d+)?"
# Groups of classifiers' options in the help of commands, and placeholders of their values.
MODEL, ROWS = "Classifiers", "Columns and rows"
LABELLED, TEMPLATE, TEXTS = "[LABEL=]NUMBER", "TEMPLATE", "TEXT,TEXT"


def _device_name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(DEVICE, value):
        raise ValueError(f"device={value!r} is not auto, cpu, mps, cuda or cuda with a number")
    return value


def _limit(value: Any) -> Any:
    return None if value == -1 else value  # -1 is NeMo Curator's old spelling of no limit


ordered_labels = functools.partial(label_tuple, "labels", keep_order=True)


@declared
class TextOptions(Declared):
    """Settings of every mapper that runs a model on a text column and adds columns to a dataframe.

    Attributes
    ----------
    model : str
        Hub name or local directory of the checkpoint.
    revision : str
        Branch, tag or commit of `model` on the Hub.
    cache_dir : str
        Directory of downloads. Default: the Hub client's cache.
    token : str
        Token of the Hub, for gated models; sent to workers, stored nowhere.
    text_field : str
        Column of the text.
    text_template : str
        Text of several columns of strings, such as "{url}\\n\\n{text}". It is null if `text_field`
        is null; other nulls are empty. `max_chars` cuts the filled template.
    max_chars : int
        Characters that the model sees; the column is never cut.
    overwrite : bool
        Replace output columns that the dataset already has.
    seen_field : str
        Output column (float32) of the share of the text that was read.
    truncated_field : str
        Output column (boolean): whether the text was not read whole.
    """

    # Advice for users who pass a pair of columns; empty if pairs are supported.
    no_pairs: ClassVar[str] = "name both in text_template="
    # Settings that filter rows, and settings about the lines of a text.
    filter_names: ClassVar[tuple[str, ...]] = ()
    line_names: ClassVar[tuple[str, ...]] = ()

    # Query and truncation of pairs; None if the mapper reads single texts.
    pairing: ClassVar[Any] = None

    model: StrPath = setting(
        default="",
        group=MODEL,
        metavar="NAME",
        help="Hub name or directory. Default: the published model.",
    )
    revision: str | None = setting(default=None, group=MODEL)
    cache_dir: StrPath | None = setting(
        default=None, changes_results=False, group=MODEL, metavar="DIRECTORY", is_shared=True
    )
    token: InitVar[str | None] = None
    text_field: str | Sequence[str] = setting(default="text", group=MODEL, is_shared=True)
    text_template: str | None = setting(default=None, group=MODEL, metavar=TEMPLATE, is_shared=True)
    max_chars: int | None = setting(default=None, convert=_limit, group=MODEL)
    overwrite: bool = setting(default=False, group=ROWS)
    seen_field: str | None = None
    truncated_field: str | None = None

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings about text columns contradict each other."""
        self.check_text_field()
        if self.main_field not in self.text_fields:
            raise ValueError(
                f"text_template={self.text_template!r} has no {{{self.text_field}}}, the text "
                "whose nulls make null rows: add it, or name that column as text_field="
            )

    def check_text_field(self) -> None:
        """Raise TypeError or ValueError unless `text_field` is a column name or an allowed pair."""
        names = self.text_field
        for name in names if isinstance(names, tuple) else [names]:
            check_text("text_field", name, "a column name")
        if not isinstance(names, tuple):
            return
        pair = f"text_field={list(names)} is a pair"
        if len(names) != 2 or names[0] == names[1]:
            raise ValueError(f"text_field={list(names)}: name one column, or the two of a pair")
        if self.no_pairs:
            raise ValueError(f"{pair}, and one text is read of a row: {self.no_pairs}")
        if self.text_template is not None:
            raise ValueError(f"{pair}, and text_template= makes one text: pass text_template=None")

    @property
    def main_field(self) -> str:
        """Column that `text_field` names, the second one of a pair; its nulls are null rows."""
        return self.text_field if isinstance(self.text_field, str) else self.text_field[-1]

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Names of the columns with a row's text: all in `text_template`, else in `text_field`."""
        if self.text_template:
            return template_fields(self.text_template)
        return (self.text_field,) if isinstance(self.text_field, str) else (*self.text_field,)

    def setting_of_column(self, name: str) -> str:
        """Return the name of the setting that names text columns, for error messages."""
        return "text_template" if self.text_template else "text_field"

    @property
    def filters(self) -> bool:
        """Whether rows are filtered. With `keep_field`, filters drop no row, but write a column."""
        return any(getattr(self, name) is not None for name in self.filter_names)

    @property
    def read_share_names(self) -> dict[str, str | None]:
        """Names of the output columns that tell how completely texts were read, by kind.

        Kinds are "seen" (share of the text) and "truncated" (whether that is below 1). A name of
        None writes no such column.
        """
        return {"seen": self.seen_field, "truncated": self.truncated_field}

    @property
    def shows_read_share(self) -> bool:
        """Whether any column in `read_share_names` is written."""
        return any(name is not None for name in self.read_share_names.values())

    @property
    def passes_per_text(self) -> int:
        """Number of times that the model reads each text: 1 here; one per label in zero-shot."""
        return 1

    @property
    def runs_lines(self) -> bool:
        """Whether the model classifies each line of a text on its own; always False here."""
        return False

    @property
    def plans_without_model(self) -> bool:
        """Whether a run can be planned without reading the model's files; always False here."""
        return False


@declared
class ModelOptions(TextOptions):
    """Settings of mappers whose model is a neural network, in addition to `TextOptions`.

    Attributes
    ----------
    base_model : str
        Checkpoint of a backbone or tokenizer that `model` lacks.
    max_seq_length : int
        Maximum tokens of a text. Default: the model's limit.
    batch_size : int
        Maximum rows of a batch. Default: limited by tokens and memory.
    sort_by_length : bool
        Batch texts of similar length together, which is faster.
    padding_side : {"left", "right"}
        Side of padding. Default: the tokenizer's.
    autocast : bool
        Use float16 or bfloat16 on GPUs; False: float32 everywhere.
    dtype : {"float32", "bfloat16", "float16", "float8"}
        Precision. Default: chosen by `autocast`. "float8" needs an Ada, Hopper or later GPU.
    device : str
        "auto" (CUDA, MPS or CPU, in this order), or "cuda:0".
    loader : {"sorted", "crossfit"}
        Form batches like gpuclassify or CrossFit.
    engine : {"auto", "packed", "padded", "reference"}
        Pack texts without padding, or pad; "auto": pack if outputs agree; "reference":
        transformers' own code.
    strict : bool
        Raise an error for labels other than the class's, not a warning.
    unpack_inference_batch : bool
        Pass keywords instead of a dict to your own module.
    long_text : {"truncate", "windows", "ends", "lines"}
        Cut long texts, or read them in windows, at both ends, or line by line.
    end_chars : int
        Characters of each end, with "ends". Default: 10,000.
    window_overlap : int
        Tokens that neighbouring windows share. Default: an eighth.
    window_aggregation : {"mean", "max", "first", "tokens"}
        Aggregation of the outputs of windows or lines; "tokens": mean weighted by tokens.
    windows_field : str
        Output column (Int64) of the number of windows, or lines.
    """

    base_model: StrPath | None = setting(default=None, group=MODEL, metavar="NAME")
    max_seq_length: int | None = setting(default=None, group=MODEL)
    batch_size: int | None = setting(default=None, group=MODEL)
    sort_by_length: bool = True
    padding_side: PaddingSide | None = None
    autocast: bool = True
    dtype: EncoderDtype | None = setting(default=None, group=MODEL)
    device: str = setting(default="auto", convert=_device_name, group=MODEL, is_shared=True)
    loader: Loader = setting(default="sorted", group=MODEL)
    engine: Engine = "auto"
    strict: bool = setting(default=False, group=MODEL)
    unpack_inference_batch: bool = True
    long_text: LongText = "truncate"
    end_chars: int | None = None
    window_overlap: int | None = setting(default=None, least=0)
    window_aggregation: Aggregation = "mean"
    windows_field: str | None = None

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other or `long_text`."""
        super().check_together()
        self._check_windows()
        if self.dtype == FLOAT8 and self.device in ("cpu", "mps"):
            raise ValueError(
                f'dtype="{FLOAT8}" needs an NVIDIA GPU, but device="{self.device}": leave one out'
            )
        if self.dtype == FLOAT8 and self.engine not in ("auto", "packed"):
            raise ValueError(
                f'dtype="{FLOAT8}" is for texts without padding, but engine="{self.engine}": '
                'pass engine="auto"'
            )

    @property
    def has_free_dtype(self) -> bool:
        """Whether gpuclassify chooses the precision: `dtype` is not set, and `autocast` is on."""
        return self.dtype is None and self.autocast

    @property
    def has_windows(self) -> bool:
        """Whether long texts are read in several windows: `long_text` is "windows" or "ends"."""
        return self.long_text in ("windows", "ends")

    @property
    def runs_lines(self) -> bool:
        """Whether the model classifies each line of a text on its own (`long_text` is "lines")."""
        return self.long_text == "lines"

    @property
    def chars_of_ends(self) -> int | None:
        """Number of characters to read at each end of a text; None unless `long_text` is "ends"."""
        return (self.end_chars or END_CHARS) if self.long_text == "ends" else None

    def overlap_of(self, window_tokens: int) -> int | None:
        """Return the number of tokens that windows share; None unless `long_text` is "windows"."""
        if self.long_text != "windows":
            return None
        return window_tokens // 8 if self.window_overlap is None else self.window_overlap

    def cut_of(self, window_tokens: int) -> dict[str, Any]:
        """Return the arguments of `TextTokenizer` for windows of this length, by name."""
        return {"overlap": self.overlap_of(window_tokens), "end_chars": self.chars_of_ends}

    @property
    def read_share_names(self) -> dict[str, str | None]:
        """Names as in `TextOptions`, and "windows" for the number of windows or lines."""
        return {"windows": self.windows_field, **super().read_share_names}

    @property
    def keeps_all_scores(self) -> bool:
        """Whether all of a token's probabilities are kept, not only the best; always False here."""
        return False

    @property
    def declared(self) -> dict[str, Any]:
        """Settings that override entries of the model's ``config.json``, by name; none here."""
        return {}

    def _check_windows(self) -> None:
        meant = {"window_overlap": "windows", "end_chars": "ends"}
        meant |= dict.fromkeys(self.line_names, "lines")
        if self.long_text == "truncate":
            meant["windows_field"] = "windows"
        for name, long_text in meant.items():
            if (value := getattr(self, name)) is not None and self.long_text != long_text:
                raise ValueError(
                    f'{name}={value!r} has no meaning with long_text="{self.long_text}": '
                    f'pass long_text="{long_text}" with it'
                )
        overlap, length = self.window_overlap, self.max_seq_length
        if overlap is not None and length is not None and overlap >= length:
            raise ValueError(
                f"window_overlap={overlap} leaves windows of {length} tokens no way forward: "
                "pass a smaller one"
            )
        if self.long_text == "lines" and self.text_template is not None:
            raise ValueError(
                f'long_text="lines" runs the lines of one column, and text_template='
                f"{self.text_template!r} joins several: make it None (null on the command line)"
            )


@declared
class PairOptions(ModelOptions):
    """Settings of mappers whose network also reads pairs of texts, in addition to `ModelOptions`.

    Attributes
    ----------
    text_field : str or list of str
        Column of the text, or the two columns of a pair of texts.
    query : str
        First text of all pairs; `text_field` is the second.
    pair_truncation : {"longest_first", "only_second"}
        Text that is cut.
    """

    no_pairs = ""

    query: str | None = setting(default=None, group=MODEL)
    pair_truncation: PairTruncation | None = None

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other, such as about pairs."""
        super().check_together()
        names, query, truncation = self.text_field, self.query, self.pair_truncation
        if query is not None and not isinstance(names, str):
            raise ValueError(f"query={query!r} is a first text beside {list(names)}: leave one out")
        if self.pairing is None and truncation is not None:
            raise ValueError(
                f"pair_truncation={truncation!r} needs query=, or two columns as text_field="
            )
        if self.pairing is not None and self.long_text != "truncate":
            raise ValueError(f'long_text="{self.long_text}" is not for pairs: leave it out')

    @property
    def pairing(self) -> tuple[Any, str] | None:
        """Query and truncation of text pairs; None if the settings ask for single texts.

        The query is the first text of every pair, or None if the pair's two texts are columns. The
        truncation, as in transformers, is "longest_first" or "only_second".
        """
        if self.query is None and isinstance(self.text_field, str):
            return None
        usual = "longest_first" if self.query is None else "only_second"
        return self.query, self.pair_truncation or usual


@declared
class LabelOptions(TextOptions):
    """Settings of every mapper that adds a label to each row, in addition to `TextOptions`.

    Attributes
    ----------
    label_field : str
        Output column of the label; None writes none.
    filter_by : str or list of str
        Keep only rows with these labels.
    keep_field : str
        Write the filters' decision to this column, and drop nothing.
    """

    filter_names: ClassVar[tuple[str, ...]] = ("filter_by",)

    label_field: str | None = setting(default=None, group=ROWS)
    filter_by: str | Collection[str] | None = setting(
        default=None,
        convert=functools.partial(label_tuple, "filter_by"),
        group=ROWS,
        metavar="[HEAD=]LABEL",
    )
    keep_field: str | None = setting(default=None, group=ROWS)

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other."""
        super().check_together()
        check_decision(self)


@declared
class ScoreOptions(LabelOptions, PairOptions):
    """Settings of mappers whose network scores labels or lines, in addition to `LabelOptions`.

    Attributes
    ----------
    score_field : str
        Output column of the scores of all labels, or of the score of a regression.
    min_score : float or dict of str to float
        Minimum score of rows to keep, or one by label.
    labels : list of str
        Labels in id order, for a client without the checkpoint.
    problem_type : str
        "single_label_classification", "multi_label_classification" or "regression", for a
        checkpoint that does not say.
    line_min_score : float or dict of str to float
        Minimum score of lines to keep, or one by label.
    line_scores_field : str
        Output column (list<float32>) of each line's score.
    kept_text_field : str
        Output column of the kept lines' text.
    kept_share_field : str
        Output column (float32) of the share of lines kept.
    min_kept_share : float
        Minimum share of kept lines to keep a row, 0 to 1.
    """

    filter_names: ClassVar[tuple[str, ...]] = ("filter_by", "min_score", "min_kept_share")
    line_names: ClassVar[tuple[str, ...]] = (
        *("line_min_score", "line_scores_field"),
        *("kept_share_field", "kept_text_field", "min_kept_share"),
    )

    score_field: str | None = setting(default=None, group=ROWS)
    min_score: float | Mapping[str, float] | None = setting(
        default=None,
        convert=functools.partial(numbers_by_label, "min_score"),
        group=ROWS,
        metavar=LABELLED,
    )
    labels: Sequence[str] | None = setting(
        default=None,
        convert=ordered_labels,
        group=MODEL,
        metavar=TEXTS,
        flags=["--labels", "--label"],
        help="Labels of the model in the order of its outputs, in place of the classifier's; "
        "repeatable, for labels with commas. Of zero-shot: any labels, or NAME=DESCRIPTION.",
    )
    problem_type: ProblemType | None = None
    line_min_score: float | Mapping[str, float] | None = setting(
        default=None, convert=functools.partial(numbers_by_label, "line_min_score")
    )
    line_scores_field: str | None = None
    kept_text_field: str | None = None
    kept_share_field: str | None = None
    min_kept_share: float | None = setting(default=None, is_share=True)

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other, such as about lines."""
        super().check_together()
        least, *about = self.line_names
        criteria = [name for name in about if getattr(self, name) is not None]
        kept = [name for name in criteria if "kept" in name]
        if self.line_min_score is None and kept:
            raise ValueError(f"{kept[0]} is about lines that are kept: pass {least}= with it")
        if self.line_min_score is not None and not criteria:
            raise ValueError(
                f"{least}={self.line_min_score} has no column to fill and no filter: pass "
                f"{', '.join(about[:-1])} or {about[-1]} with it"
            )

    @property
    def declared(self) -> dict[str, Any]:
        """Dict with `problem_type`, which overrides that entry of ``config.json`` if not None."""
        return {"problem_type": self.problem_type}

    @property
    def plans_without_model(self) -> bool:
        """Whether `labels` are passed, so that a run can be planned without the model's files."""
        return self.labels is not None


@declared
class ClassifierOptions(ScoreOptions):
    """Settings of classifiers with a probability for each label, in addition to `ScoreOptions`.

    Attributes
    ----------
    score_format : {"list", "struct"}
        List in id order, or a struct by label.
    labels_field : str
        Output column (list of strings) of labels that reach their threshold.
        `filter_by` keeps rows with any of them.
    thresholds : float or dict of str to float
        Minimum score for `labels_field`, or one by label; 0.5.
    confidence_field : str
        Output column (float32) of the label's probability.
    min_confidence : float
        Minimum probability of the label to keep a row, 0 to 1.
    """

    filter_names: ClassVar[tuple[str, ...]] = (
        *("filter_by", "min_confidence", "min_score", "min_kept_share"),
    )

    score_format: ScoreFormat = setting(
        default="list", group=ROWS, metavar="list|struct", is_shared=False
    )
    labels_field: str | None = setting(default=None, group=ROWS)
    thresholds: float | Mapping[str, float] | None = setting(
        default=None,
        convert=functools.partial(numbers_by_label, "thresholds"),
        group=ROWS,
        metavar=LABELLED,
    )
    confidence_field: str | None = setting(default=None, group=ROWS)
    min_confidence: float | None = setting(
        default=None, is_share=True, group=ROWS, metavar="[HEAD=]NUMBER"
    )

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other, such as `thresholds`."""
        super().check_together()
        thresholds = self.thresholds
        if thresholds is None:
            return
        if self.labels_field is None:
            raise ValueError(
                f"thresholds={thresholds} decide on no column of labels: pass labels_field= with "
                "them, or min_score= to filter"
            )
        for number in dict(thresholds).values() if isinstance(thresholds, tuple) else [thresholds]:
            check_share("thresholds", number)


def check_decision(options: Any) -> None:
    """Raise ValueError if `keep_field` is set, but no setting that filters rows."""
    if options.keep_field is not None and not options.filters:
        raise ValueError(
            f"keep_field={options.keep_field!r} has no decision to write: "
            f"pass {' or '.join(options.filter_names)} with it"
        )


def parse_options(
    owner: str,
    options_type: type[Options],
    defaults: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Options:
    """Create an `options_type` object from a class's defaults and its constructor's arguments.

    A default of ``max_chars`` only applies to ``long_text="truncate"``, and a default template
    reads the column that the argument ``text_field`` names. Raises TypeError for unknown or missing
    arguments, and TypeError or ValueError for wrong values.
    """
    if "dataset" in arguments:
        refuse_unnamed(owner, arguments["dataset"], is_dataset=True)
    names = setting_names(options_type)
    check_names(f"{owner} has", "argument", arguments, [*names, "token"])
    fitting = dict(defaults)  # defaults that apply with these arguments
    if arguments.get("long_text", "truncate") != "truncate":
        fitting.pop("max_chars", None)  # these settings read more of the text
    if "text_field" in arguments:
        old, name = fitting.get("text_field", "text"), arguments["text_field"]
        for template in {"text_template", "prompt"} & fitting.keys():
            fitting[template] = fitting[template].replace(f"{{{old}}}", f"{{{name}}}")
    settings = {**fitting, **arguments}
    for own in fields(options_type):  # type: ignore[arg-type]
        if own.init and own.default is MISSING and own.name not in settings:
            raise TypeError(f"{owner} needs {own.name}=")
    if "model" in names and settings.get("model") in (None, ""):
        raise TypeError(f"{owner} needs model=: a Hub name or the directory of a checkpoint")
    plain = {name: plain_value(value) for name, value in settings.items()}
    listed = {name: tuple(value) for name, value in plain.items() if isinstance(value, list)}
    return options_type(**plain | listed)


def refuse_unnamed(owner: str, value: object, is_dataset: bool = False) -> None:
    """Raise TypeError in any case, with the correct call, for a `value` passed without its name."""
    if is_dataset or hasattr(value, "columns"):
        raise TypeError(
            f"{owner} got a dataset in place of its settings: make the classifier first, as in "
            f"ddf.pipe({owner}()) or {owner}()(ddf)"
        )
    raise TypeError(f"{owner} takes its settings by name, such as {owner}(model={short(value)})")


# Templates such as "{url}\n\n{text}", which make a text of several columns.


def template_fields(template: str) -> tuple[str, ...]:
    """Return the distinct column names in a template such as "{url} {text}", in order."""
    return tuple(dict.fromkeys(name for _, name in template_pieces(template) if name is not None))


def fill_template(
    template: str, columns: Mapping[str, Sequence[str | None]], text_field: str
) -> list[str | None]:
    """Return each row's text: a template such as "{url} {text}" filled with the row's values.

    A text is None where `text_field` is None; None in other columns becomes an empty text.
    """
    pieces = template_pieces(template)
    layout = "".join(text.replace("%", "%%") + "%s" * (name is not None) for text, name in pieces)
    named = [columns[name] for _, name in pieces if name is not None]
    rows = zip(columns[text_field], zip(*named, strict=True), strict=True)
    return [
        None if text is None else layout % tuple(value or "" for value in values)
        for text, values in rows
    ]


def template_pieces(template: str, setting: str = "text_template") -> list[tuple[str, str | None]]:
    """Split a template such as "{url} {text}" into pairs (literal text, column name after it).

    The name is None if no column follows. A doubled brace becomes a single one. Raises ValueError
    for an unpaired brace, or if braces hold anything but a name.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as err:
        raise ValueError(
            f"{setting}={template!r} has a brace of its own ({err}): write {{{{ for {{ and "
            "}} for }"
        ) from err
    for _, name, form, conversion in pieces:
        if name == "" or form or conversion:
            raise ValueError(
                f"{setting}={template!r} has braces that hold more or less than a name: write "
                "columns as in {url}, without forms and conversions"
            )
    return [(text, name) for text, name, _, _ in pieces]
