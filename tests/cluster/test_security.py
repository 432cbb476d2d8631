"""TLS as one argument, and the warning where it is missing."""

import logging

import pytest
from distributed import LocalCluster, Security

from gpuclassify.cluster import get_client
from gpuclassify.cluster.local import own, start
from gpuclassify.cluster.security import (
    is_public,
    is_reachable_by_others,
    make_security,
    warn_if_open,
)


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
    made = make_security(
        {"tls_ca_file": str(folder / "ca.pem"), "tls_client_cert": certificates["cert"]}
    )
    assert made.require_encryption
    assert made.tls_ca_file == str(folder / "ca.pem")
    assert made.tls_client_cert == certificates["cert"]
    with pytest.raises(TypeError, match="tls_ca"):
        make_security({"tls_ca": "ca.pem"})
    with pytest.raises(FileNotFoundError, match=r"tls_ca_file names '.*absent\.pem'"):
        make_security({"tls_ca_file": str(folder / "absent.pem")})


def test_what_cannot_secure_is_refused(tmp_path):
    assert make_security(None) is make_security(False) is None
    with pytest.raises(FileNotFoundError, match=r"no directory with ca\.pem, cert\.pem, key\.pem"):
        make_security(tmp_path)
    with pytest.raises(ValueError, match="require_encryption=False"):
        make_security(Security())
    with pytest.raises(TypeError, match="security=3 is none of"):
        make_security(3)
    with pytest.raises(ValueError, match="a running scheduler does not know"):
        get_client(address="tcp://127.0.0.1:1", security=True)


def test_a_certificate_of_its_own_needs_cryptography(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    with pytest.raises(ImportError, match=r"pip install 'gpuclassify\[tls\]'"):
        make_security(True)


def test_a_scheduler_that_others_reach_without_tls_is_told_about(caplog):
    options = {"n_workers": 0, "processes": False, "protocol": "tcp://"}
    with caplog.at_level(logging.WARNING, "gpuclassify"):
        start(LocalCluster, {**options, "host": "0.0.0.0"}, []).close()
        (warning,) = told(caplog)
        assert "tcp://0.0.0.0:" in warning
        assert "security=True" in warning
        caplog.clear()
        start(LocalCluster, {**options, "host": "127.0.0.1"}, []).close()
    assert not told(caplog)


@pytest.mark.parametrize(
    ("address", "others", "public"),
    [
        ("tcp://127.0.0.1:8786", False, False),
        ("tcp://[::1]:8786", False, False),
        ("inproc://10.0.0.1/17/1", False, False),
        ("tls://8.8.8.8:8786", False, False),
        ("wss://8.8.8.8:8786", False, False),
        ("tcp://0.0.0.0:8786", True, False),
        ("tcp://10.1.2.3:8786", True, False),
        ("tcp://8.8.8.8:8786", True, True),
        ("ws://8.8.8.8:8786", True, True),
        ("tcp://[2001:4860:4860::8888]:8786", True, True),
    ],
)
def test_addresses_are_judged_by_who_reaches_them(address, others, public):
    assert is_reachable_by_others(address) is others
    assert is_public(address) is public


def test_a_foreign_scheduler_is_judged_by_the_public_internet(caplog):
    with caplog.at_level(logging.WARNING, "gpuclassify"):
        warn_if_open(["tcp://10.1.2.3:8786"], are_local=False)
        assert not told(caplog)
        warn_if_open(["tcp://8.8.8.8:8786"], are_local=False)
        (warning,) = told(caplog)
        assert "tcp://8.8.8.8:8786" in warning


def test_a_cluster_that_cannot_be_set_up_is_closed():
    cluster = LocalCluster(n_workers=0, processes=False, dashboard_address=":0")

    def fail(client):
        raise KeyError("set up")

    with pytest.raises(KeyError, match="set up"):
        own(cluster, fail)
    assert cluster.status.name == "closed"
