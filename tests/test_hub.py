import asyncio
import contextlib
import json
import logging
import os
import pickle
import runpy
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, LocalCluster, Worker
from huggingface_hub import constants
from safetensors.numpy import save

from gpuclassify import hub
from gpuclassify.hub import tokens

# Loaded by path: an installed package may be called "tests" too.
HubServer = runpy.run_path(str(Path(__file__).with_name("hub_server.py")))["HubServer"]

NAME = "acme/topics"
GOOD_TOKEN = "hf_goodgoodgoodgood"
OTHER_TOKEN = "hf_otherotherother"
CONFIG = {"id2label": {"1": "b", "0": "a"}, "hidden_size": 4}
SHAPES = {"encoder.weight": (300, 400), "head.bias": (2,), "scale": ()}


def weights(shapes):
    return save({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})


def checkpoint():
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": weights(SHAPES),
        "tokenizer.json": b"{}",
        "vocab.pkl": b"pickle",
        "pytorch_model.bin": b"pickle",
        "README.md": b"# Topics",
    }


def sharded_checkpoint():
    shards = {
        "model-00001-of-00002.safetensors": {"a": (3, 2)},
        "model-00002.safetensors": {"b": (5,)},
    }
    weight_map = {tensor: file for file, shapes in shards.items() for tensor in shapes}
    files = {file: weights(shapes) for file, shapes in shards.items()}
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return {"config.json": b"{}", "model.safetensors.index.json": index, **files}


def write(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def use_endpoint(monkeypatch, url):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture(autouse=True)
def no_tokens(monkeypatch, tmp_path):
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(tokens, "_tokens", {})


@pytest.fixture
def server(monkeypatch):
    with HubServer(tokens=[GOOD_TOKEN, OTHER_TOKEN]) as running:
        use_endpoint(monkeypatch, running.url)
        yield running


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def run_elsewhere(code, **environment):
    """Run code in a fresh process: the Hub client reads its settings when it is imported."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=kept | {"HF_HUB_DISABLE_XET": "1"} | environment,
        cwd=Path(hub.__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# ---- names


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


# ---- resolving on the Hub


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


# ---- access


def test_a_gated_model_without_a_token_tells_where_to_ask(server, cache):
    sha = server.add(NAME, checkpoint(), is_gated=True, readers={GOOD_TOKEN})
    pattern = r"acme/topics is gated.*https://huggingface.co/acme/topics.*token= or HF_TOKEN"
    pinned = hub.Identity(NAME, sha, False)
    for read in (hub.resolve, lambda name, cache_dir: hub.download(pinned, cache_dir=cache_dir)):
        with pytest.raises(hub.ModelAccessError, match=pattern):
            read(NAME, cache_dir=cache)
    for read_pinned in (
        hub.read_tensor_shapes,
        lambda *a, **k: hub.read_json(*a, "config.json", **k),
    ):
        with pytest.raises(hub.ModelAccessError, match=pattern):
            read_pinned(pinned, cache_dir=cache)


def test_a_gated_model_with_a_token_that_lacks_access_says_so(server, cache):
    server.add(NAME, checkpoint(), is_gated=True, readers={GOOD_TOKEN})
    hub.remember_token(NAME, OTHER_TOKEN)
    with pytest.raises(hub.ModelAccessError, match="the token in use has no access"):
        hub.resolve(NAME, cache_dir=cache)


@pytest.mark.parametrize("kind", ["is_gated", "is_private"])
def test_a_remembered_token_opens_a_model(server, cache, kind):
    server.add(NAME, checkpoint(), **{kind: True}, readers={GOOD_TOKEN})
    hub.remember_token(NAME, f" {GOOD_TOKEN}\n")
    identity = hub.resolve(NAME, cache_dir=cache)
    assert hub.read_json(identity, "config.json", cache_dir=cache) == CONFIG
    assert hub.read_tensor_shapes(identity, cache_dir=cache) == SHAPES
    assert (hub.download(identity, cache_dir=cache) / "model.safetensors").is_file()
    to_storage = [request for request in server.requests if "/storage/" in request.path]
    assert to_storage and not any(request.has_token for request in to_storage)


def test_a_private_model_without_a_token_may_be_missing_or_private(server, cache):
    server.add(NAME, checkpoint(), is_private=True, readers={GOOD_TOKEN})
    with pytest.raises(hub.ModelAccessError, match="private model needs a token") as caught:
        hub.resolve(NAME, cache_dir=cache)
    assert isinstance(caught.value, hub.ModelNotFoundError)


def test_a_token_that_the_hub_does_not_know_is_refused(server, cache):
    server.add(NAME, checkpoint())
    hub.remember_token(NAME, "hf_unknown")
    with pytest.raises(hub.ModelAccessError, match="refused access to acme/topics"):
        hub.resolve(NAME, cache_dir=cache)


def test_hf_token_is_used_where_none_is_remembered(server, cache, monkeypatch):
    sha = server.add(NAME, checkpoint(), is_gated=True, readers={GOOD_TOKEN})
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    assert hub.resolve(NAME, cache_dir=cache).revision == sha
    monkeypatch.setenv("HF_TOKEN", OTHER_TOKEN)
    with pytest.raises(hub.ModelAccessError, match="the token in use has no access"):
        hub.resolve(NAME, cache_dir=cache)


# ---- reading and downloading


def test_config_keeps_the_key_order_and_a_missing_file_is_none(server, cache):
    server.add(NAME, checkpoint())
    identity = hub.resolve(NAME, cache_dir=cache)
    config = hub.read_json(identity, "config.json", cache_dir=cache)
    assert list(config["id2label"]) == ["1", "0"]
    assert hub.read_json(identity, "missing.json", cache_dir=cache) is None


def test_broken_json_is_named(server, cache, tmp_path):
    server.add(NAME, {"config.json": b"{broken", "list.json": b"[1]"})
    local = hub.resolve(write(tmp_path / "model", {"config.json": b"\xff{", "list.json": b"[1]"}))
    for identity in (hub.resolve(NAME, cache_dir=cache), local):
        with pytest.raises(ValueError, match=r"config\.json of .* is not (UTF-8|valid JSON)"):
            hub.read_json(identity, "config.json", cache_dir=cache)
        with pytest.raises(ValueError, match=r"list\.json of .* a JSON list"):
            hub.read_json(identity, "list.json", cache_dir=cache)


def test_a_text_file_is_read_on_the_hub_and_then_from_the_cache(server, cache, unplug):
    server.add(NAME, checkpoint() | {"README.md": "# Größe\r\ntext\n".encode(), "bad.md": b"\xff"})
    identity = hub.resolve(NAME, cache_dir=cache)
    assert hub.read_text(identity, "README.md", cache_dir=cache) == "# Größe\ntext\n"
    assert hub.read_text(identity, "missing.md", cache_dir=cache) is None
    with pytest.raises(ValueError, match=r"bad\.md of acme/topics is not UTF-8 text"):
        hub.read_text(identity, "bad.md", cache_dir=cache)
    unplug()
    assert hub.read_text(identity, "README.md", cache_dir=cache) == "# Größe\ntext\n"


def test_a_text_file_of_a_directory_is_read(tmp_path):
    identity = hub.resolve(write(tmp_path / "model", checkpoint()))
    assert hub.read_text(identity, "README.md") == "# Topics"
    assert hub.read_text(identity, "missing.md") is None


def test_reads_stay_at_the_pinned_commit(server, cache):
    server.add(NAME, checkpoint())
    identity = hub.resolve(NAME, cache_dir=cache)
    server.models[NAME].commit({"config.json": b'{"newer": 1}'})
    assert hub.read_json(identity, "config.json", cache_dir=cache) == CONFIG
    folder = hub.download(identity, cache_dir=cache)
    assert json.loads((folder / "config.json").read_text()) == CONFIG


def test_shapes_come_without_the_weights(server, cache):
    big = {"embedding": (1000, 1000), "bias": (3,)}
    server.add(NAME, {"model.safetensors": weights(big)})
    identity = hub.resolve(NAME, cache_dir=cache)
    assert hub.read_tensor_shapes(identity, cache_dir=cache) == big
    assert sum(request.sent_bytes for request in server.requests) < 110_000  # of 4,000,000
    assert not list(cache.rglob("*.safetensors"))


def test_a_header_longer_than_the_first_range_is_read_whole(server, cache):
    many = {f"encoder.layer.{number}.attention.weight": (1,) for number in range(2500)}
    server.add(NAME, {"model.safetensors": weights(many)})
    assert hub.read_tensor_shapes(hub.resolve(NAME, cache_dir=cache), cache_dir=cache) == many


def test_shapes_of_shards_are_joined(server, cache, tmp_path):
    server.add(NAME, sharded_checkpoint())
    local = hub.resolve(write(tmp_path / "model", sharded_checkpoint()))
    for identity in (hub.resolve(NAME, cache_dir=cache), local):
        assert hub.read_tensor_shapes(identity, cache_dir=cache) == {"a": (3, 2), "b": (5,)}


def test_missing_shards_and_tensors_are_named(tmp_path):
    folder = write(tmp_path / "model", sharded_checkpoint())
    (folder / "model-00002.safetensors").unlink()
    with pytest.raises(hub.ModelNotFoundError, match=r"not there: \['model-00002.safetensors'\]"):
        hub.read_tensor_shapes(hub.resolve(folder))
    write(folder, {"model-00002.safetensors": weights({"c": (1,)})})
    with pytest.raises(ValueError, match=r"1 tensors that its files lack: \['b'\]"):
        hub.read_tensor_shapes(hub.resolve(folder))


@pytest.mark.parametrize("index", [{}, [1], {"weight_map": {"a": "../../secret.safetensors"}}])
def test_a_bad_shard_index_is_named(tmp_path, index):
    files = {"model.safetensors.index.json": json.dumps(index).encode()}
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        hub.read_tensor_shapes(hub.resolve(write(tmp_path / "model", files)))


def test_a_download_takes_no_pickles_and_then_no_requests(server, cache):
    server.add(NAME, {**checkpoint(), "1_Pooling/config.json": b"{}"})
    identity = hub.resolve(NAME, cache_dir=cache)
    folder = hub.download(identity, cache_dir=cache)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    expected = {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}
    assert files == expected
    server.requests.clear()
    assert hub.download(identity, cache_dir=cache) == folder
    assert hub.read_tensor_shapes(identity, cache_dir=cache) == SHAPES
    assert hub.read_json(identity, "missing.json", cache_dir=cache) is None
    assert "pytorch_model.bin" in hub.list_files(identity, cache_dir=cache)
    assert server.requests == []


PICKLED = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}


def test_pickled_weights_are_refused_on_the_hub(server, cache):
    server.add(NAME, PICKLED)
    identity = hub.resolve(NAME, cache_dir=cache)
    with pytest.raises(hub.ModelNotFoundError, match=r"pickles \(pytorch_model.bin\)"):
        hub.read_tensor_shapes(identity, cache_dir=cache)
    assert not any(request.path.endswith(".bin") for request in server.requests)


def test_the_advice_on_pickled_weights_works(tmp_path, monkeypatch):
    import torch

    folder = write(tmp_path / "model", PICKLED)
    shared = torch.zeros(3, 2)
    torch.save({"a": shared, "b": shared.T}, folder / "pytorch_model.bin")
    with pytest.raises(hub.ModelNotFoundError) as caught:
        hub.read_tensor_shapes(hub.resolve(folder))
    advice = str(caught.value).split("\n")
    code = "\n".join(line for line in advice[1:-1])
    monkeypatch.chdir(folder)
    exec(code, {})
    assert hub.read_tensor_shapes(hub.resolve(folder)) == {"a": (3, 2), "b": (2, 3)}


def test_a_directory_without_weights_lists_what_is_there(tmp_path):
    folder = write(tmp_path / "model", {"config.json": b"{}", "weights.h5": b"", ".git/x": b""})
    pattern = r"no model\.safetensors.* its files are \['config.json', 'weights.h5'\]"
    with pytest.raises(hub.ModelNotFoundError, match=pattern):
        hub.read_tensor_shapes(hub.resolve(folder))


WHOLE = weights(SHAPES)
DAMAGED = {
    "empty": b"",
    "short length": WHOLE[:5],
    "cut in the header": WHOLE[:40],
    "endless header": b"\xff" * 64,
    "no json": (12).to_bytes(8, "little") + b"x" * 12,
    "no shapes": (9).to_bytes(8, "little") + b'{"a": {}}',
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_header_is_named_on_both_sides(server, cache, tmp_path, damage):
    files = {"model.safetensors": DAMAGED[damage]}
    server.add(NAME, files)
    local = hub.resolve(write(tmp_path / "model", files))
    for identity in (hub.resolve(NAME, cache_dir=cache), local):
        with pytest.raises(ValueError, match=r"model\.safetensors.*truncated or corrupt"):
            hub.read_tensor_shapes(identity, cache_dir=cache)


def test_truncated_weights_and_lfs_pointers_are_named(tmp_path):
    folder = write(tmp_path / "model", {"model.safetensors": WHOLE[:-1]})
    with pytest.raises(ValueError, match=rf"{len(WHOLE) - 1} bytes where its header says"):
        hub.read_tensor_shapes(hub.resolve(folder))
    write(folder, {"model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid"})
    with pytest.raises(ValueError, match="git lfs pull"):
        hub.read_tensor_shapes(hub.resolve(folder))


# ---- without a network


def test_offline_work_uses_the_cache_and_says_what_it_lacks(server, cache):
    sha = server.add(NAME, checkpoint())
    hub.download(hub.resolve(NAME, cache_dir=cache), cache_dir=cache)
    server.requests.clear()
    code = f"""
        from gpuclassify import hub
        identity = hub.resolve({NAME!r}, cache_dir={str(cache)!r})
        print(identity.revision)
        print(len(hub.read_tensor_shapes(identity, cache_dir={str(cache)!r})))
        print(hub.read_json(identity, "config.json", cache_dir={str(cache)!r})["hidden_size"])
        print(hub.read_json(identity, "missing.json", cache_dir={str(cache)!r}))
        print((hub.download(identity, cache_dir={str(cache)!r}) / "model.safetensors").is_file())
        pinned = hub.Identity("acme/other", "0" * 40, False)
        for read in (
            lambda: hub.resolve({NAME!r}, "v2", cache_dir={str(cache)!r}),
            lambda: hub.resolve("acme/other"),
            lambda: hub.read_json(pinned, "config.json"),
            lambda: hub.read_tensor_shapes(pinned),
            lambda: hub.download(pinned),
        ):
            try:
                read()
            except hub.HubUnreachableError as err:
                print("HF_HUB_OFFLINE=1" in str(err) or "outgoing traffic" in str(err))
    """
    told = run_elsewhere(
        code, HF_HUB_OFFLINE="1", HF_ENDPOINT=server.url, HF_HOME=str(cache / "empty")
    )
    assert told == [sha, str(len(SHAPES)), "4", "None", "True", *["True"] * 5]
    assert server.requests == []


@pytest.fixture
def unplug(monkeypatch):
    return lambda: use_endpoint(monkeypatch, "http://127.0.0.1:9")  # nothing listens there


def test_a_lost_network_falls_back_to_the_cache(server, cache, unplug, caplog):
    server.add(NAME, checkpoint())
    identity = hub.resolve(NAME, cache_dir=cache)
    hub.download(identity, cache_dir=cache)
    unplug()
    with caplog.at_level(logging.WARNING, logger="gpuclassify.hub"):
        assert hub.resolve(NAME, cache_dir=cache) == identity
    assert "using the cached commit of acme/topics" in caplog.text
    assert hub.download(identity, cache_dir=cache).is_dir()


def test_a_lost_network_and_an_empty_cache_are_told(cache, unplug):
    unplug()
    with pytest.raises(
        hub.HubUnreachableError, match=r"acme/topics at main.*ConnectError.*hf download"
    ):
        hub.resolve(NAME, cache_dir=cache)


def test_a_failing_hub_is_unreachable(server, cache):
    server.is_failing = True
    with pytest.raises(hub.HubUnreachableError, match="the Hub answered 503"):
        hub.resolve(NAME, cache_dir=cache)


def test_a_partly_cached_model_is_not_handed_out(server, cache, unplug):
    server.add(NAME, checkpoint())
    identity = hub.resolve(NAME, cache_dir=cache)
    hub.read_json(identity, "config.json", cache_dir=cache)
    unplug()
    for read in (hub.download, hub.read_tensor_shapes):
        with pytest.raises(
            hub.HubUnreachableError, match=r"not \(completely\) in the cache.*Connect"
        ):
            read(identity, cache_dir=cache)


def test_a_partly_cached_model_is_not_handed_out_when_access_is_lost(server, cache):
    server.add(NAME, checkpoint())
    identity = hub.resolve(NAME, cache_dir=cache)
    hub.read_json(identity, "config.json", cache_dir=cache)
    server.models[NAME].is_private = True
    with pytest.raises(hub.ModelAccessError, match="private model needs a token"):
        hub.download(identity, cache_dir=cache)


def test_weights_cached_by_another_library_serve_offline(server, cache, unplug):
    server.add(NAME, checkpoint())
    identity = hub.resolve(NAME, cache_dir=cache)
    folder = hub.download(identity, cache_dir=cache)
    copied = folder.parents[3] / "copied"  # under a path that the client library has not seen
    shutil.copytree(cache, copied, ignore=lambda _, names: {"trees"} & set(names), symlinks=True)
    unplug()
    assert (hub.download(identity, cache_dir=copied) / "model.safetensors").is_file()
    assert hub.read_tensor_shapes(identity, cache_dir=copied) == SHAPES


# ---- directories


def test_a_digest_follows_what_a_loader_reads(tmp_path):
    folder = write(tmp_path / "model", checkpoint())
    first = hub.directory_digest(folder)
    assert first.startswith("sha256:") and len(first) == len("sha256:") + 64
    write(
        folder, {".git/config.json": b"", "__pycache__/x.json": b"", "train.log": b"", "a.bin": b""}
    )
    assert hub.directory_digest(folder) == first
    os.utime(folder / "model.safetensors", ns=(0, 0))
    touched = hub.directory_digest(folder)
    assert touched != first
    write(folder, {"1_Pooling/config.json": b"{}"})
    assert hub.directory_digest(folder) not in (first, touched)


def test_a_digest_sees_new_headers_behind_equal_sizes_and_times(tmp_path):
    folder = write(tmp_path / "model", {"model.safetensors": weights({"aa": (4,)})})
    times = (folder / "model.safetensors").stat()
    first = hub.directory_digest(folder)
    write(folder, {"model.safetensors": weights({"bb": (4,)})})
    os.utime(folder / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert hub.directory_digest(folder) != first


def test_a_changed_directory_is_refused(tmp_path):
    folder = write(tmp_path / "model", checkpoint())
    identity = hub.resolve(folder)
    assert hub.download(identity) == folder
    assert hub.resolve(folder, identity.revision) == identity
    time.sleep(0.01)
    write(folder, {"config.json": json.dumps(CONFIG).encode()})
    with pytest.raises(hub.ModelChangedError, match="not those that the work was planned"):
        hub.download(identity)


def test_a_copy_that_keeps_times_is_the_same_model(tmp_path):
    folder = write(tmp_path / "a/model", checkpoint())
    digest = hub.directory_digest(folder)
    subprocess.run(["cp", "-pr", folder, tmp_path / "copy"], check=True)
    assert hub.directory_digest(tmp_path / "copy") == digest


def test_a_directory_has_no_revisions(tmp_path):
    write(tmp_path, checkpoint())
    with pytest.raises(ValueError, match=r"revision='v2'.*is a directory"):
        hub.resolve(tmp_path, "v2")


# ---- tokens


@pytest.mark.parametrize("token", ["", "  ", "hf_se cret", "hf_se\ncret", "hf_sécret"])
def test_a_malformed_token_is_refused_without_showing_it(token):
    with pytest.raises(ValueError, match="the token given for acme/topics") as caught:
        hub.remember_token(NAME, token)
    assert "cret" not in str(caught.value)
    assert hub.token_for(NAME) is None


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def failing_reads(server, cache):
    """Every kind of refusal and failure of the Hub, met with a token in hand."""
    sha = server.add("acme/gated", checkpoint(), is_gated=True)
    server.add(NAME, {"model.safetensors": b""})
    pinned = hub.Identity("acme/gated", sha, False)
    reads = [
        lambda: hub.resolve("acme/gated", cache_dir=cache),
        lambda: hub.resolve("acme/missing", cache_dir=cache),
        lambda: hub.resolve(NAME, "v9", cache_dir=cache),
        lambda: hub.read_json(pinned, "config.json", cache_dir=cache),
        lambda: hub.read_tensor_shapes(pinned, cache_dir=cache),
        lambda: hub.read_tensor_shapes(hub.resolve(NAME, cache_dir=cache), cache_dir=cache),
        lambda: hub.download(pinned, cache_dir=cache),
    ]
    for name in (NAME, "acme/gated", "acme/missing"):
        hub.remember_token(name, OTHER_TOKEN)
    return reads


def test_tokens_are_in_no_error_log_or_pickle(server, cache, caplog, tmp_path):
    with caplog.at_level(logging.DEBUG):
        for read in failing_reads(server, cache):
            with pytest.raises((OSError, ValueError)) as caught:
                read()
            links = list(chain(caught.value))
            assert len(links) > 1
            for link in links:
                response = getattr(link, "response", None)
                carried = [dict(response.request.headers)] if response is not None else []
                shown = [str(link), repr(link), repr(vars(link)), repr(carried)]
                assert OTHER_TOKEN not in "".join(shown)
                assert OTHER_TOKEN.encode() not in pickle.dumps(link)
            for link in links[1:]:
                assert link.__traceback__ is None  # its frames would hold the request's headers
    assert any(request.has_token for request in server.requests)
    assert OTHER_TOKEN not in caplog.text
    identity = hub.resolve(write(tmp_path / "model", checkpoint()))
    assert OTHER_TOKEN not in repr(identity)
    assert OTHER_TOKEN.encode() not in pickle.dumps(identity)


def test_the_client_library_would_leak_the_token_that_is_stripped_here(server, cache):
    """Guards the test above: without this module's care the chain does hold the token."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    with pytest.raises(HfHubHTTPError) as caught:
        HfApi().model_info("acme/missing", token=OTHER_TOKEN)
    assert OTHER_TOKEN.encode() in pickle.dumps(caught.value)


@contextlib.contextmanager
def local_client(**settings):
    with (
        LocalCluster(dashboard_address=None, threads_per_worker=1, **settings) as cluster,
        Client(cluster) as client,
    ):
        yield cluster, client


def worker_plugins(dask_worker):
    return [repr(plugin) for key, plugin in dask_worker.plugins.items() if "gpuclassify" in key]


def test_sharing_without_a_client_or_tokens_does_nothing():
    hub.remember_token(NAME, GOOD_TOKEN)
    hub.share_tokens_with_workers([NAME])
    hub.share_tokens_with_workers([])


def test_tokens_reach_present_and_later_worker_processes():
    hub.remember_token(NAME, GOOD_TOKEN)
    hub.remember_token("acme/unrelated", OTHER_TOKEN)
    with local_client(n_workers=1, processes=True) as (cluster, client):
        hub.share_tokens_with_workers([NAME, "acme/open"])
        cluster.scale(2)
        client.wait_for_workers(2)
        assert list(client.run(hub.token_for, NAME).values()) == [GOOD_TOKEN] * 2
        assert list(client.run(hub.token_for, "acme/unrelated").values()) == [None] * 2
        hub.remember_token(NAME, OTHER_TOKEN)
        hub.share_tokens_with_workers([NAME])
        assert list(client.run(hub.token_for, NAME).values()) == [OTHER_TOKEN] * 2


def test_sharing_is_idempotent_and_works_within_one_process(monkeypatch, caplog):
    hub.remember_token(NAME, GOOD_TOKEN)
    with (
        caplog.at_level(logging.DEBUG),
        local_client(n_workers=1, processes=False) as (cluster, client),
    ):
        registered = []
        register = client.register_plugin
        monkeypatch.setattr(
            client, "register_plugin", lambda p: (registered.append(p), register(p))
        )
        for _ in range(3):
            hub.share_tokens_with_workers([NAME])
        assert len(registered) == 1
        assert client.run(worker_plugins) == {
            address: [f"<TokenPlugin {NAME}>"] for address in client.scheduler_info()["workers"]
        }
        monkeypatch.setattr(tokens, "_tokens", {})
        assert hub.token_for(NAME) is None

        async def join():
            async with Worker(cluster.scheduler.address, dashboard=False):
                return hub.token_for(NAME)

        assert client.sync(join) == GOOD_TOKEN
    assert GOOD_TOKEN not in caplog.text
    assert GOOD_TOKEN not in repr(vars(cluster.scheduler).get("events", ""))


def test_an_asynchronous_client_is_told_the_cure():
    hub.remember_token(NAME, GOOD_TOKEN)

    async def share():
        settings = {"processes": False, "n_workers": 0, "dashboard_address": None}
        async with Client(asynchronous=True, **settings):
            hub.share_tokens_with_workers([NAME])

    with pytest.raises(RuntimeError, match="set HF_TOKEN on the workers") as caught:
        asyncio.run(share())
    assert GOOD_TOKEN not in str(caught.value)


def test_importing_hub_loads_neither_the_client_library_nor_distributed():
    code = """
        import sys
        import gpuclassify.hub
        print(sorted({"huggingface_hub", "distributed", "torch"} & set(sys.modules)))
    """
    assert run_elsewhere(code) == ["[]"]
