"""A model that is one file of the Hub: its header is read by ranges, the rest is fetched once."""

import dask.dataframe as dd
import pandas as pd
import pytest

from gpuclassify import FastTextClassifier, LanguageIdentifier
from gpuclassify.hub import HubUnreachableError, ModelAccessError, ModelNotFoundError
from tests.hub.conftest import use_endpoint
from tests.hub.small_model import GOOD_TOKEN

pytestmark = pytest.mark.contract

NAME = "acme/quality"
FRAME = pd.DataFrame({"text": ["theorem proof", None]})


def sent_bytes(server):
    return sum(r.sent_bytes for r in server.requests if r.path.startswith("/store/"))


@pytest.fixture
def model(fasttext_model):
    """The largest of the small models: 60 columns of a matrix for each word."""
    return fasttext_model("wide")


def test_labels_cost_a_part_of_the_file_and_classifying_one_download(server, cache, model):
    size = model.stat().st_size
    sha = server.add(NAME, {"model.bin": model.read_bytes(), "README.md": b"a card"}).sha_of()
    made = FastTextClassifier(model=NAME, cache_dir=cache)
    assert made.labels == FastTextClassifier(model=model).labels
    assert made.model.identity.revision == sha
    assert 0 < sent_bytes(server) < size / 2
    assert not list(cache.glob("**/model.bin"))
    read = sent_bytes(server)
    found = made(FRAME)
    assert size <= sent_bytes(server) - read < 1.1 * size
    pd.testing.assert_frame_equal(found, FastTextClassifier(model=model)(FRAME))
    fetched = sent_bytes(server)
    FastTextClassifier(model=NAME, cache_dir=cache)(FRAME)
    assert sent_bytes(server) == fetched


def test_a_repository_with_several_files_is_asked_which(server, cache, model):
    server.add(NAME, {"a.bin": model.read_bytes(), "b.ftz": model.read_bytes()})
    with pytest.raises(ModelNotFoundError, match=r"it has \['a.bin', 'b.ftz'\]: pass file="):
        _ = FastTextClassifier(model=NAME, cache_dir=cache).labels
    assert len(FastTextClassifier(model=NAME, file="b.ftz", cache_dir=cache).labels) == 3


def test_a_gated_file_needs_the_token_that_opens_it(server, cache, model):
    server.add(NAME, {"a.bin": model.read_bytes()}, is_gated=True, readers={GOOD_TOKEN})
    with pytest.raises(ModelAccessError, match="gated"):
        _ = FastTextClassifier(model=NAME, cache_dir=cache).labels
    opened = FastTextClassifier(model=NAME, cache_dir=cache, token=GOOD_TOKEN)
    assert len(opened.labels) == 3
    assert opened(FRAME)["fasttext_pred"].notna().tolist() == [True, False]


def test_a_client_without_the_hub_plans_by_labels_and_a_commit(
    server, cache, model, unplug, monkeypatch
):
    sha = server.add(NAME, {"model.bin": model.read_bytes()}).sha_of()
    lazy = dd.from_pandas(FRAME, npartitions=1)
    settings = {"model": NAME, "cache_dir": cache, "labels": FastTextClassifier(model=model).labels}
    unplug()
    with pytest.raises(HubUnreachableError, match="pass revision= with 40 hex digits"):
        FastTextClassifier(**settings)(lazy)
    planned = FastTextClassifier(**settings, revision=sha)(lazy)
    use_endpoint(monkeypatch, server.url)
    found = planned.compute(scheduler="sync")
    expected = FastTextClassifier(model=model)(lazy).compute(scheduler="sync")
    pd.testing.assert_frame_equal(found, expected)


def test_glotlids_files_need_no_choice(server, cache, model, fasttext_model):
    other = fasttext_model("softmax").read_bytes()
    files = {"model.bin": model.read_bytes(), "model_v1.bin": other, "model_v3.bin": other}
    server.add("cis-lmu/glotlid", files)
    assert LanguageIdentifier(cache_dir=cache).model.file.filename == "model.bin"
    version = LanguageIdentifier(cache_dir=cache, file="model_v3.bin")
    assert version.model.file.filename == "model_v3.bin"


def test_the_tokenizer_of_a_model_is_fetched_at_its_commit(server, cache, model, tmp_path):
    from tokenizers import Tokenizer, models

    place, words = "local_tokenizer/tokenizer.json", {"theorem": 0, "proof": 1, "[UNK]": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    described = (tmp_path / "tokenizer.json").read_bytes()
    files = {"classifiers/a.bin": model.read_bytes(), place: described}
    sha = server.add(NAME, files).sha_of()
    settings = {"model": NAME, "cache_dir": cache, "preprocess": "ultra-fineweb"}
    made = FastTextClassifier(**settings)
    lazy = made(dd.from_pandas(FRAME, npartitions=1))
    assert made.describe()["tokenizer_revision"] == made.describe()["model_revision"] == sha
    assert not list(cache.glob("**/tokenizer.json"))
    server.repos[NAME].commit(files | {place: b"{}"})  # a later one, which is no tokenizer
    assert lazy.compute(scheduler="sync")["fasttext_pred"].notna().tolist() == [True, False]
    server.add("acme/lone", {"a.bin": model.read_bytes()})
    with pytest.raises(ModelNotFoundError, match="acme/lone has no such file: pass the whole"):
        _ = FastTextClassifier(**settings | {"model": "acme/lone"}).labels
