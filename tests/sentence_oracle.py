"""Sentence models made and read by sentence-transformers itself, one text at a time, in float32."""

import functools

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers.utils import logging


def save_sentence_model(
    folder, base, pooling="mean", *more, is_normalized=False, prompts=None, default_prompt=None
):
    """Save transformers' model in `base` with a pooling, as sentence-transformers does."""
    with quiet():
        transformer = Transformer(str(base))
        modules = [transformer, *poolings(transformer, pooling), *more]
        modules += [Normalize()] if is_normalized else []
        model = SentenceTransformer(
            modules=modules, device="cpu", prompts=prompts, default_prompt_name=default_prompt
        )
        model.save(str(folder), create_model_card=False)
    return folder


def poolings(transformer, pooling):
    """The pooling of that mode (several at once for a tuple), or the module itself."""
    if isinstance(pooling, (str, tuple)):
        return [Pooling(transformer.get_embedding_dimension(), pooling)]
    return [pooling]


def encoded(directory, texts, **options):
    """Embeddings of texts, float32 (texts, numbers)."""
    return np.stack([sentence_model(str(directory)).encode(text, **options) for text in texts])


@functools.cache
def sentence_model(directory):
    """The model that sentence-transformers reads from a directory."""
    with quiet():
        return SentenceTransformer(directory, device="cpu", local_files_only=True).float()


class quiet:  # noqa: N801
    """Without transformers' progress bars and load reports."""

    def __enter__(self):
        self.verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *_):
        logging.set_verbosity(self.verbosity)
        logging.enable_progress_bar()
