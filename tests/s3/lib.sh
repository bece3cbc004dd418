# Shared by start_*.sh (bash).
T0=${EPOCHREALTIME/./}
export PATH=$PATH${SERVERS_PATH-:/usr/sbin:/sbin}
begin() { # WORKDIR: make it, W becomes absolute; refuse one that is running
  mkdir -p "$1"; W=$(cd "$1" && pwd)
  [ ! -e "$W/pids" ] || { echo "$0: $W/pids exists: stop.sh $W first" >&2; exit 1; }
}
busy() { (exec 3<>/dev/tcp/127.0.0.1/"$1") 2>/dev/null; }
need_free() { local p; for p; do if busy "$p"; then echo "$0: port $p is taken" >&2; exit 1; fi; done; }
http() { # PORT PATH: first line of the answer
  exec 3<>/dev/tcp/127.0.0.1/"$1" || return 1
  printf 'GET %s HTTP/1.0\r\nHost: 127.0.0.1:%s\r\n\r\n' "$2" "$1" >&3; head -n 1 <&3; exec 3>&-
}
wait_http() { # PID PORT [PATH]: until it answers HTTP or the process is gone (30 s)
  local i
  for i in $(seq 600); do
    kill -0 "$1" 2>/dev/null || { echo "$0: process $1 died, see $W" >&2; return 1; }
    case $(http "$2" "${3:-/}" 2>/dev/null) in HTTP/*) return 0 ;; esac
    sleep 0.05
  done
  echo "$0: no answer on port $2" >&2; return 1
}
finish() { # PORT ACCESS SECRET: the server is up
  printf 'S3_ENDPOINT=http://127.0.0.1:%s\nS3_ACCESS_KEY=%s\nS3_SECRET_KEY=%s\nS3_REGION=us-east-1\n' "$1" "$2" "$3" | tee "$W/s3.env"
  echo "# up in $(( (${EPOCHREALTIME/./} - T0) / 1000 )) ms"
}
guard() { # with S3_GUARD_PID set: stop.sh WORKDIR once that process (the test run) is gone, however it went
  [ -n "${S3_GUARD_PID:-}" ] || return 0
  setsid bash -c 'while kill -0 "$1" 2>/dev/null && [ -e "$2/pids" ]; do sleep 1; done; "$3/stop.sh" "$2"' guard \
    "$S3_GUARD_PID" "$W" "$(cd "$(dirname "$0")" && pwd)" > /dev/null 2>&1 < /dev/null &
}
