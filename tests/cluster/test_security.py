"""TLS as one argument, and the warning where it is missing."""

import contextlib
import logging
import pickle
import socket
import ssl
import sys

import psutil
import pytest
from distributed import LocalCluster, Security

from gpuclassify.cluster import get_client
from gpuclassify.cluster.local import dashboard_address, owning_client, start
from gpuclassify.cluster.security import is_open, listens_here_alone, make_security


@pytest.fixture(scope="module")
def certificates():
    """Dask's own temporary certificate, as a directory would hold it."""
    made = Security.temporary()
    return {"ca": made.tls_ca_file, "cert": made.tls_worker_cert, "key": made.tls_worker_key}


def told(caplog):
    """What the library logged: Dask tells of its own when a machine is busy."""
    records = [record for record in caplog.records if record.name.startswith("gpuclassify")]
    return [record.getMessage() for record in records]


def write(folder, certificates, names=("ca.pem", "cert.pem", "key.pem")):
    folder.mkdir(exist_ok=True)
    for name, text in zip(names, certificates.values(), strict=True):
        (folder / name).write_text(text)
    return folder


def test_one_argument_encrypts_every_connection(caplog):
    with (
        caplog.at_level(logging.WARNING, "gpuclassify"),
        get_client("cpu", n_workers=1, processes=False, security=True, host="0.0.0.0") as client,
    ):
        workers = list(client.nthreads())
        assert [address[:6] for address in (client.scheduler.address, *workers)] == ["tls://"] * 2
        assert client.submit(sum, [1, 2]).result() == 3
        with pytest.raises(OSError, match="no Dask scheduler answers"):
            plain = client.scheduler.address.replace("tls://", "tcp://")
            get_client(address=plain, timeout=1, set_as_default=False)
    assert not told(caplog)


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        ({}, "tls"),
        ({"security": False}, "tcp"),
        ({"host": "127.0.0.1"}, "tcp"),
        ({"protocol": "tcp://"}, "tcp"),
        ({"interface": "lo"}, "tcp"),
        ({"host": "127.0.0.1", "security": True}, "tls"),
    ],
)
def test_a_local_cluster_takes_nobody_elses_connections_unless_it_is_told_to(options, scheme):
    with get_client("cpu", n_workers=1, **options) as client:
        addresses = [client.scheduler.address, *client.scheduler_info()["workers"]]
        assert [address.partition("://")[0] for address in addresses] == [scheme] * 2
        plain = {"address": f"tcp://{client.scheduler.address.partition('://')[2]}", "timeout": 2}
        if scheme == "tcp":
            get_client(**plain, set_as_default=False).close()
            return
        with pytest.raises(OSError, match="no Dask scheduler answers"):
            get_client(**plain, set_as_default=False)
        same = {"security": client.cluster.security, "address": client.scheduler.address}
        with get_client(**same, set_as_default=False) as second:
            assert second.submit(sum, [1, 2]).result() == 3


def test_a_connection_that_ends_without_a_word_harms_no_other_one():
    """Workers come while others' connections end: from Python 3.13 on OpenSSL mixes them up."""
    with get_client("cpu", n_workers=1) as client:
        for security in (
            client.cluster.security,
            pickle.loads(pickle.dumps(client.cluster.security)),
        ):
            for role in ("client", "scheduler", "worker"):
                for arguments in (
                    security.get_connection_args(role),
                    security.get_listen_args(role),
                ):
                    assert arguments["ssl_context"].options & ssl.OP_IGNORE_UNEXPECTED_EOF
        for count in (2, 3, 4):
            client.cluster.scale(count)
            client.wait_for_workers(count, timeout=60)
        assert client.gather(client.map(abs, range(40))) == list(range(40))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"memory_limit": "1GB", "enable_nvlink": False}, True),
        ({"processes": False}, False),
        ({"enable_nvlink": True}, False),
        ({"enable_tcp_over_ucx": True}, False),
        ({"protocol": "ucx"}, False),
    ],
)
def test_tls_is_for_clusters_over_loopback(options, expected):
    assert listens_here_alone(options) == expected


@pytest.mark.parametrize(
    "names", [("ca.pem", "cert.pem", "key.pem"), ("ca.crt", "tls.crt", "tls.key")]
)
def test_a_directory_of_certificates_serves_cluster_and_client(tmp_path, certificates, names):
    folder = write(tmp_path / "pki", certificates, names)
    with (
        get_client("cpu", n_workers=1, processes=False, security=folder) as client,
        get_client(
            address=client.scheduler.address, security=str(folder), set_as_default=False
        ) as second,
    ):
        assert second.submit(sum, [1, 2]).result() == 3


def test_a_dict_has_the_fields_of_security(tmp_path, certificates):
    folder = write(tmp_path / "pki", certificates)
    fields = {"tls_ca_file": str(folder / "ca.pem"), "tls_client_cert": certificates["cert"]}
    made = make_security(fields)
    assert made.require_encryption
    assert {name: getattr(made, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"tls_ca": "ca.pem"}, TypeError, "tls_ca"),
        ({"tls_ca_file": "absent.pem"}, FileNotFoundError, r"tls_ca_file names 'absent\.pem'"),
        ("absent", FileNotFoundError, r"no directory with ca\.pem, cert\.pem, key\.pem"),
        (Security(), ValueError, "require_encryption=False"),
        (3, TypeError, "security=3 is none of"),
    ],
)
def test_what_cannot_secure_is_refused(given, error, words):
    assert make_security(None) is make_security(False) is None
    with pytest.raises(error, match=words):
        make_security(given)
    with pytest.raises(ValueError, match="a running scheduler does not know"):
        get_client(address="tcp://127.0.0.1:1", security=True)


def test_addresses_are_judged_by_who_reaches_them():
    closed = ["tcp://127.0.0.1:1", "tcp://[::1]:1", "inproc://10.0.0.1/17/1", "tls://8.8.8.8:1"]
    opened = ["tcp://0.0.0.0:1", "tcp://10.1.2.3:1", "ws://8.8.8.8:1", "tcp://[2001:4860::8888]:1"]
    assert not any(map(is_open, closed))
    assert all(map(is_open, [*opened, "tcp://scheduler.invalid:1"]))


def own_address():
    """An address of this machine that others may reach."""
    addresses = [address for own in psutil.net_if_addrs().values() for address in own]
    found = [own.address for own in addresses if own.family == socket.AF_INET]
    return next((one for one in found if not one.startswith("127.")), None)


def test_a_scheduler_that_others_reach_without_tls_is_told_about(caplog):
    options = {"n_workers": 0, "processes": False, "protocol": "tcp://"}
    with caplog.at_level(logging.WARNING, "gpuclassify"):
        start(LocalCluster, {**options, "host": "127.0.0.1"}, []).close()
        assert not told(caplog)
        with start(LocalCluster, {**options, "host": "0.0.0.0"}, []) as client:
            address = client.cluster.scheduler_address
            get_client(address=address, set_as_default=False).close()
    started, connected = told(caplog)
    assert "tcp://0.0.0.0:" in started
    assert "security=True" in started
    if own_address() is not None:  # there is a network but loopback
        assert address in connected
        assert "pass them as security=" in connected


def listening(port):
    """The addresses on which this process waits for connections to a port."""
    found = psutil.Process().net_connections(kind="tcp")
    return {one.laddr.ip for one in found if one.status == "LISTEN" and one.laddr.port == port}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "127.0.0.1"),
        ({"interface": "lo"}, "127.0.0.1"),
        ({"host": "tcp://127.0.0.2:0"}, "127.0.0.2"),
        ({"host": "0.0.0.0"}, "0.0.0.0"),
        ({"host": "0.0.0.0", "security": True}, "127.0.0.1"),
        ({"dashboard_address": "127.0.0.3:0"}, "127.0.0.3"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="has other names and addresses of loopback")
def test_the_dashboard_listens_where_the_scheduler_does(options, expected):
    protocol = "tls://" if "security" in options else "tcp://"
    with get_client("cpu", n_workers=1, processes=False, protocol=protocol, **options) as client:
        port = client.cluster.scheduler_info["services"]["dashboard"]
        assert listening(port) == {expected}
        if expected == "127.0.0.1":
            assert client.dashboard_link == f"http://127.0.0.1:{port}/status"


def test_a_dashboard_takes_another_port_where_its_own_is_taken():
    with socket.socket() as other, contextlib.suppress(OSError):
        other.bind(("127.0.0.1", 8787))
        other.listen()
        assert dashboard_address() == "127.0.0.1:0"


def test_a_cluster_that_cannot_be_set_up_is_closed():
    cluster = LocalCluster(n_workers=0, processes=False, dashboard_address=":0")

    def fail(client):
        raise KeyError("set up")

    with pytest.raises(KeyError, match="set up"):
        owning_client(cluster, fail)
    assert cluster.status.name == "closed"
