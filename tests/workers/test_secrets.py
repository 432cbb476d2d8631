"""Secrets reach the workers of a cluster, those that come later too, and nothing else."""

import asyncio
import logging
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client, Worker

from gpuclassify import hub
from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.output.hub_writer import HubWriter
from gpuclassify.jobs.output.writers import JsonlWriter
from gpuclassify.jobs.stores.hub import share_tokens
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.workers import secrets
from tests.processes import local_client, wait_until

NAME, TOKEN, OTHER_TOKEN = "acme/topics", "hf_goodgoodgoodgood", "hf_otherotherother"


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch):
    monkeypatch.setattr(secrets, "_secrets", {})


def worker_plugins(dask_worker):
    return [repr(plugin) for key, plugin in dask_worker.plugins.items() if "gpuclassify" in key]


@pytest.mark.parametrize("token", ["", "  ", "hf_se cret", "hf_se\ncret", "hf_sécret"])
def test_a_malformed_token_is_refused_without_showing_it(token):
    with pytest.raises(ValueError, match="the token for acme/topics") as caught:
        hub.remember_token(NAME, token)
    assert "cret" not in str(caught.value)
    assert hub.token_for(NAME) is None


def test_sharing_without_a_client_or_tokens_does_nothing():
    hub.remember_token(NAME, TOKEN)
    hub.share_tokens_with_workers([NAME])
    hub.share_tokens_with_workers([])


def test_tokens_reach_present_and_later_worker_processes():
    hub.remember_token(NAME, TOKEN)
    hub.remember_token("acme/unrelated", OTHER_TOKEN)
    with local_client(processes=True) as client:
        hub.share_tokens_with_workers([NAME, "acme/open"])
        client.cluster.scale(2)
        client.wait_for_workers(2)
        assert list(client.run(hub.token_for, NAME).values()) == [TOKEN] * 2
        assert list(client.run(hub.token_for, "acme/unrelated").values()) == [None] * 2
        hub.remember_token(NAME, OTHER_TOKEN)
        hub.share_tokens_with_workers([NAME])
        assert list(client.run(hub.token_for, NAME).values()) == [OTHER_TOKEN] * 2


def test_sharing_is_idempotent_and_works_within_one_process(monkeypatch, caplog):
    hub.remember_token(NAME, TOKEN)
    with caplog.at_level(logging.DEBUG), local_client() as client:
        cluster = client.cluster
        registered = []
        register = client.register_plugin
        monkeypatch.setattr(
            client, "register_plugin", lambda p: (registered.append(p), register(p))
        )
        for _ in range(3):
            hub.share_tokens_with_workers([NAME])
        names = {f"token of {NAME}", f"token of {secrets.token_name(NAME)}"}
        assert len(registered) == len(names) == 2
        for plugins in client.run(worker_plugins).values():
            assert set(plugins) == {f"<SecretPlugin {name}>" for name in names}
        monkeypatch.setattr(secrets, "_secrets", {})
        assert hub.token_for(NAME) is None

        async def join():
            async with Worker(cluster.scheduler.address, dashboard=False):
                return hub.token_for(NAME)

        assert client.sync(join) == TOKEN
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(vars(cluster.scheduler).get("events", ""))


def start(*command):
    path = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [sys.executable, "-m", "distributed.cli.dask_" + command[0], *command[1:]],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )


def test_workers_of_a_scheduler_that_is_started_again_get_the_secrets():
    """At the same address, with the same client, which connects again by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    names = ["token of acme/topics", "output s3://documents/out"]
    secrets.remember(names[0], TOKEN)
    secrets.remember(names[1], {"key": "k", "secret": "s"})
    scheduler = ("scheduler", "--host", f"tcp://{address}", "--no-dashboard", "--no-show")
    worker = ("worker", f"tcp://{address}", "--no-dashboard", "--nthreads", "1", "--no-nanny")
    processes = [start(*scheduler), start(*worker)]
    try:
        with Client(f"tcp://{address}", timeout=60) as client:
            for is_last in (False, True):
                client.wait_for_workers(1, timeout=60)
                secrets.share_with_workers(names)
                for name in names:
                    assert [*client.run(secrets.recall, name).values()] == [secrets.recall(name)]
                if not is_last:
                    for process in processes:
                        process.kill()
                        process.wait()
                    wait_until(lambda: client.status != "running")
                    processes += [start(*scheduler), start(*worker)]
                    wait_until(lambda: client.status == "running")
    finally:
        for process in processes:
            process.kill()
            process.wait()


URL, OUT = f"hf://datasets/{NAME}/rows.jsonl", "s3://documents/out"


def share_what_a_job_needs(token, key):
    """Share one user's secrets, and return the parts of a job that travel to workers."""
    writer = JsonlWriter(OUT, storage_options={"key": key})
    reader = JsonlReader(URL, storage_options={"token": token})
    hub.remember_token(NAME, token)
    target = HubWriter(NAME, staging="out", token=token).target
    hub.share_tokens_with_workers([NAME])
    share_tokens([URL])
    secrets.share_with_workers([writer.directory.options_name])
    return hub.resolve(NAME, "0" * 40), target, writer.directory, reader.storage_options


def seen_by_a_task(identity, target, directory, options):
    tokens = [identity.token, target.api().token, open_store(URL, options).storage_options["token"]]
    return [*tokens, directory.storage_options["key"]]


def share_as_another_user(address):
    with Client(address):
        share_what_a_job_needs(OTHER_TOKEN, "other key")


def test_users_of_one_cluster_keep_their_own_secrets_for_the_same_names():
    with local_client(processes=True) as client:
        job = share_what_a_job_needs(TOKEN, "my key")
        assert client.submit(seen_by_a_task, *job, pure=False).result() == [TOKEN] * 3 + ["my key"]
        address = client.scheduler.address
        other = multiprocessing.get_context("spawn").Process(
            target=share_as_another_user, args=[address]
        )
        other.start()
        other.join(120)
        assert other.exitcode == 0
        assert OTHER_TOKEN in client.run(lambda: [*secrets._secrets.values()]).popitem()[1]
        assert client.submit(seen_by_a_task, *job, pure=False).result() == [TOKEN] * 3 + ["my key"]
        assert TOKEN not in repr(job) + repr(pickle.dumps(job))
        assert "my key" not in repr(job) + repr(pickle.dumps(job))


def test_an_asynchronous_client_is_told_the_cure():
    hub.remember_token(NAME, TOKEN)

    async def share():
        settings = {"processes": False, "n_workers": 0, "dashboard_address": None}
        async with Client(asynchronous=True, **settings):
            hub.share_tokens_with_workers([NAME])

    with pytest.raises(RuntimeError, match="set HF_TOKEN on the workers") as caught:
        asyncio.run(share())
    assert TOKEN not in str(caught.value)
