#!/usr/bin/env bash
# An island on this machine: a Ray cluster of its own that shares nothing with its neighbours but files.
#   cluster_configs/local/island.sh 0 [CPUS [OPTIONS]]      stop it with Ctrl-C or SIGTERM
# Island N has the ports 20000 + 100 N and up: Ray's address is 127.0.0.1:(20000 + 100 N), the Jobs API's the next one.
# OPTIONS are more of `ray start`.
# Ray listens on all addresses of the machine; only who has the island's token, a file of yours, gets an answer.
set -euo pipefail
number=${1:?usage: island.sh NUMBER [CPUS [OPTIONS]]}
cpus=${2:-$(getconf _NPROCESSORS_ONLN)}
base=$((20000 + 100 * number))

home=$HOME/.ddm/island-$number
# Closed to others: the token alone, never what workers write on storage that islands share.
(umask 077; mkdir -p "$home")
if [ ! -O "$home" ]; then
  echo "island.sh: $home belongs to somebody else, who could read the token; remove it" >&2
  exit 1
fi
chmod 700 "$home"
# Linked, not written, to its name: of two that start at once both have the first one's.
(umask 077; head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$home/token.$$")
ln "$home/token.$$" "$home/token" 2>/dev/null || true
rm "$home/token.$$"
unset RAY_AUTH_TOKEN
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$home/token"
# Ray opens the folder it is given to everybody: one within a folder of ours. Sockets' paths must be short.
temp=$(mktemp -d "/tmp/ddm-island-$number.XXXXXX")/ray
ln -sfn "$temp" "$home/ray"

export RAY_USAGE_STATS_ENABLED=0
# Counters would be told to whoever asks, with no token: RAY_enable_metrics_collection=1 for those who scrape them.
export RAY_enable_metrics_collection="${RAY_enable_metrics_collection:-0}"
export DASHBOARD_METRIC_PORT="${DASHBOARD_METRIC_PORT:--1}" AUTOSCALER_METRIC_PORT="${AUTOSCALER_METRIC_PORT:--1}"
# One node, whose end nobody announces: a watcher for it would cost each training job seconds to start.
export RAY_TRAIN_ENABLE_PREEMPTION_WATCHER=0
exec "$(dirname "${BASH_SOURCE[0]}")/../start_ray.py" --head --node-ip-address 127.0.0.1 --num-cpus "$cpus" --temp-dir "$temp" \
  --port "$base" --include-dashboard true --dashboard-host 127.0.0.1 --dashboard-port $((base + 1)) \
  --ray-client-server-port $((base + 2)) --node-manager-port $((base + 3)) --object-manager-port $((base + 4)) \
  --metrics-export-port $((base + 5)) --dashboard-agent-listen-port $((base + 6)) \
  --dashboard-agent-grpc-port $((base + 7)) --runtime-env-agent-port $((base + 8)) \
  --min-worker-port $((base + 10)) --max-worker-port $((base + 99)) "${@:3}"
