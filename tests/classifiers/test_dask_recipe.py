"""The published recipe for FineWeb with Dask and a transformers pipeline, beside the classifier."""

import pandas as pd
import pytest

from gpuclassify import FineWebEduClassifier
from tests.oracle import assert_close
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
RECIPE = """
import dask.dataframe as dd
import pandas as pd
from transformers import pipeline
from dask_hf import to_parquet

df = dd.read_parquet("hf://datasets/HuggingFaceFW/fineweb/data/CC-MAIN-2024-10/*.parquet")

def compute_scores(texts):
    import torch

    # Select which hardware to use
    if torch.cuda.is_available():
        device = torch.device("cuda")           # NVIDIA GPU
    elif torch.backends.mps.is_available():
        device = torch.device("mps")            # Apple silicon GPU
    else:
        device = torch.device("cpu")            # CPU

    pipe = pipeline(
        "text-classification",
        model="HuggingFaceFW/fineweb-edu-classifier",
        device=device
    )
    results = pipe(
        texts.to_list(),
        batch_size=768,
        padding="longest",
        truncation=True,
        function_to_apply="none"
    )

    return pd.Series([r["score"] for r in results])

min_edu_score = 3
df["edu-classifier-score"] = df.text.map_partitions(compute_scores, meta=pd.Series([0]))
df = df[df["edu-classifier-score"] >= min_edu_score]

to_parquet(
    df,
    "hf://datasets/<your-hf-user>/<data-dir>"  # Replace with your HF user and directory
)
"""


def test_the_recipe_and_the_classifier_keep_the_same_rows(checkpoint, tmp_path):
    frame = pd.DataFrame({"text": sample_texts(60, seed=2, max_words=40)})
    frame.to_parquet(tmp_path / "in.parquet")
    edits = {
        "from dask_hf import": "from gpuclassify import",
        "hf://datasets/HuggingFaceFW/fineweb/data/CC-MAIN-2024-10/*.parquet": tmp_path
        / "*.parquet",
        "HuggingFaceFW/fineweb-edu-classifier": checkpoint("fineweb-edu"),
        "hf://datasets/<your-hf-user>/<data-dir>": tmp_path / "out",
    }
    script = RECIPE
    for old, new in edits.items():
        script = script.replace(old, str(new))
    exec(script, {})

    found = pd.read_parquet(tmp_path / "out")
    classifier = FineWebEduClassifier(model=checkpoint("fineweb-edu"), min_score=3)
    expected = classifier(frame)
    assert 0 < len(expected) < len(frame)
    assert found["text"].tolist() == expected["text"].tolist()
    scores = found["edu-classifier-score"].clip(0, 5)  # as the classifier's are
    assert_close(scores, expected["fineweb-edu-score-float"])
