"""What a name means: a directory, or a model of the Hub at a commit."""

import pickle
import warnings

import pytest

from gpuclassify import (
    DomainClassifier,
    SemanticDuplicates,
    ZeroShotClassifier,
    hub,
    published,
)
from gpuclassify.classifiers import FAMILIES
from gpuclassify.classifiers.published import CATALOGUE
from tests.hub.small_model import GOOD_TOKEN, NAME, checkpoint, write

pytestmark = pytest.mark.contract


def test_paths_are_directories_by_spelling():
    assert all(map(hub.is_directory_name, ["/models/x", "~/x", "./x", "../x", ".", "a/b/c"]))
    assert not any(map(hub.is_directory_name, ["acme/topics", "gpt2", "", "a.b/c~"]))


def test_an_existing_directory_wins_over_a_hub_name(tmp_path, monkeypatch):
    write(tmp_path / "acme/topics", checkpoint())
    monkeypatch.chdir(tmp_path)
    identity = hub.resolve(NAME)
    assert identity.is_directory and identity.name == str(tmp_path / "acme/topics")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/acme/../acme/topics") == identity


PUBLISHED = "nvidia/domain-classifier"


def test_a_class_means_the_hub_whatever_directory_has_the_name(
    server, cache, tmp_path, monkeypatch
):
    sha = server.add(PUBLISHED, checkpoint()).sha_of()
    write(tmp_path / PUBLISHED, checkpoint())
    monkeypatch.chdir(tmp_path)
    default = DomainClassifier(cache_dir=cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (default, pickle.loads(pickle.dumps(default))):
            assert each.model.identity == hub.Identity(PUBLISHED, sha, False)
        assert DomainClassifier(model=f"./{PUBLISHED}").model.identity.is_directory
        assert not published("ultra-fineweb-en").options.model.startswith("/")
    with pytest.warns(
        UserWarning, match=f"'{PUBLISHED}' is a directory here, and its model is tak"
    ):
        assert DomainClassifier(model=PUBLISHED).model.identity.is_directory


def test_every_published_name_means_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = {ZeroShotClassifier: {"labels": ["a", "b"]}}
    published = [kind for kind in FAMILIES.values() if "model" in kind.defaults]
    made = [kind(**own.get(kind, {})) for kind in published]
    made += [entry() for entry in CATALOGUE if not entry.variants]
    named = [(each, "model") for each in made]
    named += [(each, "base_model") for each in made if "base_model" in type(each).defaults]
    for each, setting in named:
        name = getattr(each.options, setting)
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        assert not hub.is_directory_name(name)
        assert hub.is_directory_name(f"{name}")  # given by a user
    finder = SemanticDuplicates()
    (tmp_path / finder.embedder).mkdir(parents=True, exist_ok=True)
    assert not hub.is_directory_name(finder.make_embedder().options.model)


NEITHER = r"neither a directory \(looked for /.*Hub name"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, NEITHER) for name in ("my model", "a--b", "acme/", "")),
        ("{}/gone", "/gone: no such directory"),
        ("{}/model.safetensors", "a file, not a directory"),
    ],
)
def test_a_name_that_is_neither_is_told_both_readings(tmp_path, name, words):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(hub.ModelNotFoundError, match=words):
        hub.resolve(name.format(tmp_path))


def test_main_and_branches_resolve_to_commits(server, cache):
    main = server.add(NAME, {"README.md": b"hello"}).sha_of()  # without a config, too
    branch = server.repos[NAME].commit({"config.json": b"{}"}, branch="refs/pr/1")
    assert hub.resolve(NAME, cache_dir=cache) == hub.Identity(NAME, main, False)
    assert hub.resolve(NAME, "main", cache_dir=cache).revision == main
    assert hub.resolve(NAME, "refs/pr/1", cache_dir=cache).revision == branch
    newer = server.repos[NAME].commit({"config.json": b"{}"})
    assert hub.resolve(NAME, cache_dir=cache).revision == newer
    assert len({main, branch, newer}) == 3
    with pytest.raises(hub.ModelNotFoundError, match="acme/topics has no revision 'v9'"):
        hub.resolve(NAME, "v9", cache_dir=cache)


def test_a_sha_resolves_without_a_request(server, cache):
    sha = "0123456789ABCDEFabcd0123456789abcdef0123"
    assert hub.resolve(NAME, sha, cache_dir=cache).revision == sha.lower()
    assert hub.is_pinned(NAME, sha) and hub.is_pinned(NAME, sha.lower())
    assert not hub.is_pinned(NAME, sha[:-1])
    assert server.requests == []


def test_a_missing_model_is_named_with_and_without_a_token(server, cache):
    with pytest.raises(hub.ModelNotFoundError, match=r"no model 'acme/topics'.*no directory /"):
        hub.resolve(NAME, cache_dir=cache)
    hub.remember_token(NAME, GOOD_TOKEN)
    with pytest.raises(hub.ModelNotFoundError, match="no model 'acme/topics'") as caught:
        hub.resolve(NAME, cache_dir=cache)
    assert not isinstance(caught.value, hub.ModelAccessError)
