#!/usr/bin/env bash
# Installs what is missing, builds offload-run and asks it a question. Arguments, when given, go to offload-run instead
# of that question, and its answer alone goes to stdout. Run it again as often as you like: only what changed is built.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=tools/packages.sh
. "$root/tools/packages.sh"
# shellcheck source=tools/build.sh
. "$root/tools/build.sh"

need_packages "$root" build
build_preset "$root" default "$root/build" offload-run

if [ $# -eq 0 ]; then set -- -p "What is the capital of Japan?"; fi
exec "$root/build/tools/offload-run" "$@"
