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
"$program" repl "$work/adamw/checkpoints/00000010" "$work/rownorm" -e 'compare(a, b, 64)' \
  -e 'what_if(pg.optim.rownorm { lr = 1e-2 }, { warm = 1, panel = 64 })' -e 'step(2)' \
  -e 'hilbert(64)' -e 'head:neighbours(tok " the")' -e 'plot { scatter = inc, labels = 3 }'
"$program" train "$top/recipes/tiny.lua" --quiet --set data="$work/data" --set updates=100000 \
  --out "$work/live" &
until [ -e "$work/live/attach.json" ]; do sleep 0.1; done
"$program" attach "$work/live" -e 'set("head", { lr = 1e-3 })' -e 'limit(1)' -e 'pause()' \
  -e 'checkpoint()' -e 'hook(pg.every(1, function() error("no") end))' -e 'run:stop()'
wait $!
"$build/tests/host_train" "$work/data" 384
# The Lua module under a stock interpreter: the sanitizer's runtime has to come first.
LD_PRELOAD=$("${CC:-gcc}" -print-file-name=libasan.so) LUA_PATH="$top/lua/?.lua;$top/lua/?/init.lua" \
  LUA_CPATH="$build/lib/?.so" lua5.4 -e 'local pg = require "perigee"; print(pg.version)'
