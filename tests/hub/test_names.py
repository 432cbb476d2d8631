"""What a name means: a directory, or a model of the Hub at a commit."""

import pytest

from gpuclassify import hub
from tests.hub.small_model import GOOD_TOKEN, NAME, checkpoint, write


@pytest.mark.parametrize("name", ["/models/x", "~/x", "./x", "../x", ".", "a/b/c"])
def test_paths_are_directories_by_spelling(name):
    assert hub.is_directory_name(name)


@pytest.mark.parametrize("name", ["acme/topics", "gpt2", "", "a.b/c~"])
def test_hub_names_are_not_directories(name):
    assert not hub.is_directory_name(name)


def test_an_existing_directory_wins_over_a_hub_name(tmp_path, monkeypatch):
    write(tmp_path / "acme/topics", checkpoint())
    monkeypatch.chdir(tmp_path)
    identity = hub.resolve(NAME)
    assert identity.is_directory and identity.name == str(tmp_path / "acme/topics")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/acme/../acme/topics") == identity


@pytest.mark.parametrize("name", ["my model", "a--b", "acme/", ""])
def test_a_name_that_is_neither_is_told_both_readings(name):
    with pytest.raises(
        hub.ModelNotFoundError, match=r"neither a directory \(looked for /.*Hub name"
    ):
        hub.resolve(name)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(hub.ModelNotFoundError, match=rf"{tmp_path}/gone: no such directory"):
        hub.resolve(f"{tmp_path}/gone")


def test_a_file_is_no_model_directory(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(hub.ModelNotFoundError, match="a file, not a directory"):
        hub.resolve(path)


def test_main_and_branches_resolve_to_commits(server, cache):
    main = server.add(NAME, checkpoint())
    branch = server.models[NAME].commit({"config.json": b"{}"}, branch="refs/pr/1")
    assert hub.resolve(NAME, cache_dir=cache) == hub.Identity(NAME, main, False)
    assert hub.resolve(NAME, "main", cache_dir=cache).revision == main
    assert hub.resolve(NAME, "refs/pr/1", cache_dir=cache).revision == branch
    assert main != branch


def test_a_sha_resolves_without_a_request(server, cache):
    sha = "0123456789ABCDEFabcd0123456789abcdef0123"
    assert hub.resolve(NAME, sha, cache_dir=cache).revision == sha.lower()
    assert server.requests == []


def test_a_model_without_config_still_resolves(server, cache):
    sha = server.add(NAME, {"README.md": b"hello"})
    assert hub.resolve(NAME, cache_dir=cache).revision == sha


def test_a_moved_branch_is_seen(server, cache):
    server.add(NAME, checkpoint())
    hub.resolve(NAME, cache_dir=cache)
    newer = server.models[NAME].commit({"config.json": b"{}"})
    assert hub.resolve(NAME, cache_dir=cache).revision == newer


def test_a_missing_revision_is_named(server, cache):
    server.add(NAME, checkpoint())
    with pytest.raises(hub.ModelNotFoundError, match="acme/topics has no revision 'v9'"):
        hub.resolve(NAME, "v9", cache_dir=cache)


def test_a_missing_model_is_named_with_and_without_a_token(server, cache):
    with pytest.raises(hub.ModelNotFoundError, match=r"no model 'acme/topics'.*no directory /"):
        hub.resolve(NAME, cache_dir=cache)
    hub.remember_token(NAME, GOOD_TOKEN)
    with pytest.raises(hub.ModelNotFoundError, match="no model 'acme/topics'") as caught:
        hub.resolve(NAME, cache_dir=cache)
    assert not isinstance(caught.value, hub.ModelAccessError)
