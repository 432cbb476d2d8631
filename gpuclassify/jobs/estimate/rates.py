"""How fast GPUs were measured to be: nothing but figures of committed result files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuclassify.jobs.estimate.effort import Network


@dataclass(frozen=True)
class Rate:
    """A figure of a file in ``benchmarks/results``.

    Attributes
    ----------
    device : str
        The GPU, as the result names it.
    dtype : str
    model : dict of str to value
        Sizes of the network that was run: attributes of `gpuclassify.jobs.estimate.effort.Network`.
    tokens_per_second : float
        Of one GPU.
    result : str
        Name of the file.
    figure : tuple of str
        Keys that lead to `tokens_per_second` in it.
    """

    device: str
    dtype: str
    model: tuple[tuple[str, str | int], ...]
    tokens_per_second: float
    result: str
    figure: tuple[str, ...]

    def fits(self, network: Network) -> bool:
        """Whether a network of this kind and these sizes was measured."""
        return all(getattr(network, name) == value for name, value in self.model)


# A test compares each with its file. None of the files is of a GPU yet.
RATES: tuple[Rate, ...] = ()


def gpu_hours(
    network: Network | None, tokens: float, rates: Iterable[Rate] = RATES
) -> dict[str, float]:
    """Hours of one GPU for so many tokens, by GPU and precision, where they were measured.

    Parameters
    ----------
    network : Network, optional
        None is a network of unknown sizes, which nothing was measured for.
    tokens : float
    rates : iterable of Rate
    """
    if network is None:
        return {}
    return {
        f"{rate.device}, {rate.dtype}": tokens / rate.tokens_per_second / 3600
        for rate in rates
        if rate.fits(network)
    }
