"""Classifiers whose models come from a Hub: pinned, fetched once, with a token that never shows."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest

from gpuclassify import AegisClassifier, DomainClassifier
from tests.hub_server import HubServer
from tests.replicas import safety_template, sample_texts, write_checkpoint

pytestmark = pytest.mark.slow

TOKEN = "hf_plantedplantedplanted"
NAME = "acme/domains"

# Two worker processes on one node; the endpoint and the cache come from the environment.
SCRIPT = """
    import json, os, pickle, sys
    import dask.dataframe as dd, pandas as pd
    from distributed import Client, LocalCluster
    from gpuclassify import DomainClassifier
    from gpuclassify.cluster.local import PatientNanny
    from tests.replicas import sample_texts

    if __name__ == "__main__":
        frame = pd.DataFrame({"text": sample_texts(24)})
        options = {"n_workers": 2, "threads_per_worker": 1, "worker_class": PatientNanny}
        with LocalCluster(dashboard_address=None, **options) as cluster:
            with Client(cluster):
                classifier = DomainClassifier(model="acme/domains", autocast=False, **SETTINGS)
                lazy = classifier(dd.from_pandas(frame, npartitions=6))
                graph = pickle.dumps(dict(lazy.__dask_graph__())) + pickle.dumps(classifier)
                print("planned", flush=True)
                sys.stdin.readline()
                labels = lazy.compute()["domain_pred"].tolist()
        print(json.dumps({
            "labels": labels,
            "shows_token": b"hf_planted" in graph or "hf_planted" in repr(classifier),
            "revision": classifier.model.identity.revision,
        }))
"""


def files_of(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in Path(directory).rglob("*")
        if path.is_file()
    }


@pytest.fixture
def server():
    with HubServer(tokens=[TOKEN]) as running:
        yield running


def start(script, server, cache, settings):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])  # for the folder tests
    code = textwrap.dedent(script).replace("SETTINGS", repr(settings))
    path = cache / "script.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_workers_fetch_the_pinned_commit_once_with_the_clients_token(server, tmp_path):
    first = write_checkpoint(tmp_path / "first", seed=1)
    model = server.add(NAME, files_of(first), is_gated=True, readers={TOKEN})
    sha = model.sha_of()
    job = start(SCRIPT, server, tmp_path / "cache", {"token": TOKEN})
    line = job.stdout.readline()
    assert line == "planned\n", job.communicate()[1]
    # The branch moves on between planning and computing; the job stays with what it planned.
    model.commit(files_of(write_checkpoint(tmp_path / "second", seed=2)))
    output, errors = job.communicate("\n", timeout=280)
    assert job.returncode == 0, errors
    result = json.loads(output.splitlines()[-1])
    frame = pd.DataFrame({"text": sample_texts(24)})
    local = DomainClassifier(model=first, autocast=False)(frame)
    assert result["labels"] == local["domain_pred"].tolist()
    assert result["revision"] == sha
    assert not result["shows_token"]
    assert TOKEN not in errors
    weights = (first / "model.safetensors").stat().st_size
    gets = [r for r in server.requests if r.method == "GET" and "tokenizer" not in r.path]
    fetched = [r for r in gets if r.sent_bytes >= weights]
    assert len(fetched) == 1


PUSH = """
    import json
    from gpuclassify import Deberta, QualityClassifier
    from transformers import AutoTokenizer

    if __name__ == "__main__":
        SETTINGS
        model = Deberta.from_pretrained(source)
        model.push_to_hub("acme/trained", token=token)
        AutoTokenizer.from_pretrained(source).push_to_hub("acme/trained", token=token)
        again = Deberta.from_pretrained("acme/trained", token=token)
        same = all(
            (one == other).all().item()
            for one, other in zip(model.state_dict().values(), again.state_dict().values())
        )
        print(json.dumps({"same": same, "config": again.config, "labels": QualityClassifier(
            model="acme/trained", token=token).labels}))
"""


def test_a_module_of_ones_own_is_pushed_and_read_back(server, tmp_path):
    source = write_checkpoint(tmp_path / "quality", "quality")
    script = f"source, token = {str(source)!r}, {TOKEN!r}"

    process = start(PUSH.replace("SETTINGS", script), server, tmp_path / "cache", {})
    printed, errors = process.communicate(timeout=280)

    assert process.returncode == 0, errors
    found = json.loads(printed.splitlines()[-1])
    assert found["same"]
    assert found["config"]["base_model"] == "backbone"
    pushed = server.repos["acme/trained"]
    files = {path: file.data for path, file in pushed.tree().items()}
    assert {"README.md", "backbone/config.json", "tokenizer.json"} < set(files)
    config = json.loads(files["config.json"])
    digest = config.pop("weights_sha256")  # by which loading knows whole weights
    assert digest == hashlib.sha256(files["model.safetensors"]).hexdigest()
    assert config == config | json.loads((source / "config.json").read_text())
    assert found["labels"] == ["High", "Medium", "Low"]


SAFETY = """
    import hashlib, json
    import pandas as pd
    from gpuclassify import AegisClassifier, InstructionDataGuardClassifier, classify
    from gpuclassify.hub import ModelAccessError, ModelNotFoundError
    from tests.replicas import safety_template

    def failure(error, **options):
        mapper = AegisClassifier(**NAMES | options)
        try:
            mapper(frame.iloc[:0])
        except error as err:
            return str(err)

    if __name__ == "__main__":
        token = "hf_plantedplantedplanted"
        frame = pd.DataFrame({"text": ["the river", "a match", None]})
        digest = hashlib.sha256(safety_template().encode()).hexdigest()
        NAMES = {"model": "acme/aegis", "base_model": "acme/guard-base", "template_digest": digest}
        told = {
            "no token": failure(ModelAccessError),
            "no access": failure(ModelAccessError, token="hf_otherotherother"),
            "revision": failure(ModelNotFoundError, token=token, revision="v9"),
        }
        aegis = AegisClassifier(token=token, **NAMES)
        guard = InstructionDataGuardClassifier(
            model="acme/guard", adapter="acme/aegis", base_model="acme/guard-base", token=token
        )
        found = classify(frame, [aegis, guard])
        print(json.dumps(told | {
            "labels": found["aegis_pred"].fillna("").tolist(),
            "poisoned": found["is_poisoned"].astype("str").tolist(),
        }))
"""


def test_a_gated_base_is_read_with_the_token_and_explained_without(tmp_path, safety_models):
    other = "hf_otherotherother"
    with HubServer(tokens=[TOKEN, other]) as server:
        server.add("acme/guard-base", files_of(safety_models.base), is_gated=True, readers={TOKEN})
        server.add("acme/aegis", files_of(safety_models.defensive))
        server.add("acme/guard", files_of(safety_models.guard))
        process = start(SAFETY, server, tmp_path / "cache", {})
        printed, errors = process.communicate(timeout=280)

    assert process.returncode == 0, errors
    found = json.loads(printed.splitlines()[-1])
    page = "https://huggingface.co/acme/guard-base"
    assert f"acme/guard-base is gated: ask for access at {page}" in found["no token"]
    assert "token= or HF_TOKEN" in found["no token"]
    assert f"the token in use has no access to it: ask for access at {page}" in found["no access"]
    assert "acme/aegis has no revision 'v9'" in found["revision"]
    assert TOKEN not in printed + errors
    aegis = AegisClassifier(
        model=safety_models.defensive,
        base_model=safety_models.base,
        template=safety_template(),
    )
    expected = aegis(pd.DataFrame({"text": ["the river", "a match"]}))["aegis_pred"].tolist()
    assert found["labels"] == [*expected, ""]
    assert {"True", "False"} >= set(found["poisoned"][:2])
