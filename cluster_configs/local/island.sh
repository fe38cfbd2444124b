#!/usr/bin/env bash
# An island on this machine: a Ray cluster of its own, on loopback, that shares nothing with its neighbours but files.
#   cluster_configs/local/island.sh 0 [CPUS]      stop it with Ctrl-C or SIGTERM
# Island N has the ports 20000 + 100 N and up: Ray's address is 127.0.0.1:(20000 + 100 N), the Jobs API's the next one.
set -euo pipefail
number=${1:?usage: island.sh NUMBER [CPUS]}
cpus=${2:-$(getconf _NPROCESSORS_ONLN)}
base=$((20000 + 100 * number))

# Without authentication: only for a cluster that listens on loopback.
export RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0
# One node, whose end nobody announces: a watcher for it would cost each training job seconds to start.
export RAY_TRAIN_ENABLE_PREEMPTION_WATCHER=0
export RAY_health_check_period_ms=1000 RAY_health_check_failure_threshold=3
# Sockets live below the temp dir and their paths must be short.
exec ray start --head --block --node-ip-address 127.0.0.1 --num-cpus "$cpus" --temp-dir "/tmp/ddm-island-$number" \
  --port "$base" --include-dashboard true --dashboard-host 127.0.0.1 --dashboard-port $((base + 1)) \
  --ray-client-server-port $((base + 2)) --node-manager-port $((base + 3)) --object-manager-port $((base + 4)) \
  --metrics-export-port $((base + 5)) --dashboard-agent-listen-port $((base + 6)) \
  --dashboard-agent-grpc-port $((base + 7)) --runtime-env-agent-port $((base + 8)) \
  --min-worker-port $((base + 10)) --max-worker-port $((base + 99))
