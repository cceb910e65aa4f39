#!/usr/bin/env bash
# nvcc has compiled and linked the plugins of a build: they hold machine code for sm_90, and what
# the core looks for in them. Leaves with 77 where there is no nvcc.
#
#   tests/cuda/plugins.sh BUILD
set -uo pipefail
build=${1:?plugins.sh BUILD}
cd "$(dirname "$0")/../.."
. tools/packages.sh

good=0 bad=0
# plugin FILE SYMBOL SOURCE...
plugin() {
  local file=$build/lib/perigee/$1 symbol=$2 source
  echo "$1"
  shift 2
  if [ ! -e "$file" ]; then
    echo "not ok: it was not built, although nothing is missing for it"
  elif ! readelf -SW "$file" | grep -q ' \.nv_fatbin '; then
    echo "not ok: there are no kernels in it"
  elif ! nm -D --defined-only "$file" | grep -q " T $symbol\$"; then
    echo "not ok: it does not export $symbol"
  else
    for source; do
      grep -F "/$source\"" -B 2 "$build/compile_commands.json" | grep -q 'code=[^ ]*sm_90' && continue
      echo "not ok: $source was not compiled for sm_90"
      bad=$((bad + 1))
      return
    done
    good=$((good + 1))
    return
  fi
  bad=$((bad + 1))
}

find_nvcc >/dev/null || { echo "there is no nvcc"; exit 77; }
plugin perigee_cuda.so pg_cuda_kernels kernels/cuda/*.cu
missing=$(missing_cuda)
if [ -n "$missing" ]; then
  echo "perigee_nccl.so: there is no$missing"
else
  plugin perigee_nccl.so pg__comm_plugin core/plugins/comm_nccl.cu
fi
echo "unit: $good passed, $bad failed"
[ $bad = 0 ]
