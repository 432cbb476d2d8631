"""Files of a model, read one by one or downloaded, always at the pinned commit."""

import contextlib
import json
from pathlib import Path

import pytest

from gpuclassify import hub
from tests.hub.small_model import CONFIG, NAME, SHAPES, checkpoint, write


def test_broken_json_is_named(server, cache, tmp_path):
    server.add(NAME, {"config.json": b"{broken", "list.json": b"[1]"})
    local = hub.resolve(write(tmp_path / "model", {"config.json": b"\xff{", "list.json": b"[1]"}))
    for identity in (hub.resolve(NAME, cache_dir=cache), local):
        with pytest.raises(ValueError, match=r"config\.json of .* is not (UTF-8|valid JSON)"):
            hub.read_json(identity, "config.json", cache_dir=cache)
        with pytest.raises(ValueError, match=r"list\.json of .* a JSON list"):
            hub.read_json(identity, "list.json", cache_dir=cache)


def test_a_text_file_is_read_on_the_hub_and_then_from_the_cache_and_of_a_directory(
    server, cache, unplug, tmp_path
):
    server.add(NAME, checkpoint() | {"README.md": "# Größe\r\ntext\n".encode(), "bad.md": b"\xff"})
    identity = hub.resolve(NAME, cache_dir=cache)
    assert hub.read_text(identity, "README.md", cache_dir=cache) == "# Größe\ntext\n"
    assert hub.read_text(identity, "missing.md", cache_dir=cache) is None
    with pytest.raises(ValueError, match=r"bad\.md of acme/topics is not UTF-8 text"):
        hub.read_text(identity, "bad.md", cache_dir=cache)
    unplug()
    assert hub.read_text(identity, "README.md", cache_dir=cache) == "# Größe\ntext\n"
    identity = hub.resolve(write(tmp_path / "model", checkpoint()))
    assert hub.read_text(identity, "README.md") == "# Topics"
    assert hub.read_text(identity, "missing.md") is None


def test_reads_stay_at_the_pinned_commit(server, cache):
    server.add(NAME, checkpoint())
    identity = hub.resolve(NAME, cache_dir=cache)
    server.repos[NAME].commit({"config.json": b'{"newer": 1}'})
    config = hub.read_json(identity, "config.json", cache_dir=cache)
    assert (config, list(config["id2label"])) == (CONFIG, ["1", "0"])  # in the file's order
    folder = hub.download(identity, cache_dir=cache)
    assert json.loads((folder / "config.json").read_text()) == CONFIG


def test_a_download_takes_no_pickles_and_then_no_requests(server, cache):
    own = {"1_Pooling/config.json": b"{}", "chat_template.jinja": b"{{ messages }}"}
    server.add(NAME, {**checkpoint(), **own})
    identity = hub.resolve(NAME, cache_dir=cache)
    folder = hub.download(identity, cache_dir=cache)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", *own}
    assert hub.weights_paths(folder) == {folder / "model.safetensors": True}  # never changes
    server.requests.clear()
    assert hub.download(identity, cache_dir=cache) == folder
    assert hub.read_tensor_shapes(identity, cache_dir=cache) == SHAPES
    assert hub.read_json(identity, "missing.json", cache_dir=cache) is None
    assert "pytorch_model.bin" in hub.list_files(identity, cache_dir=cache)
    assert server.requests == []


@pytest.mark.parametrize(
    "name", ["../../../../escaped.json", "/escaped.json", "a/../../escaped.json"]
)
def test_names_in_the_hubs_answers_lead_to_no_file_outside_of_the_cache(
    server, cache, tmp_path, name
):
    server.add(NAME, {**checkpoint(), name: b'{"escaped": 1}'})
    identity = hub.resolve(NAME, cache_dir=cache)
    with contextlib.suppress(ValueError, OSError):
        hub.download(identity, cache_dir=cache)
    with contextlib.suppress(ValueError, OSError):
        hub.read_json(identity, name, cache_dir=cache)
    outside = [path for path in tmp_path.rglob("*escaped*") if cache not in path.parents]
    assert outside == [] and not Path("/escaped.json").exists()


def test_a_busy_hub_is_asked_again(server, cache):
    server.add(NAME, checkpoint())
    for method, path in [("HEAD", "config.json"), ("GET", "/tree/"), ("GET", "/store/")]:
        server.fail(method, path, 503)
    server.fail("GET", "/resolve/", "drop")
    server.fail("GET", "/api/", 429, Retry_After="0")
    identity = hub.resolve(NAME, cache_dir=cache)
    assert hub.read_tensor_shapes(identity, cache_dir=cache) == SHAPES
    assert hub.read_json(identity, "config.json", cache_dir=cache) == CONFIG
    assert (hub.download(identity, cache_dir=cache) / "model.safetensors").is_file()
    assert sum(request.status in (429, 503) for request in server.requests) == 4


@pytest.mark.parametrize("asked", ["978307200", "9" * 400])
def test_a_hub_that_asks_for_years_is_not_waited_for(server, cache, asked):
    server.add(NAME, checkpoint())
    server.fail("GET", "/api/", 429, Retry_After=asked)
    figure = "978,307,200" if len(asked) < 20 else "inf"
    with pytest.raises(OSError, match=f"asks for a wait of {figure} seconds"):
        hub.resolve(NAME, cache_dir=cache)
