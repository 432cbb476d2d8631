"""A small DeBERTa-v2 classifier trained on the demo's documents, in the published layout."""

import hashlib
import json
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from examples.demo.corpus import Document
from gpuclassify.hub.saving import saving, sweep, workshop

logger = logging.getLogger(__name__)

Progress = Callable[[float, float], None]

_SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
PAD, CLS, SEP, UNK = range(4)
_DROPOUT = 0.2  # before the last layer, as published
_COMPLETE = "complete"
_DOCUMENTS = "documents.json"  # beside the model: what it must not be judged by


@dataclass(frozen=True)
class Settings:
    """Settings that, with the documents, decide the weights; sized for half a minute on a core."""

    vocabulary: int = 8000
    width: int = 128
    layers: int = 1
    heads: int = 4
    steps: int = 300
    batch_documents: int = 32
    max_tokens: int = 128
    min_kept_share: float = 0.1
    max_kept_share: float = 0.25
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup_share: float = 0.1


def train(
    documents: list[Document],
    directory: str | Path,
    *,
    seed: int = 0,
    seconds_limit: float = 600.0,
    settings: Settings | None = None,
    on_progress: Progress | None = None,
) -> Path:
    """Train a classifier of the documents' areas and save it like ``nvidia/domain-classifier``.

    The directory then holds what `gpuclassify.Deberta` saves and the tokenizer's files.
    Neither the global random state nor the number of torch threads is changed.

    Parameters
    ----------
    documents : list of Document
        The training half; its sorted areas become the labels.
    directory : str or Path
        Created if missing; files of an earlier training are replaced.
    seed : int
        Fixes initial weights, batches and dropout.
    seconds_limit : float
        A stop for slow machines; the number of steps decides otherwise.
    settings : Settings, optional
        Sizes and schedule.
    on_progress : callable, optional
        Called after every step with the share done (0 to 1) and the loss.

    Returns
    -------
    Path
        The directory.

    Raises
    ------
    ValueError
        There are no documents, or they are all of one area.
    """
    import torch

    from gpuclassify.models.deberta import Deberta

    settings = settings or Settings()
    areas = sorted({document.area for document in documents})
    if len(areas) < 2:
        raise ValueError(
            f"{len(documents)} documents are of the areas {areas}; a classifier needs two or more."
        )
    directory = Path(directory)
    config = {
        "base_model": str(directory),  # which gets the backbone's sizes, too
        "fc_dropout": _DROPOUT,
        "id2label": dict(enumerate(areas)),
    }
    tokenizer = train_tokenizer([document.text for document in documents], settings.vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = build_backbone(len(tokenizer), settings)
        classifier = Deberta(config, backbone)
        batches = _Batches(documents, areas, tokenizer, settings, seed)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # of so small a model, others only wait where cores are busy
        try:
            _fit(classifier, batches, settings, time.monotonic() + seconds_limit, on_progress)
        finally:
            torch.set_num_threads(threads)
    with saving(directory) as beside:
        classifier.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
    return directory


def cached_model(
    documents: list[Document],
    *,
    max_documents: int | None = None,
    cache_dir: str | Path | None = None,
    settings: Settings | None = None,
    on_progress: Progress | None = None,
) -> Path:
    """Return the directory of a classifier of the documents' areas, training it only once.

    Parameters
    ----------
    documents : list of Document
        The training half. A cached classifier may have been trained on another one, when other
        packages were installed: `trained_on` tells.
    max_documents : int, optional
        Most documents that were asked for; another number is another classifier.
    cache_dir : str or Path, optional
        Default ``gpuclassify/demo`` below the platform's cache directory.
    settings : Settings, optional
        Sizes and schedule.
    on_progress : callable, optional
        As in `train`; not called when the cache answers.

    Returns
    -------
    Path
        A directory named by the digest of settings, library versions and the demo's own code. It
        appears under that name only when it is complete.

    Raises
    ------
    ValueError
        As in `train`.
    """
    settings = settings or Settings()
    cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir)
    final = cache_dir / _digest(max_documents, settings)
    sweep(cache_dir)
    if final.is_dir():
        logger.info("using the classifier cached in %s", final)
        return final
    with workshop(cache_dir) as beside:
        made = train(documents, beside / _COMPLETE, settings=settings, on_progress=on_progress)
        content = json.dumps([asdict(document) for document in documents])
        (made / _DOCUMENTS).write_text(content, encoding="utf-8")
        try:
            made.rename(final)
        except OSError:
            if not final.is_dir():  # otherwise another process finished first: equally good
                raise
    return final


def is_cached(max_documents: int | None = None) -> bool:
    """Tell whether `cached_model` has a classifier of the default settings."""
    return (default_cache_dir() / _digest(max_documents, Settings())).is_dir()


def trained_on(directory: Path) -> list[Document]:
    """Read the documents that a classifier of `cached_model` was trained on."""
    content = (directory / _DOCUMENTS).read_text(encoding="utf-8")
    return [Document(**values) for values in json.loads(content)]


def default_cache_dir() -> Path:
    """Return where `cached_model` keeps its classifiers on this platform.

    Returns
    -------
    Path
        Below ``XDG_CACHE_HOME`` if that is set, else ``~/Library/Caches`` on macOS and
        ``~/.cache`` elsewhere.
    """
    home = "~/Library/Caches" if platform.system() == "Darwin" else "~/.cache"
    root = os.environ.get("XDG_CACHE_HOME") or Path(home).expanduser()
    return Path(root) / "gpuclassify" / "demo"


def train_tokenizer(texts: list[str], vocabulary: int) -> Any:
    """Train a DeBERTa-v2 tokenizer of at most so many pieces, special tokens included."""
    from tokenizers.trainers import UnigramTrainer
    from transformers import DebertaV2Tokenizer

    def tokenizer(pieces: list[tuple[str, float]]) -> Any:
        return DebertaV2Tokenizer(
            vocab=pieces,
            unk_id=UNK,
            do_lower_case=True,
            split_by_punct=True,
            model_max_length=512,
        )

    specials = [(piece, 0.0) for piece in _SPECIAL_TOKENS]
    learner = tokenizer(specials).backend_tokenizer
    trainer = UnigramTrainer(
        vocab_size=vocabulary - 1,
        special_tokens=list(_SPECIAL_TOKENS),
        unk_token="[UNK]",
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    learned = [(piece, score) for piece, score in model["vocab"] if piece not in _SPECIAL_TOKENS]
    mask = ("[MASK]", 0.0)
    return tokenizer([*specials, *(pair for pair in learned if pair != mask), mask])


def build_backbone(vocabulary: int, settings: Settings) -> Any:
    """Build an untrained encoder like the published one, but for the sizes."""
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=vocabulary,
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=4 * settings.width,
        max_position_embeddings=512,
        position_buckets=32,
        max_relative_positions=-1,
        relative_attention=True,
        position_biased_input=False,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        type_vocab_size=0,
        # Leaving tokens out (see training) regularises more, and dropout is slow on a CPU.
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        layer_norm_eps=1e-7,
        pad_token_id=PAD,
    )
    return DebertaV2Model(config)


class _Batches:
    """Endless training batches of documents of like length, with most tokens left out.

    Each time another random share of a document's tokens is shown, so that no single telling
    word (a package's own name, above all) can be relied on: held-out packages do not have it.
    """

    def __init__(
        self,
        documents: list[Document],
        areas: list[str],
        tokenizer: Any,
        settings: Settings,
        seed: int,
    ) -> None:
        encoded = tokenizer(
            [document.text for document in documents],
            add_special_tokens=False,
            truncation=True,
            max_length=510,
        )["input_ids"]
        self.tokens = [np.array(ids, dtype=np.int64) for ids in encoded]
        self.labels = np.array([areas.index(document.area) for document in documents])
        self.weights = _weights(documents)
        self.settings = settings
        self.random = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield (input_ids, attention_mask, labels, weights) as torch tensors."""
        import torch

        lengths = np.array([len(ids) for ids in self.tokens])
        while True:
            shuffled = self.random.permutation(len(lengths))
            # Sorting by rough length keeps padding small and the batches different every round.
            by_length = shuffled[np.argsort(lengths[shuffled] // 16, kind="stable")]
            cuts = range(0, len(by_length), self.settings.batch_documents)
            for start in self.random.permutation(list(cuts)):
                rows = by_length[start : start + self.settings.batch_documents]
                ids = self._padded([self._some_tokens(self.tokens[row]) for row in rows])
                yield (
                    torch.from_numpy(ids),
                    torch.from_numpy((ids != PAD).astype(np.int64)),
                    torch.from_numpy(self.labels[rows]),
                    torch.from_numpy(self.weights[rows]),
                )

    def _some_tokens(self, ids: np.ndarray) -> np.ndarray:
        share = self.random.uniform(self.settings.min_kept_share, self.settings.max_kept_share)
        count = min(max(4, round(share * len(ids))), len(ids), self.settings.max_tokens - 2)
        return ids[np.sort(self.random.choice(len(ids), count, replace=False))]

    def _padded(self, rows: list[np.ndarray]) -> np.ndarray:
        padded = np.full((len(rows), max(map(len, rows)) + 2), PAD, dtype=np.int64)
        for row, ids in zip(padded, rows, strict=True):
            row[: len(ids) + 2] = [CLS, *ids, SEP]
        return padded


def _weights(documents: list[Document]) -> np.ndarray:
    """Return weights of mean 1: areas count alike, a package by the root of its size."""
    packages = Counter(document.package for document in documents)
    weights = np.array([packages[document.package] ** -0.5 for document in documents])
    areas = np.unique([document.area for document in documents], return_inverse=True)[1]
    weights /= np.bincount(areas, weights)[areas]
    return (weights / weights.mean()).astype(np.float32)


def _fit(
    classifier: Any,
    batches: _Batches,
    settings: Settings,
    deadline: float,
    on_progress: Progress | None,
) -> None:
    import torch
    from torch.nn import functional as F

    optimizer = torch.optim.AdamW(
        classifier.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    classifier.train()
    for step, (ids, mask, labels, weights) in zip(
        range(1, settings.steps + 1), batches, strict=False
    ):
        losses = F.cross_entropy(classifier(ids, mask), labels, reduction="none")
        loss = (losses * weights).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(classifier.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if on_progress is not None:
            on_progress(step / settings.steps, loss.item())
        if time.monotonic() > deadline:
            logger.warning("training stopped at its time limit, after %d steps", step)
            break
    classifier.eval()


def _rate(step: int, settings: Settings) -> float:
    """Return the factor of the learning rate: linear warm-up, then linear decay to zero."""
    warmup = max(1, round(settings.warmup_share * settings.steps))
    rising = (step + 1) / warmup
    falling = (settings.steps - step) / max(1, settings.steps - warmup)
    return max(0.0, min(rising, falling, 1.0))


def _digest(max_documents: int | None, settings: Settings) -> str:
    """Return a digest of all that decides the model except which packages are installed."""
    code = sorted(Path(__file__).parent.glob("*.py"))
    parts = {
        "max_documents": max_documents,
        "settings": asdict(settings),
        "versions": {name: version(name) for name in ("tokenizers", "torch", "transformers")},
        "code": [hashlib.sha256(file.read_bytes()).hexdigest() for file in code],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]
