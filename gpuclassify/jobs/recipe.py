"""Recipe: a reader, stages, a writer, and steps before documents are written; and how it is run."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from gpuclassify.jobs.annotating import earlier_jobs, with_decisions
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.input.sources import Source, as_source
from gpuclassify.jobs.job import Job, make_job
from gpuclassify.jobs.ledger.manifest import RunOptions
from gpuclassify.jobs.ledger.quarantine import OnError
from gpuclassify.jobs.ledger.records import JOB, LEDGER
from gpuclassify.jobs.output.writers import AnnotationWriter, FileWriter
from gpuclassify.jobs.report.progress import JobProgress
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.jobs.stages import ToBackend, as_chain, describe_settings, import_lines, shown
from gpuclassify.jobs.steps import StepReport, Steps
from gpuclassify.mapping.chain import Chain
from gpuclassify.pages.sections import ReportPart
from gpuclassify.settings.checks import Backend
from gpuclassify.settings.declared import Declared, declared, setting
from gpuclassify.workers.secrets import remember, share_with_workers

if TYPE_CHECKING:
    from distributed import Client


@declared
class Recipe(Declared):
    """Base of jobs over files: a reader, stages and a writer, and steps before these.

    A subclass declares its settings as fields, and gives the reader, stages and writer (`parts`).
    If documents are written by something that all of them decide, it names a `folder`, takes
    steps (`take_steps`) and makes the job that writes documents from their results (`last_pass`).
    Each step is done once: running the same recipe again continues it.
    """

    backend: Backend = setting(default="pandas", changes_results=False)
    on_error: OnError = setting(default="raise", changes_results=False)

    # Folder of the steps' results in the output, which readers of datasets pass over; "" for none.
    folder: ClassVar[str] = ""
    # The name of the last pass in reports of progress, and titles of steps by the first word of
    # their names.
    last_step: ClassVar[str] = "documents"
    words: ClassVar[Mapping[str, str]] = {}

    @property
    def ledger(self) -> str:
        """File in the folder without which nothing there counts."""
        return f"{self.folder}/{LEDGER}"

    # What a subclass says.

    @abstractmethod
    def parts(self) -> tuple[Any, list[Any], FileWriter]:
        """Return the reader, the stages and the writer; raise TypeError if one is missing."""

    def other_inputs(self) -> dict[str, Any]:
        """Return readers and Dask frames that are read next to the reader, by name."""
        return {}

    def check_job(self, job: RecipeJob) -> None:
        """Raise TypeError or ValueError unless the settings fit the input of a planned job."""

    def job_settings(self) -> dict[str, Any]:
        """Return further settings of `gpuclassify.jobs.job.make_job`."""
        return {}

    def job_identity(self) -> dict[str, dict[str, Any]]:
        """Return the settings that make another job if they change, as JSON values by heading."""
        return describe_settings(type(self).__name__, self) if self.identity() else {}

    @property
    def report_parts(self) -> tuple[ReportPart, ...]:
        """Additions of the recipe to the report; those of stages come by themselves."""
        return ()

    def take_steps(self, job: RecipeJob, steps: Steps, is_done: bool) -> Any:
        """Take the steps that are left, and return their results.

        `is_done`: all documents are written already.
        """

    def last_pass(self, job: RecipeJob, results: Any) -> Job:
        """Return the job that writes documents, by the results of the steps."""
        return job

    def has_steps_to_do(self, job: RecipeJob) -> bool:
        """Return whether steps are needed even if all documents are written."""
        return False

    def result(self, job: RecipeJob, steps: Steps, summary: JobSummary) -> Any:
        """Return the result of a run; default: the summary of documents."""
        return summary

    def numbers(self, summary: Any) -> list[str]:
        """Return the lines that a command prints; default: none, for the labels and totals."""
        return []

    # How it is run.

    def prepare(
        self,
        *,
        restart: bool = False,
        verify: str = "digest",
        accept_changed_code: bool = False,
        command: str = "",
    ) -> RecipeJob:
        """Find the parts and check everything that can be checked without workers; writes nothing.

        Parameters
        ----------
        restart, verify, accept_changed_code
            See `run`.
        command : str
            The command that makes the same job, for the report.

        Raises
        ------
        TypeError
            The stages do not begin with a reader and end with a writer, or one is none.
        UnreadableInputError
            The input cannot be read.
        JobChangedError
            The output has parts of a job that differs from this one, and `restart` is false.
        DamagedMetadataError
            What says whose parts the output has cannot be read, and `restart` is false.
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
        """Make the job of a reader, a writer and stages, checked."""
        if writer.annotates:
            stages = with_decisions(as_chain(stages).mappers)
        needed = as_chain(stages).read_fields
        source = self.open_source(reader, self.on_error, needed, lends_positions=writer.annotates)
        chain = self.make_chain(source, stages)
        chain.prepare()
        others, identity = {}, self.job_identity()
        for name, other in self.other_inputs().items():
            others[name] = self.open_source(other, "whole")
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
            **self.job_settings(),
        )
        planned = RecipeJob(**vars(job), recipe=self, others=others)
        self.check_job(planned)
        return planned

    def open_source(self, reader: Any, on_error: str, needed: Any = (), **options: Any) -> Source:
        """Return the source of a reader or a Dask frame; steps see a frame as it is."""
        return as_source(reader, on_error, needed, keeps_partitions=bool(self.folder), **options)

    def make_chain(self, source: Source, stages: list[Any]) -> Chain:
        """Return the stages as one mapper, checked for the source's columns."""
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
            Start over, and remove what earlier runs wrote; nothing else is ever removed.
        verify : {"digest", "size"}
            How to find out whether parts that earlier runs wrote are still what they wrote: by the
            SHA-256 of their files, which are read at the speed of the disk, by the workers of
            `client` or by threads here; a store that tells the MD5 of its objects is asked for it
            instead. "size" looks at names and sizes alone, and reads nothing. What does not hold
            is done again, and named in Python's log.
        accept_changed_code : bool
            Continue, and keep the parts that are there, although a callable among the stages has
            other code: where you know that it gives the same rows. Nothing else may differ.
        report : callable, optional
            ``report(parts_done, parts, summary_so_far)``, at first and after every part; of a
            recipe with steps ``report(step, done, of, summary)``, of every step. Default: a live
            line on a terminal, a widget in a notebook, or a line a minute in Python's log.

        Returns
        -------
        JobSummary
            For a recipe with steps, the summary of the last one, or the recipe's own result.

        Raises
        ------
        TypeError, ValueError, FileExistsError, NotADirectoryError
            See `prepare`. `client` is no Client of Dask, or an asynchronous one.
        ChangedInputError
            A file is not what it was when the job began.
        JobChangedError
            Another run has started over in the output meanwhile.
        Exception
            The first one that a part raises. What is written stays: run the same job again.
        """
        job = self.prepare(restart=restart, verify=verify, accept_changed_code=accept_changed_code)
        if report is not None:
            return job.run(client, report)
        with JobProgress(job.title, client=client) as progress:
            return job.run(client, job.shown_by(progress))

    # How it is shown.

    def code(self, show: Callable[[Any], str] = repr) -> str:
        """Return the call that makes the recipe, a line for each stage."""
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
        """Return Python code that makes the recipe, with its imports."""
        things: list[Any] = [type(self)]
        for value in self.settings().values():
            things += value if isinstance(value, list) else [value]
        return f"{import_lines(things)}\n\n{self!r}"


@dataclass(frozen=True, kw_only=True)
class RecipeJob(Job):
    """A recipe that is planned and checked; `others` are its other inputs by name."""

    recipe: Recipe
    others: Mapping[str, Source]

    @property
    def title(self) -> str:
        """Title of the work in progress, for people."""
        return self.recipe.last_step if self.recipe.folder else super().title

    @property
    def report_parts(self) -> tuple[ReportPart, ...]:
        """Additions of the recipe and of the stages to the report."""
        return (*self.recipe.report_parts, *super().report_parts)

    def shown_by(self, progress: JobProgress) -> Callable[..., None]:
        """Return the report function for `run` that shows this job in `progress`."""
        if not self.recipe.folder:
            return progress.parts
        words = self.recipe.words

        def show(step: str, done: int, of: int, summary: JobSummary) -> None:
            first, _, rest = step.partition("-")
            progress.step(f"{words.get(first, first)} {rest}".rstrip(), done, of, summary)

        return show

    def needs_workers(self) -> bool:
        """Return whether `run` has steps or parts to do or files to upload; reads any manifest."""
        return super().needs_workers() or self.recipe.has_steps_to_do(self)

    def run(self, client: Client | None = None, report: Callable[..., None] | None = None) -> Any:
        """Run what is not done yet; see `Recipe.run`."""
        if not self.recipe.folder:
            return super().run(client, report)
        with self.current(client):
            return self._run_steps(client, report)

    def _run_steps(self, client: Client | None, report: StepReport | None) -> Any:
        recipe = self.recipe
        if self.restart or not self.directory.has(JOB):
            # Remove what earlier runs kept; first the ledger: half removed, nothing counts.
            self.directory.remove(recipe.ledger)
            self.directory.remove_folder(recipe.folder)
        is_done = sum(1 for _ in self.begin(client)) == self.manifest.count
        self.directory.sweep(recipe.folder)
        share_with_workers([other.options_name for other in self.others.values()])
        steps = Steps(self, recipe.folder, client, report)
        last = recipe.last_pass(self, recipe.take_steps(self, steps, is_done))
        summary = last.write(client, steps.report_of(recipe.last_step))
        return recipe.result(self, steps, summary)
