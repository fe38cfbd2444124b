"""Draw images from a finished mixture, as a job on an island's Ray cluster.

ray job submit --address http://HEAD:8265 --working-dir . -- python jobs/sample.py s3://bucket/run7 -o /tmp/it.png
"""

import sys

from ddm_ray.cli import main

if __name__ == "__main__":
    main(["sample", *sys.argv[1:]])
