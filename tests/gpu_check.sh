#!/usr/bin/env bash
# tests/gpu_check.sh BUILD WORK [full]: tools/gpu-check from end to end without a GPU. BUILD is a
# build with -DPG_EMULATE_CUDA=ON, made here if it is not there; nvidia-smi, compute-sanitizer and,
# unless PERIGEE_PYTHON names a Python that has torch, PyTorch are stand-ins. Then the bundle: what
# it holds is enough to compile, link and run without this machine's packages.
set -uo pipefail
build=$1 work=$2
command -v clang++ >/dev/null || { echo "there is no clang++"; exit 77; }
rm -rf "$work" && mkdir -p "$work/fake" || exit 1
work=$(realpath "$work")
if ! grep -qs '^PG_EMULATE_CUDA:BOOL=ON' "$build/CMakeCache.txt"; then
  CC=clang CXX=clang++ cmake -S . -B "$build" -G Ninja -DPG_EMULATE_CUDA=ON -DPG_WERROR=ON \
    >"$work/cmake.log" ||
    { tail -n 3 "$work/cmake.log"; echo "there is no emulated build"; exit 77; }
fi

passed=0 failed=0
check() { # WHAT COMMAND...
  local what=$1
  shift
  if "$@"; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "not ok $what"
    tail -n 15 "$work/output" | sed 's/^/    | /'
  fi
}

stand_in() { # NAME, the script on standard input
  { echo '#!/usr/bin/env bash'; cat; } >"$work/fake/$1"
  chmod +x "$work/fake/$1"
}
stand_in nvidia-smi <<'SH'
[ -z "${FAKE_STUCK:-}" ] || { trap '' TERM; while :; do sleep 1; done; }
[ "${FAKE_GPUS:-1}" != 0 ] ||
  { echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."; exit 9; }
for ((i = 0; i < ${FAKE_GPUS:-1}; i++)); do echo "Emulated \"GPU\", 580.1, 8192, 9.0"; done
SH
stand_in compute-sanitizer <<'SH'
[ -z "${FAKE_RACE:-}" ] || { echo "========= Error: Race reported"; exit 99; }
while [ "${1#--}" != "$1" ]; do shift 2; done
exec "$@"
SH
stand_in busted <<'SH'
echo "$*" >"$0.words"
printf 'ok 1 - one\nok 2 - two\n'
SH
stand_in torch <<'SH'
[ "$1" != -c ] || exit 0
[ -z "${FAKE_HANG:-}" ] || sleep 100
[ "${*: -4:1}" = --eager ] && mode=eager speed=1000 || mode=compiled speed=2000
cat <<JSON
{"torch": "2", "device": "cpu", "machine": "", "threads": 1, "flops_per_token": 1000, "cases": [
  {"name": "torch $mode", "compute": "bf16", "head": "rownorm", "tokens_per_second": $speed,
   "sequences": 4, "micro": 2, "seconds_per_update": 0.1, "peak_memory_bytes": 1073741824,
   "parts": {"newton_schulz": 0.01}}]}
JSON
SH
export PERIGEE_PYTHON=${PERIGEE_PYTHON:-$work/fake/torch}

# gpu_check STATUS WORDS...: run it, expecting an exit code.
gpu_check() {
  local want=$1 status
  shift
  PATH=$work/fake:$PATH tools/gpu-check --build "$build" --quick --out "$work/out" "$@" \
    >"$work/output" 2>&1
  status=$?
  [ $status = "$want" ] || echo "status $status instead of $want" >>"$work/output"
  [ $status = "$want" ]
}
says() { grep -qE -- "$1" "$work/output"; }
json() { # a Lua condition on `result`, the decoded gpu-check.json, and `step`, its steps by name
  "$build/perigee" run "$work/json.lua" "$work/out/gpu-check.json" "$1" >>"$work/output" 2>&1
}
cat >"$work/json.lua" <<'LUA'
local core = require "perigee.core"
local result, step = core.json.decode(assert(core.fs.read(arg[1]))), {}
for _, s in ipairs(result.steps) do step[s.name] = s end
local condition = assert(load("local result, step, null = ...\nreturn " .. arg[2]))
assert(condition(result, step, core.json.null), arg[2])
LUA

check "usage" gpu_check 2 --minuts 3
check "usage" gpu_check 2 --minutes soon
check "usage" gpu_check 2 --bundle-dir "$work"
check "usage" gpu_check 2 --bundle "$work/bundle.zip"
# Before anything is packed: that takes minutes.
mkdir "$work/folder.tar.gz"
for file in /nonexistent/x.tar.gz "$work/folder.tar.gz"; do
  check "bundle: no folder for it" gpu_check 2 --bundle "$file"
  check "bundle: no folder for it" says "^tools/gpu-check: --bundle '$file': a file in a folder"
done
start=$SECONDS
FAKE_STUCK=1 check "a driver that does not answer" gpu_check 1 --minutes 0.05
check "a driver that does not answer" says "nvidia-smi did not answer within [1-3] s"
check "a driver that does not answer" test $((SECONDS - start)) -lt 20
FAKE_GPUS=0 check "no GPU" gpu_check 1
check "no GPU: one line" says "^tools/gpu-check: there is no GPU: NVIDIA-SMI has failed.*It needs"
check "no GPU: one line" test "$(wc -l <"$work/output")" = 1

# All of it; of the tests on the device only quick ones.
fast='^(doctor|specs|cuda_(dense|optimizer|attention_plain)|memcheck:cuda_dense|kernels|bench.*|'
fast+='torch.*)$'
check "everything" gpu_check 0 --only "$fast"
for line in '^Emulated GPU \(emulated' '^cuda +[0-9]+ +0 ' '^memcheck +[0-9]+ +0 ' \
  '^measured peaks: [0-9]' '^cross_entropy.* [0-9.]+$' '^perigee, (adamw|rownorm) head' \
  '^perigee without cuDNN' '^torch eager' '^perigee / torch .*x tokens/s, .*x memory$' \
  '^exact diameter, rownorm head, d = 64: 0' \
  '^[0-9]+ passed, 0 failed$'; do
  check "table: $line" says "$line"
done
for fact in 'result.machine.gpus == 1 and result.machine.memory_mib == 8192' \
  'result.failed == 0 and result.passed > 10 and result.quick and #result.commit == 12' \
  'step.cuda_dense.status == "ok" and step.cuda_dense.passed > 3 and step.specs.passed == 2' \
  '#result.kernels.kernels > 10 and result.kernels.peak.bytes_per_second > 0' \
  '#result.bench.cases == 2 and result.bench.cases[1].parts.head.share > 0' \
  'result.torch[1].cases[1].name == "torch eager" and #result.torch == 2'; do
  check "JSON: $fact" json "$fact"
done

PERIGEE_PYTHON=false FAKE_RACE=1 check "a failing step" gpu_check 1 \
  --only '^(cuda_dense|memcheck:cuda_dense|memcheck:cuda_queue|torch)$'
check "a failing step" says '^FAILED memcheck:cuda_dense: status 99: =+ Error: Race reported'
check "a failing step" json 'step["memcheck:cuda_queue"].status == "failed" and result.failed == 2'
check "no torch" json 'step.torch.status == "skipped" and result.torch[1] == null'

PERIGEE_PYTHON=$work/fake/torch FAKE_HANG=1 check "time is over" gpu_check 1 --minutes 0.3 \
  --only '^torch'
# A machine so busy that the build took all of it has nothing to stop.
check "time is over" says '^FAILED torch_eager: (stopped after [0-9]+ s|no time left)'
check "time is over" json 'step.torch_compile.note == "no time left" and result.failed == 2'

FAKE_GPUS=2 check "two GPUs" gpu_check 0 --only '^nccl$'
check "two GPUs" json 'result.machine.gpus == 2 and step.nccl.passed == 2'
check "two GPUs" grep -q -- '--filter=2.of.them tests/nccl_spec.lua$' "$work/fake/busted.words"

# ---- the bundle ------------------------------------------------------------------------------
if ! git rev-parse -q --verify HEAD >/dev/null; then
  echo "the bundle: skipped, this is no git repository"
  echo "unit: $passed passed, $failed failed"
  [ $failed = 0 ]
  exit
fi
# Small enough, and complete: what is compiled against it runs without this machine's
# packages. With "full" the whole project is built from it, by nvcc where that is.
bundle_file=$work/bundle.tar.zst
pack() { PERIGEE_ZSTD_LEVEL=-3 tools/gpu-check --bundle "$bundle_file" >"$work/output" 2>&1; }
check "bundle" pack
check "bundle: size" test "$(stat -c %s "$bundle_file")" -le $((64 << 20))
tar x -C "$work" -f "$bundle_file" || exit 1
bundle=$work/perigee-gpu-check/bundle
clean=(env -i "HOME=$work" "PATH=$work/fake:/usr/bin:/bin" PKG_CONFIG_LIBDIR=/nonexistent
  "PERIGEE_PYTHON=false" OMP_WAIT_POLICY=passive)
cat >"$work/all.c" <<'C'
#include <cblas.h>
#include <histedit.h>
#include <jansson.h>
#include <lua.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <openssl/evp.h>
#include <pcre2.h>
#include <stdio.h>
#include <uv.h>
int main(void) {
  char pcre2[32];
  pcre2_config(PCRE2_CONFIG_VERSION, pcre2);
  float x[2] = {3, 4};
  History *lines = history_init();
  if (!lines) return 1;
  history_end(lines);
  printf("%s %s %s %g %d %d\n", uv_version_string(), jansson_version_str(), pcre2,
         (double)cblas_snrm2(2, x, 1), EVP_MD_get_size(EVP_sha256()), (int)lua_version(NULL));
  return 0;
}
C
compile() {
  "${clean[@]}" "PKG_CONFIG_PATH=$bundle/lib/pkgconfig" bash -c 'cc "$1/all.c" -o "$1/all" \
    -I"$2/include/openblas-openmp" $("$2/bin/pkg-config" --cflags --libs lua5.4 libuv libpcre2-8 \
    jansson libcrypto libedit) -L"$2/lib" -lopenblas -Wl,-rpath,"$2/lib",--disable-new-dtags' _ "$work" \
    "$bundle" >"$work/output" 2>&1 && "${clean[@]}" "$work/all" >"$work/output" 2>&1
}
check "bundle: compile and run" compile
check "bundle: compile and run" says '^[0-9.]+ [0-9.]+ 10\.[0-9]+ .* 5 32 504$'
inside() { # every library of FILES is the bundle's or the compiler's
  local compiler='.*/lib(c|m|dl|rt|pthread|resolv|gcc_s|stdc\+\+|gomp)\.so'
  ! ldd "$@" | grep -E '=> ' | grep -vE "=> ($bundle/|$compiler)" >>"$work/output"
}
check "bundle: libraries" inside "$work/all" "$bundle"/bin/{cmake,ninja,pkg-config,lua5.4,protoc-c}
for program in cmake ninja busted; do
  check "bundle: $program" "${clean[@]}" "$bundle/bin/$program" --version >"$work/output" 2>&1
done
if [ "${3:-}" = full ]; then
  build=$work/perigee-gpu-check/build/gpu-check
  from_bundle() {
    "${clean[@]}" "$work/perigee-gpu-check/tools/gpu-check" --out "$work/out" --minutes 30 \
      --only doctor >"$work/output" 2>&1
  }
  if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
    check "the project from the bundle" from_bundle
    check "the project from the bundle" json 'step.build.status == "ok"'
    check "the project from the bundle" inside "$build/perigee" "$build/lib/perigee/core.so"
  else
    echo "the project from the bundle: skipped, there is no nvcc"
  fi
fi

echo "unit: $passed passed, $failed failed"
[ $failed = 0 ]
