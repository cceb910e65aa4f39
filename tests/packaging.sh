#!/usr/bin/env bash
# tests/packaging.sh BUILD WORK: the rock that `luarocks make` installs, and the Debian package in a
# fresh root: it installs, trains the quickstart's recipe, and is removed without a trace. Needs
# root and network; exit 77 where the fresh root cannot be made.
set -euo pipefail
build=$(realpath "$1") work=$2
count=0
ok() { echo "ok $((count += 1)) - $*"; }
rm -rf "$work"
mkdir -p "$work"
work=$(realpath "$work")

# ---- rock: from a copy of the tree, into a tree of its own -------------------------------------
mkdir "$work/source"
git ls-files -z | xargs -0 cp --parents -t "$work/source"
(cd "$work/source" && luarocks --lua-version 5.4 --tree "$work/rocks" make \
  tools/packaging/perigee-scm-1.rockspec >"$work/rock.log" 2>&1) ||
  { tail -n 20 "$work/rock.log"; exit 1; }
(cd / && eval "$(luarocks --lua-version 5.4 --tree "$work/rocks" path)" &&
  lua5.4 -e 'local pg = require "perigee"; assert(pg.optim.rownorm)' &&
  "$work/rocks/bin/perigee" --version)
ok "luarocks installs the module and the program"

# ---- Debian package ----------------------------------------------------------------------------
[ "$(id -u)" = 0 ] || { echo "the Debian package's test needs root"; exit 77; }
(cd "$build" && cpack -G DEB -B "$work/deb" >"$work/cpack.log" 2>&1) ||
  { tail -n 20 "$work/cpack.log"; exit 1; }
package=$(echo "$work"/deb/perigee_*.deb)
# The mirror that this machine uses, with its keys, proxies and certificates.
mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' 'Created-By: Packages' |
  awk '$2 == "bookworm" {print $1; exit}')
root=$work/root
debootstrap --variant=minbase --include=ca-certificates bookworm "$root" "$mirror" \
  >"$work/debootstrap.log" 2>&1 || { tail -n 5 "$work/debootstrap.log"; exit 77; }
cp -r /etc/apt/. "$root/etc/apt/"
for file in /etc/resolv.conf /etc/hosts; do cat "$file" >"$root$file"; done
cp -rL /etc/ssl/certs/. "$root/etc/ssl/certs/" 2>/dev/null || true
trap 'umount "$root/proc" 2>/dev/null; rm -rf "$root"' EXIT
mount -t proc proc "$root/proc"
inside() { chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/srv \
  DEBIAN_FRONTEND=noninteractive "$@"; }
cp "$package" "$root/srv/perigee.deb"
listing() { (cd "$root" && find . -xdev -path ./proc -prune -o -path ./var -prune -o -path ./tmp -prune -o -print | sort); }
inside apt-get update -qq >/dev/null
# Its dependencies first, so that what it leaves behind is its own.
inside sh -c 'apt-get install -y -qq --no-install-recommends $(dpkg-deb -f /srv/perigee.deb Depends |
  sed -E "s/\([^)]*\)//g; s/\|[^,]*//g; s/,/ /g")' >"$work/apt.log" 2>&1 ||
  { tail -n 5 "$work/apt.log"; exit 1; }
listing >"$work/before"
inside apt-get install -y -qq --no-install-recommends /srv/perigee.deb >>"$work/apt.log" 2>&1 ||
  { tail -n 5 "$work/apt.log"; exit 1; }
inside perigee --version
inside lua5.4 -e 'assert(require("perigee").version)'
ok "the package installs"
cat lua/doc/*.md >"$root/srv/text"
inside sh -ec 'cd /srv
  perigee data prepare --text text --out data --vocab-size 512
  for head in adamw rownorm; do
    perigee train /usr/share/perigee/recipes/quickstart.lua --set head=$head --set data=data \
      --set updates=4 --set validation=2048 --out runs/$head
  done
  perigee eval runs/adamw runs/rownorm
  rm -r data runs text'
ok "the package trains the quickstart's recipe"
inside apt-get purge -y -qq perigee >>"$work/apt.log" 2>&1
listing | diff "$work/before" - >"$work/left" || { head "$work/left"; exit 1; }
ok "the package leaves nothing behind"
