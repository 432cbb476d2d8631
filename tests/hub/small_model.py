"""A small model as the Hub or a directory holds it, and the accounts that may ask for it."""

import json

import numpy as np
from safetensors.numpy import save

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
