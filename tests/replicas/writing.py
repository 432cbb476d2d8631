"""How random models are seeded and fitted, and how they reach a directory."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def seeded(build: Callable[[], Any], seed: int) -> Any:
    """What `build` returns when run from `seed`, the caller's random state left as it was."""
    import torch

    # torch.manual_seed would also reseed every GPU.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


def fit_head(
    head: Any,
    outputs_of: Callable[[Any], Any],
    documents: list[Any],
    centre: float = 0.0,
    spread: float = 1.5,
) -> None:
    """Shift and scale the linear layer `head`: outputs get mean `centre`, deviation `spread`."""
    import torch

    with torch.no_grad():
        outputs = torch.stack([outputs_of(ids) for ids in documents]).double()
        mean = outputs.mean(dim=0)
        # Rounded, so that the last bit of a matrix product does not reach the written bytes.
        scale = round(float(spread / (outputs - mean).square().mean().sqrt()), 3)
        head.weight.mul_(scale)
        if head.bias is not None:
            head.bias.copy_(((head.bias.double() - mean) * scale + centre).round(decimals=3))


def token_ids(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[Any]:
    """The first 32 texts that are not empty, each as a tensor of ids, int64 (1, tokens)."""
    import torch

    encodings = tokenizer.encode_batch(list(texts)[:32])
    ids = [encoding.ids[:max_tokens] for encoding in encodings]
    return [torch.tensor([row]) for row in ids if row]


def save_tensors(tensors: dict[str, Any], path: Path) -> None:
    """Save tensors in one file, which says that they are of torch."""
    from safetensors.torch import save_file

    save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})


def save_model(model: Any, path: Path) -> None:
    """Save without the progress bar, which would fill a test's output."""
    from transformers.utils import logging

    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(path)
    finally:
        if is_shown:
            logging.enable_progress_bar()


def empty_directory(directory: str | Path) -> Path:
    """Create the directory if need be; FileExistsError unless it is empty."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty")
    return path


def write_json(path: Path, value: Any) -> None:
    """Write an indented JSON file, its keys in the order given."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file, or drop those set to None."""
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: v for key, v in settings.items() if v is not None}))


def rewrite(model: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensors of a directory's weights."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
