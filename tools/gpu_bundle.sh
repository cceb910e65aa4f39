#!/usr/bin/env bash
# tools/gpu_bundle.sh FILE: the archive of tools/gpu-check --bundle, for a machine without network:
# the repository at HEAD and, in its folder bundle/, the libraries, headers and programs that
# Perigee's build and tests need beside a compiler and CUDA, copied from this machine's Debian
# packages. They run where glibc is not older than bundle/MANIFEST says.
set -euo pipefail
file=$1
cd "$(dirname "$0")/.."
. tools/packages.sh
limit=$((64 << 20)) # bytes

case $file in
  *.tar.zst) compress="zstd -q -T0 ${PERIGEE_ZSTD_LEVEL:--19}" ;;
  *.tar.gz) compress="gzip -9" ;;
  *) echo "tools/gpu-check: --bundle '$file': a name ending in .tar.zst or .tar.gz is allowed" >&2
    exit 2 ;;
esac
folder=$(dirname "$file")
if [ ! -d "$folder" ] || [ ! -w "$folder" ] || [ -d "$file" ]; then
  echo "tools/gpu-check: --bundle '$file': a file in a folder that can be written is allowed" >&2
  exit 2
fi
git rev-parse -q --verify HEAD >/dev/null ||
  { echo "error: this is no git repository" >&2; exit 1; }
need_packages "the bundle" $PERIGEE_BUILD_PACKAGES $PERIGEE_BUNDLE_PACKAGES

triplet=$(cc -dumpmachine)
libraries=/usr/lib/$triplet
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/perigee-gpu-check bundle=$work/perigee-gpu-check/bundle
mkdir -p "$root" "$bundle"/{bin,include,lib/pkgconfig,libexec,share/lua}
git archive HEAD | tar x -C "$root"

files_of() { dpkg -L "$@" | sort -u | while read -r f; do [ -d "$f" ] || echo "$f"; done; }

# What FILE loads, but for what a C++ compiler brings.
needed_by() {
  ldd "$1" | awk '$2 == "=>" { print $3 }' |
    sed -E '/\/(libc|libm|libdl|librt|libpthread|libresolv|libgcc_s|libstdc\+\+|libgomp)\.so\./d'
}

headers=$(grep -oE '\blib\S+-dev\b' <<<"$PERIGEE_BUILD_PACKAGES" | grep -v '^libc6')
for header in $(files_of $headers | grep '^/usr/include/'); do
  to=${header#/usr/include/}
  to=$bundle/include/${to#"$triplet"/}
  mkdir -p "${to%/*}"
  cp -L "$header" "$to"
done

modules=$(perigee_modules)
for name in openblas-openmp/libopenblas $(pkg-config --libs-only-l $modules | sed 's/-l/lib/g'); do
  library=$libraries/$name.so
  [ -e "$library" ] || continue # libdl and such: glibc's
  name=$(readelf -d "$library" | sed -nE 's/.*SONAME.*\[(.*)\]/\1/p')
  cp -L "$library" "$bundle/lib/$name"
  ln -s "$name" "$bundle/lib/${library##*/}"
  needed_by "$library" | while read -r other; do cp -L "$other" "$bundle/lib/"; done
done
for module in $modules; do
  sed -E "s|^prefix=.*|prefix=\${pcfiledir}/../..|; s|/usr/|\${prefix}/|g
          s|/($triplet\|\\$\{deb_host_multiarch\})||g" \
    "$libraries/pkgconfig/$module.pc" >"$bundle/lib/pkgconfig/$module.pc"
done

for program in cmake ninja pkg-config lua5.4 protoc-c; do
  cp -L "/usr/bin/$program" "$bundle/bin/"
  needed_by "/usr/bin/$program" | while read -r other; do cp -L "$other" "$bundle/libexec/"; done
  patchelf --force-rpath --set-rpath '$ORIGIN/../libexec' "$bundle/bin/$program"
done
for library in "$bundle"/libexec/*; do patchelf --force-rpath --set-rpath '$ORIGIN' "$library"; done
cp -r /usr/share/cmake-[0-9]* "$bundle/share/"
rm -rf "$bundle"/share/cmake-*/Help

# busted: Lua files, and modules in C for lua5.4.
busted=$(apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts \
  --no-breaks --no-replaces --no-enhances lua-busted | grep '^lua-')
for lua in $(files_of $busted | grep -E "^(/usr/share/lua/5\.4|$libraries/lua/5\.4)/"); do
  case $lua in *.so) to=$bundle/lib/${lua#"$libraries"/} ;; *) to=$bundle/${lua#/usr/} ;; esac
  mkdir -p "${to%/*}"
  cp -L "$lua" "$to"
done
cp -L /usr/bin/busted "$bundle/share/lua/busted"
cat >"$bundle/bin/busted" <<'SH'
#!/bin/sh
here=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$here/bin:$PATH"
export LUA_PATH="$here/share/lua/5.4/?.lua;$here/share/lua/5.4/?/init.lua;;"
export LUA_CPATH="$here/lib/lua/5.4/?.so;;"
exec lua5.4 "$here/share/lua/busted" "$@"
SH
chmod +x "$bundle/bin/busted"

frontend=$(cudnn_frontend build/cudnn-frontend)
if [ -n "$frontend" ]; then
  cp -r "$frontend"/cudnn_* "$bundle/include/"
  mkdir -p "$bundle/share/doc"
  cp -r "$frontend"/../nvidia_cudnn_frontend-*.dist-info "$bundle/share/doc/"
fi

glibc=$(objdump -T "$bundle"/lib{,exec}/*.so.* "$bundle"/bin/{cmake,ninja,lua5.4,protoc-c} |
  grep -oE 'GLIBC_2\.[0-9]+' | sort -uV | tail -n 1)
packages=$(find "$bundle/lib" "$bundle/libexec" -name '*.so*' -type f -printf '%f\n' |
  while read -r f; do dpkg -S "*/$triplet/$f" 2>/dev/null || true; done | cut -d: -f1 | sort -u)
mkdir -p "$bundle/share/doc"
for package in $packages $headers $busted cmake ninja-build pkgconf lua5.4 protobuf-c-compiler; do
  cp -L "/usr/share/doc/$package/copyright" "$bundle/share/doc/$package" 2>/dev/null || true
done
{
  echo "perigee $(git rev-parse HEAD)"
  echo "glibc ${glibc#GLIBC_}, $triplet"
  dpkg-query -W $packages $headers $busted cmake ninja-build pkgconf lua5.4 protobuf-c-compiler
} >"$bundle/MANIFEST"

tar c -C "$work" --sort=name --owner=0 --group=0 perigee-gpu-check | $compress >"$work/archive"
size=$(stat -c %s "$work/archive")
if [ "$size" -gt $limit ]; then
  echo "error: the bundle has $size bytes, $limit are allowed" >&2
  exit 1
fi
cp "$work/archive" "$file"
echo "$file: $((size >> 20)) MiB, for $triplet with glibc ${glibc#GLIBC_} or newer, a C++ compiler" \
  "and CUDA"
echo "there: tar xf ${file##*/} && perigee-gpu-check/tools/gpu-check --out gpu-check-results"
