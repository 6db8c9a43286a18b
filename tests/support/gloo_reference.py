"""One of two real gloo ranks that write what every collective gave: RANK, STORE and OUT in argv."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch import distributed as dist

from emulation import communicate_everything

if __name__ == "__main__":
    rank, store, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = communicate_everything(2, rank)
    dist.barrier()
    dist.destroy_process_group()
    out.write_text(json.dumps(results))
