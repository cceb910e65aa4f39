# Sourced by the other tools: which Debian packages Perigee needs, and how to get the missing ones.

# What building and running needs.
PERIGEE_BUILD_PACKAGES="cmake ninja-build pkg-config gcc libc6-dev lua5.4 liblua5.4-dev libuv1-dev
  libopenblas-openmp-dev libpcre2-dev libjansson-dev libssl-dev libedit-dev
  libprotobuf-c-dev protobuf-c-compiler"
# Plots. Optional: without it plot{…} says so.
PERIGEE_PLOT_PACKAGES="gnuplot-nox"
# Runs of several ranks on CPUs. Optional: without them the build leaves that out.
PERIGEE_MPI_PACKAGES="openmpi-bin libopenmpi-dev"
# The King James Bible as text.
PERIGEE_TEXT_PACKAGES="bible-kjv bible-kjv-text"
# Tests, lint, sanitizers, fuzzers.
PERIGEE_CHECK_PACKAGES="lua-busted lua-check clang clang-format clang-tidy cppcheck g++
  libclang-rt-14-dev libomp-14-dev git locales-all python3-venv lua-ldoc lua-discount man-db zsh
  shellcheck"
# The test that looks at a report in a browser; without it that test is pending.
PERIGEE_BROWSER_PACKAGES="chromium"
# Building a rock, and the Debian package in a fresh root.
PERIGEE_PACKAGING_PACKAGES="luarocks debootstrap"
# The test of sweeps on a cluster of its own.
PERIGEE_SLURM_PACKAGES="slurm-wlm munge openmpi-bin"
# The unit tests on an emulated ARM64 processor.
PERIGEE_ARM64_PACKAGES="gcc-aarch64-linux-gnu libc6-dev-arm64-cross mmdebstrap qemu-user"
# Packing them for a machine without network.
PERIGEE_BUNDLE_PACKAGES="binutils git lua-busted patchelf zstd"

# The libraries that the build asks pkg-config for.
perigee_modules() {
  sed -nE 's/^pkg_check_modules\([A-Z0-9]+ REQUIRED IMPORTED_TARGET ([^ )]+)\)$/\1/p' CMakeLists.txt
}

as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    echo "error: installing packages needs root, and there is no sudo: run as root: $*" >&2
    return 1
  fi
}

# need_packages WHY PACKAGE...: install those that are missing, saying which and what for.
need_packages() {
  local why=$1 missing="" package
  shift
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' ||
      missing="$missing $package"
  done
  [ -n "$missing" ] || return 0
  command -v apt-get >/dev/null || {
    echo "error: missing:$missing; this system has no apt-get, install their equivalents" >&2
    return 1
  }
  echo "Installing what $why needs:$missing"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq &&
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      $missing >"${TMPDIR:-/tmp}/perigee-apt.log" 2>&1 || {
    echo "error: apt-get failed; its output is in ${TMPDIR:-/tmp}/perigee-apt.log" >&2
    return 1
  }
}

find_nvcc() { command -v nvcc || command -v /usr/local/cuda/bin/nvcc; }

# cudnn_frontend FOLDER: print where the headers of cudnn-frontend are, a Python package of 12 MB
# that is installed into FOLDER. When it cannot be had, say why and print nothing:
# the build then leaves attention through cuDNN out.
cudnn_frontend() {
  local folder python
  mkdir -p "$1"
  folder=$(realpath "$1") python=$folder/venv/bin/python
  if [ ! -f "$folder/include/cudnn_frontend.h" ] && ! {
    python3 -m venv "$folder/venv" && "$python" -m pip install -q --disable-pip-version-check \
      --no-deps --target "$folder" 'nvidia-cudnn-frontend>=1.13'
  } >"$folder/log" 2>&1; then
    echo "note: no attention through cuDNN: $(tail -n 1 "$folder/log")" >&2
    folder=
  fi
  rm -rf "$1/venv"
  [ -z "$folder" ] || echo "$folder/include"
}

# What the CUDA plugins need and Debian does not have: prints the names of what is missing here.
missing_cuda() {
  local nvcc toolkit folder header="" missing=""
  nvcc=$(find_nvcc) || missing=" nvcc"
  toolkit=$(dirname "$(dirname "$(readlink -f "${nvcc:-/usr/bin/nvcc}")")")
  for folder in "$toolkit" /usr/local/cuda /usr/local /usr; do
    [ ! -e "$folder/include/nccl.h" ] || header=found
  done
  [ -n "$header" ] || missing+=" nccl.h"
  echo "$missing"
}
