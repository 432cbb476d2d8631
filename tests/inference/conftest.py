"""Tiny checkpoints, written and loaded once for all tests of this folder."""

import functools
import gc
import itertools

import pytest
import torch

from gpuclassify import hub
from gpuclassify.inference.loaded_model import load_model
from gpuclassify.models.checkpoint import read_checkpoint

_keys = itertools.count()


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def _quick_collection():
    """Each out-of-memory collects garbage: among what a test made, not among all of torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def directory_of(sequence_classifier):
    """Architecture to the directory of its checkpoint."""
    return sequence_classifier


@pytest.fixture(scope="session")
def load_directory():
    """Directory to LoadedModel, float32 on the CPU."""

    def load(directory):
        checkpoint = read_checkpoint(hub.resolve(str(directory)))
        return load_model(checkpoint, directory, torch.device("cpu"), torch.float32)

    return load


@pytest.fixture(scope="session")
def model_of(directory_of, load_directory):
    """Architecture to its LoadedModel."""
    return functools.cache(lambda name: load_directory(directory_of(name)))


@pytest.fixture
def key():
    """A key under which no limits are remembered yet."""
    return ("limits of a test", next(_keys))
