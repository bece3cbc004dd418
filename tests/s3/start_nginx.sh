#!/bin/bash
# nginx with plain, shaped and chaos ports before the S3 server whose s3.env is in S3DIR.
#   start_nginx.sh WORKDIR S3DIR [BASE_PORT]        ports: BASE plain, +1 shaped, +2 chaos, +3 control
# Debian 12:  apt-get install -y --no-install-recommends nginx-light libnginx-mod-http-lua      (root not needed to run)
# Writes WORKDIR/s3.env (plain), s3-shaped.env, s3-chaos.env; stop with stop.sh WORKDIR.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd); . "$HERE/lib.sh"
begin "${1:?usage: start_nginx.sh WORKDIR S3DIR [BASE_PORT]}"; S=${2:?S3DIR}; BASE=${3:-9800}
NGINX=${NGINX:-nginx}
command -v "$NGINX" >/dev/null || { echo "start_nginx.sh: $NGINX missing (nginx-light)" >&2; exit 127; }
MODULES=${NGINX_MODULES:-$($NGINX -V 2>&1 | grep -o -- '--modules-path=[^ ]*' | cut -d= -f2)}
[ -e "$MODULES/ngx_http_lua_module.so" ] || { echo "start_nginx.sh: lua missing (libnginx-mod-http-lua)" >&2; exit 127; }
UP=$(sed -n 's|^S3_ENDPOINT=http://127.0.0.1:||p' "$S/s3.env")
need_free "$BASE" $((BASE + 1)) $((BASE + 2)) $((BASE + 3))
mkdir -p "$W"/{logs,tmp}; rm -f "$W"/logs/*.log
cp "$HERE/chaos.lua" "$W/chaos.lua"
sed -e "s|@MODULES@|$MODULES|g; s|@DIR@|$W|g; s|@USER@|$(id -un)|g; s|@UPSTREAM@|$UP|g" \
    -e "s|@P0@|$BASE|g; s|@P1@|$((BASE + 1))|g; s|@P2@|$((BASE + 2))|g; s|@P3@|$((BASE + 3))|g" "$HERE/nginx_chaos.conf.template" > "$W/nginx.conf"
setsid "$NGINX" -p "$W" -e logs/error.log -c nginx.conf > "$W/logs/nginx.out" 2>&1 < /dev/null &
echo "$! nginx" > "$W/pids"; guard
wait_http $! $((BASE + 3)) /stats || { cat "$W"/logs/nginx.out "$W"/logs/error.log >&2; "$HERE/stop.sh" "$W"; exit 1; }
i=0
for n in "" -shaped -chaos; do
  { echo "S3_ENDPOINT=http://127.0.0.1:$((BASE + i))"; grep -v S3_ENDPOINT "$S/s3.env"; } > "$W/s3$n.env"; i=$((i + 1))
done
grep -h ENDPOINT "$W"/s3.env "$W"/s3-shaped.env "$W"/s3-chaos.env; echo "CONTROL=http://127.0.0.1:$((BASE + 3))"
