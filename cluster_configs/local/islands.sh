#!/usr/bin/env bash
# Several islands on this machine at once: Ray clusters of one node each, as island.sh starts them.
#   cluster_configs/local/islands.sh up 0 1 2    start islands 0, 1 and 2, which stay; ~/.ddm/islands/islands.yaml names them
#   cluster_configs/local/islands.sh down        end all of them, and whatever trains there; `down 1` ends island 1 alone
# CPUS=4 before it gives each so many; else they share this machine's. `up` leaves alone what runs, and starts the others.
set -euo pipefail
usage="usage: islands.sh up NUMBER... | down [NUMBER...]"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$HOME/.ddm/islands
(umask 077; mkdir -p "$folder")
unset RAY_ADDRESS RAY_API_SERVER_ADDRESS RAY_AUTH_TOKEN
export RAY_AUTH_MODE=token
exec 8>"$folder/lock"
flock --nonblock 8 || { echo "islands.sh: another command brings islands up or down" >&2; exit 1; }

# An island is the process group of its scope.py, which holds a lock while it lives: until then its pid is no other's.
alive() { [ -e "$folder/$1.lock" ] && ! flock --nonblock "$folder/$1.lock" true; }

end() {
  local number=$1 temp
  [ -e "$folder/$number.pid" ] || return 0
  if alive "$number"; then
    kill -TERM -- "-$(cat "$folder/$number.pid")" || true
    for _ in {1..150}; do alive "$number" || break; sleep 0.2; done
    ! alive "$number" || kill -KILL -- "-$(cat "$folder/$number.pid")" || true
  fi
  temp=$(readlink "$HOME/.ddm/island-$number/ray" || true)
  [[ $temp != /tmp/ddm-island-*/ray ]] || rm -rf "${temp%/ray}"
  rm -rf "$HOME/.ddm/island-$number" "$folder/$number."{pid,lock}
}

start() {
  local number=$1 log="$folder/$1.log"
  : >"$log"
  (
    exec 8>&- 9>"$folder/$number.lock"
    flock 9
    # Without `env` it would ignore Ctrl-C, as background processes of a script do, and so would its jobs.
    exec setsid env --default-signal=INT python3 "$here/scope.py" \
      "$here/island.sh" "$number" "$cpus" --object-store-memory "$objects" --include-log-monitor=false
  ) >>"$log" 2>&1 </dev/null &
  echo $! >"$folder/$number.pid"
  for _ in {1..1500}; do
    ! grep -qs "Ray runtime started" "$log" || return 0
    kill -0 $! 2>/dev/null || break
    sleep 0.2
  done
  end "$number"
  return 1
}

# The Jobs API answers some time before it takes any.
try_job() {
  for _ in {1..30}; do
    alive "$1" || break
    ! RAY_AUTH_TOKEN_PATH="$HOME/.ddm/island-$1/token" \
      ray job submit --address "http://127.0.0.1:$((20001 + 100 * $1))" -- true >>"$folder/$1.log" 2>&1 || return 0
    sleep 1
  done
  return 1
}

up() {
  local number
  for number in "$@"; do
    ! alive "$number" || { echo "island $number runs already"; continue; }
    end "$number"  # what a lost head has left
    ! (exec 3<>"/dev/tcp/127.0.0.1/$((20000 + 100 * number))") 2>/dev/null || fail "$number" "its port is in use"
    echo "starting island $number"
    start "$number" || fail "$number" "$(said "$number")"
    echo "island $number runs"
  done
  for number in "$@"; do try_job "$number" || fail "$number" "$(said "$number")"; done
  {
    echo "# Islands on this machine. \`islands.sh up\` writes it: change a copy of it."
    echo "islands:"
    for number in "$@"; do
      echo "  local-$number:"
      echo "    address: 127.0.0.1:$((20000 + 100 * number))"
      echo "    jobs: http://127.0.0.1:$((20001 + 100 * number))"
      echo "    token_file: \"$HOME/.ddm/island-$number/token\""
      echo "    threads: $cpus"
      # Half of them: there is room beside a training for what another job needs.
      echo "    resources_per_worker: {CPU: $((cpus / 2)).$((cpus % 2 * 5))}"
    done
  } >"$folder/islands.yaml.new"
  mv "$folder/islands.yaml.new" "$folder/islands.yaml"
  echo "$folder/islands.yaml names them; next: ddm launch RUN --islands $(printf %q "$folder/islands.yaml")"
}

said() { echo "$(tail -n 1 "$folder/$1.log"); see $folder/$1.log"; }
fail() { echo "islands.sh: island $1 doesn't start: $2" >&2; exit 1; }

verb=${1:?$usage}
shift
case $verb in
  up)
    [[ $# -gt 0 && "$*" =~ ^[0-9\ ]+$ ]] || { echo "$usage" >&2; exit 2; }
    cpus=${CPUS:-$(($(getconf _NPROCESSORS_ONLN) / $#))}
    cpus=$((cpus > 0 ? cpus : 1))
    # Ray would give each a share of the memory as if it were alone.
    objects=$(($(getconf _PHYS_PAGES) * $(getconf PAGE_SIZE) * 3 / 10 / $#))
    up "$@"
    ;;
  down)
    for file in "$folder"/*.pid; do
      number=$(basename "$file" .pid)
      [ -e "$file" ] && [[ $# -eq 0 || " $* " == *" $number "* ]] || continue
      end "$number"
      echo "island $number is ended"
    done
    # It would name what is no more. While others run, theirs are the lines that count.
    compgen -G "$folder/*.pid" >/dev/null || rm -f "$folder/islands.yaml"
    ;;
  *) echo "$usage" >&2; exit 2 ;;
esac
