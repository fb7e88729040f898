#!/usr/bin/env bash
# Builds for this machine's GPU, runs the tests that need one and measures the model cut to 12 layers (56 GiB of experts
# made up in memory, 22 GiB of GPU memory): one call, logs in a folder, a short table last.
#
#   tools/gpu_check.sh [--only build|test|parity|bench|sanitize] [--out FOLDER] [--build FOLDER]
#
# Takes some minutes and 80 GiB of host memory for the benchmarks. Exit code 1 when a check failed.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
only=all out=$root/build-gpu/report build=$root/build-gpu
while [ $# -gt 0 ]; do
  case $1 in
    --only) only=$2 && shift 2 ;;
    --out) out=$2 && shift 2 ;;
    --build) build=$2 && shift 2 ;;
    *)
      sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 2
      ;;
  esac
done
mkdir -p "$out"
wants() { [ "$only" = all ] || [ "$only" = "$1" ]; }
rows=() failed=0 configure=()
if [ -d "$root/.deps/usr" ]; then configure=(-DOFFLOAD_PREFER_DEPS=ON); fi
note() { rows+=("$(printf '%-34s %s' "$1" "$2")"); }

# check NAME COMMAND...: the command's log is NAME.log; the table says ok or FAILED with the last line.
check() {
  local name=$1 begin=$SECONDS
  shift
  if "$@" >"$out/$name.log" 2>&1; then
    note "$name" "ok ($((SECONDS - begin)) s)"
  else
    note "$name" "FAILED ($((SECONDS - begin)) s): $(tail -n 1 "$out/$name.log")"
    failed=1
  fi
}

# bench NAME ARGS...: the result lines of offload-bench go into the table.
bench() {
  local name=$1
  shift
  check "$name" "$build/tools/offload-bench" --load-format dummy \
    --model "$root/configs/models/qwen3.8-flash-next-12.json" "$@"
  rows+=("$(grep -E '^(prefill|decode|roofs|NOT)' "$out/$name.log" | sed 's/^/    /')")
}

if wants build || [ ! -x "$build/tools/offload-bench" ]; then
  check configure cmake -S "$root" -B "$build" -G Ninja -DOFFLOAD_CUDA=ON "${configure[@]}"
  check build cmake --build "$build" --target cuda_ops_test cuda_model_test cuda_group_test cuda_ranks_test \
    offload-bench offload-parity offload-stress offload-run
fi
if wants test; then
  check ops "$build/tests/cuda_ops_test" -s
  check model "$build/tests/cuda_model_test" -s
  check group "$build/tests/cuda_group_test"
  check ranks "$build/tests/cuda_ranks_test"
fi
if wants sanitize; then
  # Without the cases that take minutes under a sanitizer; a test asks for more memory than there is, on purpose.
  fast=(--test-case-exclude='every_case*,prefill_of*,rows_that_fill*,results_beyond*')
  check memcheck compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
    "$build/tests/cuda_ops_test" "${fast[@]}"
  check racecheck compute-sanitizer --tool racecheck --error-exitcode 9 "$build/tests/cuda_ops_test" "${fast[@]}"
fi
if wants parity; then
  rm -rf "$build/demo-qwen4-exp-stressed"
  check twin "$build/tools/offload-stress" --out "$build/demo-qwen4-exp-stressed"
  for plan in native 75; do
    flags=(--device cuda --oracle --evidence "$out/evidence")
    if [ "$plan" != native ]; then flags+=(--force-sm "$plan"); fi
    check "parity-$plan" "$build/tools/offload-parity" "${flags[@]}"
    check "parity-twin-$plan" "$build/tools/offload-parity" "${flags[@]}" --model "$build/demo-qwen4-exp-stressed"
  done
fi
if wants bench; then
  bench resident-8k --chunk 8192 --prompt-tokens 8192 --decode-tokens 64
  bench link-8k --vram-budget 22 --chunk 8192 --prompt-tokens 8192 --decode-tokens 0 --repeat 2
  bench link-32k --vram-budget 22 --chunk 8192 --prompt-tokens 32768 --decode-tokens 0 --repeat 1
  # 10 slots hold one layer's experts of one token: every expert of every token comes over the link.
  bench link-decode --vram-budget 22 --expert-slots 10 --prompt-tokens 16 --decode-tokens 16 --repeat 2
  bench contexts --chunk 8192 --prompt-tokens 1024,8192,30720 --decode-tokens 32 --repeat 2
  bench arms --chunk 8192 --prompt-tokens 8192 --decode-tokens 0 --repeat 5 --arms scaled_fp16,fp16
  bench forced-75 --force-sm 75 --chunk 8192 --prompt-tokens 8192 --decode-tokens 32 --repeat 1
fi

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
printf '%s\n' "${rows[@]}"
exit $failed
