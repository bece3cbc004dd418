#!/bin/bash
# Stop what a start_*.sh started: stop.sh WORKDIR.   Only the pids it recorded ("PID NAME [SIGNAL]" a line), newest first;
# each gets its signal (TERM by default; KILL for ceph, whose daemons would wait 5 s for each other), then KILL after 3 s.
W=${1:?usage: stop.sh WORKDIR}
[ -e "$W/pids" ] || exit 0
alive() { # a zombie that the container's init has not collected yet is gone too
  kill -0 "$1" 2>/dev/null && ! grep -qs '^State:[[:space:]]*Z' "/proc/$1/status"
}
tac "$W/pids" | while read -r pid name sig; do kill -"${sig:-TERM}" "$pid" 2>/dev/null; done
for _ in $(seq 150); do
  left=0; while read -r pid name sig; do alive "$pid" && left=1; done < "$W/pids"
  [ $left = 0 ] && break; sleep 0.02
done
while read -r pid name sig; do kill -KILL "$pid" 2>/dev/null; done < "$W/pids"
rm -f "$W/pids" "$W"/s3*.env
exit 0
