"""Compare a run's mixture with its monolith, as a job on an island's Ray cluster.

ray job submit --address http://HEAD:8265 --working-dir . -- python jobs/evaluate.py s3://bucket/run7
"""

import sys

from ddm_ray.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
