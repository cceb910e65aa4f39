#!/usr/bin/env bash
# tests/asan_training.sh BUILD WORK: a short training with checkpoint and resume, the data tools, a
# C host and an embedded Lua under the sanitizer build; any report is a failure.
set -euo pipefail
build=$(realpath "$1") work=$2
top=$PWD
rm -rf "$work"
mkdir -p "$work"
program=$build/perigee
head -c 60000 <(bible -f 'gen1:1-gen20:18' </dev/null | sed -E 's/^[^ ]+ //') >"$work/text.txt"
"$program" data prepare --text "$work/text.txt" --out "$work/data" --vocab-size 384 --val-fraction 0.2
"$program" data check "$work/data"
cd "$work"
for head in adamw rownorm; do
  "$program" train "$top/recipes/tiny.lua" --quiet --set head=$head --set data="$work/data" \
    --out "$work/$head"
done
set +e
"$program" train "$top/recipes/tiny.lua" --quiet --set data="$work/data" --set updates=100000 \
  --max-time 3 --out "$work/stopped"
status=$?
set -e
[ $status = 75 ] || { echo "--max-time ended with $status instead of 75"; exit 1; }
"$program" eval "$work/rownorm/checkpoints/"*
"$program" generate "$work/rownorm" --prompt "In the beginning" --tokens 8
"$build/tests/host_train" "$work/data" 384
# The Lua module under a stock interpreter: the sanitizer's runtime has to come first.
LD_PRELOAD=$("${CC:-gcc}" -print-file-name=libasan.so) LUA_PATH="$top/lua/?.lua;$top/lua/?/init.lua" \
  LUA_CPATH="$build/lib/?.so" lua5.4 -e 'local pg = require "perigee"; print(pg.version)'
