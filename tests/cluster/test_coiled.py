"""Coiled without an account: its real signature, and a local cluster in its place."""

import inspect
import os
import sys

import pandas as pd
import pytest
from distributed import Client, LocalCluster

from gpuclassify import DomainClassifier
from gpuclassify.cluster import get_client
from gpuclassify.cluster.coiled import IDLE_TIMEOUT, coiled_arguments, find_secret
from gpuclassify.cluster.local import PatientNanny
from gpuclassify.workers.machine import usable_cores
from tests.replicas import sample_texts

pytestmark = pytest.mark.slow

TOKEN = "hf_plantedForCoiled0123456789"
EXAMPLE = {
    "n_workers": 100,
    "worker_vm_types": ["g6.xlarge"],
    "spot_policy": "spot_with_fallback",
    "region": "us-east-1",
}


@pytest.fixture
def coiled():
    return pytest.importorskip("coiled", reason="the extra coiled is not installed")


@pytest.fixture
def stand_in(coiled, monkeypatch):
    """A local cluster that takes exactly the arguments of the real one."""
    real = coiled.Cluster
    started = []

    class StandIn(LocalCluster):
        __signature__ = inspect.signature(real)

        def __init__(self, **arguments):
            self.arguments = self.__signature__.bind(**arguments).arguments
            self.sent = {}
            started.append(self)
            workers = self.arguments["worker_options"]
            super().__init__(
                n_workers=1,
                threads_per_worker=workers["nthreads"],
                dashboard_address=":0",
                worker_class=PatientNanny,
            )

        def send_private_envs(self, *arguments, **named):
            call = inspect.signature(real.send_private_envs).bind(self, *arguments, **named)
            self.sent |= call.arguments["env"]

            def set_variables(variables):  # in here, so that it travels by value
                os.environ.update(variables)

            with Client(self, set_as_default=False) as client:
                client.run(set_variables, call.arguments["env"])

    monkeypatch.setattr(coiled, "Cluster", StandIn)
    return started


def test_the_example_runs_from_end_to_end(stand_in, monkeypatch, checkpoint):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    frame = pd.DataFrame({"text": sample_texts(6)})
    classifier = DomainClassifier(model=checkpoint("domain"), autocast=False)
    with get_client("coiled", private_environ={"BUCKET_KEY": "b"}, **EXAMPLE) as client:
        (cluster,) = stand_in
        found = client.submit(classifier, frame).result(timeout=300)
        assert list(client.nthreads().values()) == [1]
        assert list(client.run(os.getenv, "HF_TOKEN").values()) == [TOKEN]
        assert list(client.run(os.getenv, "RAYON_NUM_THREADS").values()) == [str(usable_cores())]
        assert cluster.scheduler.allowed_failures > 3
    pd.testing.assert_frame_equal(found, classifier(frame))
    assert cluster.sent == {"HF_TOKEN": TOKEN, "BUCKET_KEY": "b"}
    assert TOKEN not in repr(cluster.arguments)
    assert {name: cluster.arguments[name] for name in EXAMPLE} == EXAMPLE
    assert cluster.status.name == "closed"


def test_arguments_are_those_of_the_real_cluster(coiled, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    arguments, private = coiled_arguments(EXAMPLE)
    assert inspect.signature(coiled.Cluster).bind(**arguments)
    assert arguments == EXAMPLE | {
        "worker_options": {"nthreads": 1},
        "scheduler_gpu": False,
        "idle_timeout": IDLE_TIMEOUT,
        "show_widget": False,
    }
    assert private == {}
    changes = {"idle_timeout": "1h", "scheduler_gpu": True, "worker_options": {"nthreads": 2}}
    assert coiled_arguments(EXAMPLE | changes)[0] == arguments | changes
    scaled = {"n_workers": [1, 9]}
    threads = {"worker_options": {"nthreads": 3}}
    found, _ = coiled_arguments(EXAMPLE | scaled, threads_per_worker=3)
    assert found == arguments | scaled | threads


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"spot_polcy": 1}, TypeError, "no option 'spot_polcy'.*Did you mean .*'spot_policy'"),
        ({"rmm_async": True}, TypeError, "Cluster have no option 'rmm_async'"),
        ({"security": {}}, ValueError, "makes TLS certificates by itself"),
        ({"threads_per_worker": 0}, ValueError, "threads_per_worker=0"),
        ({"tags": {"owner": TOKEN}}, ValueError, r"tags\.owner looks like a secret"),
        (
            {"environ": {"HF_TOKEN": "x"}},
            ValueError,
            r"environ\.HF_TOKEN looks like.*private_environ=\{'HF_TOKEN': \.\.\.\}",
        ),
    ],
)
def test_what_does_not_fit_coiled_is_refused(coiled, monkeypatch, options, error, words):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(error, match=words) as caught:
        get_client("coiled", **options)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"environ": {"HF_TOKEN": "x"}}, "environ.HF_TOKEN"),
        ({"environ": {"AWS_SECRET_ACCESS_KEY": "x"}}, "environ.AWS_SECRET_ACCESS_KEY"),
        ({"environ": {"db_password": "x"}}, "environ.db_password"),
        ({"environ": {"OPENAI_API_KEY": "x"}}, "environ.OPENAI_API_KEY"),
        ({"environ": {"FINE": "1", "HARMLESS": "hf_" + "abcdefgh" * 3}}, "environ.HARMLESS"),
        ({"environ": {"STORE": "postgres://me:hidden@host/db"}}, "environ.STORE"),
        ({"tags": {"owner": f"x{TOKEN}"}}, "tags.owner"),
        ({"worker_options": {"preload_argv": ["-t", TOKEN]}}, "worker_options.preload_argv"),
        # Words that only look like one, and values too short to be looked for.
        ({"environ": {"TOKENIZERS_PARALLELISM": "false", "MONKEY": "1"}}, None),
        ({"environ": {"ENDPOINT": "https://user@host:8443/path", "PATH": "/bin:/usr"}}, None),
        ({**EXAMPLE, "tags": {"team": "data"}}, None),
    ],
)
def test_secrets_among_the_arguments_are_found(options, name):
    assert find_secret(options, ["", "spot", TOKEN]) == name


def test_a_missing_package_is_told_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "coiled", None)
    with pytest.raises(RuntimeError, match=r"pip install 'gpuclassify\[coiled\]'"):
        get_client("coiled", **EXAMPLE)
