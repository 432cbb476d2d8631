"""Recipe: base of jobs that have a reader, stages and a writer, and optional steps before these."""

from __future__ import annotations

import functools
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from gpuclassify.jobs.annotating import add_decision_column, earlier_jobs
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.input.sample import sample_files, sample_partitions
from gpuclassify.jobs.input.sources import FileSource, Source, as_source
from gpuclassify.jobs.job import Job, make_job
from gpuclassify.jobs.ledger.manifest import RunOptions
from gpuclassify.jobs.ledger.quarantine import OnError
from gpuclassify.jobs.ledger.records import JOB, LEDGER
from gpuclassify.jobs.output.writers import AnnotationWriter, FileWriter
from gpuclassify.jobs.report.progress import JobProgress
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.jobs.stages import ToBackend, as_chain, describe_settings, import_lines, shown
from gpuclassify.jobs.steps import StepReport, Steps
from gpuclassify.jobs.stores.store import UnreadableInputError
from gpuclassify.mapping.chain import Chain
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.mapping.select import RowFilter
from gpuclassify.pages.sections import ReportPart
from gpuclassify.settings.checks import Backend
from gpuclassify.settings.declared import Declared, declared, setting
from gpuclassify.workers.secrets import remember, share_with_workers

if TYPE_CHECKING:
    from distributed import Client

    from gpuclassify.frames import Frame, LazyFrame


@declared
class Recipe(Declared):
    """Base of jobs over files: a reader, stages and a writer, and optional steps before these.

    A subclass declares its settings as fields, and returns the reader, stages and writer (`parts`).
    If writing a document depends on all documents, the subclass names a `folder`, takes steps,
    which are passes over all documents (`take_steps`), and makes the job that writes documents from
    the steps' results (`last_pass`). Each step is done once: running the same recipe again
    continues it.
    """

    backend: Backend = setting(default="pandas", changes_results=False)
    on_error: OnError = setting(default="raise", changes_results=False)

    # Folder of the steps' results in the output, which readers of datasets ignore; "" for no steps.
    folder: ClassVar[str] = ""
    # Name of the last pass in progress reports, and titles of steps by the first word of the name.
    last_step: ClassVar[str] = "documents"
    words: ClassVar[Mapping[str, str]] = {}

    @property
    def ledger(self) -> str:
        """Path, relative to the output, of the file that shows that steps are finished.

        A recipe that stores its result in another file in `folder` overrides it.
        """
        return f"{self.folder}/{LEDGER}"

    # Methods for subclasses.

    @abstractmethod
    def parts(self) -> tuple[Any, list[Any], FileWriter]:
        """Return the reader, the stages and the writer; raise TypeError if one is missing."""

    def other_inputs(self) -> dict[str, Any]:
        """Return other inputs that steps read, by name: readers or Dask frames; by default none."""
        return {}

    def step_mappers(self) -> list[PartitionMap]:
        """Return the mappers that steps run, such as embedders; by default none."""
        return []

    def check_job(self, job: RecipeJob) -> None:
        """Raise TypeError or ValueError unless the settings fit the input; default: do nothing."""

    def job_settings(self) -> dict[str, Any]:
        """Return further keyword arguments for `gpuclassify.jobs.job.make_job`; by default none."""
        return {}

    def job_identity(self) -> dict[str, dict[str, Any]]:
        """Return the recipe's settings that change results, as dicts of JSON values by heading.

        A run with other ones is another job.
        """
        return describe_settings(type(self).__name__, self) if self.identity() else {}

    @property
    def report_parts(self) -> tuple[ReportPart, ...]:
        """Numbers and sections that the recipe itself adds to the report; by default none."""
        return ()

    def take_steps(self, job: RecipeJob, steps: Steps, is_done: bool) -> Any:
        """Run the steps that must precede the writing of documents, and return their results.

        A step is a pass over all documents. `steps` runs steps and stores their results, so that
        finished ones are read and not run again. `last_pass` gets the results, whose type the
        recipe decides. `is_done` tells that an earlier run has written all documents, so that a
        recipe may skip steps that only writing needs. Only called if `folder` is set. Default: no
        steps, and None.
        """

    def last_pass(self, job: RecipeJob, results: Any) -> Job:
        """Return the job that reads the input once more and writes documents; by default `job`.

        `job` is the planned job, and `results` is the return value of `take_steps`: a recipe adds a
        stage that applies it, such as by `RecipeJob.with_stages`. Only called if `folder` is set.
        """
        return job

    def result(self, job: RecipeJob, steps: Steps, summary: JobSummary) -> Any:
        """Return the result of `run`; default: `summary`, which is about the written documents.

        Only called if `folder` is set; otherwise, `run` returns the `JobSummary`.
        """
        return summary

    def numbers(self, summary: Any) -> list[str]:
        """Return lines on the result of `run` for commands to print; if [], they print totals."""
        return []

    # Running.

    def prepare(
        self,
        *,
        restart: bool = False,
        verify: str = "digest",
        accept_changed_code: bool = False,
        command: str = "",
    ) -> RecipeJob:
        """Find the parts and check everything that can be checked without workers; writes nothing.

        Returns the planned job, for its method `run`.

        Parameters
        ----------
        restart, verify, accept_changed_code
            See `run`.
        command : str
            The command that makes the same job, for the report.

        Raises
        ------
        TypeError
            The stages do not begin with a reader and end with a writer, or one is not a stage.
        UnreadableInputError
            The input cannot be read.
        JobChangedError
            The output has parts of a job that differs from this one, and `restart` is false.
        DamagedMetadataError
            The metadata of the output is damaged, no record there is of a part of this job, and
            `restart` is false.
        FileExistsError, NotADirectoryError
            The output has data files that no job wrote, or is a file.
        ValueError
            The settings do not fit the input, or each other.
        """
        options = RunOptions(restart, verify, accept_changed_code, command)
        reader, stages, writer = self.parts()
        writer.directory.refuse_file()  # before any model is looked up
        adds_files = isinstance(writer, AnnotationWriter) and isinstance(reader, FileReader)
        if not adds_files or self.folder:
            return self.plan_job(reader, writer, stages, options)
        make = functools.partial(self.plan_job, stages=stages, options=options)
        *earlier, last = earlier_jobs(reader, writer, options, make)
        return replace(last, earlier=tuple(earlier))

    def plan_job(
        self, reader: Any, writer: FileWriter, stages: list[Any], options: RunOptions
    ) -> RecipeJob:
        """Make and check the job of a reader, a writer and stages; writes nothing."""
        if writer.annotates:
            stages = add_decision_column(as_chain(stages).mappers)
        # Conditions take null for a column that a file lacks; other stages need the column.
        demanding = [m for m in as_chain(stages).mappers if not isinstance(m, RowFilter)]
        needed = as_chain(demanding).read_fields
        open_source = functools.partial(
            as_source,
            keeps_partitions=bool(self.folder),  # steps read a frame repeatedly
            is_slow=as_chain([*stages, *self.step_mappers()]).is_slow,
        )
        source = open_source(reader, self.on_error, needed, lends_positions=writer.annotates)
        chain = self.make_chain(source, stages)
        chain.prepare()
        others, identity = {}, self.job_identity()
        settings = identity.get(type(self).__name__)
        rules = [] if settings is None else [f"{type(self).__name__} {json.dumps(settings)}"]
        for name, other in self.other_inputs().items():
            others[name] = open_source(other, "whole")
            others[name].refuse_output(writer.directory, writer.sample_name)
            parts = others[name].identity().items()
            identity |= {heading.replace("input", name, 1): values for heading, values in parts}
            remember(others[name].options_name, others[name].storage_options)
        job = make_job(
            source,
            chain,
            writer,
            options,
            backend=self.backend,
            on_error=self.on_error,
            identity=identity,
            code=self.script(),
            rules=rules,
            **self.job_settings(),
        )
        planned = RecipeJob(**vars(job), recipe=self, others=others)
        self.check_job(planned)
        return planned

    def make_chain(self, source: Source, stages: list[Any]) -> Chain:
        """Return the stages as one mapper, after checking that it accepts the source's columns.

        If `backend` is "cudf", the partitions of a Dask frame are moved to cudf first.
        """
        is_moved = self.backend != "pandas" and not source.reads_any_backend
        chain = as_chain([ToBackend(self.backend), *stages] if is_moved else stages)
        chain.check(source.meta)
        return chain

    def run(
        self,
        client: Client | None = None,
        *,
        restart: bool = False,
        verify: str = "digest",
        accept_changed_code: bool = False,
        report: Callable[..., None] | None = None,
    ) -> Any:
        """Run the job, or continue it.

        Parameters
        ----------
        client : distributed.Client, optional
            Default: everything runs here, one part after another.
        restart : bool
            Start over, and remove the output of earlier runs; nothing else is ever removed.
        verify : {"digest", "size"}
            How to verify parts of earlier runs. "digest" compares the SHA-256 of their files, which
            the workers of `client` or threads here read at the speed of the disk, or the MD5 that a
            store reports. "size" compares names and sizes, and reads nothing. Damaged parts are
            done again, and named in Python's log.
        accept_changed_code : bool
            Continue, and keep finished parts, although a callable or class among the stages has
            other code, or a library that computes a stage's results another version. Use it if you
            know that the rows are the same. Nothing else may differ.
        report : callable, optional
            ``report(parts_done, parts, summary_so_far)``, called at first, after every part and
            after every joined file; for a recipe with steps, ``report(step, done, of, summary)``,
            also for the parts of steps. Default: a live line on a terminal, a widget in a notebook,
            or a line a minute in Python's log.

        Returns
        -------
        JobSummary
            For a recipe with steps, the summary of the last pass, or the recipe's own result. If an
            annotation set has several jobs, the summary of the last one.

        Raises
        ------
        TypeError, ValueError, FileExistsError, NotADirectoryError
            See `prepare`. `client` is no Client of Dask, or an asynchronous one.
        ChangedInputError
            A file has changed since the job began.
        JobChangedError
            Another run has started over in the output meanwhile.
        Exception
            The first error of a part. Written parts stay: run the same job again.
        """
        job = self.prepare(restart=restart, verify=verify, accept_changed_code=accept_changed_code)
        if report is not None:
            return job.run(client, report)
        with JobProgress(job.title, client=client) as progress:
            return job.run(client, job.shown_by(progress))

    # Display.

    def code(self, show: Callable[[Any], str] = repr) -> str:
        """Return the call that makes the recipe, as Python code; `show` is not used."""
        settings = self.settings()
        first = [setting.name for setting in fields(self) if not setting.kw_only]
        lines = []
        for name in first:
            value = settings.pop(name)
            if isinstance(value, list):
                inner = "".join(f"        {shown(stage)},\n" for stage in value)
                lines.append(f"    [\n{inner}    ],\n")
            else:
                lines.append(f"    {shown(value)},\n")
        lines += [f"    {n}={shown(v)},\n" for n, v in settings.items() if v is not None]
        return f"{type(self).__name__}(\n{''.join(lines)})"

    def script(self) -> str:
        """Return Python code that makes the recipe: import statements, and the call of `code`."""
        things: list[Any] = [type(self)]
        for value in self.settings().values():
            things += value if isinstance(value, list) else [value]
        return f"{import_lines(things)}\n\n{self!r}"


@dataclass(frozen=True, kw_only=True)
class RecipeJob(Job):
    """Planned and checked job of a recipe; `others` are sources of its other inputs by name."""

    recipe: Recipe
    others: Mapping[str, Source]

    @property
    def title(self) -> str:
        """Title of the progress display: `Recipe.last_step` if there are steps, or as for `Job`."""
        return self.recipe.last_step if self.recipe.folder else super().title

    @property
    def report_parts(self) -> tuple[ReportPart, ...]:
        """Numbers and sections that the recipe and the stages add to the report."""
        return (*self.recipe.report_parts, *super().report_parts)

    def shown_by(self, progress: JobProgress) -> Callable[..., None]:
        """Return the function to pass to `run` as `report`, so that `progress` shows this job."""
        if not self.recipe.folder:
            return progress.parts
        words = self.recipe.words

        def show(step: str, done: int, of: int, summary: JobSummary) -> None:
            first, _, rest = step.partition("-")
            progress.step(f"{words.get(first, first)} {rest}".rstrip(), done, of, summary)

        return show

    def documents(self) -> LazyFrame:
        """Return a lazy Dask frame of the input's documents, with a partition for each part.

        A Dask frame as input is returned itself. From files, the recipe's `on_error` applies.
        """
        return self.source.frame(self.recipe.on_error, self.recipe.backend)

    def sample(self, rows: int) -> Frame | None:
        """Draw up to `rows` rows from all over the input, always the same ones.

        Returns None if the input has no rows or cannot be read.
        """
        try:
            if isinstance(self.source, FileSource):
                drawn, _ = sample_files(self.source.input, rows, 0, self.recipe.on_error)
            else:
                drawn, _ = sample_partitions(self.source.partitions(), rows, 0)
        except UnreadableInputError:
            return None
        return drawn.frame

    def with_stages(self, mappers: Iterable[PartitionMap]) -> RecipeJob:
        """Return a copy with the stages `mappers`, which must give the same columns (unchecked)."""
        chain = Chain(tuple(mappers))
        meta_dtypes = chain.meta_dtypes(self.source.meta)
        return replace(self, spec=replace(self.spec, chain=chain, meta_dtypes=meta_dtypes))

    def run(self, client: Client | None = None, report: Callable[..., None] | None = None) -> Any:
        """Run or continue the job as `Recipe.run` does; without `report`, report nothing."""
        if not self.recipe.folder:
            return super().run(client, report)
        with self.current(client):
            return self._run_steps(client, report)

    def _run_steps(self, client: Client | None, report: StepReport | None) -> Any:
        recipe = self.recipe
        if self.restart or not self.directory.has(JOB):
            # The ledger goes first, so that it lists no step whose files are removed.
            self.directory.remove(recipe.ledger)
            self.directory.remove_folder(recipe.folder)
        is_done = self.manifest.done(r.name for r in self.begin(client)) == self.manifest.count
        self.directory.sweep(recipe.folder)
        share_with_workers([other.options_name for other in self.others.values()])
        steps = Steps(self, recipe.folder, client, report)
        last = recipe.last_pass(self, recipe.take_steps(self, steps, is_done))
        summary = last.write(client, steps.report_of(recipe.last_step))
        return recipe.result(self, steps, summary)
