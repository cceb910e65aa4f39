#!/usr/bin/env bash
# tests/readme.sh BUILD WORK [full]: run every command of README.md, in its order, in a folder that
# looks like the tree. Without `full` the quickstart's trainings are cut to a few updates; tools/check
# is what runs this, so it is left out.
set -euo pipefail
build=$(realpath "$1") work=$2 mode=${3:-short}
top=$PWD
rm -rf "$work"
mkdir -p "$work"
for entry in CMakeLists.txt README.md core kernels lua recipes tests tools; do
  ln -s "$top/$entry" "$work/$entry"
done
ln -s "$build" "$work/build"
cd "$work"

# The recipe, then the shell blocks.
sed -n '/^```lua$/,/^```$/p' README.md | sed '/^```/d' >first.lua
sed -n '/^```sh$/,/^```$/p' README.md | sed '/^```/d' >commands
[ -s first.lua ] && [ -s commands ] || { echo "README.md has lost its commands"; exit 1; }
count=0
while IFS= read -r command <&3; do
  case $command in
    "" | tools/check) continue ;;
    tools/quickstart) [ "$mode" = full ] || command="tools/quickstart --updates 6" ;;
  esac
  echo "+ $command"
  bash -euo pipefail -c "$command" </dev/null
  count=$((count + 1))
done 3<commands
echo "unit: $count passed, 0 failed"
lua5.4 tests/session.lua build/perigee . "$mode"
[ "$(realpath build/lua)" = "$(realpath "$top/lua")" ] ||
  { echo "the build has lost its source folder: build/lua is $(readlink build/lua)"; exit 1; }
