"""Train whatever is left of a run, one model after another, as a job on an island's Ray cluster.

ray job submit --address http://HEAD:8265 --working-dir . -- python jobs/work.py s3://bucket/run7 --island room-2
"""

import sys

from ddm_ray.cli import main

if __name__ == "__main__":
    main(["work", *sys.argv[1:]])
