"""An S3 store, which jobs and processes of these tests find by environment variables."""

import fsspec
import pytest
from job_faults import write_input


@pytest.fixture(scope="module")
def store():
    from tests.s3_server import S3Server  # needs packages that other tests do not

    with pytest.MonkeyPatch.context() as patch, S3Server() as server:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield server


@pytest.fixture
def bucket(store):
    """The store's file system, without its cache of listings."""
    return fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)


@pytest.fixture
def prefix(request, store, bucket, tmp_path):
    """A prefix with input, for one test."""
    write_input(tmp_path / "in")
    url = f"s3://{store.bucket}/{abs(hash(request.node.name))}"
    bucket.put(f"{tmp_path}/in", f"{url}/in", recursive=True)
    return url
