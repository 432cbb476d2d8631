import re,sys,os
def sub(p,*pairs):
    s=open(p).read()
    for a,b in pairs:
        assert a in s,(p,a)
        s=s.replace(a,b,1)
    open(p,"w").write(s)
p="gpuclassify/cli.py"
s=open(p).read()
a=s.index("@main.command()\n@click.argument(\"inputs\""); b=s.index("@main.command()\n@click.option(\"--json\", \"as_json\", is_flag=True, help=\"Print JSON.\")\ndef models")
s=s[:a]+s[b:]
a=s.index("def print_summary("); b=s.index("def _describe(")
s=s[:a]+s[b:]
a=s.index("def _console("); b=s.index('if __name__ == "__main__":')
s=s[:a]+s[b:]
s=s.replace("_console(","open_console(").replace("_families().items()","families().items()")
s=s.replace('''"""The command line: ``gpuclassify classify | models | doctor | demo``.

Exit codes: 0 done, 1 the work failed, 2 the call was wrong and no work was started, 130 it was
interrupted.
"""''','''"""The command line: ``gpuclassify classify | report | models | doctor | demo``.

Exit codes: 0 done, 1 the work failed, 2 the call was wrong and no work was started, 3 done, with
something left out in quarantine, 130 interrupted.
"""''')
s=s.replace('''import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

import gpuclassify
from gpuclassify.options import DTYPES, LOADERS

if TYPE_CHECKING:
    from rich.console import Console

    from gpuclassify.jobs.run import JobSummary

FAILED = 1
# What the library raises for wrong settings and inputs, at the call.
WRONG_CALL = (
    ValueError,
    TypeError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    PermissionError,
)
''','''import json
import logging
import sys
from typing import Any

import click

import gpuclassify
from gpuclassify.commands import classify, report
from gpuclassify.console import FAILED, open_console, print_summary, quiet_dask, told
''')
s=s.replace('''            click.echo(f"Error: {error or type(error).__name__}", err=True)
''','''            click.echo(f"Error: {told(error)}", err=True)
''')
s=s.replace('''@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(as_json: bool) -> None:
    """List the classifiers, their models, licences and output columns."""
''','''main.add_command(classify)
main.add_command(report)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(as_json: bool) -> None:
    """List the classifiers, their models, licences and output columns."""
    from gpuclassify.jobs.settings import families

''')
open(p,"w").write(s)
sub("gpuclassify/__init__.py",('''    from gpuclassify.jobs.readers import read_files
    from gpuclassify.jobs.writers import to_parquet
''','''    from gpuclassify.jobs.pipeline import Pipeline
    from gpuclassify.jobs.readers import FileReader, JsonlReader, ParquetReader, read_files
    from gpuclassify.jobs.stages import ToBackend
    from gpuclassify.jobs.writers import JsonlWriter, ParquetWriter, to_parquet
'''))
s=open("gpuclassify/__init__.py").read()
homes={"FileReader":"readers","JsonlReader":"readers","ParquetReader":"readers","JsonlWriter":"writers","ParquetWriter":"writers","Pipeline":"pipeline","ToBackend":"stages"}
a=s.index("_HOMES = {")+len("_HOMES = {\n"); b=s.index("}\n",a)
entries=dict(re.findall(r'    "(\w+)": "([\w.]+)",\n',s[a:b])); entries.update({k:f"gpuclassify.jobs.{v}" for k,v in homes.items()})
key=lambda k:(k[0].islower(),k)
s=s[:a]+"".join(f'    "{k}": "{entries[k]}",\n' for k in sorted(entries,key=key))+s[b:]
a=s.index("__all__ = [\n")+len("__all__ = [\n"); b=s.index("]\n",a)
s=s[:a]+"".join(f'    "{k}",\n' for k in sorted(entries,key=key))+s[b:]
open("gpuclassify/__init__.py","w").write(s)
sub("gpuclassify/demo/run.py",("from gpuclassify.jobs.run import JobSummary, plan_job, run_job\n",""),('''if TYPE_CHECKING:
    from rich.console import Console
''','''if TYPE_CHECKING:
    from rich.console import Console

    from gpuclassify.jobs.summary import JobSummary
'''),('''    from gpuclassify import DomainClassifier, get_client
    from gpuclassify.jobs.progress import JobProgress
''','''    from gpuclassify import DomainClassifier, JsonlReader, ParquetWriter, Pipeline, get_client
    from gpuclassify.jobs.progress import JobProgress
'''),('''    plan = plan_job([str(directory / "input")], str(output), classifier, overwrite=True)
    with get_client() as client, JobProgress("DomainClassifier", console) as progress:
        job = run_job(plan, client, progress.parts)
''','''    stages = [JsonlReader(str(directory / "input")), classifier, ParquetWriter(str(output))]
    planned = Pipeline(stages).prepare(restart=True)
    with get_client() as client, JobProgress("DomainClassifier", console, client) as progress:
        job = planned.run(client, progress.parts)
'''),('''    frame = pd.read_parquet(output, columns=["area", "domain_pred"])
''','''    frame = pd.read_parquet(output, columns=["area", "domain_pred"])
'''))
sub("setup.cfg",('''    gpuclassify = gpuclassify.cli:main
''','''    gpuclassify = gpuclassify.cli:main
dask_cli =
    gpuclassify = gpuclassify.cli:main
'''))
os.remove("gpuclassify/jobs/run.py"); os.remove("tests/jobs/test_run.py")
sub("tests/test_cli.py",("from gpuclassify.cli import print_summary\nfrom gpuclassify.jobs.run import JobSummary\n","from gpuclassify.console import print_summary\nfrom gpuclassify.jobs.summary import JobSummary\n"),
('"x"], "--min-score"','"x"], "--min-score"'),('"big"], "part-size")','"big"], "part_size")'),
('''    assert (done.returncode, "--overwrite" in done.stderr) == (2, True)
''','''    assert (done.returncode, "that no job wrote" in done.stderr) == (2, True)
'''),('''    (job / "earlier").mkdir()
    (job / "earlier" / "part-00000.parquet").write_bytes(b"earlier")
    options = ["--classifier", "domain", "--model", "model", "--overwrite"]
    done = run(
        "classify", "in.jsonl", "earlier", *options, "--scheduler", "tcp://127.0.0.1:1", cwd=job
    )
    assert (done.returncode, "no Dask scheduler answers" in done.stderr) == (1, True)
    assert (job / "earlier" / "part-00000.parquet").read_bytes() == b"earlier"
''','''    options = ["--classifier", "domain", "--model", "model"]
    command = ["classify", "in.jsonl", "earlier", *options]
    assert run(*command, "--cluster", "cpu", cwd=job).returncode == 0
    before = sorted(path.name for path in (job / "earlier").iterdir())
    done = run(*command, "--restart", "--scheduler", "tcp://127.0.0.1:1", cwd=job)
    assert (done.returncode, "no Dask scheduler answers" in done.stderr) == (1, True)
    assert sorted(path.name for path in (job / "earlier").iterdir()) == before
'''))
