"""Secrets reach the workers of a cluster, those that come later too, and nothing else."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client, Worker

from gpuclassify import hub
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
        assert len(registered) == 1
        assert client.run(worker_plugins) == {
            address: [f"<SecretPlugin token of {NAME}>"] for address in client.nthreads()
        }
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


def test_an_asynchronous_client_is_told_the_cure():
    hub.remember_token(NAME, TOKEN)

    async def share():
        settings = {"processes": False, "n_workers": 0, "dashboard_address": None}
        async with Client(asynchronous=True, **settings):
            hub.share_tokens_with_workers([NAME])

    with pytest.raises(RuntimeError, match="set HF_TOKEN on the workers") as caught:
        asyncio.run(share())
    assert TOKEN not in str(caught.value)
