#!/usr/bin/env bash
# One machine that a scheduler lends to an island: Ray, in the foreground. After SIGTERM its workers save a state and leave.
#   machine.sh BASE head [OPTIONS]      Ray's head at port BASE; it trains too
#   machine.sh BASE HEAD [OPTIONS]      a machine more of the head at this IP address, once that is up
# Ports are BASE to BASE + 99, so that jobs with other ones fit the same machine. OPTIONS are more of `ray start`.
# Ray listens on all addresses: RAY_AUTH_TOKEN or the file at RAY_AUTH_TOKEN_PATH is the same on all machines.
set -euo pipefail
base=${1:?usage: machine.sh BASE head|HEAD} role=${2:?usage: machine.sh BASE head|HEAD}
if [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -s "${RAY_AUTH_TOKEN_PATH:-}" ]; then
  echo "machine.sh: no token; set RAY_AUTH_TOKEN_PATH to the file that has this island's" >&2
  exit 1
fi
# Ray opens the folder it is given to everybody: one within a folder of ours. Sockets' paths must be short.
temp=/tmp/ddm-$UID-$base
(umask 077; mkdir -p "$temp")
if [ ! -O "$temp" ]; then
  echo "machine.sh: $temp belongs to somebody else; remove it" >&2
  exit 1
fi
chmod 700 "$temp"
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
# Counters would be told to whoever asks, with no token: RAY_enable_metrics_collection=1 for those who scrape them.
export RAY_enable_metrics_collection="${RAY_enable_metrics_collection:-0}"
export DASHBOARD_METRIC_PORT="${DASHBOARD_METRIC_PORT:--1}" AUTOSCALER_METRIC_PORT="${AUTOSCALER_METRIC_PORT:--1}"
start="$(dirname "${BASH_SOURCE[0]}")/start_ray.py"
ports=(
  --node-manager-port $((base + 3)) --object-manager-port $((base + 4)) --metrics-export-port $((base + 5))
  --dashboard-agent-listen-port $((base + 6)) --dashboard-agent-grpc-port $((base + 7))
  --runtime-env-agent-port $((base + 8)) --min-worker-port $((base + 10)) --max-worker-port $((base + 99))
)
if [ "$role" = head ]; then
  exec "$start" --head --port "$base" --temp-dir "$temp/ray" --dashboard-host 127.0.0.1 \
    --dashboard-port $((base + 1)) --ray-client-server-port $((base + 2)) "${ports[@]}" "${@:3}"
fi
for _ in {1..60}; do
  if ray health-check --address "$role:$base" &> /dev/null; then
    exec "$start" --address "$role:$base" --temp-dir "$temp/ray" "${ports[@]}" "${@:3}"
  fi
  sleep 2
done
echo "machine.sh: no Ray at $role:$base" >&2
exit 75
