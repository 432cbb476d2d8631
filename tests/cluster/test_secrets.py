"""A planted token is searched for wherever a job leaves anything: only memory may have it."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd

from gpuclassify.testing import sample_texts, write_checkpoint

SERVER = runpy.run_path(str(Path(__file__).parents[1] / "hub_server.py"))
TOKEN = "hf_plantedInManyPlaces0123456789"

# Dask logs whole messages at the level DEBUG.
# The token comes by standard input: nothing that is searched gets it from the test itself.
SCRIPT = """
import json, logging, pickle, sys
from pathlib import Path

import cloudpickle, psutil
import dask.dataframe as dd

from gpuclassify import DomainClassifier, get_client
from gpuclassify.workers.secrets import token_for
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.input.readers import ParquetReader
from gpuclassify.jobs.output.writers import ParquetWriter

def tree_of_processes():
    me = psutil.Process()
    return [me, *me.children(recursive=True)]

def knows_token():
    return token_for("acme/domains") is not None

def files_below(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}

if __name__ == "__main__":
    folder, token = Path(sys.argv[1]), sys.stdin.readline().strip()
    logging.basicConfig(level=logging.DEBUG)
    classifier = DomainClassifier(
        model="acme/domains", token=token, autocast=False, score_field="scores"
    )
    reader = ParquetReader(str(folder / "in"), part_bytes=1)
    pipeline = Pipeline([reader, classifier, ParquetWriter(str(folder / "out"))])
    scratch = folder / "scratch"
    with get_client("cpu", n_workers=1, security=True, silence_logs=False,
                    local_directory=str(scratch)) as client:
        job = pipeline.prepare()
        job.run(client)
        lazy = classifier(dd.read_parquet(folder / "in"))
        lazy.persist()
        graph = lazy.optimize().__dask_graph__()
        places = {
            "pickled mapper": pickle.dumps(classifier),
            "pickled identity": pickle.dumps(classifier.model.identity),
            "pickled work": cloudpickle.dumps(job.work),
            "pickled job": cloudpickle.dumps([job.source, job.work, job.restart]),
            "graph": cloudpickle.dumps(dict(graph)),
            "collection": cloudpickle.dumps(lazy),
            "reprs": repr([classifier, pipeline, job, lazy, client, dict(graph)]).encode(),
            "worker logs": repr(client.get_worker_logs()).encode(),
            "nanny logs": repr(client.get_worker_logs(nanny=True)).encode(),
            "scheduler logs": repr(client.get_scheduler_logs()).encode(),
            "scheduler events": repr(client.get_events()).encode(),
            "scheduler identity": repr(client.scheduler_info()).encode(),
            **files_below(scratch),
        }
        processes = tree_of_processes()
        for process in processes:
            places[f"arguments of {process.pid}"] = "\\0".join(process.cmdline()).encode()
            places[f"environment of {process.pid}"] = repr(process.environ()).encode()
        held = list(client.run(knows_token).values())
    places["control"] = pickle.dumps({"token": token})
    print(json.dumps({
        "found": [place for place, content in places.items() if token.encode() in content],
        "searched": {place: len(content) for place, content in places.items()},
        "processes": len(processes),
        "held": held,
    }))
"""


def run_job(folder: Path, url: str) -> subprocess.CompletedProcess:
    (folder / "job.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": url,
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "DASK_LOGGING__DISTRIBUTED": "debug",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    return subprocess.run(
        [sys.executable, str(folder / "job.py"), str(folder)],
        input=f"{TOKEN}\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_token_is_nowhere_but_in_the_memory_of_client_and_workers(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "model")
    folder = tmp_path / "job"
    (folder / "in").mkdir(parents=True)
    frame = pd.DataFrame({"text": sample_texts(20, seed=1)})
    for name, rows in (("a", frame[:10]), ("b", frame[10:])):
        rows.to_parquet(folder / "in" / f"{name}.parquet")
    with SERVER["HubServer"](tokens=[TOKEN]) as server:
        model = SERVER["Model"](is_gated=True, readers={TOKEN})
        server.models["acme/domains"] = model
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        model.commit({str(path.relative_to(checkpoint)): path.read_bytes() for path in files})
        done = run_job(folder, server.url)
        asked = [request for request in server.requests if request.has_token]
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])

    assert asked, "the model was read without the token, so that there was nothing to hide"
    assert result["held"] == [True]
    assert result["processes"] >= 2
    empty = [place for place, size in result["searched"].items() if not size]
    assert [place for place in empty if not place.startswith(str(folder / "scratch"))] == []
    assert result["found"] == ["control"]

    assert TOKEN not in done.stdout + done.stderr
    assert "DEBUG" in done.stderr
    written = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert {"report.html", "report.json"} <= names
    assert [path for path in written if TOKEN.encode() in path.read_bytes()] == []
