"""``python tests/faults CASE``: see `tests.faults.harness`."""

import sys
from pathlib import Path
from types import ModuleType

package = ModuleType("tests")  # that name is also some installed package's
package.__path__ = [str(Path(__file__).parents[1])]
sys.modules["tests"] = package

from tests.faults.harness import main  # noqa: E402

main()
