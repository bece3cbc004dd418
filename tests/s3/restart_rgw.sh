#!/bin/bash
# Start the gateway of a cluster of start_ceph.sh again, after it was killed: restart_rgw.sh WORKDIR.  Mon and osd, and so the data, live on.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd); . "$HERE/lib.sh"
W=$(cd "${1:?usage: restart_rgw.sh WORKDIR}" && pwd)
PORT=$(sed -n 's|^S3_ENDPOINT=http://127.0.0.1:||p' "$W/s3.env")
need_free "$PORT"
sed -i '/ rgw KILL$/d' "$W/pids"
setsid radosgw -c "$W/ceph.conf" -n client.rgw -f > "$W/log/rgw.out" 2>&1 < /dev/null &
echo "$! rgw KILL" >> "$W/pids"
wait_http $! "$PORT"
