#!/usr/bin/env bash
# One machine of a Ray cluster that several jobs share, each bound to a slice of it. Stop it with SIGTERM.
#   node.sh head                      the head: it trains nothing, so no loss of a training machine touches it
#   node.sh HEAD:6379 island-a 4      a machine of slice island-a, for 4 workers: as many as it has GPUs
# Further words are passed on to `ray start`. Ray listens on all addresses: all machines have one token, which it asks for.
set -euo pipefail
role=${1:?usage: node.sh head | node.sh HEAD:PORT SLICE WORKERS}
if [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -s "${RAY_AUTH_TOKEN_PATH:-}" ]; then
  echo "node.sh: no token; set RAY_AUTH_TOKEN_PATH to the file that has this cluster's (cluster_configs/README.md)" >&2
  exit 1
fi
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
# Counters would be told to whoever asks, with no token: RAY_enable_metrics_collection=1 for those who scrape them.
export RAY_enable_metrics_collection="${RAY_enable_metrics_collection:-0}"
export DASHBOARD_METRIC_PORT="${DASHBOARD_METRIC_PORT:--1}" AUTOSCALER_METRIC_PORT="${AUTOSCALER_METRIC_PORT:--1}"
start="$(dirname "${BASH_SOURCE[0]}")/../start_ray.py"
if [ "$role" = head ]; then
  exec "$start" --head --num-cpus 0 "${@:2}"
fi
slice=${2:?name of the slice} workers=${3:?workers that this machine is for}
exec "$start" --address "$role" --resources "{\"$slice\": $workers}" "${@:4}"
