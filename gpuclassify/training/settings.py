"""What can be trained, and which settings have a meaning."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from gpuclassify.hub.saving import CONFIG, finish_saving
from gpuclassify.models.embedding_head import refuse_other_model
from gpuclassify.settings.checks import check_choice, check_count, check_flag, check_number
from gpuclassify.settings.options import StrPath

Kind = Literal["linear", "mlp", "pooler"]
TaskName = Literal["classes", "multilabel", "regression"]
RECORD = "training.json"


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise, before anything is embedded, unless settings have a meaning and training can run."""
    check_choice("kind", settings["kind"], get_args(Kind))
    check_choice("task", settings["task"], get_args(TaskName))
    check_flag("balanced", settings["balanced"])
    for name in ("hidden_size", "epochs"):
        check_count(name, settings[name])
    if (rate := settings["learning_rate"]) is not None:
        check_number("learning_rate", rate)
        if not 0 < rate < float("inf"):
            raise ValueError(f"learning_rate={rate!r} must be above 0, such as 0.001")
    if settings["kind"] == "mlp" and settings["hidden_size"] is None:
        raise ValueError('hidden_size=None: kind="mlp" needs a width, such as 256')
    seed = settings["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed={seed!r} must be a whole number, 0 or more")
    given = [name for name in ("epochs", "learning_rate") if settings[name] is not None]
    if given and settings["kind"] == "linear":
        raise ValueError(
            f'{" and ".join(given)} have no meaning for kind="linear", which is not trained in '
            "epochs: leave them out"
        )
    for module in ("scipy", "sklearn"):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(
                f"Head.fit needs {module}: pip install 'gpuclassify[train]'", name=module
            )


def check_directory(directory: StrPath, kind: Kind) -> Path:
    """The directory that a head is saved in.

    Raises
    ------
    FileExistsError
        It holds a model that a head of this kind must not replace.
    """
    folder = Path(os.fspath(directory)).expanduser()
    finish_saving(folder)
    if kind != "pooler":
        refuse_other_model(folder)
    elif (folder / CONFIG).exists() and not (folder / RECORD).exists():
        raise FileExistsError(f"{folder} holds another model: name another directory")
    return folder
