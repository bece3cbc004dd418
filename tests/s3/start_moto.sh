#!/bin/bash
# moto's threaded S3 server: start_moto.sh WORKDIR [PORT].   PYTHON=... with moto[s3] and flask (default python3).  Signatures are NOT checked.
set -euo pipefail
. "$(dirname "$0")/lib.sh"; begin "${1:?usage: start_moto.sh WORKDIR [PORT]}"; PORT=${2:-9500}; need_free "$PORT"
rm -rf "$W/tmp"; mkdir -p "$W/tmp"
TMPDIR=$W/tmp setsid "${PYTHON:-python3}" -m moto.server -H 127.0.0.1 -p "$PORT" > "$W/moto.log" 2>&1 < /dev/null &
echo "$! moto" > "$W/pids"; guard; wait_http $! "$PORT"; finish "$PORT" shardstreamtest shardstreamsecret
