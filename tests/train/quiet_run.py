"""A whole run of which expert 0 alone is trained, without Ray: `python -m tests.train.quiet_run FOLDER SETTINGS`.

The recipe is tiny; SETTINGS is a JSON list of `field=value`.
"""

import json
import sys

from ddm_ray.storage.graph import expert
from ddm_ray.train import local
from tests.random_run import make_run

if __name__ == "__main__":
    run = make_run(sys.argv[1], settings=tuple(json.loads(sys.argv[2])))
    run.store.delete(expert(0))
    local.train(run.url, [expert(0)])
    print(run.url)
