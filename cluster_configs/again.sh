#!/usr/bin/env bash
# Runs a command again, as long as it exits with 75: the same may work later. Any other end is this one's too.
#   again.sh 30 ddm work RUN --island NAME      30 seconds between two tries
# SIGTERM and Ctrl-C reach the command as SIGTERM, and nothing is tried after them.
set -uo pipefail
pause=${1:?usage: again.sh SECONDS COMMAND...}
shift
running='' signals=0
trap 'signals=$((signals + 1)); [ -z "$running" ] || kill -TERM "$running" 2>/dev/null || true' TERM INT

# Waits for the child of this id. A signal ends bash's own wait, not the child.
ended() {
  local before
  while before=$signals; do
    status=0
    wait "$1" || status=$?
    [ "$before" = "$signals" ] && return
  done
}

while :; do
  "$@" &
  running=$!
  ended "$running"
  if [ "$status" != 75 ] || [ "$signals" != 0 ]; then exit "$status"; fi
  echo "again.sh: again in $pause s" >&2
  sleep "$pause" &
  running=$!
  ended "$running"
  if [ "$signals" != 0 ]; then exit 75; fi
done
