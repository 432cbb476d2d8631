"""The commands that are tried, on inputs of a few rows."""

import base64
import copy
import functools
import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from tests.faults.harness import Case, World
from tests.hub_server import HubServer

TOKEN, REPO = "hf_thistokenissecret", "acme/books"
COMMON = [*"abcdefghijklmnop"]


def documents(folder, files=2, rows=4, broken=False):
    """JSON lines of equal lengths, of which parts are as long as their siblings."""
    (folder / "in").mkdir()
    for number in range(files):
        lines = [
            {"id": 10 * number + row + 10, "text": f"text {row} of {number}", "lab": "ab"[row % 2]}
            for row in range(rows)
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / f"in/{number}.jsonl").write_text(text + '{"id": broken\n' * broken)


def copies(folder):
    """Documents of which some are copies, and some nearly so; with embeddings."""
    (folder / "in").mkdir()
    random = np.random.default_rng(3)
    rows = []
    for row in range(12):
        words = [*random.choice(COMMON, 30), f"document{row}"]
        vector = random.normal(size=16)
        rows.append([" ".join(words), vector])
        if row % 3 == 0:
            rows.append([" ".join([*words, "more"]), vector + 1e-4])
        if row % 4 == 0:
            rows.append([" ".join(words), vector])
    frame = pd.DataFrame(rows, columns=["text", "embedding"]).assign(url=range(len(rows)))
    half = len(frame) // 2
    for number, part in enumerate((frame[:half], frame[half:])):
        part.to_parquet(folder / f"in/{number}.parquet")


def scored(folder):
    (folder / "in").mkdir()
    for number in range(2):
        ids = np.arange(8) + 8 * number
        frame = pd.DataFrame({"id": ids, "text": [f"text {i:02d}" for i in ids], "s": ids * 7 % 16})
        frame.assign(s=frame["s"].astype(float)).to_parquet(folder / f"in/{number}.parquet")


def classified(folder, **options):
    """Documents, and a model."""
    documents(folder, **options)
    write_model(folder)


def write_model(folder):
    """A small model in the layout of FineWeb-Edu's."""
    from tests.replicas import write_checkpoint

    write_checkpoint(folder / "model", "fineweb-edu")


def with_notes(folder):
    """Documents, and a set of annotations of them."""
    from gpuclassify import AnnotationWriter, JsonlReader, Pipeline

    documents(folder)
    # Places and times of files are part of what a set is of.
    stages = [JsonlReader("in"), with_rank, AnnotationWriter("notes")]
    here = Path.cwd()
    os.chdir(folder)
    try:
        Pipeline(stages).run(report=lambda *_: None)
    finally:
        os.chdir(here)


def with_rank(frame):
    return frame.assign(rank=frame["id"] % 10)


def write_backbone(folder):
    """A small model to train a head on."""
    from tests.replicas import write_sequence_classifier

    write_sequence_classifier(folder / "model", "bert")


def annotated(folder):
    write_backbone(folder)
    random = np.random.default_rng(5)
    lines = []
    for row in range(60):
        topic = ("mill", "river")[row % 2]
        words = [*random.choice(COMMON, 6), *[topic] * 4, str(row)]
        lines.append({"text": " ".join(words), "topic": topic})
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def layers(folder):
    random = np.random.default_rng(7)
    np.savez(folder / "head.npz", coef_=random.normal(size=(3, 8)), intercept_=np.zeros(3))


def contaminated(folder):
    """Documents, of which the last holds a test item."""
    documents(folder)
    item = "what is the name of the river that flows through the town"
    (folder / "evals.jsonl").write_text(json.dumps({"question": item}) + "\n")
    line = {"id": 20, "text": item.upper(), "lab": "a"}
    with (folder / "in/1.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def rows_of(folder, suffix):
    """All rows of an output, by plain pandas."""
    read = pd.read_parquet if suffix == "parquet" else partial(pd.read_json, lines=True)
    paths = sorted((folder / "out").rglob(f"part-*.{suffix}"))
    return pd.concat(read(p) for p in paths if "_" not in p.relative_to(folder / "out").parts[0][0])


def has_ids(folder, suffix="parquet", name="id"):
    """Each document of the input once."""
    lines = [line for path in sorted(folder.glob("in/*")) for line in path.read_text().splitlines()]
    wanted = [json.loads(line)["id"] for line in lines if "broken" not in line]
    assert sorted(rows_of(folder, suffix)[name]) == sorted(wanted)


def has_places(folder):
    """Each document of the input once, by its line's first byte, and no text."""
    found = rows_of(folder, "parquet")
    assert "text" not in found and found["fineweb-edu-score-float"].notna().all()
    for path, rows in found.groupby("_file"):
        content = Path(path).read_bytes()
        starts = [0, *(place + 1 for place, byte in enumerate(content) if byte == 10)][:-1]
        assert sorted(rows["_place"]) == starts
    assert found["_file"].nunique() == 2


def has_chosen(folder):
    found = rows_of(folder, "parquet")
    assert sorted(found["id"]) == [12, 13, 22, 23]
    assert (found["rank"] == found["id"] % 10).all()


def has_originals(folder, most):
    """Of equal texts one, and no more than `most` of all."""
    given = pd.concat(map(pd.read_parquet, sorted(folder.glob("in/*"))))
    kept = rows_of(folder, "parquet")
    assert kept["url"].is_unique
    assert {*kept["text"]} <= {*given["text"]}
    assert kept["text"].is_unique
    assert len(kept) == most, len(kept)


def is_clean(folder):
    """Each document of the input once, but the contaminated one."""
    texts = [line for path in sorted(folder.glob("in/*")) for line in path.read_text().splitlines()]
    clean = [json.loads(line)["id"] for line in texts if "RIVER" not in line]
    assert sorted(rows_of(folder, "parquet")["id"]) == sorted(clean)


def has_buckets(folder):
    """Four of equal weight, by numpy: texts are equally long."""
    found = rows_of(folder, "parquet").sort_values("id")
    scores = found["id"].to_numpy() * 7 % 16
    edges = np.quantile(scores, [0.25, 0.5, 0.75], method="inverted_cdf")
    assert found["s_bucket"].tolist() == np.digitize(scores, edges).tolist()


def has_head(folder):
    from safetensors.numpy import load_file

    tensors = load_file(folder / "out/model.safetensors")
    np.testing.assert_array_equal(
        tensors["layers.0.weight"], np.load(folder / "head.npz")["coef_"].astype(np.float32)
    )


def has_trained_head(folder):
    """It tells what it was trained on apart."""
    import gpuclassify

    given = pd.read_json(folder / "in.jsonl", lines=True)
    result = gpuclassify.HeadClassifier(heads={"h": folder / "out/head"}, device="cpu")(given)
    assert (result["h_pred"] == given["topic"]).mean() > 0.8


def labelled(folder):
    scores = np.arange(200) / 200
    frame = pd.DataFrame({"s": scores, "good": scores + np.tile([-0.2, 0.2], 100) > 0.5})
    frame.to_json(folder / "labelled.jsonl", orient="records", lines=True)


def has_drawn(folder):
    """Two rows of each label, which stand for all."""
    drawn = pd.read_json(folder / "out/drawn.jsonl", lines=True)
    assert drawn["lab"].value_counts().to_dict() == {"a": 2, "b": 2}
    assert drawn["weight"].tolist() == [2.0] * 4 and drawn["id"].is_unique


def has_threshold(folder):
    """The highest score that four of five good rows reach."""
    found = json.loads((folder / "out/thresholds.json").read_text())["groups"]["null"]
    given = pd.read_json(folder / "labelled.jsonl", lines=True)
    good = given["s"][given["good"]].sort_values(ascending=False)
    assert found["threshold"] == good.iloc[int(np.ceil(0.8 * len(good))) - 1]
    assert (folder / "out/page.html").read_text().rstrip().endswith("</html>")


def with_vectors(folder):
    """Three vectors along the first axis, and five along the second."""
    vectors = [[3.0, 0.1]] * 3 + [[0.1, 2.0]] * 5 + [[9.0, 0.2 + n] for n in range(2)]
    pd.DataFrame({"embedding": vectors}).to_json(folder / "v.jsonl", orient="records", lines=True)


def has_clusters(folder):
    """A cluster along each axis; equal vectors count once."""
    found = json.loads((folder / "out/clusters.json").read_text())
    assert found["width"] == 2 and sorted(found["sizes"]) == [1, 3]
    centroids = np.frombuffer(base64.b64decode(found["data"]), "<f4").reshape(2, 2)
    np.testing.assert_allclose(centroids[np.argmin(found["sizes"])], [0.04994, 0.99875], atol=1e-4)


def has_mix(folder):
    """All rows of the input 2.5 times."""
    cells = json.loads((folder / "out/mix.json").read_text())["cells"].values()
    assert sum(cell["rows"] for cell in cells) == 8
    assert {cell["epochs"] for cell in cells} == {2.5}


class Hub(World):
    """A server with no repository at first; its address is part of what a job notes."""

    @functools.cached_property
    def server(self):
        return HubServer([TOKEN], "datasets").__enter__()

    def begin(self):
        from huggingface_hub import constants

        from gpuclassify.hub import calls

        os.environ["HF_TOKEN"] = TOKEN
        constants.ENDPOINT, constants.HF_HUB_DISABLE_XET = self.server.url, True
        calls.FIRST_WAIT_SECONDS = 0.01

    def watch(self, fault):
        from huggingface_hub.utils import get_session

        kind = type(get_session())
        send = kind.send

        def watched(client, request, **options):
            fault.change("request", f"{request.url}")
            return send(client, request, **options)

        kind.send = watched

    def state(self):
        repo = self.server.repos.get(REPO)
        return repo and {
            "files": {name: file.digest for name, file in repo.tree().items()},
            "commits": len(repo.branches["main"]),
        }

    def keep(self):
        return copy.deepcopy(self.server.repos)

    def set(self, kept):
        self.server.repos = copy.deepcopy(kept or {})


OUTPUT = ("in", "out", "--part-size", "250B", "--examples", "1")  # a part for each file
CLASSIFY = ("classify", *OUTPUT, "--classifier", "fineweb-edu", "--model", "model")
DEDUP = ("dedup", "in", "out", "--id-field", "url")
FUZZY = (*DEDUP, "--method", "fuzzy", "--set", "bands_per_pass=15")
TRAIN = ("train", "in.jsonl", "out/head", "--label-field", "topic", "--backbone", "model")

CASES = {
    case.name: case
    for case in (
        Case("classify", CLASSIFY, classified, has_ids),
        Case("classify-parts", (*CLASSIFY, "--output-bytes", "0"), classified, has_ids),
        Case(
            "classify-jsonl",
            (*CLASSIFY, "--format", "jsonl"),
            classified,
            partial(has_ids, suffix="jsonl"),
        ),
        Case("annotate", ("annotate", *CLASSIFY[1:]), classified, has_places),
        Case(
            "select",
            ("select", *OUTPUT, "--annotations", "notes", "--where", "rank >= 2"),
            with_notes,
            has_chosen,
        ),
        Case("classify-folders", (*CLASSIFY, "--partition-by", "lab"), classified, has_ids),
        Case(
            "classify-quarantine",
            (*CLASSIFY, "--partition-by", "lab", "--on-error", "quarantine"),
            partial(classified, broken=True),
            has_ids,
            code=3,
        ),
        Case("dedup-exact", (*DEDUP, "--method", "exact"), copies, partial(has_originals, most=16)),
        Case("dedup-fuzzy", FUZZY, copies, partial(has_originals, most=12)),
        Case(
            "dedup-rounds",
            (*FUZZY, "--set", "components=rounds"),
            copies,
            partial(has_originals, most=12),
        ),
        Case(
            "dedup-semantic",
            (*DEDUP, "--method", "semantic", "--set", "embedding_field=embedding"),
            copies,
            partial(has_originals, most=12),
        ),
        Case(
            "buckets",
            ("buckets", "in", "out", "--score", "s", "--n", "4", "--partition-by", "bucket"),
            scored,
            has_buckets,
        ),
        Case(
            "decontaminate",
            ("decontaminate", *OUTPUT, "--against", "evals.jsonl"),
            contaminated,
            is_clean,
        ),
        Case(
            "sample",
            ("sample", "in", "out/drawn.jsonl", "-n", "2", "--by", "lab", "--overwrite"),
            documents,
            has_drawn,
        ),
        Case(
            "thresholds",
            (
                *("thresholds", "labelled.jsonl", "out/thresholds.json", "--score", "s"),
                *("--label", "good", "--recall", "0.8", "--page", "out/page.html"),
            ),
            labelled,
            has_threshold,
        ),
        Case(
            "clusters",
            ("clusters", "v.jsonl", "out/clusters.json", "--n-clusters", "2"),
            with_vectors,
            has_clusters,
        ),
        Case(
            "mix",
            (
                *("mix", OUTPUT[0], "out/mix.json", "--annotations", "notes", "--by", "lab"),
                *("--token-field", "rank", "--tokens", "30"),
            ),
            with_notes,
            has_mix,
        ),
        Case("train", (*TRAIN, "--embeddings", "out/embeddings"), annotated, has_trained_head),
        Case(
            "convert",
            ("convert", "head.npz", "out", "--label", "a", "--label", "b", "--label", "c"),
            layers,
            has_head,
        ),
        Case(
            "upload",
            (
                *("classify", "in", f"hf://datasets/{REPO}", "--staging", "out"),
                *("--classifier", "fineweb-edu", "--model", "model"),
            ),
            classified,
            has_ids,
            world=Hub(),
        ),
    )
}
