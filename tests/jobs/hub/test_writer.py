"""Dataset repositories as output: one commit, whatever the Hub answers and whoever dies."""

import io
import itertools
import json
import logging
import os
import pickle
import signal
import time

import cloudpickle
import dask.dataframe as dd
import datasets
import pandas as pd
import pytest
import yaml
from hub_client import PARTS, REPO, TOKEN, assert_clean, push_in_process
from huggingface_hub import DatasetCard
from job_faults import double, in_process, write_input

from gpuclassify import QualityClassifier
from gpuclassify.commands.settings import JobSettings
from gpuclassify.hub.calls import TRIES, DatasetAccessError, HubBusyError, HubRefusedError
from gpuclassify.jobs.input.readers import JsonlReader, ParquetReader, read_files
from gpuclassify.jobs.ledger.manifest import MANIFEST
from gpuclassify.jobs.ledger.records import sealed
from gpuclassify.jobs.output.hub_writer import HubWriter
from gpuclassify.jobs.output.writers import JsonlWriter, ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline, push_to_hub
from gpuclassify.mapping.select import Select
from tests.hub_server import File, RefusalError
from tests.processes import local_client

pytestmark = pytest.mark.slow


@pytest.fixture
def frame():
    return pd.DataFrame({"id": range(600), "text": [f"text {i} " * 20 for i in range(600)]})


@pytest.fixture
def push(hub, frame, tmp_path):
    """Pushes a frame of six partitions; some arguments have other defaults."""

    def run(data=frame, **options):
        lazy = dd.from_pandas(data, npartitions=PARTS) if isinstance(data, pd.DataFrame) else data
        defaults = {"staging": str(tmp_path / "out"), "token": TOKEN, "endpoint": hub.url}
        defaults["output_bytes"] = 0  # a file for each partition
        return push_to_hub(lazy, REPO, **{**defaults, **options})

    return run


def rows(repo, folder="data", revision="main"):
    """The rows of the repository's Parquet files."""
    tree = repo.tree(revision)
    names = sorted(name for name in tree if name.startswith(f"{folder}/"))
    return pd.concat([pd.read_parquet(io.BytesIO(tree[name].data)) for name in names])


def assert_same_rows(found, frame):
    pd.testing.assert_frame_equal(found.reset_index(drop=True), frame, check_dtype=False)


def assert_pushed_once(server, frame, others=0):
    """All rows are there, of one commit beside the first one and those of others."""
    repo = server.repos[REPO]
    assert_same_rows(rows(repo), frame)
    assert len(repo.branches["main"]) == 2 + others
    assert len(server.uploads) == len(set(server.uploads)) == PARTS


def test_a_job_on_a_cluster_is_one_commit_and_its_token_is_nowhere(
    hub, tmp_path, caplog, frame
):  # fmt: skip
    caplog.set_level(logging.DEBUG)
    write_input(tmp_path / "in")
    hub.add(REPO, is_private=True)
    hub.fail("PUT", "/upload/", 503)
    hub.fail("POST", "/preupload/", 429, Retry_After="0")
    hub.fail("POST", "/commit/", 503, "drop", Retry_After="0")
    reader = JsonlReader(f"{tmp_path}/in/*.jsonl", part_bytes=8_000)
    out = tmp_path / "out"
    options = {"token": TOKEN, "endpoint": hub.url, "output_bytes": 0}
    writer = HubWriter(REPO, staging=str(out), path="some/rows", **options)
    pipeline = Pipeline([reader, double, writer])
    job = pipeline.prepare()
    with local_client(2, processes=True) as client:
        assert TOKEN not in str(client.run(lambda: str(dict(os.environ)))), "it must travel"
        summary = job.run(client)
        logs = str(client.get_worker_logs()) + str(client.get_scheduler_logs())
        arguments = str(client.run(lambda: open("/proc/self/cmdline").read()))  # noqa: PTH123, SIM115
    repo = hub.repos[REPO]
    assert [repo.titles[c] for c in repo.branches["main"]] == [
        "initial commit",
        f"Add {job.manifest.count} files with gpuclassify",
    ]
    assert sorted(rows(repo, "some/rows")["id"]) == [i for i in range(600) if i % 3]
    assert summary.commit_url == f"{hub.url}/datasets/{REPO}/commit/{repo.branches['main'][-1]}"
    assert len(hub.uploads) == len(set(hub.uploads)) == job.manifest.count
    shown = [repr(pipeline), repr(job), str(summary), logs, arguments, caplog.text]
    shown += [path.read_text() for path in (out / "_gpuclassify").rglob("*.json*")]
    shown += [path.read_text() for path in (out / "_report").iterdir()]
    assert not any(TOKEN in text for text in shown)
    pickles = [pickle.dumps(writer), cloudpickle.dumps(pipeline), cloudpickle.dumps(job)]
    pickles.append(job.spec.pack())
    assert not any(TOKEN.encode() in content for content in pickles)


def test_files_are_called_as_loaders_expect(hub, push, frame):
    summary = push(private=True)
    repo = hub.repos[REPO]
    assert repo.is_private
    names = [f"data/train-{i:05d}-of-00006.parquet" for i in range(6)]
    assert sorted(repo.tree()) == [".gitattributes", *names]
    assert_pushed_once(hub, frame)
    assert list(rows(repo).columns) == ["id", "text"]  # no index
    assert summary.commit_url.endswith(repo.branches["main"][-1])


def test_a_finished_job_asks_for_nothing_and_restart_looks_again(hub, push, frame, tmp_path):
    first = push()
    hub.requests.clear()
    assert push().commit_url == first.commit_url
    assert hub.requests == []
    [note] = (tmp_path / "out/_gpuclassify").glob("commit-*.json")
    content = note.read_bytes()
    note.write_bytes(content.replace(first.commit_url.rpartition("/")[2].encode(), b"0" * 40))
    assert push().commit_url == first.commit_url  # a note that is edited does not count
    assert note.read_bytes() == content
    for commit in ("../../evil", None, ["a"], "\x1b]0;x"):  # nor does one that names no commit
        noted = json.loads(content)
        del noted["sha256"]
        note.write_bytes(sealed(noted | {"commit": commit}))
        assert push().commit_url == first.commit_url
    (tmp_path / "out/_SUCCESS").unlink()
    push()
    assert_pushed_once(hub, frame)
    repo = hub.repos[REPO]
    repo.commit({".gitattributes": repo.tree()[".gitattributes"]}, "somebody removes all")
    push(restart=True)
    assert_pushed_once(hub, frame, others=2)
    elsewhere = push(path="again", revision="draft/one")  # and another place computes nothing
    assert elsewhere.resumed_parts == PARTS
    assert_same_rows(rows(repo, "again", "draft/one"), frame)
    assert len(repo.branches["main"]) == 4


@pytest.mark.parametrize(
    "outcomes",
    [(503,), ("drop",), (429, 500), (412, 412, 412, 412, 412)],
    ids=["503", "lost", "busy", "moved"],
)
def test_a_commit_that_fails_or_whose_answer_is_lost_is_made_once(hub, push, frame, outcomes):
    hub.fail("POST", "/commit/", *outcomes, Retry_After="0")
    push()
    assert_pushed_once(hub, frame)


@pytest.mark.parametrize("code", ["RevisionNotFound", "EntryNotFound", "RepoNotFound", ""])
def test_a_commit_that_the_hub_does_not_show_for_a_moment_is_made_once(hub, push, frame, code):
    repo, refused = hub.add(REPO), []

    def lag():
        if len(repo.branches["main"]) > 1 and len(refused) < 2:
            refused.append(code)
            raise RefusalError(404, "not here yet", code)

    hub.fail("GET", "/tree/", *[lag] * 20)
    summary = push()
    assert refused == [code] * 2
    assert_pushed_once(hub, frame)
    assert summary.commit_url.endswith(repo.branches["main"][-1])


@pytest.mark.parametrize("code", ["RevisionNotFound", "RepoNotFound", ""])
def test_a_branch_that_is_not_shown_for_a_moment_is_not_taken_for_empty(hub, push, code):
    hub.add(REPO, {"data/train-00000-of-00001.parquet": b"another job's"})

    def lag():
        raise RefusalError(404, "not here yet", code)

    hub.fail("GET", "/tree/", lag)
    with pytest.raises(FileExistsError, match="has 1 files of the split 'train'"):
        push()


@pytest.mark.parametrize("revision", ["main", "draft"])
def test_a_token_that_may_write_need_not_be_allowed_to_create(hub, push, frame, revision):
    repo = hub.add(REPO)
    repo.branches["draft"] = [repo.sha_of()]
    for path in ("/api/repos/create", "/branch/"):
        hub.fail("POST", path, *[403] * 9)
    push(revision=revision)
    assert_same_rows(rows(repo, revision=revision), frame)


FEATURES = [{"name": "id", "dtype": "int64"}, {"name": "text", "dtype": "string"}]
LABEL = {"name": "id", "dtype": {"class_label": {"names": {str(n): f"n{n}" for n in range(99)}}}}
CARDS = [
    *("info", "info of labels", "info and configs", "exact names", "a dictionary", "one pattern"),
    *("two configs", "unreadable"),
]


def make_card(kind, splits):
    """The metadata of a card, in the forms that `datasets` and people write."""

    def described(first=FEATURES[0], **config):
        sizes = [{"name": name, "num_bytes": 9, "num_examples": splits[name]} for name in splits]
        info = {"features": [first, FEATURES[1]], "splits": sizes}
        return {**config, **info, "download_size": 9, "dataset_size": 18}

    def files(folder="data", names=splits, end="*"):
        return [{"split": name, "path": f"{folder}/{name}-{end}"} for name in names]

    def config(name, data_files, **more):
        return {"config_name": name, "data_files": data_files, **more}

    first = next(iter(splits))
    one = f"data/{first}-*"
    two = [config("en", files("en")), config("de", files(names=[first]), default=True)]
    infos = [described(config_name="en"), described(config_name="de")]
    return {
        "info": {"dataset_info": described()},
        "info of labels": {"dataset_info": described(LABEL)},
        "info and configs": {"dataset_info": described(), "configs": [config("default", files())]},
        "exact names": {"configs": [config("default", files(end="00000-of-00001.parquet"))]},
        "a dictionary": {"configs": [config("default", {first: [one]})]},
        "one pattern": {"configs": [config("default", one)]},
        "two configs": {"dataset_info": infos, "configs": two},
        "unreadable": {"tags": ["books"]},
    }[kind]


@pytest.mark.parametrize("old", ["", "# Books\n\nA text.\n", "---\nlicense: mit\n---\n# Books\n"])
def test_the_card_says_where_columns_come_from(hub, frame, tmp_path, old):
    repo = hub.add(REPO, {"README.md": old.encode()} if old else {})
    frame.to_parquet(tmp_path / "in.parquet", index=False)

    def run(split, factor):
        def with_rank(frame):
            return frame.assign(rank=frame["id"] * factor)

        options = {"token": TOKEN, "endpoint": hub.url, "split": split, "overwrite": True}
        writer = HubWriter(REPO, staging=f"{tmp_path}/{split}-{factor}", **options)
        where = Select(f"rank < {factor * 100}")
        Pipeline([ParquetReader(f"{tmp_path}/in.parquet"), with_rank, where, writer]).run()
        return repo.tree()["README.md"].data.decode()

    first = run("train", 1)
    card = DatasetCard(first)
    assert old in first and card.data.license == ("mit" if "mit" in old else None)
    assert "### rank\n" in card.text and "* rank &lt; 100\n" in card.text
    assert old or (card.data.tags == ["gpuclassify"] and card.text.startswith(f"\n# {REPO}\n"))
    second = run("test", 2)
    assert second.startswith(first) and "* rank &lt; 200\n" in second
    again = run("train", 3)
    assert again == second.replace("* rank &lt; 100\n", "* rank &lt; 300\n")


def test_the_card_names_datasets_and_models_and_no_path(hub, frame, tmp_path, checkpoint):
    buffer = io.BytesIO()
    frame.to_parquet(buffer)
    hub.add("acme/raw")
    sha = hub.repos["acme/raw"].commit({"data/0.parquet": File(buffer.getvalue(), is_large=True)})
    options = {"token": TOKEN, "endpoint": hub.url}
    reader = ParquetReader("hf://datasets/acme/raw/data/*.parquet", storage_options=options)
    classifier = QualityClassifier(model=checkpoint("quality"))
    writer = HubWriter(REPO, staging=f"{tmp_path}/staging", **options)
    Pipeline([reader, classifier, writer]).run()
    card = hub.repos[REPO].tree()["README.md"].data.decode()
    assert f"| acme/raw | {sha} |" in card
    assert "* class: QualityClassifier\n" in card
    assert classifier.model.identity.revision.removeprefix("sha256:") in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("has_other_columns", [False, True])
@pytest.mark.parametrize("split", ["train", "test", "new"])
@pytest.mark.parametrize("kind", CARDS)
def test_datasets_loads_a_split_that_was_replaced_or_added(
    hub, push, frame, tmp_path, kind, split, has_other_columns
):
    """With the card that is in the same commit; splits of one configuration have equal columns."""

    def content(count):
        buffer, numbers = io.BytesIO(), range(count)
        old = pd.DataFrame({"id": numbers, "text": [f"old {n}" for n in numbers]})
        old.to_parquet(buffer, index=False)
        return File(buffer.getvalue(), is_large=True)

    splits = {split: 10} if has_other_columns else {"train": 10, "test": 4}
    metadata = yaml.safe_dump(make_card(kind, splits))
    metadata += "configs: 7\n" * (kind == "unreadable")
    text = f"---\nlicense: mit\n{metadata}---\n# Books\n\nA text.\n"
    old = {f"data/{name}-00000-of-00001.parquet": content(splits[name]) for name in splits}
    if kind == "two configs":
        old |= {path.replace("data/", "en/"): file for path, file in old.items()}
    repo = hub.add(REPO, {"README.md": text.encode(), **old})
    frame = frame.assign(id=frame["id"] % 99, **({"score": 0.5} if has_other_columns else {}))
    push(frame, split=split, overwrite=True)
    assert len(repo.branches["main"]) == 2
    for path, file in repo.tree().items():
        (tmp_path / "repo" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repo" / path).write_bytes(file.data)
    card = (tmp_path / "repo/README.md").read_text()
    assert "license: mit" in card
    assert card.endswith("---\n# Books\n\nA text.\n")
    if kind == "unreadable":
        assert card == text
        return
    name = "de" if kind == "two configs" else "default"
    found = datasets.load_dataset(f"{tmp_path}/repo", name, cache_dir=f"{tmp_path}/cache")
    assert found[split].to_pandas()[list(frame)].equals(frame)
    counts = {"train": 10, "test": 4} if kind.startswith("info") and not has_other_columns else {}
    assert {s: found[s].num_rows for s in counts if s != split}.items() <= counts.items()
    if kind == "info of labels" and not has_other_columns:
        assert found[split].features["id"].names[:2] == ["n0", "n1"]


def test_the_files_of_a_racing_writer_stay(hub, push, frame):
    repo = hub.add(REPO)
    numbers = itertools.count()

    def race():
        number = next(numbers)
        repo.commit(repo.tree() | {f"other-{number}.txt": File(b"theirs")}, "other")

    hub.fail("POST", "/commit/", race, race)
    hub.fail("GET", r"/datasets/acme/books/revision", 503)  # once more than the client tries
    push()
    assert {"other-0.txt", "other-1.txt"} < set(repo.tree())
    assert_pushed_once(hub, frame, others=2)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_hub_that_stays_busy_raises_and_the_next_run_only_commits(hub, push, frame, forgets):
    """But for what the store has forgotten meanwhile."""
    hub.fail("POST", "/commit/", *[503] * TRIES, Retry_After="0")
    with pytest.raises(HubBusyError, match=r"the Hub answered 503 for acme/books") as caught:
        push()
    assert "run the same job again to upload" in caught.value.__notes__[-1]
    assert len(hub.uploads) == PARTS
    if forgets:
        hub.repos[REPO].large.clear()
        hub.uploads.clear()
    assert push().resumed_parts == PARTS
    assert_pushed_once(hub, frame)


@pytest.mark.parametrize(
    ("method", "pattern", "number"), [("PUT", "/upload/", 4), ("POST", "/commit/", 1)]
)
def test_a_client_that_is_killed_uploads_nothing_twice(
    hub, tmp_path, frame, method, pattern, number
):
    """It dies while the server has its request, which the server answers all the same."""
    frame.to_parquet(tmp_path / "frame.parquet")
    processes = []
    earlier = [lambda: None] * (number - 1)
    hub.fail(method, pattern, *earlier, lambda: os.kill(processes[0].pid, signal.SIGKILL))
    processes.append(in_process(push_in_process, tmp_path, hub.url))
    processes[0].join()
    assert processes[0].exitcode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while hub.count(method, pattern) < number and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(hub.uploads) == (4 if method == "PUT" else PARTS)
    assert len(hub.repos[REPO].branches["main"]) == (1 if method == "PUT" else 2)
    lazy = dd.from_pandas(pd.read_parquet(tmp_path / "frame.parquet"), npartitions=PARTS)
    options = {"token": TOKEN, "endpoint": hub.url, "output_bytes": 0}
    summary = push_to_hub(lazy, REPO, staging=str(tmp_path / "out"), **options)
    assert summary.resumed_parts == PARTS
    assert_pushed_once(hub, frame)


def test_an_upload_that_is_refused_raises_the_answer_without_the_request(hub, push):
    hub.fail("PUT", "/upload/", 400)
    with pytest.raises(HubRefusedError, match=r"the Hub answered 400 for acme/books") as caught:
        push()
    assert_clean(caught.value, [TOKEN])


def test_a_commit_that_lacks_what_somebody_removed_meanwhile_does_not_count(hub, push, frame):
    push()
    repo = hub.repos[REPO]
    names = sorted(name for name in repo.tree() if name.startswith("data/"))
    others = {name: file for name, file in repo.tree().items() if name not in names}
    repo.commit({**others, **{name: repo.tree()[name] for name in names[1:]}}, "one removed")
    hub.fail("POST", "/preupload/", lambda: repo.commit(others, "the rest removed"))
    with pytest.raises(HubRefusedError, match="lacks files that were there"):
        push(restart=True)
    push()
    assert_same_rows(rows(repo), frame)


def test_a_repository_that_ignores_such_files_gets_them_all_the_same(hub, push, frame):
    hub.add(REPO, {".gitignore": File(b"*.parquet\n*.jsonl\n")})
    push()
    assert_pushed_once(hub, frame)
    push(file_format="jsonl", path="lines", staging="memory://lines")
    assert len([name for name in hub.repos[REPO].tree() if name.startswith("lines/")]) == PARTS


def test_other_files_of_the_split_are_refused_or_replaced_and_all_else_stays(hub, push, frame):
    old = {f"data/train-{i:05d}-of-00003.parquet": File(b"old", True) for i in range(3)}
    mine = {"README.md": File(b"# mine"), "data/test-00000-of-00001.parquet": File(b"test", True)}
    repo = hub.add(REPO, {**old, **mine})
    with pytest.raises(FileExistsError, match=r"3 files of the split 'train'.*overwrite=True"):
        push()
    assert not hub.uploads, "it is found out before anything is computed"
    push(overwrite=True)
    assert {name: repo.tree()[name] for name in mine} == mine
    names = [name for name in repo.tree() if name.startswith("data/train-")]
    assert names == [f"data/train-{i:05d}-of-00006.parquet" for i in range(6)]
    assert len(repo.branches["main"]) == 2


def test_parts_without_rows_are_left_out_but_columns_stay(hub, push, frame, tmp_path):
    lazy = dd.from_pandas(frame, npartitions=PARTS)
    push(lazy[lazy.id >= 250])
    repo = hub.repos[REPO]
    assert [name for name in repo.tree() if "train" in name] == [
        f"data/train-{i:05d}-of-00004.parquet" for i in range(4)
    ]
    assert rows(repo)["id"].tolist() == list(range(250, 600))
    push(lazy[lazy.id < 0], path="nothing", staging=str(tmp_path / "nothing"))
    assert list(rows(repo, "nothing").columns) == ["id", "text"]


def test_a_list_of_parts_that_is_cut_is_not_taken_for_the_whole(hub, push, tmp_path):
    push()
    path = tmp_path / "out" / MANIFEST
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
    writer = HubWriter(REPO, staging=str(tmp_path / "out"), token=TOKEN, endpoint=hub.url)
    with pytest.raises(ValueError, match=r"lists 4 of the job's 6 parts: run the same job again"):
        writer.upload(None, restart=True)
    push()
    assert len(hub.repos[REPO].branches["main"]) == 2


def test_what_git_keeps_itself_travels_inside_of_the_commit(hub, push, frame):
    push(file_format="jsonl", compression="gzip")
    push(file_format="jsonl", compression="gzip")
    repo = hub.repos[REPO]
    names = [name for name in repo.tree() if name.startswith("data/")]
    assert names == [f"data/train-{i:05d}-of-00006.jsonl.gz" for i in range(6)]
    assert not hub.uploads
    assert len(repo.branches["main"]) == 2


def test_a_wrong_token_is_refused_before_work_begins_and_not_shown(hub, push):
    hub.add(REPO, is_private=True)
    wrong = "hf_wrongwrongwrong"
    with pytest.raises(DatasetAccessError, match="HF_TOKEN here and on the workers") as caught:
        push(token=wrong)
    assert_clean(caught.value, [wrong])
    assert not hub.uploads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repo": "books"}, "pass OWNER/NAME"),
        ({"repo": "acme/bo oks"}, "acme/bo oks"),
        ({"split": "a-b"}, "split='a-b'"),
        ({"path": "a/../b"}, "no folder of a repository"),
        ({"file_format": "csv"}, "file_format"),
        ({"token": "hf secret"}, "has spaces"),
    ],
)
def test_wrong_arguments_name_the_cure(options, message, tmp_path):
    arguments = {"repo": REPO, "staging": str(tmp_path), **options}
    with pytest.raises(ValueError, match=message) as caught:
        HubWriter(**arguments)
    assert "hf secret" not in str(caught.value)


def test_partitions_are_joined_into_few_files(hub, push, frame):
    push(output_bytes=1 << 30)
    assert_same_rows(rows(hub.repos[REPO]), frame)
    assert [name for name in hub.repos[REPO].tree("main") if name.startswith("data/")] == [
        "data/train-00000-of-00001.parquet"
    ]


def test_more_files_than_a_folder_takes_are_refused_at_once(hub, push, tmp_path):
    many = dd.from_pandas(pd.DataFrame({"id": range(10_001)}), npartitions=10_001)
    with pytest.raises(ValueError, match=r"10,001 files are more.*10,000.*output_bytes="):
        push(many)
    assert not (tmp_path / "out").exists()
    options = {"staging": str(tmp_path), "token": TOKEN, "endpoint": hub.url}
    HubWriter(REPO, output_bytes=0, **options).check(10_000)
    HubWriter(REPO, **options).check(10_001)  # parts, which are joined


def test_the_shown_code_of_a_writer_makes_the_same_one_again():
    options = {
        **{"file_format": "jsonl", "compression": "gzip", "split": "test", "private": True},
        **{"overwrite": True, "commit_message": "Books", "revision": "v2"},
    }
    for given in ({}, {"endpoint": "http://hub:1"}, options):
        writer = HubWriter("acme/books", staging="out", **given)
        again = eval(repr(writer))
        for name in ("path", "target", "encoding"):
            assert getattr(again, name) == getattr(writer, name)


def test_outputs_of_the_command_line(tmp_path):
    def make_writer(output, file_format, **settings):
        return JobSettings(input=[], output=output, format=file_format, **settings).writer()

    writer = make_writer("hf://datasets/acme/books@v2/some/rows", "jsonl", staging=str(tmp_path))
    assert (writer.target.repo, writer.target.revision) == ("acme/books", "v2")
    assert (writer.target.path, writer.file_format) == ("some/rows", "jsonl")
    assert make_writer("hf://datasets/acme/books", "parquet", staging="x").target.path == "data"
    assert isinstance(make_writer("out/", "parquet", compression="snappy"), ParquetWriter)
    assert isinstance(make_writer("out/", "jsonl"), JsonlWriter)
    with pytest.raises(ValueError, match="staging="):
        make_writer("hf://datasets/acme/books", "parquet")
    with pytest.raises(ValueError, match="output to hf://"):
        make_writer("out/", "parquet", staging="x")
    with pytest.raises(ValueError, match="no dataset"):
        make_writer("hf://acme/books", "parquet", staging="x")
    with pytest.raises(ValueError, match=r'HubWriter\("OWNER/NAME"'):
        ParquetWriter("hf://datasets/acme/books/data")


def test_a_finished_output_of_files_is_uploaded_as_it_is(hub, tmp_path):
    write_input(tmp_path / "in")
    reader = JsonlReader(f"{tmp_path}/in/*.jsonl", part_bytes=8_000)
    Pipeline([reader, double, ParquetWriter(f"{tmp_path}/out")]).run()
    writer = HubWriter(REPO, staging=f"{tmp_path}/out", token=TOKEN, endpoint=hub.url)
    summary = Pipeline([reader, double, writer]).run()
    assert summary.resumed_parts == summary.parts > 3
    assert len(rows(hub.repos[REPO])) == summary.rows_written
    description = json.loads((tmp_path / "out/_gpuclassify/job.json").read_text())
    assert REPO not in str(description["identity"])  # the place is no part of what the job is


def test_annotations_are_uploaded_and_read_from_where_they_were_staged(hub, frame, tmp_path):
    (tmp_path / "crawl").mkdir()
    frame.to_parquet(tmp_path / "crawl/0.parquet", row_group_size=100)

    def with_length(frame):
        return frame.assign(length=frame["text"].str.len().astype("Int64"))

    staging = str(tmp_path / "notes")
    options = {"staging": staging, "token": TOKEN, "endpoint": hub.url, "annotates": True}
    reader = ParquetReader(str(tmp_path / "crawl"))
    Pipeline([reader, with_length, HubWriter(REPO, **options)]).run(report=lambda *_: None)
    found = rows(hub.repos[REPO])
    assert [*found.columns] == ["_file", "_place", "_left_out", "length"]
    assert sorted(found["_place"]) == frame["id"].tolist()
    beside = read_files(str(tmp_path / "crawl"), annotations=staging).compute()
    assert beside["length"].tolist() == frame["text"].str.len().tolist()
    with pytest.raises(ValueError, match="annotations are Parquet"):
        HubWriter(REPO, file_format="jsonl", **options)
