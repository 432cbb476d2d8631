"""Results are drawn, and a picture tells where they come from."""

import numpy as np
from matplotlib import image

from benchmarks import plots


def is_drawn(path):
    """Whether a picture has light paper and dark ink, and nothing runs over its edges."""
    pixels = image.imread(path)[..., :3].mean(axis=2)
    edges = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    return path.stat().st_size > 10_000 and pixels.min() < 0.2 and edges.min() == 1


def test_results_are_drawn(throughput_run, scaling_run, tmp_path, capsys):
    (_, first, _), (_, second, _) = throughput_run, scaling_run
    paths = plots.main([str(first), str(second), "--output", str(tmp_path / "new")])
    names = [f"{first.stem}-ratios.png", f"{first.stem}-peak.png", f"{second.stem}-scaling.png"]
    assert [path.name for path in paths] == names
    assert all(map(is_drawn, paths))
    assert capsys.readouterr().out.count("drawn to") == 3


def test_a_picture_tells_machine_precision_and_dates():
    result = {
        "machine": {"processor": "AMD EPYC", "torch_threads": 1},
        "noisy": False,
        "settings": {"dtype": "float32"},
        "finished": "2026-11-21T10:00:00+00:00",
    }
    assert plots.subtitle([result]) == "AMD EPYC, 1 thread · float32 · 2026-11-21"
    gpu = {
        "machine": {"processor": "AMD EPYC", "torch_threads": 2, "gpu": "NVIDIA H100"},
        "noisy": False,
        "settings": {"dtype": "bfloat16, float32"},
        "finished": "2026-11-20T10:00:00+00:00",
    }
    both = (
        "NVIDIA H100 · AMD EPYC, 1 thread · bfloat16, float32 · float32 · 2026-11-20 · 2026-11-21"
    )
    assert plots.subtitle([gpu, result]) == both
    assert plots.subtitle([gpu, result | {"noisy": True}]) == f"{both} · NOISY"
