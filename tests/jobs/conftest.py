"""Makes `job_faults` importable by its own name, as processes that the tests start import it."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
