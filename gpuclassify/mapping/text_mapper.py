"""TextMapper: run a model over texts, by a pinned model, a runner and heads."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import pyarrow as pa

from gpuclassify import hub
from gpuclassify.frames import Frame, Texts, backend_of, name_row
from gpuclassify.mapping.columns import (
    DeclaredColumns,
    check_are_new,
    check_column_types,
    check_is_there,
    check_room,
)
from gpuclassify.mapping.heads import Columns, Head, labelling_head, take
from gpuclassify.mapping.label_heads import check_published
from gpuclassify.mapping.lines import LinesRunner, with_lines
from gpuclassify.mapping.partition_map import (
    CODE,
    FULL_SETTINGS,
    MODEL_DESCRIPTION,
    PartitionMap,
    RowWiseMap,
)
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.read_share import read_share_columns, read_share_fields
from gpuclassify.mapping.runners import EncoderRunner, Runner
from gpuclassify.mapping.stage_counts import LABEL, TextOutcomes
from gpuclassify.models.checkpoint import OwnModule
from gpuclassify.pages import html_table
from gpuclassify.pages.sections import ReportPart
from gpuclassify.settings.checks import HubName
from gpuclassify.settings.code_digest import value_digest
from gpuclassify.settings.old_spellings import modern_spellings
from gpuclassify.settings.options import (
    ModelOptions,
    TextOptions,
    fill_template,
    parse_options,
    refuse_unnamed,
)
from gpuclassify.settings.signatures import (
    call_text,
    changed_settings,
    short,
    show_settings,
    takes,
)
from gpuclassify.workers.run_context import RunStats, add_counts, current_run, report_stats

if TYPE_CHECKING:
    from torch import nn

Settings = TypeVar("Settings", bound=TextOptions)

# Attributes that `dir` hides, and that do not identify a mapper beyond its settings.
_PARTS = frozenset({"options", "model", "runner", "heads", "licence", "cite"})


class TextMapper(RowWiseMap, Generic[Settings]):
    """Base class of mappers that run one model over a text column and add columns of its outputs.

    With filters, they also drop rows. The constructor checks and stores settings, and reads no
    file. When a dataset is passed, the model's configuration and headers of weights are read once,
    so that mistakes fail before any work starts. Weights are loaded in each process that runs
    partitions, with its first partition or by `setup`.

    A subclass declares the classes of its parts (`model_type`, `runner_type`, and `head_type` or
    `make_heads`) and the defaults of its settings.
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
    # Key of older argument names in `gpuclassify.settings.old_spellings`.
    family: ClassVar[str] = "checkpoint"
    # One-line description in the output of `gpuclassify models`.
    purpose: ClassVar[str] = ""
    # Facts on the model in `defaults`. The catalogue sets `licence` and `cite` for its checkpoints.
    licence: str = ""
    cite: str = ""
    is_gated: ClassVar[bool] = False
    # All labels of the published model; other checkpoints do not belong to this class.
    published_labels: ClassVar[tuple[Any, ...]] = ()
    # Declarations of a custom class; see `ModelMapper`.
    new_columns: ClassVar[Mapping[str, str]] = {}
    build_module: Callable[[dict[str, Any]], nn.Module] | None = None
    columns: Callable[[np.ndarray], Columns] | None = None
    # Setting that may be passed without its name.
    first_setting: ClassVar[str | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("gpuclassify."):  # users' classes may name local folders
            models = {"model", "base_model"} & cls.defaults.keys()
            cls.defaults = cls.defaults | {name: HubName(cls.defaults[name]) for name in models}
        check_column_types(cls.__qualname__, cls.new_columns)
        if "__init__" in vars(cls):
            _self, *parameters = inspect.signature(cls.__init__).parameters.values()
            cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        else:
            show_settings(cls, cls.Options, cls.defaults)

    @takes(ModelOptions)
    def __init__(self, *unnamed: Any, **arguments: Any) -> None:
        owner = type(self).__qualname__
        if len(unnamed) == 1 and self.first_setting and not hasattr(unnamed[0], "columns"):
            arguments = {self.first_setting: unnamed[0], **arguments}
        elif unnamed:
            refuse_unnamed(owner, unnamed[0])
        settings = modern_spellings(owner, self.family, arguments)
        token = settings.pop("token", None)  # must not be shown or stored
        self.options = cast(Settings, parse_options(owner, self.Options, self.defaults, settings))
        if token is not None:
            for name in self.model.repositories:
                hub.remember_token(name, token)

    # Parts.

    @functools.cached_property
    def model(self) -> PinnedModel:
        """Description of the model, pinned to a revision when it is first read, without weights."""
        return self.model_type(
            self.options,
            has_own_module=self.build_module is not None,
            has_own_columns=bool(self.new_columns),
        )

    @functools.cached_property
    def runner(self) -> Runner:
        """Runner, which computes the model's outputs for texts or for their lines; not pickled."""
        runner = self.make_runner()
        return LinesRunner(runner) if self.options.runs_lines else runner

    def make_runner(self) -> Runner:
        """Create the runner that computes the model's outputs for texts, not for their lines."""
        module = None
        if self.build_module is not None:
            module = OwnModule(self.build_module, self._definition)
        return self.runner_type(self.options, self.model, module)

    @functools.cached_property
    def heads(self) -> tuple[Head, ...]:
        """Heads, which convert the model's outputs to columns and apply filters; not pickled."""
        heads = self._declared_heads() or self.make_heads()
        return with_lines(heads, self.options) if self.options.runs_lines else heads

    def _declared_heads(self) -> tuple[Head, ...]:
        if not self.new_columns:
            return ()
        parts = (type(self).__qualname__, self.options, self.model)
        return (DeclaredColumns(*parts, declared=self.new_columns, compute=self.columns),)

    def make_heads(self) -> tuple[Head, ...]:
        """Create the heads, which convert outputs to columns; one of `head_type`, by default."""
        return (self.head_type(type(self).__qualname__, self.options, self.model),)

    # Identity for Dask and pickle, and repr.

    def __dir__(self) -> list[str]:
        return [n for n in super().__dir__() if n not in _PARTS or n in self.public_names]

    def __getstate__(self) -> dict[str, Any]:
        made_anew = ("runner", "heads")
        return {name: value for name, value in vars(self).items() if name not in made_anew}

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        module, name, source, *settings = self._definition()
        return module, name, source, value_digest(settings), value_digest(self.model.key())

    def digest(self) -> dict[str, Any]:
        """Return digests of the settings, of the model's description and of the code, by name."""
        *_, options, attributes = self._definition()
        return {
            FULL_SETTINGS: value_digest((options, attributes)),
            MODEL_DESCRIPTION: value_digest(self.model.key()),
            CODE: self.code_parts(),
        }

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the packages that compute outputs, whose versions may change results."""
        return self.runner.libraries

    def _definition(self) -> tuple[Any, ...]:
        """Return (module, class name, digest of the class, settings, digests of attributes)."""
        owner = type(self)
        attributes = sorted(
            (name, value_digest(value)) for name, value in vars(self).items() if name not in _PARTS
        )
        return (owner.__module__, owner.__qualname__, value_digest(owner), self.options, attributes)

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
        """Return settings that change results, as JSON values by name, and the model's revision.

        ``model_revision`` is the model's commit, or the digest of its directory; None if the model
        cannot be reached. Without a model, it is the version of the rules.
        """
        described = self.options.describe()
        with contextlib.suppress(hub.HubUnreachableError, hub.ModelNotFoundError):
            described["model_revision"] = None
            described |= self.model.describe()
        return described

    def origin(self) -> dict[str, Any]:
        """Return facts on the origin of the mapper's columns by name, for a dataset card.

        ``commit`` is None if the model cannot be reached. ``settings`` has those that differ from
        the defaults of `Options`, without ``revision`` and ``labels``. The class's default model
        and models of the catalogue add ``licence`` and ``citation``. A mapper that uses rules in
        place of a model has only ``kind`` and ``settings``, with the rules' version.
        """
        settings, given = self.describe(), self.options.settings()
        usual = {field.name: field.default for field in dataclasses.fields(self.options)}
        unchanged = {name for name in given if given[name] == usual[name]}
        name, commit = settings.pop("model", None), settings.pop("model_revision", None)
        hidden = {*unchanged, "revision", "labels"}
        about: dict[str, Any] = {
            "kind": self.__name__,
            "settings": {n: value for n, value in settings.items() if n not in hidden},
        }
        if name is None:  # rules, which have a version
            about["settings"] |= {"version": commit} if commit else {}
            return about
        about |= {"model": name, "commit": commit}
        if "licence" in vars(self) or name == self.defaults.get("model"):
            page = f"https://huggingface.co/{name}"
            about |= {"licence": self.licence, "citation": self.cite or page}
        return about

    @property
    def text_field(self) -> str:
        """Name of the column in the setting `text_field`; of the second one if it is a pair."""
        return self.options.main_field

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Names of the text columns that are read: one, both of a pair, or all in the template."""
        return self.options.text_fields

    @property
    def main_text_fields(self) -> tuple[str, ...]:
        """One name: the column that gets the texts if the mapper is called with a list of texts."""
        return (self.text_field,)

    @property
    def drops_rows(self) -> bool:
        """Whether filters drop rows; False if they only write to the bool column `keep_field`."""
        return self._keep_field is None and self.options.filters

    @property
    def is_slow(self) -> bool:
        """Whether the mapper may take minutes per megabyte of text."""
        return self.runner.is_slow

    def text_mappers(self) -> tuple[TextMapper, ...]:
        """Return a tuple with only this mapper, because it runs a model."""
        return (self,)

    @property
    def report_parts(self) -> tuple[ReportPart, ...]:
        """Objects that add sections and numbers about this mapper to a job's HTML report."""
        return tuple(dict.fromkeys(part for head in self.heads for part in head.report_parts))

    def code(self, show: Callable[[Any], str] = repr) -> str:
        """Return the constructor call with ``model`` and changed settings, formatted by `show`."""
        settings = changed_settings(self.options, self.defaults, ["model"])
        return call_text(self.__name__, settings, show)

    @property
    def labels(self) -> list[Any]:
        """Distinct labels that a row can get, in the order of the model; empty without labels.

        For a regression model, they are the names of its outputs. The model's configuration may be
        read for them.
        """
        return list(dict.fromkeys(label for head in self.heads for label in head.labels))

    def schema(self) -> pa.Schema:
        """Return the Arrow schema of the new columns.

        They are the heads' columns, the bool column `keep_field`, and columns about the share of
        each text that was read. The last two exist only if the settings name them.
        """
        new = []
        for head in self.heads:
            for field in head.fields():
                is_label = field.name == head.label_field
                new.append(field.with_metadata(LABEL) if is_label else field)
        if self._keep_field is not None:
            new.append(pa.field(self._keep_field, pa.bool_(), nullable=False))
        if self.options.shows_read_share:
            new += read_share_fields(self.options)
        return pa.schema(new)

    @property
    def _keep_field(self) -> str | None:
        return next((head.keep_field for head in self.heads if head.keep_field is not None), None)

    def keeping(self, field: str) -> TextMapper[Settings] | None:
        """Return a copy that drops no row, but writes whether a row passes its filters to a column.

        `field` is the name of this bool column. None if the class has no setting `keep_field`.
        Raises ValueError if the mapper has no filter.
        """
        if not hasattr(self.options, "keep_field"):
            return None
        kept = copy.copy(self)
        vars(kept).pop("model", None)  # the model holds the settings
        kept.options = dataclasses.replace(cast(Any, self.options), keep_field=field)
        return kept

    def after(self, earlier: PartitionMap) -> PartitionMap:
        """Return a chain that runs `earlier`, then this mapper, in one task per partition."""
        from gpuclassify.mapping.chain import joined

        return joined([earlier, self])

    # Methods for the client.

    def check(self, frame: Frame) -> None:
        """Raise an error unless the mapper can run on the frame, which may be empty.

        The model's small files are read, unless the settings have labels. Labels that differ from
        `published_labels` cause a warning, or CheckpointError if the setting `strict` is True.
        """
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
                self._check_model()  # before labels, which depend on the kind of model
                if self.published_labels:
                    options = cast("ModelOptions", self.options)
                    owner = type(self).__qualname__
                    check_published(owner, options, self.labels, self.published_labels)

    def prepare(self) -> None:
        """Check the model's files, and send its Hub token to workers, before any work starts.

        Nothing is checked if this machine cannot reach the files and the settings have labels.
        """
        if self.model.is_readable():
            self._check_model()
            self.model.check_directories()
            self.runner.check_weights()
            self.runner.check_tokenizer()
        hub.share_tokens_with_workers(self.model.repositories)

    def _check_model(self) -> None:
        for head in self.heads:
            head.check_model(head.model.checkpoint)

    def meta(self, frame: Frame) -> Frame:
        """Return an empty frame with the columns and dtypes of the result for `frame`."""
        schema = self.schema()
        empty = {field.name: pa.array([], field.type) for field in schema}
        backend = backend_of(frame)
        return backend.with_columns(frame.iloc[:0], empty, schema, self.meta_dtypes(frame))

    def meta_dtypes(self, frame: Frame) -> Any:
        """Return the dtype that new string columns have in Dask's meta.

        The text column of a partition may have another dtype, such as object.
        """
        return backend_of(frame).string_dtype(frame, self.text_field)

    # Methods for workers.

    def setup(self) -> None:
        """Load the model into this process now, instead of with the first partition."""
        with self.runner.lease(*self.runner.device_and_dtype()):
            pass

    def teardown(self) -> None:
        """Free the model's memory in this process, and on all workers of the current Dask client.

        A model that a task uses at the moment stays. Without a client, only this process is
        affected.
        """
        self.runner.evict()
        distributed = sys.modules.get("distributed")
        with contextlib.suppress(ValueError):  # no client
            if distributed is not None:
                distributed.get_client().run(_evict, self)

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Return the result for a pandas or cudf frame, such as a partition on a worker."""
        backend = backend_of(frame)
        string_dtype = self.meta_dtypes(frame) if meta_dtypes is None else meta_dtypes
        if backend.MOST_NUMBERS is not None:
            check_room(self.heads, len(frame), backend.MOST_NUMBERS)
        arrays, keep = self.compute(self.read_texts(frame), functools.partial(name_row, frame))
        result = backend.with_columns(frame, arrays, self.schema(), string_dtype)
        return backend.take_rows(result, keep) if self.drops_rows else result

    def read_texts(self, frame: Frame) -> Texts:
        """Return each row's text, or pair of texts as a tuple; None for a null row.

        Text columns are cut to one character more than the setting `max_chars`, so that `compute`
        can detect long texts, unless an output column needs the share of the text that was read.
        """
        most = self.options.max_chars
        max_chars = None if most is None or self.options.shows_read_share else most + 1
        return Texts(self.list_texts(frame, max_chars))

    def list_texts(self, frame: Frame, max_chars: int | None) -> list[Any]:
        """Return each row's text, or pair of texts as a tuple; None for a null row.

        A row is null if its `text_field` is null, or either text of a pair. Text columns are cut to
        `max_chars` characters before a `text_template` is filled; None does not cut.
        """
        template, texts = self.options.text_template, backend_of(frame).texts
        columns = {name: texts(frame, name, max_chars) for name in self.text_fields}
        if template is not None:
            return fill_template(template, columns, self.text_field)
        if len(columns) == 1:
            return columns[self.text_field]
        pairs = zip(*columns.values(), strict=True)  # null if one of both is null
        return [None if None in pair else pair for pair in pairs]

    def compute(
        self, texts: Texts, name_row: Callable[[int], str]
    ) -> tuple[dict[str, pa.Array], np.ndarray | None]:
        """Return new columns by name for the rows' texts, and the mask of rows that filters keep.

        `texts` are the result of `read_texts`. Columns have one value per row, null for a null text
        (False in `keep_field`). The mask is bool (rows,), false for a null text; None without
        filters. `name_row` returns the name of a row for messages, from its index. Within a job,
        counts are added to the job's.
        """
        started = time.perf_counter()
        distinct, positions = texts.fold(self.options.max_chars)
        null_rows = int((positions < 0).sum())
        stats = RunStats(rows=len(texts), null_rows=null_rows)
        stats.folded_rows = len(texts) - null_rows - len(distinct)
        made, read, passed, outcomes = self._run(
            distinct, stats, lambda index: name_row(int((positions == index).argmax()))
        )
        is_cut = read[1] < 1
        if (most := self.options.max_chars) is not None:
            is_cut[positions[texts.char_counts > most]] = True
        stats.truncated_texts = int(is_cut.sum())
        report_stats(stats)
        indices = pa.array(positions, mask=positions < 0)
        arrays = {name: take(array, indices) for name, array in made.items()}
        if self.options.shows_read_share:
            arrays |= read_share_columns(self.options, texts, positions, *read)
        if outcomes is not None:
            counts: dict[str, Any] = {"truncated_texts": stats.truncated_texts}
            for head in self.heads:
                add_counts(counts, head.counts(texts))
            seconds = time.perf_counter() - started
            current_run().stages.add(self, outcomes, positions, arrays, **counts, seconds=seconds)
        keep = None
        if passed is not None:
            keep = np.all([np.ones(len(distinct), dtype=bool), *passed.values()], axis=0)
            keep = np.append(keep, False)[positions]  # the last entry is for null, position -1
        if self._keep_field is not None:
            arrays[self._keep_field] = pa.array(keep)
        return {name: arrays[name] for name in self.schema().names}, keep

    def _run(
        self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]
    ) -> tuple[dict[str, pa.Array], Any, dict[str, np.ndarray] | None, TextOutcomes | None]:
        """Return columns, (windows, share of tokens read), filter masks and outcomes for `texts`.

        All have a value for each of the distinct `texts`. Masks, by filter, are true for texts that
        pass; None without filters. Outcomes, for a job's report, are None outside of a job.
        """
        read = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        fields = (field for head in self.heads for field in head.fields())
        arrays = {field.name: pa.array([], field.type) for field in fields}
        passed: dict[str, np.ndarray] = {}
        outcomes_of: Callable[..., TextOutcomes] = TextOutcomes
        labelling = labelling_head(self.heads)
        if len(texts):
            self.model.check_directories()  # the model may be in memory already
            self._check_model()
            outputs = self.runner.run(texts, stats, name_text)
            read = outputs.text_windows, outputs.seen_share
            for head in self.heads:
                values = head.values(outputs)
                arrays |= head.arrays(values)
                for reason, passing in head.passes(values).items():
                    passed[reason] = passed.get(reason, True) & passing
                if head is labelling:
                    outcomes_of = functools.partial(head.outcomes, values)
        filtered = passed if self.options.filters else None
        outcomes = None
        if current_run().stages is not None:
            outcomes = outcomes_of(texts, filtered, arrays.get(labelling.label_field or ""))
        return arrays, read, filtered, outcomes


def _evict(mapper: TextMapper) -> None:
    mapper.runner.evict()
