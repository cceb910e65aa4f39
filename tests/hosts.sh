#!/usr/bin/env bash
# tests/hosts.sh BUILD WORK: the two example hosts, a C program without Lua (20 updates and the
# diameter) and a C program with its own lua_State.
set -euo pipefail
build=$(realpath "$1") work=$2
rm -rf "$work"
mkdir -p "$work"
[ "$(wc -l <tests/host/train.c)" -lt 80 ] || { echo "tests/host/train.c has 80 lines or more"; exit 1; }
"$build/perigee" data prepare --text README.md --out "$work/data" --vocab-size 300 --val-fraction 0.2
"$build/tests/host_train" "$work/data" 300 | tee "$work/out"
[ "$(grep -c 'diameter 0\.[0-9]*$' "$work/out")" = 20 ] || { echo "not 20 diameters"; exit 1; }
# Twice RowNorm's learning rate of 0.01 bounds the diameter at every update.
awk '$6 > 0.02 * (1 + 1e-5) { print "diameter above 2 lr: " $0; bad = 1 } END { exit bad }' "$work/out"
LUA_PATH="lua/?.lua;lua/?/init.lua" LUA_CPATH="$build/lib/?.so" \
  "$build/tests/host_embed" tests/host/embed.lua "$work/data" "$work/run"
echo "unit: 2 passed, 0 failed"
