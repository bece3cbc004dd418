#!/bin/bash
# A throw-away Ceph RADOS Gateway (S3) on loopback: one mon, one osd, one rgw.  No systemd, no mgr, no cephx, no Python; root not needed.
#   start_ceph.sh WORKDIR [PORT] [memstore|bluestore]      S3 on PORT, mon on PORT+1, osd on free ports of 6800-7300
# Debian 12:  apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd     (or unpacked into DIR with dpkg -x, then CEPH_ROOT=DIR)
# memstore: up in 0.6 s; RAM = 2 x data; no size limit.   bluestore: up in 8 s; sparse file of CEPH_STORE_BYTES in WORKDIR; RSS 0.3 GB.
# Prints S3_ENDPOINT, S3_ACCESS_KEY, S3_SECRET_KEY, S3_REGION and leaves them in WORKDIR/s3.env.  stop.sh WORKDIR ends it; data are not kept.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd); . "$HERE/lib.sh"
begin "${1:?usage: start_ceph.sh WORKDIR [PORT] [memstore|bluestore]}"
PORT=${2:-9400}; STORE=${3:-memstore}; MONPORT=$((PORT + 1))
ACCESS=${S3_ACCESS_KEY:-shardstreamtest}; SECRET=${S3_SECRET_KEY:-shardstreamsecret}
STORE_BYTES=${CEPH_STORE_BYTES:-21474836480}
ROOTCONF=
if [ -n "${CEPH_ROOT:-}" ]; then                 # packages unpacked with dpkg -x instead of installed
  R=$(cd "$CEPH_ROOT" && pwd); L=$R/usr/lib/x86_64-linux-gnu
  export PATH=$R/usr/bin:$R/usr/sbin:$PATH LD_LIBRARY_PATH=$L:$L/ceph:$R/lib/x86_64-linux-gnu
  ROOTCONF="osd class dir = $L/rados-classes
plugin dir = $L/ceph
erasure code dir = $L/ceph/erasure-code"
fi
for t in ceph-mon ceph-osd radosgw radosgw-admin monmaptool osdmaptool; do
  command -v $t >/dev/null || { echo "start_ceph.sh: $t missing (radosgw ceph-mon ceph-osd)" >&2; exit 127; }
done
need_free "$PORT" "$MONPORT"
rm -rf "$W"/{mon,osd,run,log,monmap,osdmap}; mkdir -p "$W"/{mon,osd,run,log}
FSID=$(cat /proc/sys/kernel/random/uuid)
trap 'rc=$?; [ $rc = 0 ] || { echo "start_ceph.sh: failed (rc $rc); logs in $W/log" >&2; tail -n 3 "$W"/log/*.out >&2 || true; "$HERE/stop.sh" "$W" || true; }' EXIT

cat > "$W/ceph.conf" <<CONF
[global]
fsid = $FSID
mon initial members = a
mon host = [v2:127.0.0.1:$MONPORT/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
ms bind msgr1 = false
auth cluster required = none
auth service required = none
auth client required = none
# radosgw asks the mon for "secure" by default, which auth none cannot give: it would retry for ever with -13
ms mon client mode = crc
ms crc data = false
ms async op threads = 2
objecter tick interval = 0.5
keyring = $W/keyring
run dir = $W/run
admin socket =
log file = $W/log/\$name.log
mon cluster log file = $W/log/cluster.log
crash dir = $W/log
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
$ROOTCONF
[mon]
mon data = $W/mon
mon data avail crit = 1
mon data avail warn = 1
paxos propose interval = 0.02
paxos min wait = 0.01
auth allow insecure global id reclaim = false
[osd]
osd data = $W/osd
osd objectstore = $STORE
osd numa auto affinity = false
osd max object name len = 1024
osd op num shards = 2
osd op num threads per shard = 1
osd memory target = 939524096
memstore device bytes = $STORE_BYTES
bluestore block size = $STORE_BYTES
bluestore block create = true
[client]
# tcp_nodelay=1: without it every small answer waits 40 ms (Nagle and delayed ACK)
rgw frontends = beast endpoint=127.0.0.1:$PORT tcp_nodelay=1
rgw thread pool size = ${RGW_THREADS:-64}
rgw enable apis = s3, admin
rgw run sync thread = false
rgw override bucket index max shards = 1
rgw dynamic resharding = false
# deleted data leave memory after seconds, not two hours
rgw gc obj min wait = 1
rgw gc processor period = 5
rgw gc processor max time = 5
CONF
C="-c $W/ceph.conf"
: > "$W/keyring"
: > "$W/pids"
guard                                            # before the first daemon: a run killed while Ceph starts leaves none behind
run() { # name, command...: in the background, its own session, pid recorded
  local n=$1; shift
  setsid "$@" > "$W/log/$n.out" 2>&1 < /dev/null &
  echo "$! $n KILL" >> "$W/pids"
}
monmaptool --create --fsid "$FSID" --addv a "[v2:127.0.0.1:$MONPORT]" "$W/monmap" > "$W/log/monmaptool.out" 2>&1
osdmaptool --createsimple 1 "$W/osdmap" --clobber > "$W/log/osdmaptool.out" 2>&1        # osd.0 exists from epoch 1: no `ceph osd new`
ceph-mon $C -i a --mkfs --monmap "$W/monmap" --osdmap "$W/osdmap" > "$W/log/mon-mkfs.out" 2>&1
run mon ceph-mon $C -i a -f
ceph-osd $C -i 0 --mkfs --osd-uuid "$(cat /proc/sys/kernel/random/uuid)" > "$W/log/osd-mkfs.out" 2>&1
run osd ceph-osd $C -i 0 -f
for _ in $(seq 1500); do grep -q 'osd.0 .*boot$' "$W/log/cluster.log" 2>/dev/null && break; kill -0 $!; sleep 0.02; done   # a client before that waits 5 s
timeout 120 radosgw-admin $C user create --uid=test --display-name=test --max-buckets=0 \
   --access-key="$ACCESS" --secret-key="$SECRET" > "$W/log/user.out" 2>&1               # makes zone and pools too
run rgw radosgw $C -n client.rgw -f
wait_http $! "$PORT"
finish "$PORT" "$ACCESS" "$SECRET"
