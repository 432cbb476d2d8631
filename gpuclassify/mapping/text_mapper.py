"""TextMapper: settings, and three parts that do the work: a pinned model, a runner and heads."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from gpuclassify import hub
from gpuclassify.frames import HostTexts, Texts, backend_of, name_row
from gpuclassify.mapping.code_digest import code_digest, value_digest
from gpuclassify.mapping.heads import (
    Columns,
    Head,
    OwnColumns,
    check_are_new,
    check_column_types,
    check_is_there,
    line_fields,
    read_share_columns,
    read_share_fields,
    take,
)
from gpuclassify.mapping.lines import LineOutputs, line_lengths, run_lines
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.runners import EncoderRunner, Runner, TokenLengths
from gpuclassify.mapping.stage_counts import LABEL, TextOutcomes
from gpuclassify.models.checkpoint import CheckpointError, OwnModule, some_of
from gpuclassify.pages import html_table
from gpuclassify.settings.checks import setting_names, warn_once
from gpuclassify.settings.old_spellings import modern_spellings
from gpuclassify.settings.options import (
    ModelOptions,
    TextOptions,
    fill_template,
    parse_options,
    refuse_unnamed,
)
from gpuclassify.settings.signatures import (
    as_json,
    call_text,
    changed_settings,
    short,
    show_settings,
    takes,
)
from gpuclassify.workers.run_context import RunStats, current_run, tell

if TYPE_CHECKING:
    from torch import nn

# Attributes that are no settings of a subclass's own.
_PARTS = frozenset({"options", "model", "runner", "heads"})


class TextMapper(PartitionMap):
    """Runs one model over a text column and adds columns of its outputs.

    The constructor stores settings and reads nothing. The model is looked up once, when a dataset
    is given: its configuration and the headers of its weights, so that mistakes show before any
    work starts. Weights are loaded on workers, once a process.

    A subclass declares which parts it is made of (`model_type`, `runner_type`, `head_type`, or
    `make_heads` where the model decides) and the defaults of its settings.
    """

    public_names = (
        *("describe", "labels", "options", "published_labels"),
        *("schema", "setup", "teardown"),
    )
    Options: ClassVar[type[TextOptions]] = ModelOptions
    model_type: ClassVar[type[PinnedModel]] = PinnedModel
    runner_type: ClassVar[type[Runner]] = EncoderRunner
    head_type: ClassVar[type[Head]]
    defaults: ClassVar[dict[str, Any]] = {}
    # Whose older spellings of arguments are accepted: see `gpuclassify.settings.old_spellings`.
    family: ClassVar[str] = "checkpoint"
    # What `gpuclassify models` shows of a published model.
    purpose: ClassVar[str] = ""
    licence: ClassVar[str] = ""
    is_gated: ClassVar[bool] = False
    # Every label of the published model; a checkpoint with others is not one of this class.
    published_labels: ClassVar[tuple[Any, ...]] = ()
    # What a class of one's own may declare; see `ModelMapper`.
    new_columns: ClassVar[Mapping[str, str]] = {}
    build_module: Callable[[dict[str, Any]], nn.Module] | None = None
    columns: Callable[[np.ndarray], Columns] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_column_types(cls.__qualname__, cls.new_columns)
        if "__init__" in vars(cls):
            _self, *own = inspect.signature(cls.__init__).parameters.values()
            cls.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        else:
            show_settings(cls, cls.Options, cls.defaults)

    @takes(ModelOptions)
    def __init__(self, *unnamed: Any, **arguments: Any) -> None:
        owner = type(self).__qualname__
        if unnamed:
            refuse_unnamed(owner, unnamed[0])
        given = modern_spellings(owner, self.family, arguments)
        token = given.pop("token", None)  # before anything could show or keep it
        self.options: Any = parse_options(owner, self.Options, self.defaults, given)
        if token is not None:
            for name in self.model.repositories:
                hub.remember_token(name, token)

    # The parts.

    @functools.cached_property
    def model(self) -> PinnedModel:
        """What the settings name, pinned and described; what it has read travels to workers."""
        return self.model_type(
            self.options,
            has_own_module=self.build_module is not None,
            has_own_columns=bool(self.new_columns),
        )

    @functools.cached_property
    def runner(self) -> Runner:
        """Texts to outputs."""
        own = None
        if self.build_module is not None:
            own = OwnModule(self.build_module, self._definition)
        return self.runner_type(self.options, self.model, own)

    @functools.cached_property
    def heads(self) -> tuple[Head, ...]:
        """Outputs to columns; several heads read the outputs of one run."""
        if self.new_columns:
            owner = type(self).__qualname__
            parts = (owner, self.options, self.model)
            return (OwnColumns(*parts, declared=self.new_columns, compute=self.columns),)
        return self.make_heads()

    def make_heads(self) -> tuple[Head, ...]:
        """The heads of a mapper that declares no columns of its own."""
        return (self.head_type(type(self).__qualname__, self.options, self.model),)

    # What a mapper is, for Dask, pickle and people.

    def __dir__(self) -> list[str]:
        return [n for n in super().__dir__() if n not in _PARTS or n in self.public_names]

    def __getstate__(self) -> dict[str, Any]:
        made_anew = ("runner", "heads")
        return {name: value for name, value in vars(self).items() if name not in made_anew}

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return (*self._definition(), self.model.key())

    def _definition(self) -> tuple[Any, ...]:
        """What tells this mapper from another of any class, whatever the model says."""
        owner = type(self)
        own = sorted(
            (name, value_digest(value)) for name, value in vars(self).items() if name not in _PARTS
        )
        return (owner.__module__, owner.__qualname__, code_digest(owner), self.options, own)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._definition() == other._definition()

    def __hash__(self) -> int:
        return hash((type(self), self.options))

    def __repr__(self) -> str:
        return self.code(short)

    def _repr_html_(self) -> str:
        settings = changed_settings(self.options, self.defaults, ["model", *self.defaults])
        rows = [(name, short(value)) for name, value in settings.items()]
        return html_table(self.__name__, [("", self.purpose), *rows])

    def describe(self) -> dict[str, Any]:
        """Settings as JSON values, and the model's commit or digest if in reach."""
        described = {
            name: as_json(getattr(self.options, name)) for name in setting_names(self.options)
        }
        with contextlib.suppress(hub.HubUnreachableError, hub.ModelNotFoundError):
            described["model_revision"] = None
            described |= self.model.describe()
        return described

    @property
    def text_field(self) -> str:
        """Name of the text column."""
        return self.options.text_field

    @property
    def text_fields(self) -> tuple[str, ...]:
        """The text column, or those of the template."""
        return self.options.text_fields

    @property
    def main_text_fields(self) -> tuple[str, ...]:
        """The text column."""
        return (self.text_field,)

    @property
    def tokenizes_on_gpu(self) -> bool:
        """Whether texts of a cudf frame stay on the GPU."""
        return getattr(self.options, "tokenizer", "host") == "gpu"

    @property
    def runs_lines(self) -> bool:
        """Whether the lines of texts are run, each as a text."""
        return getattr(self.options, "long_text", "truncate") == "lines"

    @property
    def is_row_wise(self) -> bool:
        """A text gets the same columns whatever texts are beside it."""
        return True

    @property
    def drops_rows(self) -> bool:
        """Whether there are filters, and no column for their decision."""
        return self._keep_field is None and self.options.filters

    def text_mappers(self) -> tuple[TextMapper, ...]:
        """Itself."""
        return (self,)

    def code(self, show: Callable[[Any], str] = repr) -> str:
        """The call that makes it, with each setting as `show` gives it."""
        settings = changed_settings(self.options, self.defaults, ["model"])
        return call_text(self.__name__, settings, show)

    @property
    def labels(self) -> list[Any]:
        """Every label that a row can get; empty for a mapper that gives none."""
        return list(dict.fromkeys(label for head in self.heads for label in head.labels))

    def schema(self) -> pa.Schema:
        """The new columns: results, lines', the decision, the share that was read."""
        new = []
        for head in self.heads:
            for field in head.fields():
                is_label = field.name == head.label_field
                new.append(field.with_metadata(LABEL) if is_label else field)
        new += line_fields(self.options)
        if self._keep_field is not None:
            new.append(pa.field(self._keep_field, pa.bool_(), nullable=False))
        return pa.schema([*new, *read_share_fields(self.options)])

    def list_sizes(self) -> dict[str, int]:
        """How many numbers a row has in each new column of lists of numbers; 0 if not known."""
        return {
            field.name: head.list_size
            for head in self.heads
            for field in head.fields()
            if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type)
        }

    @property
    def _keep_field(self) -> str | None:
        return next((head.keep_field for head in self.heads if head.keep_field is not None), None)

    def after(self, earlier: PartitionMap) -> PartitionMap:
        """Both in one pass, in which they may share tokens and layers."""
        from gpuclassify.mapping.chain import joined

        return joined([earlier, self])

    # In the client.

    def check(self, frame: Any) -> None:
        """Raise unless the frame has the columns that are needed, and the filters a meaning."""
        columns, backend = list(frame.columns), backend_of(frame)
        for name in self.text_fields:
            check_is_there(name, columns, self.options.setting_of_column(name))
            backend.check_text_column(frame, name)
        schema = self.schema()
        check_are_new(schema.names, columns, self.text_fields, self.options.overwrite)
        backend.check_new_columns(schema)
        if self.options.plans_without_model or self.model.is_readable():
            for head in self.heads:
                head.check_settings()
            if not self.options.plans_without_model:
                self._check_model()  # a model of another kind is no matter of its labels
            self._check_published_labels()

    def check_labels(self, column: str, labels: Iterable[Any]) -> None:
        """Raise ValueError if it gives labels in the column, and never one of these."""
        if self.options.plans_without_model or self.model.is_readable():
            for head in self.heads:
                if head.label_field == column:
                    head.check_labels(*labels)

    def check_library(self, frame: Any) -> None:
        """Raise TypeError if the GPU is to tokenize a frame that is not on it."""
        self.runner.check_library(frame)

    def prepare(self) -> None:
        """Check the checkpoint and give workers the token, before any work starts."""
        if self.model.is_readable():
            self._check_model()
            self.model.check_directories()
            self.runner.check_weights()
            self.runner.check_tokenizer()
        hub.share_tokens_with_workers(self.model.repositories)

    def _check_model(self) -> None:
        for head in self.heads:
            head.check_model(head.model.checkpoint)

    def _check_published_labels(self) -> None:
        """Warn of labels that are not the class's, or raise CheckpointError if `strict`."""
        found, published = self.labels, self.published_labels
        are_meant = self.options.plans_without_model  # because they are given
        if not (found and published) or are_meant or set(found) == set(published):
            return
        owner = type(self).__qualname__
        message = (
            f"{self.options.model} gives {some_of(found, 2)}, which are not the labels of {owner} "
            f"({some_of(published, 2)}). If they are meant, pass labels=; else take the class of "
            "this model (`gpuclassify models`), or DistributedDataClassifier"
        )
        if self.options.strict:
            raise CheckpointError(message)
        warn_once(message)

    def meta(self, frame: Any) -> Any:
        """The empty frame with the result's columns and dtypes."""
        schema = self.schema()
        empty = {field.name: pa.array([], field.type) for field in schema}
        backend = backend_of(frame)
        return backend.with_columns(frame.iloc[:0], empty, schema, self.meta_dtypes(frame))

    def meta_dtypes(self, frame: Any) -> Any:
        """The dtype of new string columns; a partition without strings may suggest another."""
        return backend_of(frame).string_dtype(frame, self.text_field)

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """How long texts, or their lines, are for the model, found without its weights."""
        runner = self.runner
        return line_lengths(runner, texts) if self.runs_lines else runner.token_lengths(texts)

    # On a worker.

    def setup(self) -> None:
        """Load the model into this process, as a worker's first partition does."""
        with self.runner.lease(*self.runner.device_and_dtype()):
            pass

    def teardown(self) -> None:
        """Give the model's memory back, here and on the workers of a Dask client."""
        self.runner.evict()
        distributed = sys.modules.get("distributed")
        with contextlib.suppress(ValueError):  # no client
            if distributed is not None:
                distributed.get_client().run(_evict, self)

    def map_frame(self, frame: Any, meta_dtypes: Any = None) -> Any:
        """Map one plain frame, as a worker does with each partition."""
        backend = backend_of(frame)
        string_dtype = self.meta_dtypes(frame) if meta_dtypes is None else meta_dtypes
        self.check_room(frame)
        arrays, keep = self.compute(self.read_texts(frame), functools.partial(name_row, frame))
        result = backend.with_columns(frame, arrays, self.schema(), string_dtype)
        return backend.take_rows(result, keep) if self.drops_rows else result

    def check_room(self, frame: Any) -> None:
        """Raise OverflowError before a model runs whose numbers a column of lists cannot hold."""
        rows, most = len(frame), backend_of(frame).MOST_NUMBERS
        for name, numbers in () if most is None else self.list_sizes().items():
            if rows * numbers > most:
                raise OverflowError(
                    f"column {name!r} would hold {numbers:,} numbers in each of {rows:,} rows, "
                    f"and one of cudf holds {most:,} in all: at most {most // numbers:,} rows fit. "
                    "Make partitions smaller (ddf.repartition(partition_size='256MB'), part_bytes= "
                    "of a reader), or use frames of pandas, which hold any number"
                )

    def read_texts(self, frame: Any) -> Any:
        """The rows' texts: a list of strings, or a column if the GPU is to tokenize."""
        # All of a text, if a column has to tell how much of it was read.
        max_chars = None if read_share_fields(self.options) else self.options.max_chars
        on_device = self.runner.device_texts(frame, self.text_field, max_chars)
        return HostTexts(self.list_texts(frame, max_chars)) if on_device is None else on_device

    def list_texts(self, frame: Any, max_chars: int | None) -> list[str | None]:
        """The rows' texts, of columns that are cut to `max_chars` characters; None where null."""
        template, texts = self.options.text_template, backend_of(frame).texts
        columns = {name: texts(frame, name, max_chars) for name in self.text_fields}
        if template is None:
            return columns[self.text_field]
        return fill_template(template, columns, self.text_field)

    def compute(
        self, texts: Any, name_row: Callable[[int], str]
    ) -> tuple[dict[str, pa.Array], np.ndarray | None]:
        """New columns for `texts` of `read_texts`, each distinct one of which is run once.

        Columns have one value a row, null where the text is, in the order of meta. Beside them
        stands the filters' decision, bool (rows,), false for a null text; None without filters.
        """
        started = time.perf_counter()
        distinct, positions = texts.fold(self.options.max_chars)
        null_rows = int((positions < 0).sum())
        stats = RunStats(rows=len(texts), null_rows=null_rows)
        stats.folded_rows = len(texts) - null_rows - len(distinct)
        made, read, found = self._run(
            distinct, stats, lambda place: name_row(int((positions == place).argmax()))
        )
        tell(stats)
        indices = pa.array(positions, mask=positions < 0)
        arrays = {name: take(array, indices) for name, array in made.items()}
        if read_share_fields(self.options):
            arrays |= read_share_columns(self.options, texts.to_list(), positions, *read)
        if (stages := current_run().stages) is not None:
            counts = {"truncated_texts": stats.truncated_texts}
            seconds = time.perf_counter() - started
            stages.add(self, found, positions, arrays, **counts, seconds=seconds)
        keep = None
        if found.passed is not None:
            keep = np.all([np.ones(len(distinct), dtype=bool), *found.passed.values()], axis=0)
            keep = np.append(keep, False)[positions]  # the last one for null, whose place is -1
        if self._keep_field is not None:
            arrays[self._keep_field] = pa.array(keep)
        return {name: arrays[name] for name in self.schema().names}, keep

    def passing(self, values: np.ndarray) -> np.ndarray:
        """Which texts pass all filters by their raw outputs, (texts, outputs); bool (texts,)."""
        passed = np.ones(len(values), dtype=bool)
        with np.errstate(all="ignore"):  # outputs that are not finite are made again later
            for head in self.heads:
                for each in head.passes(head.activate(values[..., head.outputs])).values():
                    passed &= each
        return passed

    def _run(
        self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]
    ) -> tuple[dict[str, pa.Array], tuple[np.ndarray, np.ndarray], TextOutcomes]:
        """New columns of distinct texts, what was read of them, and which pass the filters."""
        read = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        fields = [field for head in self.heads for field in head.fields()]
        fields += line_fields(self.options)
        arrays = {field.name: pa.array([], field.type) for field in fields}
        passed: dict[str, np.ndarray] = {}
        certainties = None
        labelling = next((h for h in self.heads if h.label_field is not None), self.heads[0])
        if len(texts):
            self._check_model()
            run = functools.partial(run_lines, self.runner) if self.runs_lines else self.runner.run
            outputs = run(texts, stats, name_text)
            read = outputs.text_windows, outputs.seen_share
            for head in self.heads:
                values = outputs.by_text(head.activate, head.outputs)
                arrays |= head.arrays(values)
                for reason, passing in head.passes(values).items():
                    passed[reason] = passed.get(reason, True) & passing
                if head is labelling:
                    certainties = head.certainties(values)
            if isinstance(outputs, LineOutputs) and self.options.line_names:
                of_lines, share = outputs.columns(self.options, labelling)
                arrays |= of_lines
                if (least := self.options.min_kept_share) is not None:
                    passed["score"] = passed.get("score", True) & (share >= np.float32(least))
        labels = arrays.get(labelling.label_field or "")
        found = TextOutcomes(texts, passed if self.options.filters else None, labels, certainties)
        return arrays, read, found


def _evict(mapper: TextMapper) -> None:
    mapper.runner.evict()
