"""A whole run of the recipe tiny in one process, without Ray: `python -m tests.train.quiet_run FOLDER SETTINGS`.

SETTINGS is a JSON list of `field=value`. Without an evaluation, and without a student.
"""

import json
import sys

from ddm_ray.data.partition.stage import partition
from ddm_ray.run import graph
from ddm_ray.train import local
from tests.data.rows import commit_rows

if __name__ == "__main__":
    run = commit_rows(sys.argv[1], tuple(json.loads(sys.argv[2])))
    partition(run)
    local.train_locally(run.url, graph.wanted_of(run.config, [graph.MONOLITH]))
    print(run.url)
