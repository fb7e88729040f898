#!/usr/bin/env bash
# Fills .deps with the libraries and Ninja from the distribution's packages, as static archives and headers, without
# installing anything. Copied along with the tree, .deps lets a machine with g++ and CMake but no package network build
# offload; a program built with -DOFFLOAD_PREFER_DEPS=ON runs there as it is. Needs no root, but package lists (apt-get
# update) and the network. Takes seconds: 2 MB to download, 7 MB when unpacked.
set -euo pipefail
if [ $# -gt 0 ]; then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  case $1 in -h | --help) exit 0 ;; *) exit 2 ;; esac
fi

root=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=tools/packages.sh
. "$root/tools/packages.sh"

if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
  printf 'fetch_deps.sh: needs apt-get and dpkg (Debian or Ubuntu); run it on such a machine and copy .deps\n' >&2
  exit 1
fi

# A half-filled .deps must never be found: it is made beside its place and moved there when whole.
mkdir -p "$root/.deps.new"
new=$(mktemp -d "$root/.deps.new/XXXXXX")
trap 'rm -rf "$root/.deps.new"' EXIT
mkdir "$new/packages" "$new/root"
(cd "$new/packages" && apt-get -q download ninja-build "${build_libraries[@]}" >&2) || {
  printf 'fetch_deps.sh: the download failed; if apt-get found no such package, run: apt-get update\n' >&2
  exit 1
}
for package in "$new"/packages/*.deb; do dpkg -x "$package" "$new/root"; done

# Only archives and headers stay: a shared library would tie the programs to this folder.
find "$new/root/usr/lib" \( -type f -o -type l \) ! -name '*.a' -delete
find "$new/root/usr/lib" -type d -empty -delete
rm -rf "$new/root/usr/share"
rm -rf "$root/.deps"
mv "$new/root" "$root/.deps"
printf 'fetch_deps.sh: filled %s (%s)\n' "$root/.deps" "$(du -sh "$root/.deps" | cut -f1)" >&2
