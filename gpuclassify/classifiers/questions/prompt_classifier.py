"""PromptClassifier: ask a decoder about every row, and read its answers from logits."""

from __future__ import annotations

import functools
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from gpuclassify import hub
from gpuclassify.classifiers.questions.answers import (
    Answer,
    AnswerForm,
    AnswerReader,
    Choice,
    Known,
    Reading,
    Tokens,
    is_list,
    named_field,
)
from gpuclassify.classifiers.questions.lora import (
    LoraCheckpoint,
    LoraModel,
    end_ids,
    most_positions,
)
from gpuclassify.classifiers.questions.prompt_tokens import (
    CRITERION,
    Prompt,
    PromptTokenizer,
    prompt_columns,
    render_prompt,
    shared_length,
)
from gpuclassify.classifiers.questions.runners import PromptRunner
from gpuclassify.classifiers.questions.safety_template import TemplateError, full_digest
from gpuclassify.frames import Texts, backend_of
from gpuclassify.hub import Identity
from gpuclassify.mapping.heads import FLOAT32, Columns, Head, named_columns, named_fields
from gpuclassify.mapping.label_heads import CategoryHead, MultiLabelHead
from gpuclassify.mapping.runners import Outputs
from gpuclassify.mapping.stage_counts import LABELS
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.models.checkpoint import Checkpoint, position_limit
from gpuclassify.settings.checks import check_text
from gpuclassify.settings.declared import declared, setting
from gpuclassify.settings.options import MODEL, TEMPLATE, TEXTS, ClassifierOptions, Dtype, StrPath
from gpuclassify.settings.signatures import takes
from gpuclassify.workers.run_context import RunStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gpuclassify.classifiers.questions.decoder import Decoder
    from gpuclassify.frames import Frame
    from gpuclassify.tokenizing.text_tokenizer import TokenBatch

logger = logging.getLogger(__name__)

LABEL = "label"  # default column of `answers`
_BRACES = re.compile(r"\{\w+\}|\{\{")  # a column's placeholder, or an escaped brace
# Settings of other classifiers, which raise an error here, and what to pass instead.
_NO_SETTINGS = {
    "labels": "name the labels in answers= or fields=",
    "problem_type": "answers=, fields= and criteria= say it",
    "base_model": "the decoder is model=, and adapter= a LoRA adapter on it",
    "query": "write it into prompt=",
    "pair_truncation": "a prompt that is too long loses the end of text_field",
}
_MOST_TOKENS = 4_096  # prompt tokens for a model that states no limit


def _as_json_text(value: object) -> str | None:
    if value is None:
        return None
    try:
        settings = json.loads(value) if isinstance(value, str) else value
        if isinstance(settings, Mapping):
            return json.dumps(dict(settings), sort_keys=True)
    except (TypeError, ValueError) as err:
        raise TypeError(f"chat_template_kwargs={value!r}: pass plain values ({err})") from err
    raise TypeError(f"chat_template_kwargs={value!r}: pass a dict")


def _answers(value: Any) -> Any:
    return None if value is None else Choice(value).options


def _named_fields(value: object) -> tuple[tuple[str, Any], ...] | None:
    if value is None:
        return None
    if not isinstance(value, (Mapping, tuple)) or not value:
        raise TypeError(f"fields={value!r}: pass a dict of a field's name to its options")
    return tuple((name, named_field(options)) for name, options in dict(value).items())


def _criteria(value: object) -> tuple[tuple[str, str], ...] | None:
    if value is None:
        return None
    if not isinstance(value, (Mapping, tuple)) or not value:
        raise TypeError(f"criteria={value!r}: pass a dict of a column to a criterion's text")
    for name, text in dict(value).items():
        check_text("criteria's key", name, "a column name")
        check_text(f"criteria[{name!r}]", text, "a text")
    return tuple(dict(value).items())


@declared
class PromptOptions(ClassifierOptions):
    """Settings of questions to a decoder, in addition to `ClassifierOptions`.

    Attributes
    ----------
    model : str
        Any decoder for ``AutoModelForCausalLM``, on the Hub or in a directory.
    max_seq_length : int
        Maximum tokens of the whole prompt. Only the document is cut, at its end. Default: the
        model's limit, or 4,096.
    label_field : str
        Output column of the label, first field in `answer`, or most probable of `criteria`.
        Default: "label", the field's name, or none.
    score_field : str
        Output column of the probabilities of all `answers`, of all options of the first field in
        `answer`, or of all `criteria`.
    prompt : str
        Question, with columns in braces, such as "Is this an advertisement?\\n\\n{text}". It
        becomes one user message; ``{{`` and ``}}`` are braces. Braces in documents are text.
    system : str
        System message before the question.
    response : str
        Assistant message after the question, such as "{response}", for models that judge responses.
    chat : bool
        Apply the tokenizer's chat template; False: `prompt` is the whole text.
    chat_template_kwargs : dict
        Variables of the chat template other than the messages.
    opening : str
        Beginning of the answer, which the model continues, such as an empty think block.
    answers : list of str, or dict of str to str or list of str
        Possible labels; or, by label, the text or texts that the model writes for it. Probabilities
        of a label's texts are added.
    answer : str
        Template of an answer with several fields, such as
        "Safety: {safety}\\nCategories: {categories}".
    fields : dict of str to list, dict, Choice, Several or Free
        Possible values of each field of `answer`, by name. Each field is an output column.
    criteria : dict of str to str
        Text for ``{criterion}`` in the prompt, by output column. Each column (float32) is the
        probability of the first of `answers`.
    confidences : bool
        Add a column NAME_confidence (float32), the value's probability, for every field. A first
        field that is one label has `confidence_field` instead.
    adapter : str
        Hub name or directory of a LoRA adapter on the model.
    adapter_revision : str
        Branch, tag or commit of `adapter` on the Hub.
    keep_raw : bool
        Also let the model write an answer of its own, greedily, and store it in `raw_field`. Other
        columns do not depend on it.
    raw_field : str
        Output column of the answer that `keep_raw` keeps.
    max_new_tokens : int
        Maximum tokens of the answer that `keep_raw` keeps.
    prompt_digest : str
        SHA-256 (64 hex digits) that the prompt must have with empty columns; otherwise a warning is
        logged, or an error raised if `strict`.
    """

    no_pairs = "name both columns in prompt="

    dtype: Dtype | None = setting(default=None, group=MODEL)  # 8-bit products are for encoders
    prompt: str = setting(  # `check_together` requires it
        default="",
        least=0,
        group=MODEL,
        metavar=TEMPLATE,
        help="Question to a language model, with columns in braces, such as "
        "'An advertisement?\\n\\n{text}'.",
    )
    system: str | None = None
    response: str | None = None
    chat: bool = True
    chat_template_kwargs: Any = setting(default="{}", convert=_as_json_text)
    opening: str = setting(default="", least=0)
    answers: Any = setting(
        default=None,
        convert=_answers,
        group=MODEL,
        metavar=TEXTS,
        help="Possible answers to the prompt; repeatable, for answers with commas.",
    )
    answer: str | None = None
    fields: Any = setting(default=None, convert=_named_fields)
    criteria: Any = setting(default=None, convert=_criteria)
    confidences: bool = False
    adapter: StrPath | None = None
    adapter_revision: str | None = None
    keep_raw: bool = False
    raw_field: str | None = "raw_answer"
    max_new_tokens: int = 128
    prompt_digest: str | None = None

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings are missing or contradict each other."""
        self.check_text_field()
        check_text("prompt", self.prompt, "a text with a column in braces, such as {text}")
        for name in ("system", "opening"):
            text = getattr(self, name) or ""
            if braces := {*_BRACES.findall(text)} - {f"{{{CRITERION}}}"}:
                raise ValueError(
                    f"{name}={text!r} is the same for all rows, and {braces.pop()} would stand "
                    "there: name columns in prompt=, and write a brace of the text with a space"
                )
        for name, cure in _NO_SETTINGS.items():
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}={value!r} has no meaning for a question: {cure}")
        if self.prompt_digest is not None:
            full_digest("prompt_digest", self.prompt_digest)
        if self.text_template is not None:
            raise ValueError("text_template= is for other models: name the columns in prompt=")
        if self.text_field not in self.text_fields:
            raise ValueError(
                f"prompt={self.prompt!r} has no {{{self.text_field}}}, the text whose nulls make "
                "null rows: add it, or name that column as text_field="
            )
        if not self.chat:
            for name in ("system", "response"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} is a message of a chat, and chat=False "
                        "has none: write it into prompt="
                    )
        self._check_criteria()
        self.form  # noqa: B018 - raises if the answer cannot be read
        super().check_together()
        several = len(self.text_fields) > 1
        refused: dict[str, Any] = {
            "max_chars": several and "cuts the text of one column, and the prompt reads several",
            "long_text": self.long_text != "truncate" and self._no_windows,
            "end_chars": 'is for long_text="ends", which prompts do not have',
        }
        for name, reason in refused.items():
            if getattr(self, name) not in (None, "truncate") and reason:
                cure = "a prompt that is too long loses the document's end"
                raise ValueError(f"{name}={getattr(self, name)!r} {reason}: leave it out, {cure}")
        if self.keep_raw and self.criteria:
            raise ValueError("keep_raw=True keeps one answer a row: leave it out with criteria=")

    @property
    def _no_windows(self) -> str:
        if self.long_text in ("ends", "lines"):
            return "is no way to read prompts"
        if self.fields is not None or len(self.text_fields) > 1 or self.keep_raw:
            return "joins probabilities, of answers= or criteria= about one column"
        return ""

    @functools.cached_property
    def form(self) -> AnswerForm:
        """Form of the answer: its fields, such as a choice of labels, and the texts around them.

        With `answers`, its only field is a choice named "label", without texts around it.
        """
        if (self.answers is None) == (self.answer is None) or (
            (self.answer is None) != (self.fields is None)
        ):
            raise ValueError(
                "pass either answers=, such as ['yes', 'no'], or answer= with fields=, such as "
                "answer='Safety: {safety}' with fields={'safety': ['safe', 'unsafe']}"
            )
        if self.answers is not None:
            return AnswerForm.of(f"{{{LABEL}}}", {LABEL: self.answers})
        return AnswerForm.of(self.answer or "", dict(self.fields))

    def _check_criteria(self) -> None:
        named = [self.prompt, self.system or "", self.response or "", self.chat_template_kwargs]
        has_place = any(f"{{{CRITERION}}}" in text for text in named)
        if has_place != (self.criteria is not None):
            raise ValueError(
                f"criteria={self.criteria!r} and {{{CRITERION}}} belong together: pass "
                "criteria={'column': 'text'} and name {criterion} in prompt="
            )
        if self.criteria and self.answers is None:
            raise ValueError("criteria= need answers=, such as ['Yes', 'No']: pass them")

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Distinct names of the input columns in `prompt`, and then in `response`, in order."""
        return prompt_columns(self.prompt, self.response)

    def setting_of_column(self, name: str) -> str:
        """Return the name of the setting that names this input column, for messages."""
        if name == self.text_field:
            return "text_field"
        return "prompt" if name in prompt_columns(self.prompt) else "response"


class PromptModel(LoraModel):
    """Decoder and its LoRA adapter, if any, pinned to versions, with the prompts to ask it."""

    @property
    def repositories(self) -> list[str]:
        """Hub names or directories of the decoder and, if set, of the adapter."""
        return [name for name in (self.options.model, self.options.adapter) if name]

    def resolve_base(self) -> Identity:
        """Return the decoder, pinned to a commit, or to a digest of its directory."""
        return self.identity

    def resolve_adapter(self) -> Identity | None:
        """Return the LoRA adapter, pinned to a commit or digest; None if there is no adapter."""
        options = self.options
        if options.adapter is None:
            return None
        return hub.resolve(options.adapter, options.adapter_revision, cache_dir=options.cache_dir)

    def read(self) -> LoraCheckpoint:
        """Read the configurations of decoder and adapter, and build the prompts, without weights.

        There is one prompt per criterion, or only one. If `prompt_digest` differs, logs a warning,
        or raises TemplateError if `strict`.
        """
        from gpuclassify.models.tokenizer_files import load_tokenizer

        checkpoint, options = super().read(), self.options
        directory = hub.download(checkpoint.base, cache_dir=options.cache_dir, has_weights=False)
        tokenizer = load_tokenizer(checkpoint, directory)
        criteria = [text for _, text in options.criteria or [("", None)]]
        name = checkpoint.base.name
        prompts = tuple(render_prompt(options, tokenizer, name, text) for text in criteria)
        self._check_digest(prompts[0], name)
        ends = end_ids(checkpoint.sizes, directory, tokenizer)
        readers = new_readers(options, prompts, tokenizer, ends)
        answer = max(reader.most_tokens for reader in readers)
        length = self._prompt_length(checkpoint.sizes, answer)
        for prompt in prompts:
            main = prompt.columns.index(options.text_field)
            whole = PromptTokenizer(tokenizer, prompt, length, main)
            overlap = options.overlap_of(whole.window_tokens) or 0
            if overlap >= whole.window_tokens:
                raise ValueError(
                    f"the prompt leaves windows of {whole.window_tokens} tokens, which "
                    f"window_overlap={overlap} gives no way forward: pass a smaller one, or a "
                    "larger max_seq_length="
                )
        return replace(checkpoint, prompts=prompts, max_tokens=length)

    def _prompt_length(self, sizes: Mapping[str, Any], answer_tokens: int) -> int:
        """Return the maximum tokens of a prompt: `max_seq_length`, else the model's limit or 4,096.

        With "longrope" positions, the limit leaves room for an answer, and a larger
        `max_seq_length` raises ValueError.
        """
        asked = self.options.max_seq_length
        most = most_positions(sizes)
        if most is None:
            return asked or position_limit(sizes)[0] or _MOST_TOKENS
        if self.options.keep_raw:
            answer_tokens = max(answer_tokens, self.options.max_new_tokens)
        most -= answer_tokens
        if asked is not None and asked > most:
            raise ValueError(
                f"max_seq_length={asked} is more than the {most} tokens of a prompt up to which "
                f"{self.options.model} has the same positions for all rows: pass at most that"
            )
        return asked or most

    def _check_digest(self, prompt: Prompt, name: str) -> None:
        wanted = self.options.prompt_digest
        if wanted is None or prompt.digest == wanted.lower():
            return
        message = (
            f"the prompt that {name} is given has the digest {prompt.digest}, not the one that is "
            f"known, {wanted}: its template may have changed. Read `mapper.model.checkpoint.prompts"
            "`, then pass prompt_digest= with the digest found"
        )
        if self.options.strict:
            raise TemplateError(message)
        logger.warning("%s", message)


def new_readers(
    options: PromptOptions,
    prompts: tuple[Prompt, ...],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int],
) -> list[AnswerReader]:
    """Make an `AnswerReader` for each prompt; they share one table of logit columns.

    `end_ids` are the token ids that end an answer. Raises ValueError as `AnswerReader` does.
    """
    backend, places = tokenizer.backend_tokenizer, {}  # type: ignore[var-annotated]

    def encode(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    def decode(tokens: Tokens) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    # All probabilities of the first field are needed for these columns and filters.
    shows = (options.score_field, options.confidence_field, options.min_score)
    needs_all = any(shows) or options.min_confidence is not None or bool(options.criteria)
    return [
        AnswerReader(
            options.form, encode, decode, one.literals[-1], end_ids,
            needs_all or options.has_windows, places,
        )
        for one in prompts
    ]  # fmt: skip


@dataclass(frozen=True)
class CriteriaReader:
    """Reader that computes one answer per criterion to the same document.

    The criteria follow the document in the prompt, so that the decoder runs the document only once.
    """

    readers: list[AnswerReader]
    starts: list[Tokens]  # tokens of the prompt from each criterion to its end

    @property
    def columns(self) -> Tokens:
        """Token ids whose logits are needed at each requested position, equal for all criteria."""
        return self.readers[0].columns

    @property
    def has_free_fields(self) -> bool:
        """Whether an answer has free text: always False, because criteria have only choices."""
        return False

    @property
    def most_tokens(self) -> int:
        """Approximate number of tokens of the longest criterion with its longest answer."""
        return max(map(len, self.starts)) + self.readers[0].most_tokens

    def read(self, known: Known) -> Reading:
        """Read an answer for each criterion: see `Reader.read` in generation.py.

        Returns one `Answer`: its `shares` are the probabilities of the first option, float64
        (criteria,).
        """
        shares = []
        for reader, start in zip(self.readers, self.starts, strict=True):
            answer = yield from reader.read(known, start)
            shares.append(answer.shares[0])
        return Answer(shares=np.array(shares))


@dataclass(frozen=True)
class _Ask:
    """Tokenizer of a prompt and a reader, which also reads the prompt's last `trim` tokens."""

    tokenizer: PromptTokenizer
    trim: int
    reader: Any


class ChoiceRunner(PromptRunner):
    """Runner that asks a decoder about each row.

    Choices are computed from logits. Free text, such as the answer of `keep_raw`, is decoded
    greedily.
    """

    def columns_of(self, text: str) -> tuple[str, ...]:
        """Return the texts of the prompt's columns, in the order of the prompt, for a row's `text`.

        `text` is an item of `PromptClassifier.list_texts`.
        """
        names = self.options.text_fields
        values = dict(zip(names, json.loads(text) if len(names) > 1 else [text], strict=True))
        return tuple(values[name] for name in self.model.checkpoint.prompts[0].columns)

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Ask the decoder about each distinct text; the values are `Answer` objects (texts,).

        If documents are read in windows, the values are probabilities of labels or criteria,
        float32 (windows, labels), which `Outputs.by_text` aggregates.
        """
        options, rows = self.options, [self.columns_of(text) for text in texts]
        with self.lease_decoder(*self.device_and_dtype()) as decoder:
            asks = decoder.attached(
                ("asks", options, self.model.checkpoint), lambda: self._new_asks(decoder)
            )
            rows, counts = self.windows_of(rows, asks[0].tokenizer)
            named = np.repeat(np.arange(len(counts)), counts), name_text
            stats.windows += len(rows)
            results = [self._ask(ask, rows, stats, *named) for ask in asks]
            _, prompts = results[0]
            seen = asks[0].tokenizer.seen_share(prompts)
            answers = results[0][0]
            if options.criteria and type(asks[0].reader) is AnswerReader:  # one per criterion
                shares = np.stack(
                    [[one.shares[0] for one in answers_of_one] for answers_of_one, _ in results],
                    axis=1,
                )
                answers = [Answer(shares=row) for row in shares]
            if options.keep_raw:
                until = (lambda _, is_complete: is_complete), options.max_new_tokens
                raw = self.free_answers(prompts, asks[0].tokenizer.prefix, *until, stats, *named)
                answers = [replace(one, raw=text) for one, text in zip(answers, raw, strict=True)]
        if not options.has_windows:
            values = np.empty(len(answers), dtype=object)
            values[:] = answers
            return Outputs(values, counts, seen)
        numbers = np.stack([one.shares for one in answers]).astype(np.float32)
        lengths = np.maximum(prompts.lengths - asks[0].tokenizer.fixed_tokens, 1)
        whole = np.ones(len(counts), dtype=np.float32)
        return Outputs(numbers, counts, whole, counts, lengths, options.window_aggregation)

    def _ask(
        self,
        ask: _Ask,
        rows: list[tuple[str, ...]],
        stats: RunStats,
        text_of: np.ndarray,
        name_text: Callable[[int], str],
    ) -> tuple[list[Any], TokenBatch]:
        started = time.perf_counter()
        prompts = ask.tokenizer(rows)
        stats.tokenize_seconds += time.perf_counter() - started
        trimmed = _without_ends(prompts, ask.trim)
        prefix = ask.tokenizer.prefix
        answers = self.answers(trimmed, prefix, lambda _: ask.reader, stats, text_of, name_text)
        return answers, prompts

    def _new_asks(self, decoder: Decoder) -> list[_Ask]:
        prompts, tokenizer = self.model.checkpoint.prompts, decoder.new_tokenizer()
        readers = new_readers(self.options, prompts, tokenizer, decoder.eos_ids)
        asks = [
            _Ask(self.prompt_tokenizer(prompt, tokenizer), reader.dropped, reader)
            for prompt, reader in zip(prompts, readers, strict=True)
        ]
        if len(asks) == 1:
            return asks
        # Prompts of all criteria for a document of one letter. If the document precedes the
        # criterion, the prompts differ only after it.
        wholes = [
            np.array(ask.tokenizer.encode(["a"] * len(prompts[0].columns)).ids) for ask in asks
        ]
        shared = min(shared_length(wholes[0], whole) for whole in wholes[1:])
        first = replace(prompts[0], literals=(*prompts[0].literals[:-1], ""), chat="")
        without_end = PromptTokenizer(tokenizer, first, self.model.checkpoint.max_tokens)
        if shared <= len(without_end.encode(["a"] * len(prompts[0].columns)).ids):
            return asks
        starts = [
            tuple(whole[shared : len(whole) - ask.trim].tolist())
            for ask, whole in zip(asks, wholes, strict=True)
        ]
        reader = CriteriaReader(readers, starts)
        longest = max(range(len(asks)), key=lambda number: len(starts[number]))
        ask = asks[longest]  # documents are cut to fit this one
        return [replace(ask, trim=len(wholes[longest]) - shared, reader=reader)]


def _without_ends(prompts: TokenBatch, count: int) -> TokenBatch:
    if not count:
        return prompts
    from gpuclassify.tokenizing.text_tokenizer import flat_batch

    rows = np.split(prompts.ids, prompts.offsets[1:-1])
    return flat_batch([row[: len(row) - count] for row in rows])


class AnswerHead(CategoryHead):
    """Head that converts answers to a column per field.

    The settings can add columns of probabilities, and of the raw answer.
    """

    @property
    def _first(self) -> Any:
        return self.options.form.fields[0]

    @property
    def _has_label(self) -> bool:
        return type(self._first) is Choice

    @property
    def labels(self) -> list[str]:
        """Labels of the first field in option order; empty unless it is a choice of one label."""
        return list(self._first.labels) if self._has_label else []

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self._name = self.label_field or self.options.form.names[0]
        self.label_field = self._name if self._has_label else None  # free text is not a label

    def fields(self) -> list[pa.Field]:
        """Return the Arrow fields of each answer field's columns, and of the raw answer if kept."""
        fields = super().fields() if self._has_label else []
        form = self.options.form
        names = [self._name, *form.names[1:]]
        for number, (name, kind) in enumerate(zip(names, form.fields, strict=True)):
            if number or not self._has_label:
                fields.append(pa.field(name, LABELS if is_list(kind) else pa.string()))
                if self.options.confidences:
                    fields.append(pa.field(f"{name}_confidence", FLOAT32))
        raw = self.options.raw_field if self.options.keep_raw else None
        return [*fields, *named_fields((raw, pa.string()))]

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Return the outputs unchanged, because they are answers or probabilities already."""
        return outputs

    def columns(self, values: np.ndarray) -> Columns:
        """Return the columns by name.

        `values` are `Answer` objects (texts,), or probabilities of labels, float32 (texts, labels).
        """
        made = dict(super().columns(_shares(values))) if self._has_label else {}
        if values.dtype != object:
            return made
        form = self.options.form
        names = [self._name, *form.names[1:]]
        for number, (name, kind) in enumerate(zip(names, form.fields, strict=True)):
            if number or not self._has_label:
                texts = [one.values[number] for one in values]
                if is_list(kind):
                    made[name] = pa.array([one or [] for one in texts], LABELS)
                else:
                    made[name] = pa.array(texts, pa.string())
                if self.options.confidences:
                    shares = [one.confidences[number] for one in values]
                    made[f"{name}_confidence"] = pa.array(shares, FLOAT32, from_pandas=True)
        raw = self.options.raw_field if self.options.keep_raw else None
        return made | named_columns((raw, [one.raw for one in values]))

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Map filters in use to masks of texts; {} unless the first field is one label."""
        return super().passes(_shares(values)) if self._has_label else {}

    def certainties(self, values: np.ndarray) -> np.ndarray:
        """Return the probability of the first field's value for each text, float (texts,)."""
        if self._has_label:
            return super().certainties(_shares(values))
        return np.array([one.confidences[0] for one in values])

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Accept any decoder, because the prompt, not the model, has the labels."""

    def check_settings(self) -> None:
        """Raise ValueError for filters and columns that the answer's first field cannot have."""
        if self._has_label:
            super().check_settings()
            return
        columns = ("score_field", "confidence_field", "labels_field")
        unset: dict[str, Any] = dict.fromkeys((*self.options.filter_names, *columns))
        for name, value in (unset | {"score_format": "list"}).items():
            if getattr(self.options, name) != value:
                raise ValueError(
                    f"{name} is about the labels of a first field, and {self._name} is no "
                    "choice of one option: put one that is first in answer="
                )


class CriteriaHead(MultiLabelHead):
    """Head that converts answers to a column per criterion: the probability of the first option."""

    @property
    def labels(self) -> list[str]:
        """Names of the criteria, which are also names of their columns."""
        return [name for name, _ in self.options.criteria]

    def fields(self) -> list[pa.Field]:
        """Return the Arrow fields of the criteria, and of other columns that the settings name."""
        return [*(pa.field(name, FLOAT32) for name in self.labels), *super().fields()]

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Return the outputs unchanged, because they are probabilities already."""
        return outputs

    def columns(self, values: np.ndarray) -> Columns:
        """Return the columns by name, from `Answer` objects or probabilities (texts, criteria)."""
        shares = _shares(values)
        columns = {name: np.ascontiguousarray(shares[:, n]) for n, name in enumerate(self.labels)}
        return {**columns, **super().columns(shares)}

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Map each filter in use to its mask of texts; labels are names of criteria."""
        return super().passes(_shares(values))

    def certainties(self, values: np.ndarray) -> np.ndarray:
        """Return the largest probability among each text's criteria, float32 (texts,)."""
        return super().certainties(_shares(values))

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Accept any decoder, because the prompt, not the model, has the criteria."""


def _shares(values: np.ndarray) -> np.ndarray:
    if values.dtype != object:
        return values
    return np.stack([one.shares for one in values]).astype(np.float32)


class PromptClassifier(TextMapper[PromptOptions]):
    """Classifier that asks a language model about each row, and reads the answer from logits.

    The model reads a question with the row's columns. Rows with a null in `text_field` are not
    asked, and have null answers. Choices are not generated: the softmax over the possible next
    tokens gives the probabilities of the options, so that each choice is valid. Only fields of
    free text and `keep_raw` decode token by token. A prefix that the prompts have in common is run
    once per process.

    Examples
    --------
    >>> ads = PromptClassifier(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     prompt="Is this page an advertisement?\\n\\n{text}",
    ...     answers=["yes", "no"],
    ...     label_field="is_ad",
    ... )
    >>> ddf = ddf.pipe(ads)  # doctest: +SKIP
    """

    Options = PromptOptions
    model_type = PromptModel
    runner_type = ChoiceRunner
    family = "prompt"
    purpose = "answers of any language model to a question about each row"
    licence = "the model's"

    def __init_subclass__(cls, **kwargs: object) -> None:
        cls.defaults = PromptOptions.normal(cls.defaults)
        super().__init_subclass__(**kwargs)

    if TYPE_CHECKING:

        @takes(PromptOptions)
        def __init__(self, **settings: Any) -> None: ...

    def make_heads(self) -> tuple[Head, ...]:
        """Return a tuple with a `CriteriaHead` if there are criteria, else an `AnswerHead`."""
        kind = CriteriaHead if self.options.criteria else AnswerHead
        return (kind(type(self).__qualname__, self.options, self.model),)

    def describe(self) -> dict[str, Any]:
        """Return settings as `TextMapper.describe` does, with the whole template as ``prompt``."""
        return super().describe() | {"prompt": self.options.prompt}

    def first_prompt(self, frame: Frame, most_chars: int) -> str | None:
        """Return the complete prompt for a frame's first row with a text; None if all are null.

        It is shown to users: "..." replaces each column's characters after the first `most_chars`.
        With criteria, it is the prompt of the first one. Texts are cut to the setting `max_chars`,
        but the prompt is not cut to `max_seq_length`.
        """
        texts = self.list_texts(frame, self.options.max_chars)
        text = next((text for text in texts if text is not None), None)
        if text is None:
            return None
        runner, checkpoint = cast("ChoiceRunner", self.runner), cast("Any", self.model.checkpoint)
        shown = [
            value if len(value) <= most_chars else f"{value[:most_chars]}..."
            for value in runner.columns_of(text)
        ]
        return checkpoint.prompts[0].filled(self.model.new_tokenizer(), shown)

    def list_texts(self, frame: Frame, max_chars: int | None) -> list[str | None]:
        """Return each row's text, or a JSON list of its texts if the prompt has several columns.

        The list is in the order of `text_fields`. A row's value is None if its text in the column
        `text_field` is null; other null texts become "". Each text is cut to `max_chars` characters
        unless it is None.
        """
        texts, names = backend_of(frame).texts, self.text_fields
        columns = [texts(frame, name, max_chars) for name in names]
        if len(names) == 1:
            return columns[0]
        main = names.index(self.text_field)
        return [
            None if row[main] is None else json.dumps([value or "" for value in row])
            for row in zip(*columns, strict=True)
        ]
