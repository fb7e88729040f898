# shellcheck shell=bash
# The packages that offload is built from, by their names in Debian 12 and Ubuntu 24.04. Sourced by the other scripts,
# which call need_packages before they build. Takes a few milliseconds when nothing is missing.
#
# Refuses to touch a machine that lacks nothing, and any distribution other than these and their kin.

# A tool counts as there when its command is, wherever that came from: PACKAGE:COMMAND.
build_tools=(g++:g++ cmake:cmake ninja-build:ninja)
build_libraries=(nlohmann-json3-dev libfmt-dev libcli11-dev doctest-dev libpcre2-dev libutf8proc-dev liburing-dev
                 libhwloc-dev)
# For the presets clang and fuzz only. tests/tidy_test.cpp also uses clang-format 14 where it is installed.
clang_tools=(clang:clang++)
clang_libraries=(libomp-dev libclang-rt-dev)

# Ninja from .deps (tools/fetch_deps.sh) comes last, so that the system's own is preferred.
use_deps_path() {
  local root=$1
  if [ -x "$root/.deps/usr/bin/ninja" ]; then export PATH="$PATH:$root/.deps/usr/bin"; fi
}

# Prints those of the named packages that dpkg doesn't know as installed, one a line.
missing_libraries() {
  local package
  local -A installed=()
  if [ $# -gt 0 ] && command -v dpkg-query >/dev/null; then
    while read -r status package; do
      if [ "$status" = installed ]; then installed[${package%%:*}]=1; fi
    done < <(dpkg-query -W -f='${db:Status-Status} ${binary:Package}\n' "$@" 2>/dev/null)
  fi
  for package in "$@"; do
    if [ -z "${installed[$package]:-}" ]; then printf '%s\n' "$package"; fi
  done
}

# Prints the packages of those PACKAGE:COMMAND pairs whose command isn't there, one a line.
missing_tools() {
  local pair
  for pair in "$@"; do
    if ! command -v "${pair#*:}" >/dev/null; then printf '%s\n' "${pair%%:*}"; fi
  done
  return 0
}

# need_packages ROOT build|clang: installs what is missing, as root or through sudo. Exits 1 with the command to run
# where that can't be done. All output goes to stderr.
need_packages() {
  local root=$1 purpose=$2
  local -a tools=("${build_tools[@]}") libraries=() missing=() as_root=()
  use_deps_path "$root"
  if [ ! -d "$root/.deps/usr" ]; then libraries+=("${build_libraries[@]}"); fi
  if [ "$purpose" = clang ]; then
    tools+=("${clang_tools[@]}")
    libraries+=("${clang_libraries[@]}")
  fi
  mapfile -t missing < <(missing_tools "${tools[@]}" && missing_libraries "${libraries[@]}")
  if [ ${#missing[@]} -eq 0 ]; then return 0; fi

  printf 'offload: missing packages: %s\n' "${missing[*]}" >&2
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    printf '%s\n' "offload: this is not Debian or Ubuntu. Install what it calls these packages, then build by hand:" \
      "  cmake --preset default && cmake --build build && ctest --test-dir build" >&2
    exit 1
  fi
  if [ "$(id -u)" -ne 0 ]; then
    # Without a terminal sudo could not ask for a password, and must not wait for one.
    if ! command -v sudo >/dev/null || { [ ! -t 0 ] && ! sudo -n true 2>/dev/null; }; then
      printf '%s\n' "offload: installing them needs root. Run this, then the same command again:" \
        "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}" >&2
      exit 1
    fi
    as_root=(sudo)
  fi
  local -a apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120)
  "${apt[@]}" update >&2 </dev/null || printf 'offload: apt-get update failed; trying the lists that are here\n' >&2
  if ! "${apt[@]}" install --no-install-recommends "${missing[@]}" >&2 </dev/null; then
    printf '%s\n' "offload: apt-get could not install them. See its message above; the command was:" \
      "  ${as_root[*]:+${as_root[*]} }apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
}
