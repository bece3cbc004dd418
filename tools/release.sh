#!/usr/bin/env bash
# Build a release and try it: tools/release.sh [--any-version] VERSION
#
# 1. Check that the tree is clean, and that pyproject.toml and CHANGELOG.md name the version (--any-version: try the steps without that).
# 2. Build the sdist and the wheel into dist/, and check their metadata.
# 3. Try both in an empty environment of each Python that is found: all commands that need no torch, and with the torch of
#    constraints.txt, on this Python, a loader.
# 4. Print what is left for a person: the tag, and the upload.
set -euo pipefail
cd "$(dirname "$0")/.."
any=false
if [ "${1:-}" = --any-version ]; then any=true; shift; fi
version=${1:?usage: tools/release.sh [--any-version] VERSION}

fail() { echo "release: $1" >&2; exit 1; }

if ! $any; then
  [ -z "$(git status --porcelain)" ] || fail "the tree has changes; commit them"
  grep -qx "version = \"$version\"" pyproject.toml || fail "pyproject.toml has another version"
  grep -q "^## $version" CHANGELOG.md || fail "CHANGELOG.md has no section '## $version'"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/build"
"$work/build/bin/pip" install -q build twine
rm -rf dist
"$work/build/bin/python" -m build --outdir dist . >"$work/log" 2>&1 || { tail -n 30 "$work/log"; fail "the build failed"; }
"$work/build/bin/twine" check --strict dist/*
ls -l dist

cat >"$work/pack.py" <<'PYTHON'
import shardstream as ss

with ss.ShardWriter("shards", max_samples=10) as writer:
    for number in range(40):
        writer.write({"__key__": f"{number:04d}", "txt": str(number), "cls": number % 3})
PYTHON
cat >"$work/read.py" <<'PYTHON'
import shardstream as ss

loader = ss.ShardLoader(ss.ShardDataset("shards", shuffle=True).decode().to_tuple("txt", "cls"), batch_size=8)
assert sorted(int(text) for texts, _ in loader for text in texts) == list(range(40))
PYTHON

# try_out PYTHON FILE HAS_TORCH
try_out() {
  local place bin
  place=$(mktemp -d -p "$work")
  bin=$place/venv/bin
  "$1" -m venv "$place/venv"
  if $3; then
    "$bin/pip" install -q -c constraints.txt "$2"
  else
    "$bin/pip" install -q $(python3 tools/requirements.py)
    "$bin/pip" install -q --no-deps "$2"
  fi
  (
    cd "$place"
    "$bin/python" "$work/pack.py"
    "$bin/shardstream" verify shards
    "$bin/shardstream" ls shards >/dev/null
    "$bin/shardstream" doctor shards --seconds 0.1 >/dev/null
    if $3; then "$bin/python" "$work/read.py"; fi
  )
  echo "works: $(basename "$2") with $("$bin/python" --version), $("$bin/pip" list --format=freeze | wc -l) packages, $(du -sh "$place/venv" | cut -f1)"
  rm -rf "$place"
}

this=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for name in 3.11 3.12 3.13 3.14; do
  for python in "$(command -v "python$name" || true)" "$HOME"/.pyenv/versions/"$name".*/bin/python; do
    if [ -x "$python" ] && "$python" -c 'import venv, ssl' 2>/dev/null; then
      has_torch=false
      [ "$name" != "$this" ] || has_torch=true
      for file in dist/*.whl dist/*.tar.gz; do try_out "$python" "$PWD/$file" $has_torch; done
      break
    fi
  done
done

cat <<TEXT
Left to do by a person, after .ci/run is green for this commit:
  git tag -s v$version -m "shardstream $version" && git push origin v$version
  pipx run twine upload dist/*
TEXT
