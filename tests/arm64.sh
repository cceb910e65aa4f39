#!/usr/bin/env bash
# tests/arm64.sh WORK: the unit tests, built for ARM64 by a cross compiler and run by qemu. Only the
# plain path of the kernels exists there. Libraries come from Debian, unpacked into WORK/root, which
# wants network; exit 77 where they cannot be had.
set -euo pipefail
mkdir -p "$1"
work=$(realpath "$1") root=$work/root build=$work/build triplet=aarch64-linux-gnu
. tools/packages.sh

# ---- libraries ---------------------------------------------------------------------------------
if [ ! -e "$root/usr/lib/$triplet/libm.so" ]; then
  rm -rf "$root"
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' 'Created-By: Packages' |
    awk '$2 == "bookworm" {print $1; exit}')
  libraries=$(echo $PERIGEE_BUILD_PACKAGES | tr ' ' '\n' | grep -E '^lib.*-dev$' | paste -sd,)
  mmdebstrap --arch=arm64 --variant=extract --include="$libraries,libgomp1" bookworm "$root" \
    "$mirror" >"$work/libraries.log" 2>&1 || { tail -n 1 "$work/libraries.log"; exit 77; }
  # Some links there are absolute: they would lead out of the root.
  find "$root/usr/lib" -type l -lname '/*' -print0 | while IFS= read -r -d '' link; do
    ln -sfrT "$root$(readlink "$link")" "$link"
  done
fi

# ---- build -------------------------------------------------------------------------------------
export PKG_CONFIG_LIBDIR=$root/usr/lib/$triplet/pkgconfig PKG_CONFIG_SYSROOT_DIR=$root
cmake -S . -B "$build" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_C_COMPILER=$triplet-gcc -DCMAKE_SYSROOT="$root" \
  -DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=NEVER -DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY \
  -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY \
  -DPG_NVCC= -DPG_WERROR=ON >"$work/cmake.log" 2>&1 || { tail -n 20 "$work/cmake.log"; exit 1; }
targets=$(ninja -C "$build" -t targets all | sed -n 's/^\(tests\/[^:]*_test\):.*/\1/p')
ninja -C "$build" $targets >"$work/ninja.log" 2>&1 ||
  { grep -E 'error|FAILED' "$work/ninja.log" | head -n 20; exit 1; }

# ---- tests -------------------------------------------------------------------------------------
# OpenBLAS hangs under qemu with threads of its own.
export OPENBLAS_NUM_THREADS=1
failed=0
for test in $targets; do
  name=$(basename "$test" _test)
  case $name in
    # They measure the process, or start others, which qemu makes something else of.
    comm | memory | plugin | rendezvous) continue ;;
    # Many minutes under qemu, and no kernels of their own.
    estimate | oracle) continue ;;
  esac
  status=0
  timeout 900 qemu-aarch64 -L "$root" "$build/$test" >"$work/$name.log" 2>&1 </dev/null || status=$?
  case $status in
    0) grep '^unit:' "$work/$name.log" | sed "s/$/ in $name/" ;;
    77) echo "# $name: $(tail -n 1 "$work/$name.log")" ;;
    *)
      echo "not ok - $name, status $status"
      grep -av '^ok' "$work/$name.log" | tail -n 20
      failed=1
      ;;
  esac
done
exit $failed
