"""A probe's report without Ray's part, as a job of a real island: from one storage, by one clock and with one cache."""

import argparse
import time

from ddm_ray.islands.probe import MARK, ClusterReport, look, probe

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_url")
    parser.add_argument("question")
    parser.add_argument("--ahead", type=float, default=0.0, help="seconds")
    parser.add_argument("--cache")
    given = parser.parse_args()
    node = look(given.run_url, given.question, given.cache, use_gpu=False).model_copy(update={"places": 4})
    cluster = ClusterReport(resources={"CPU": 4.0}, places=4, nodes=[node], open=False)
    report = probe(given.run_url, given.question, cluster, lambda: time.time() + given.ahead)
    print(MARK + report.to_json())
