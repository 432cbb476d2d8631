"""Example of signals, which have no options of networks."""

from gpuclassify import Signals
from tests.examples import known_options


def signals(**options):
    return Signals(**known_options(Signals, options))


EXAMPLES = {"signals": signals}
