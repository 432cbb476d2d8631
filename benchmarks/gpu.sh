#!/usr/bin/env bash
# The whole GPU benchmark in under 9 minutes, with random weights: nothing is downloaded.
#
#   bash benchmarks/gpu.sh                           # on a machine with a GPU, RAPIDS and torch
#   bash benchmarks/gpu.sh --output /tmp/results --limit-seconds 300
#   bash benchmarks/gpu.sh --smoke --device cpu      # that this script works, where no GPU is
#
# PYTHON is the interpreter that has them all (python3). A short table comes last; README.md says
# what is measured. Exits with 1 if some benchmark failed or had no time left.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export HF_HUB_OFFLINE=1

"$python" -m gpuclassify doctor || echo "gpu.sh: some things do not fit together, see above" >&2
exec "$python" -m benchmarks.suite gpu "$@"
