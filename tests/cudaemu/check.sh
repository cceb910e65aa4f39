#!/usr/bin/env bash
# Builds the emulation and runs its tests and seeded bugs through the matrix: orders of threads,
# lazy streams, guard mode, ASan, TSan with blocks ordered and unordered, alignment with g++, and
# nvcc for sm_90. The last line is "unit: N passed, N failed".
#
#   tests/cudaemu/check.sh BUILD [--quick] [--project]
#
#   BUILD      folder for the builds of all cells
#   --quick    one cell: clang, random order, lazy streams, guard mode
#   --project  build the project with -DPG_EMULATE_CUDA=ON instead of the emulation alone: all
#              programs of pg_emulated_test run in every cell
set -uo pipefail
build=${1:?check.sh BUILD [--quick] [--project]}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
quick=no source=$here options=()
for word in "${@:2}"; do
  case $word in
    --quick) quick=yes ;;
    --project) source=$root options=(-DPG_EMULATE_CUDA=ON -DPG_WERROR=ON) ;;
    *) echo "check.sh: unknown argument '$word'" >&2; exit 2 ;;
  esac
done
command -v clang++ >/dev/null || { echo "there is no clang++"; exit 77; }
mkdir -p "$build"
build=$(cd "$build" && pwd)
passed=0 failed=0
export OMP_NUM_THREADS=1
export TSAN_OPTIONS="halt_on_error=1 atexit_sleep_ms=0" UBSAN_OPTIONS=print_stacktrace=1

result() { # STATUS TEXT [LOG]
  if [ "$1" = 0 ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "not ok $2"
    [ -z "${3:-}" ] || grep -v '^ok ' "$3" | head -n 30 | cut -c 1-200 | sed 's/^/    | /'
  fi
}

# make_build NAME COMPILER SANITIZERS, COMPILER being clang or g
make_build() {
  local c=$2
  [ "$2" = g ] && c=gcc
  { CC=$c CXX=$2++ cmake -S "$source" -B "$build/$1" -G Ninja -DPG_SANITIZE="$3" \
    ${options[@]+"${options[@]}"} && nice cmake --build "$build/$1" --target cudaemu_tests
  } >"$build/$1.log" 2>&1 && return
  result 1 "build of $1" "$build/$1.log"
  return 1
}

# cell NAME BUILD "BUGS IT HAS TO CATCH" VARIABLE=VALUE...: all tests pass, all repaired bugs give
# the right result, and the broken ones of the list are noticed.
bugs="barrier reuse overrun overrun_scalar sync event refill pointer host_read misaligned blocks
      divergent uninitialised shared_overrun"
cell() {
  local name=$1 folder=$build/$2/cudaemu caught=$3 log=$build/cell-$1.log start=$SECONDS
  local before=$failed test bug status
  shift 3
  for test in "$folder"/*_test; do
    env "$@" timeout 300 "$test" >"$log" 2>&1
    result $? "$name: ${test##*/}" "$log"
  done
  for bug in $bugs; do
    env "$@" timeout 60 "$folder/emu_bugs" "$bug" fixed >"$log" 2>&1
    result $? "$name: $bug, repaired" "$log"
  done
  for bug in $caught; do
    env "$@" timeout 60 "$folder/emu_bugs" "$bug" broken >"$log" 2>&1
    status=$?
    [ $status != 0 ] && [ $status != 124 ] # noticed, and not by hanging
    result $? "$name: $bug, status $status"
  done
  [ $failed = "$before" ] && echo "ok $name ($((SECONDS - start)) s)"
}

always="pointer divergent uninitialised"
if [ "$quick" = yes ]; then
  make_build clang clang "" &&
    cell quick clang "$always overrun overrun_scalar sync event barrier" \
      CUDAEMU_ORDER=random:1 CUDAEMU_STREAMS=lazy CUDAEMU_GUARD=1
else
  if make_build clang clang ""; then
    cell forward clang "$always"
    cell reverse clang "$always barrier reuse" CUDAEMU_ORDER=reverse
    cell random-1 clang "$always barrier" CUDAEMU_ORDER=random:1
    cell random-2 clang "$always barrier refill" CUDAEMU_ORDER=random:2 \
      CUDAEMU_STREAMS=random:2
    cell lazy clang "$always sync event" CUDAEMU_STREAMS=lazy
    cell guard clang "$always overrun overrun_scalar" CUDAEMU_GUARD=1
    cell guard-host clang "$always host_read overrun" CUDAEMU_GUARD=2 CUDAEMU_ORDER=random:3 \
      CUDAEMU_STREAMS=lazy
  fi
  make_build asan clang address,undefined &&
    cell asan asan "$always overrun overrun_scalar host_read shared_overrun" \
      ASAN_OPTIONS=detect_leaks=0
  if make_build tsan clang thread; then
    cell tsan tsan "$always barrier reuse"
    cell tsan-unordered tsan "$always barrier reuse blocks" CUDAEMU_BLOCKS=unordered
  fi
  make_build align g alignment && cell align align "pointer divergent misaligned"
  if nvcc=$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc); then
    for source in emu_kernels_test emu_bugs; do
      "$nvcc" -std=c++17 -arch=sm_90 -I "$root" -o "$build/nvcc_$source" \
        "$here/tests/$source.cu" >"$build/nvcc.log" 2>&1
      result $? "nvcc: $source" "$build/nvcc.log"
    done
  else
    echo "nvcc: skipped, there is no nvcc"
  fi
fi
echo "unit: $passed passed, $failed failed"
[ "$failed" = 0 ]
