"""Train one model of a run (expert INDEX, router, monolith), or all, as a job on an island's Ray cluster.

ray job submit --address http://HEAD:8265 --working-dir . -- python jobs/train.py s3://bucket/run7 expert 3
"""

import sys

from ddm_ray.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
