#!/usr/bin/env bash
# need_packages of tools/packages.sh against stand-ins for dpkg-query, apt-get, sudo and id: what it installs, how, and
# what it says where it can't. Nothing is installed. Usage: packages_test.sh SOURCE_DIR
set -uo pipefail

root=$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

# stand_in NAME BODY: a command of that name in the current case's folder.
stand_in() {
  printf '#!%s\n%s\n' "$BASH" "$2" >"$bin/$1"
  chmod +x "$bin/$1"
}

# A machine of Debian's kind on which every tool, but only the libraries named, are installed, with root's rights.
# Only the stand-ins can be found: PATH holds no other folder.
machine() {
  bin=$scratch/$1
  tree=$bin/tree
  shift
  mkdir -p "$tree"
  for tool in g++ cmake ninja; do stand_in "$tool" 'exit 0'; done
  stand_in dpkg-query "for p in $*; do echo \"installed \$p:amd64\"; done; echo 'config-files libfmt-dev'; exit 1"
  stand_in apt-get "echo \"apt-get \$*\" >>'$bin/log'"
  stand_in env 'shift; exec "$@"'
  stand_in id 'echo 0'
  : >"$bin/log"
}

# Runs need_packages on the machine; sets status, and said (its output).
need() {
  # shellcheck disable=SC2016 # the inner shell expands them
  said=$(PATH=$bin "$BASH" -c 'set -euo pipefail; . "$1"; need_packages "$2" "$3"; echo went on' - \
    "$root/tools/packages.sh" "$tree" "$1" 2>&1 </dev/null)
  status=$?
}

expect() {
  local what=$1
  shift
  if ! "$@"; then
    printf 'FAILED: %s\n  status: %s\n  said: %s\n  log: %s\n' "$what" "$status" "$said" "$(cat "$bin/log")"
    failures=$((failures + 1))
  fi
}
says() { [[ $said == *"$1"* ]]; }
logs() { [[ $(cat "$bin/log") == *"$1"* ]]; }
no_apt() { [ ! -s "$bin/log" ]; }
exits() { [ "$status" -eq "$1" ]; }

all='nlohmann-json3-dev libfmt-dev libcli11-dev doctest-dev libpcre2-dev libutf8proc-dev liburing-dev libhwloc-dev'
some='nlohmann-json3-dev libcli11-dev doctest-dev libpcre2-dev libutf8proc-dev libhwloc-dev'
options='-q -y -o DPkg::Lock::Timeout=120'

machine complete "$all"
need build
expect 'a complete machine goes on' says 'went on'
expect 'a complete machine is left alone' no_apt

machine lacking "$some"
rm "$bin/ninja"
need build
expect 'missing packages alone are installed' logs "install --no-install-recommends ninja-build libfmt-dev liburing-dev"
expect 'the lists are updated first' logs "apt-get $options update"
expect 'and the script goes on' says 'went on'

machine for_clang "$all"
need clang
expect 'clang brings its own packages' logs 'recommends clang libomp-dev libclang-rt-dev'

machine stale_lists "$some"
stand_in apt-get "echo \"\$*\" >>'$bin/log'; case \"\$*\" in *update) exit 100 ;; esac"
need build
expect 'a failed update is no end' says 'went on'

machine no_network "$some"
stand_in apt-get 'exit 100'
need build
expect 'a failed install ends it' exits 1
expect 'with the command' says '  apt-get install -y --no-install-recommends libfmt-dev liburing-dev'

machine no_rights "$some"
stand_in id 'echo 1000'
need build
expect 'no root and no sudo ends it' exits 1
expect 'with the packages' says 'missing packages: libfmt-dev liburing-dev'
expect 'with the command' says 'apt-get update && apt-get install -y --no-install-recommends libfmt-dev liburing-dev'
expect 'without trying' no_apt

machine sudo_wants_a_password "$some"
stand_in id 'echo 1000'
stand_in sudo "[ \"\$1\" != -n ] || exit 1; echo waited >>'$bin/log'"
need build
expect 'a sudo that would ask ends it' exits 1
expect 'and is not waited for' no_apt

machine sudo_works "$some"
stand_in id 'echo 1000'
stand_in sudo "[ \"\$1\" != -n ] || exit 0; echo sudo >>'$bin/log'; exec \"\$@\""
need build
expect 'sudo installs' logs 'install --no-install-recommends libfmt-dev liburing-dev'
expect 'through sudo' logs 'sudo'

machine another_distribution "$all"
rm "$bin/dpkg-query" "$bin/apt-get"
need build
expect 'another distribution ends it' exits 1
expect 'with every package' says "missing packages: $all"
expect 'with how to build' says 'cmake --preset default'

machine with_deps ''
rm "$bin/ninja"
mkdir -p "$tree/.deps/usr/bin"
printf '#!%s\n' "$BASH" >"$tree/.deps/usr/bin/ninja"
chmod +x "$tree/.deps/usr/bin/ninja"
need build
expect '.deps stands for the libraries and ninja' says 'went on'
expect 'and nothing is installed' no_apt

if [ "$failures" -gt 0 ]; then exit 1; fi
printf 'all cases passed\n'
