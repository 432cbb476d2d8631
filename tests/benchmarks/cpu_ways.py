"""What a run of the throughput benchmark on a CPU compares."""

import argparse


def asked(**options):
    return argparse.Namespace(**{"device": "cpu", "peers": True, "variants": [], **options})


CPU_NAMES = [
    "pipeline held",
    "pipeline per partition",
    "pipeline held, batch 256",
    "sorted batches of 32",
    "Curator's stages, batch 256",
    "Curator's stages, batch 32",
    "Curator's stages, best batch",
    "crossfit-original",
    "loader=crossfit",
    "gpuclassify",
]
