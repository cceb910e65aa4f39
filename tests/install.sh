#!/usr/bin/env bash
# tests/install.sh BUILD PREFIX: after `cmake --install`, a stock lua5.4, a CMake project and a
# Makefile with pkg-config outside the tree find Perigee; man and the shells find its pages.
set -euo pipefail
build=$(realpath "$1") prefix=$2 top=$PWD
rm -rf "$prefix"
cmake --install "$build" --prefix "$prefix" >/dev/null
prefix=$(realpath "$prefix")
cd /
count=0
ok() { echo "ok $((count += 1)) - $*"; }

export LUA_PATH="$prefix/share/lua/5.4/?.lua;$prefix/share/lua/5.4/?/init.lua"
export LUA_CPATH="$prefix/lib/lua/5.4/?.so"
lua5.4 -e 'local pg = require "perigee"; assert(pg.version, "no version")'
ok "a stock lua5.4 loads the module"
version=$("$prefix/bin/perigee" --version)
"$prefix/bin/perigee" repl -e 'print(help "batch")' | grep -q sequences
ok "help finds the installed reference"

mkdir "$prefix/host"
cat >"$prefix/host/host.c" <<'C'
#include <perigee/core/perigee.h>
#include <stdio.h>
int main(void) {
  pg_context *ctx;
  char message[256];
  if (pg_context_new(NULL, &ctx, message, sizeof message) < 0) return 1;
  printf("runs on %s\n", pg_context_device(ctx));
  pg_context_free(ctx);
  return 0;
}
C
cat >"$prefix/host/CMakeLists.txt" <<'C'
cmake_minimum_required(VERSION 3.25)
project(host LANGUAGES C)
find_package(Perigee 0.1 REQUIRED)
add_executable(host host.c)
target_link_libraries(host Perigee::perigee)
C
cmake -S "$prefix/host" -B "$prefix/host/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
cmake --build "$prefix/host/build" >/dev/null
[ "$("$prefix/host/build/host")" = "runs on cpu" ]
ok "find_package builds a C host"
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
cc $(pkg-config --cflags perigee) "$prefix/host/host.c" -o "$prefix/host/host" \
  $(pkg-config --libs perigee)
[ "$("$prefix/host/host")" = "runs on cpu" ]
[ "perigee $(pkg-config --modversion perigee)" = "$version" ]
ok "pkg-config builds a C host"

page=$prefix/share/man/man1/perigee.1
grep -q '^\.SS perigee data check DIR' "$page"
if command -v man >/dev/null; then
  [ -z "$(man --warnings -l "$page" 2>&1 >/dev/null)" ]
  ok "the manual page has no fault"
fi
# What bash offers after the words given.
offers() {
  bash -c '. "$1"; shift; compopt() { :; }
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _perigee; echo "${COMPREPLY[@]}"' _ \
    "$prefix/share/bash-completion/completions/perigee" "$@"
}
[ "$(offers perigee tr)" = train ]
[ "$(offers perigee data "")" = "prepare check" ]
[ "$(offers perigee data check --se)" = --sequences ]
[ "$(offers perigee train --device "")" = "auto cpu cuda" ]
[ "$(cd "$top" && offers perigee train rec)" = recipes ]
ok "bash completes commands, options and values"
if command -v zsh >/dev/null; then
  PERIGEE_FUNCTIONS=$prefix/share/zsh/vendor-completions timeout 30 zsh -f "$top/tests/zsh_completion.zsh"
  ok "zsh completes commands, options and values"
fi
