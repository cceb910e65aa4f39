#!/usr/bin/env bash
# tests/install.sh BUILD PREFIX: after `cmake --install`, a stock lua5.4 and a C program outside
# the tree find Perigee.
set -euo pipefail
build=$(realpath "$1") prefix=$2
rm -rf "$prefix"
cmake --install "$build" --prefix "$prefix" >/dev/null
cd /
export LUA_PATH="$prefix/share/lua/5.4/?.lua;$prefix/share/lua/5.4/?/init.lua"
export LUA_CPATH="$prefix/lib/lua/5.4/?.so"
lua5.4 -e 'local pg = require "perigee"; assert(pg.version, "no version"); print("lua5.4 loads Perigee " .. pg.version)'
"$prefix/bin/perigee" --version
cat >"$prefix/host.c" <<'C'
#include <perigee/core/perigee.h>
#include <stdio.h>
int main(void) {
  pg_context *ctx;
  char message[256];
  if (pg_context_new(NULL, &ctx, message, sizeof message) < 0) return 1;
  printf("a C host outside the tree runs on %s\n", pg_context_device(ctx));
  pg_context_free(ctx);
  return 0;
}
C
openblas=$(dirname "$(sed -n 's/^PG_OPENBLAS:FILEPATH=//p' "$build/CMakeCache.txt")")
cc -I"$prefix/include" "$prefix/host.c" -o "$prefix/host" "$prefix/lib/libperigee.a" -L"$openblas" \
  -Wl,-rpath,"$openblas" -lopenblas $(pkg-config --libs libuv libpcre2-8 jansson libcrypto) \
  -fopenmp -lm
"$prefix/host"
"$prefix/bin/perigee" repl -e 'print(help "batch")' | grep -q sequences
echo "help finds the installed reference"
