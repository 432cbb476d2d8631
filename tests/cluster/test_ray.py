"""Ray's scheduler for Dask computes the same lazy frame, with the GPUs that each task asks for.

Ray replaces `dask.persist` when it is imported, so that all of it runs in a process of its own.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from tests.hub_server import HubServer
from tests.oracle import assert_close, probabilities, raw_outputs
from tests.replicas import sample_texts

# Ray and torch start in several processes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXTS = [*sample_texts(22, seed=4, max_words=12), "", None]
PARTITIONS = 12
LABELS = ("ham", "spam", "other")
CLIENT_TOKEN, LOGIN_TOKEN = "hf_plantedclient", "hf_plantedlogin"

SCRIPT = """
import json, os, pathlib, pickle, sys, time

import dask.dataframe as dd
import pandas as pd
import ray
from ray.util.dask import ray_dask_get

from gpuclassify import DistributedDataClassifier

TEXTS, PARTITIONS, MODEL, FOLDER, SOCKETS, CLIENT_TOKEN, LOGIN_TOKEN = json.loads(sys.argv[1])
LOADS, PLACES = pathlib.Path(FOLDER, "loads"), pathlib.Path(FOLDER, "places")
ON_RAY = {"scheduler": ray_dask_get, "ray_remote_args": {"num_gpus": 1}}


class Watched(DistributedDataClassifier):
    '''Notes which process loads a model, and where each partition is classified.

    It travels to workers by value. No worker goes on before two have a partition.
    '''

    def map_frame(self, frame, meta_dtypes=None):
        (PLACES / f"{os.getpid()} {os.environ['CUDA_VISIBLE_DEVICES']}").touch()
        deadline = time.monotonic() + 120
        while len(list(PLACES.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        from gpuclassify.inference import loaded_model

        real = vars(loaded_model).setdefault("real_load_model", loaded_model.load_model)

        def load(*arguments, **named):
            with LOADS.open("a") as file:
                file.write(f"{os.getpid()}\\n")
            return real(*arguments, **named)

        loaded_model.load_model = load
        return super().map_frame(frame, meta_dtypes)


def main():
    frame = pd.DataFrame({"text": TEXTS, "id": range(len(TEXTS))})
    frame.index = [number // 2 for number in frame.id]  # labels occur twice
    lazy = dd.from_pandas(frame, npartitions=PARTITIONS, sort=False)
    settings = {"model": MODEL, "score_field": "s", "autocast": False}
    DistributedDataClassifier(**settings)(lazy).compute(scheduler="threads").to_pickle(
        f"{FOLDER}/threads.pkl"
    )
    Watched(**settings)(lazy).compute(**ON_RAY).to_pickle(f"{FOLDER}/ray.pkl")
    loads = LOADS.read_text().split()  # before those of another model
    # A model that only tokens open: the client's own does not travel, a worker's login serves.
    classifier = DistributedDataClassifier(model="acme/gated", token=CLIENT_TOKEN, autocast=False)
    gated = classifier(lazy)
    graph = pickle.dumps(dict(gated.__dask_graph__())) + pickle.dumps(classifier)
    error = ""
    try:
        gated.compute(**ON_RAY)
    except Exception as err:
        error = str(err)
    pathlib.Path(os.environ["HF_HOME"], "token").write_text(LOGIN_TOKEN)
    gated.compute(**ON_RAY).to_pickle(f"{FOLDER}/gated.pkl")
    print(json.dumps([lazy.npartitions, loads, b"hf_planted" in graph, error]))


if __name__ == "__main__":
    ray.init(
        num_cpus=2,
        num_gpus=2,  # of which there are none: Ray only counts them
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        _temp_dir=SOCKETS,
        _node_ip_address="127.0.0.1",
    )
    try:
        main()
    finally:
        ray.shutdown()
"""


def test_ray_classifies_as_threads_do_and_keeps_tokens_where_they_are(
    tmp_path, sequence_classifier
):
    (tmp_path / "places").mkdir()
    model = sequence_classifier("bert", labels=LABELS)
    with (
        # A short name: Ray's sockets lie in it, and their paths may be 107 long.
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as sockets,
        HubServer(tokens=[CLIENT_TOKEN, LOGIN_TOKEN]) as server,
    ):
        files = {path.name: path.read_bytes() for path in Path(model).iterdir()}
        server.add("acme/gated", files, is_gated=True, readers=server.tokens)
        given = [TEXTS, PARTITIONS, str(model), str(tmp_path), sockets, CLIENT_TOKEN, LOGIN_TOKEN]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(given)],
            env=kept
            | {
                "HF_ENDPOINT": server.url,
                "HF_HOME": str(tmp_path),
                "HF_HUB_DISABLE_XET": "1",
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "RAY_AUTH_MODE": "token",  # as by default, but the token is in no file at home
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_memory_monitor_refresh_ms": "0",  # others' memory is no reason to kill
                "RAY_worker_register_timeout_seconds": "300",  # a busy machine starts them slowly
            },
            capture_output=True,
            text=True,
            timeout=540,
        )
    assert done.returncode == 0, done.stderr
    partitions, loads, shows_token, error = json.loads(done.stdout.splitlines()[-1])
    on_ray, threaded, gated = (
        pd.read_pickle(tmp_path / f"{name}.pkl") for name in ("ray", "threads", "gated")
    )
    # Rows, types and scores are those of the threaded scheduler, and of plain transformers.
    pd.testing.assert_frame_equal(on_ray.drop(columns="s"), threaded.drop(columns="s"))
    assert on_ray.dtypes.equals(threaded.dtypes) and list(on_ray.text[:-1]) == TEXTS[:-1]
    outputs = raw_outputs(model, TEXTS[:-1])
    for scores in (on_ray.s, threaded.s):
        assert pd.isna(scores.iloc[-1])
        assert_close(list(scores)[:-1], probabilities(outputs))
    # Each worker loads a model once, and sees the GPU that its task asked for.
    places = [path.name.split() for path in (tmp_path / "places").iterdir()]
    workers = {worker for worker, _ in places}
    assert partitions == PARTITIONS and len(workers) >= 2  # which waited for each other
    assert Counter(loads) == dict.fromkeys(workers, 1)
    assert {gpu for _, gpu in places} == {"0", "1"}
    # A token stays with the client, and a login of the workers serves.
    assert not shows_token and "hf_planted" not in error
    assert "acme/gated is gated" in error and "token= or HF_TOKEN" in error
    assert list(gated.preds)[:-1] == [LABELS[best] for best in outputs.argmax(axis=1)]
    assert pd.isna(gated.preds.iloc[-1])
