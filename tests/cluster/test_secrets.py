"""Planted secrets are searched for wherever a job leaves anything: only memory may have them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.hub_server import HubServer
from tests.replicas import sample_texts, write_checkpoint

pytestmark = pytest.mark.contract

TOKEN = "hf_plantedInManyPlaces0123456789"
STORE_KEY = "objectStoreKeyPlantedToo9876543210"

# Dask logs whole messages at the level DEBUG.
# Secrets come by standard input: nothing that is searched gets them from the test itself.
SCRIPT = """
import json, logging, pickle, sys
from pathlib import Path

import cloudpickle, psutil
import dask.dataframe as dd

from gpuclassify import DomainClassifier, get_client
from gpuclassify.workers.secrets import recall, token_for
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.input.readers import ParquetReader, read_files
from gpuclassify.jobs.output.writers import ParquetWriter

def tree_of_processes():
    me = psutil.Process()
    return [me, *me.children(recursive=True)]

def knows(names):
    return [token_for("acme/domains") is not None, *[recall(name) is not None for name in names]]

def files_below(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    token, store_key = sys.stdin.readline().split()
    logging.basicConfig(level=logging.DEBUG)
    classifier = DomainClassifier(
        model="acme/domains", token=token, autocast=False, score_field="scores"
    )
    options = {"secret": store_key}  # the local file system takes any
    reader = ParquetReader(str(folder / "in"), part_bytes=1, storage_options=options)
    writer = ParquetWriter(str(folder / "out"), storage_options=options)
    pipeline = Pipeline([reader, classifier, writer])
    scratch = folder / "scratch"
    with get_client("cpu", n_workers=1, security=True, silence_logs=False,
                    local_directory=str(scratch)) as client:
        job = pipeline.prepare()
        job.run(client)
        lazy = classifier(dd.read_parquet(folder / "in"))
        lazy.persist()
        read_files(folder / "in", storage_options=options).compute()
        graph = lazy.optimize().__dask_graph__()
        places = {
            "pickled mapper": pickle.dumps(classifier),
            "pickled identity": pickle.dumps(classifier.model.identity),
            "pickled work": cloudpickle.dumps(job.spec),
            "pickled job": cloudpickle.dumps([job.source.input_schema, job.spec, job.restart]),
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
        names = [job.spec.input_name, job.spec.directory.options_name]
        held = list(client.run(knows, names).values())
    places["control"] = pickle.dumps([token, store_key])
    secrets = [token.encode(), store_key.encode()]
    print(json.dumps({
        "found": [name for name, content in places.items() if any(s in content for s in secrets)],
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
        input=f"{TOKEN} {STORE_KEY}\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_secrets_are_nowhere_but_in_the_memory_of_client_and_workers(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "model")
    folder = tmp_path / "job"
    (folder / "in").mkdir(parents=True)
    frame = pd.DataFrame({"text": sample_texts(20, seed=1)})
    for name, rows in (("a", frame[:10]), ("b", frame[10:])):
        rows.to_parquet(folder / "in" / f"{name}.parquet")
    with HubServer(tokens=[TOKEN]) as server:
        paths = [path for path in checkpoint.rglob("*") if path.is_file()]
        files = {str(path.relative_to(checkpoint)): path.read_bytes() for path in paths}
        server.add("acme/domains", files, is_gated=True, readers={TOKEN})
        done = run_job(folder, server.url)
        asked = [request for request in server.requests if request.has_token]
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])

    assert asked, "the model was read without the token, so that there was nothing to hide"
    assert result["held"] == [[True, True, True]]
    assert result["processes"] >= 2
    empty = [place for place, size in result["searched"].items() if not size]
    assert [place for place in empty if not place.startswith(str(folder / "scratch"))] == []
    assert result["found"] == ["control"]

    assert "DEBUG" in done.stderr
    for secret in (TOKEN, STORE_KEY):
        assert secret not in done.stdout + done.stderr
    written = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert {"report.html", "report.json"} <= names
    for path in written:
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in (TOKEN, STORE_KEY)), path
