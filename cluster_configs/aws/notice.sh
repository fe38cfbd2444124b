#!/usr/bin/env bash
# On a spot machine of AWS: hears that it will be taken back, two minutes before, and tells the Ray at RAY_ADDRESS, so that
# its workers save a state and leave. METADATA is another address of the instance metadata service, for tests.
set -euo pipefail
metadata=${METADATA:-http://169.254.169.254}/latest
while :; do
  # 404: nobody wants this machine back.
  token=$(curl -sf -m 2 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$metadata/api/token" || true)
  if curl -sf -m 2 -H "X-aws-ec2-metadata-token: $token" "$metadata/meta-data/spot/instance-action"; then
    exec ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "spot" --deadline-remaining-seconds 110
  fi
  sleep 5
done
