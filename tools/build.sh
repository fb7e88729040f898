# shellcheck shell=bash
# Configuring and building, sourced by quickstart.sh and test.sh. Installs nothing. Not thread-safe: one build of a
# preset at a time.

# build_preset ROOT PRESET BUILD_DIR [TARGET]: all of its output goes to stderr.
build_preset() {
  local root=$1 preset=$2 build=$3 target=${4:-all}
  local -a fresh=()
  if [ -e "$build" ] && [ ! -w "$build" ]; then
    printf 'offload: %s belongs to another user; remove it, or run this as that user\n' "$build" >&2
    return 1
  fi
  # A tree that was copied or moved with its build folder would be refused by CMake.
  if [ -f "$build/CMakeCache.txt" ] && ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$root" "$build/CMakeCache.txt"; then
    fresh=(--fresh)
  fi
  (cd "$root" && cmake --preset "$preset" "${fresh[@]}" && cmake --build "$build" --target "$target") >&2 </dev/null
}
