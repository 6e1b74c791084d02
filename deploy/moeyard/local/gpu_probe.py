"""Say in JSON which GPUs `--device DEVICE --workers N` would take: `python -m moeyard.local.gpu_probe DEVICE N`.

It runs in a process of its own, because it loads torch, which the launcher never does.
"""

import json
import sys
from typing import Any

import torch

from moeyard_worker.engine.assembly.device import check_gpu


def probe(device: str, num_workers: int) -> dict[str, Any]:
    """{"gpus": names, one for each worker}, or {"problem": one line} where a worker's GPU is missing or unfit."""
    try:
        found = [check_gpu(device, gpu=rank, num_workers=num_workers) for rank in range(num_workers)]
    except ValueError as error:
        return {"problem": str(error)}
    return {"gpus": [torch.cuda.get_device_name(each.index) for each in found]}


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], int(sys.argv[2]))))
