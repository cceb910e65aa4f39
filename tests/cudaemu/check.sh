#!/usr/bin/env bash
# The CUDA backend where there is no GPU: kernels and host sources of the project, the emulation's
# own tests and its seeded bugs, in the cells of a matrix: orders of threads, lazy streams, guard
# mode, ASan, TSan with blocks ordered and unordered, alignment with g++, and nvcc for sm_90. The
# last line is "unit: N passed, N failed".
#
#   tests/cudaemu/check.sh BUILD [--quick] [--cells PATTERN]
#
#   BUILD            folder of the plain build; those with sanitizers lie in it
#   --quick          one cell: random order, lazy streams, guard mode
#   --cells PATTERN  only the cells whose name matches the extended regular expression PATTERN
#
# Every source is compiled once per build. What runs in a cell is in the list below: the kernels'
# tests and the emulation's run everywhere. Of the golden trajectory the plain cell follows all 40
# updates; the others follow the first ten, in fp32 and bf16, through the first validation: the same
# kernels, shapes and host code, each a hundred times. Race detection costs a factor of 20 and
# leaves out the kernels' largest sizes (UNIT_SLOW in cuda_unit.h) and what only differs in numbers.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=${1:?check.sh BUILD [--quick] [--cells PATTERN]}
quick=no pattern=. one=
shift
while [ $# -gt 0 ]; do
  case $1 in
    --quick) quick=yes ;;
    --cells) pattern=${2:?--cells needs a pattern}; shift ;;
    --one) one=${2:?}; shift ;; # of the jobs that this script starts
    *) echo "check.sh: unknown argument '$1'" >&2; exit 2 ;;
  esac
  shift
done
command -v clang++ >/dev/null || { echo "there is no clang++"; exit 77; }
mkdir -p "$build/check"
build=$(cd "$build" && pwd)
logs=$build/check

# ---- the matrix ------------------------------------------------------------------------------
# Programs of tests/unit that run on a device as on the CPU; an argument follows a colon.
project="model_gradient model_compute model_file optimizers optimizers_equation optimizers_golden
  tensor tensor_ops geometry geometry_properties panel checkpoint recompute profile"
everywhere="bugs"
for source in "$here"/tests/*_test.cu "$root"/tests/cuda/cuda_*_test.c; do
  name=${source##*/}
  everywhere+=" cudaemu/${name%.*}"
done

cells=()
declare -A build_of programs caught settings
# cell NAME BUILD "PROGRAMS" "SEEDED BUGS IT HAS TO CATCH" "VARIABLE=VALUE..."
cell() {
  [[ $1 =~ $pattern ]] || return 0
  cells+=("$1")
  build_of[$1]=$2 programs[$1]="$3 $everywhere" caught[$1]="pointer divergent $4" settings[$1]=$5
}
bugs="barrier reuse overrun overrun_scalar sync event refill pointer host_read misaligned blocks
  divergent uninitialised shared_overrun"
if [ $quick = yes ]; then
  cell quick clang "trajectory:10 $project" \
    "uninitialised overrun overrun_scalar sync event barrier" \
    "CUDAEMU_ORDER=random:1 CUDAEMU_STREAMS=lazy CUDAEMU_GUARD=1"
else
  cell tsan tsan "trajectory:10 loader checkpoint recompute" "uninitialised barrier reuse" ""
  cell tsan-unordered tsan "trajectory:10" "uninitialised barrier reuse blocks" \
    "CUDAEMU_BLOCKS=unordered"
  cell asan asan "trajectory:10 model $project" \
    "uninitialised overrun overrun_scalar host_read shared_overrun" ""
  cell forward clang "trajectory generate model $project" "uninitialised" ""
  cell reverse clang "trajectory:10" "uninitialised barrier reuse" "CUDAEMU_ORDER=reverse"
  cell lazy clang "trajectory:10 $project" "uninitialised barrier sync event" \
    "CUDAEMU_STREAMS=lazy CUDAEMU_ORDER=random:1"
  cell streams clang "trajectory:10" "uninitialised barrier refill" \
    "CUDAEMU_STREAMS=random:2 CUDAEMU_ORDER=random:2"
  cell guard clang "trajectory:10 $project" "uninitialised barrier overrun overrun_scalar" \
    "CUDAEMU_GUARD=1 CUDAEMU_ORDER=random:4"
  cell guard-host clang "trajectory:10 $project" "uninitialised host_read overrun" \
    "CUDAEMU_GUARD=2 CUDAEMU_ORDER=random:3 CUDAEMU_STREAMS=lazy"
  cell align align "trajectory:10 $project" "misaligned" ""
fi

# ---- one job ---------------------------------------------------------------------------------
declare -A sanitizer=([clang]= [asan]=address,undefined [tsan]=thread [align]=alignment)
folder() { [ "$1" = clang ] && echo "$build" || echo "$build/$1"; }

# Sanitized builds have one variant of the CPU's kernels: theirs is the CUDA backend.
make_build() {
  local c=clang cxx=clang++ levels=() targets="cudaemu_tests perigee_cuda" name cell
  [ "$1" = align ] && c=gcc cxx=g++ # clang 14 has no such check
  for cell in "${cells[@]}"; do
    [ "${build_of[$cell]}" = "$1" ] || continue
    for name in ${programs[$cell]}; do
      [[ $name == bugs || $name == */* ]] || targets+=" ${name%%:*}_test"
    done
  done
  [ "$1" = clang ] || levels=(-DPG_CPU_LEVELS=base)
  CC=$c CXX=$cxx cmake -S "$root" -B "$(folder "$1")" -G Ninja -DPG_EMULATE_CUDA=ON \
    -DPG_WERROR=ON -DPG_SANITIZE="${sanitizer[$1]}" ${levels[@]+"${levels[@]}"} &&
    cmake --build "$(folder "$1")" -j $(((${jobs:-2} + 1) / 2)) --target $targets
}

# All repaired bugs give the right result, and the broken ones of the cell are noticed, not by
# hanging. Prints what unit.h prints.
seeded() {
  local program=$1 good=0 bad=0 bug status
  for bug in $bugs; do
    timeout 100 "$program" "$bug" fixed && { good=$((good + 1)); continue; }
    echo "not ok $bug, repaired" && bad=$((bad + 1))
  done
  for bug in $2; do
    timeout 100 "$program" "$bug" broken >"$3" 2>&1
    status=$?
    if [ $status != 0 ] && [ $status != 124 ]; then
      good=$((good + 1))
    else
      echo "not ok $bug, status $status" && bad=$((bad + 1))
    fi
  done
  echo "unit: $good passed, $bad failed"
}

nvcc_compiles() {
  local nvcc source
  nvcc=$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc) || return 77
  for source in emu_kernels_test emu_bugs; do
    "$nvcc" -std=c++17 -arch=sm_90 -I "$root" -o "$logs/nvcc_$source" "$here/tests/$source.cu" ||
      return 1
  done
}

run_job() { # build:NAME, nvcc or CELL:PROGRAM[:ARGUMENT]
  local cell=${1%%:*} name=${1#*:} in argument=
  case $cell in
    build) make_build "$name"; return ;;
    nvcc) nvcc_compiles; return ;;
  esac
  in=$(folder "${build_of[$cell]}")
  [ -z "${settings[$cell]}" ] || export ${settings[$cell]}
  ulimit -t 900 # of CPU time: the machine may be busy with other things
  case $name in
    bugs) seeded "$in/cudaemu/emu_bugs" "${caught[$cell]}" "$logs/$cell.bugs.out" ;;
    cudaemu/*) timeout 3600 "$in/$name" ;;
    *)
      [[ $name == *:* ]] && argument=${name#*:}
      PG_TEST_DEVICE=cuda timeout 3600 "$in/tests/${name%%:*}_test" $argument
      ;;
  esac
}

if [ -n "$one" ]; then
  log=$logs/${one//[:\/]/.}
  rm -f "$log.status"
  run_job "$one" >"$log.log" 2>&1 </dev/null
  status=$?
  echo $status >"$log.status"
  [[ $one != build:* ]] || exit $status # without it there is nothing to run
  exit 0
fi

# ---- all of them -------------------------------------------------------------------------------
# Ninja keeps every core busy: with one thread each, builds go on while earlier ones are tested.
export jobs=${PERIGEE_JOBS:-$(nproc)} # before OMP_NUM_THREADS, which nproc takes for an answer
export OMP_NUM_THREADS=1 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS="halt_on_error=1 atexit_sleep_ms=0 ignore_noninstrumented_modules=1"
export ASAN_OPTIONS=detect_leaks=0
todo=()
{
  printf 'rule job\n  command = nice "%s" "%s" --cells "%s" %s --one "$job"\n' \
    "$here/check.sh" "$build" "${pattern//\$/\$\$}" "$([ $quick = yes ] && echo --quick)"
  for name in $(printf '%s\n' "${cells[@]}" | while read -r cell; do
    echo "${build_of[$cell]}"
  done | awk '!seen[$0]++'); do
    printf 'build build.%s: job\n  job = build:%s\n' "$name" "$name"
    todo+=("build:$name")
  done
  if [ $quick = no ] && [[ nvcc =~ $pattern ]]; then
    printf 'build nvcc: job\n  job = nvcc\n'
    todo+=(nvcc)
  fi
  for cell in "${cells[@]}"; do
    for name in ${programs[$cell]}; do
      printf 'build %s: job | build.%s\n  job = %s\n' "$cell.${name//[:\/]/.}" \
        "${build_of[$cell]}" "$cell:$name"
      todo+=("$cell:$name")
    done
  done
} >"$logs/matrix.ninja"
[ ${#todo[@]} -gt 0 ] || { echo "check.sh: no cell matches '$pattern'" >&2; exit 2; }
rm -f "$logs"/*.status
start=$SECONDS
ninja -C "$logs" -f matrix.ninja -j "$jobs" -k 0 >"$logs/ninja.out" 2>&1

passed=0 failed=0
declare -A count # passed tests by cell
for job in "${todo[@]}"; do
  log=$logs/${job//[:\/]/.}
  status=$(cat "$log.status" 2>/dev/null || echo none)
  [ "$status" != none ] || continue # its build failed
  if [ "$status" = 77 ]; then
    echo "skipped $job"
    continue
  fi
  read -r good bad < <(awk '/^unit: / {g += $2; b += $4} END {print g + 0, b + 0}' "$log.log")
  if [ "$status" != 0 ] && [ "$bad" = 0 ]; then bad=1; fi
  [ $((good + bad)) != 0 ] || good=1
  count[${job%%:*}]=$((${count[${job%%:*}]:-0} + good))
  passed=$((passed + good)) failed=$((failed + bad))
  [ "$bad" = 0 ] && continue
  echo "not ok $job, status $status"
  grep -av '^ok ' "$log.log" | head -n 30 | cut -c 1-200 | sed 's/^/    | /'
done
for cell in "${!count[@]}"; do echo "ok $cell: ${count[$cell]}"; done | sort
times >"$logs/times"
cpu=$(awk 'NR == 2 {gsub(/[ms]/, " "); print int($1 * 60 + $2 + $3 * 60 + $4)}' "$logs/times")
echo "${#cells[@]} cells in $((SECONDS - start)) s, $cpu s of CPU time"
echo "unit: $passed passed, $failed failed"
[ "$failed" = 0 ]
