"""A whole run of the recipe tiny in one process, without Ray: `python -m tests.train.quiet_run FOLDER SETTINGS`.

SETTINGS is a JSON list of `field=value`. Without an evaluation.
"""

import json
import sys

from ddm_ray.config import load_recipe
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.storage import graph
from ddm_ray.storage.run import Run
from ddm_ray.train import local

if __name__ == "__main__":
    url, settings = sys.argv[1], json.loads(sys.argv[2])
    run = Run.create(url, load_recipe("tiny", settings))
    prepare(run, execute=serial)
    partition(run)
    local.train(url, graph.trained_of(run.config))
    print(url)
