#!/usr/bin/env bash
# Builds for this machine's GPU, runs the tests that need one and measures the published model cut to 4 and 12 layers,
# with weights made up in memory: one call, logs in a folder, a short table last. Benchmarks run alone, tests beside one
# another.
#
#   tools/gpu_check.sh [--only build|test|ranks|sanitize|parity|bench] [--out FOLDER] [--build FOLDER]
#
# FOLDERs are relative to the root of the tree. The benchmarks load up to five models of 23 GiB side by side, and one of
# 60 GiB. Exit code 1 when a check failed, 2 for bad usage.
set -uo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
cd "$(dirname "$script")/.." || exit 1
only=all out=build-gpu/report build=build-gpu
while [ $# -gt 0 ]; do
  case "$1 ${2:-}" in
    "--only build" | "--only test" | "--only ranks" | "--only sanitize" | "--only parity" | "--only bench")
      only=$2 && shift 2 ;;
    "--out "?*) out=$2 && shift 2 ;;
    "--build "?*) build=$2 && shift 2 ;;
    *)
      sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$script"
      exit 2
      ;;
  esac
done
mkdir -p "$out/evidence"
wants() { [ "$only" = all ] || [ "$only" = "$1" ]; }
rows=() pending=() failed=0 configure=()
if [ -d .deps/usr ]; then configure=(-DOFFLOAD_PREFER_DEPS=ON); fi

# outcome NAME COMMAND...: prints the table's row, ok or FAILED with the last line; the command's log is NAME.log.
outcome() {
  local name=$1 begin=$SECONDS
  shift
  if "$@" >"$out/$name.log" 2>&1; then
    printf '%-34s ok (%s s)' "$name" $((SECONDS - begin))
  else
    printf '%-34s FAILED (%s s): %s' "$name" $((SECONDS - begin)) "$(tail -n 1 "$out/$name.log")"
    return 1
  fi
}
check() {
  local row
  row=$(outcome "$@") || failed=1
  rows+=("$row")
}
# beside NAME COMMAND...: check, while others run. join waits for them and puts their rows into the table.
beside() {
  outcome "$@" >"$out/$1.row" &
  pending+=("$! $1")
}
join() {
  local each
  for each in "${pending[@]}"; do
    wait "${each%% *}" || failed=1
    rows+=("$(cat "$out/${each#* }.row")")
    rm "$out/${each#* }.row"
  done
  pending=()
}

# bench NAME LAYERS ARGS...: offload-bench on the published model cut to so many layers; its result lines go into the
# table.
bench() {
  local name=$1 layers=$2
  shift 2
  check "$name" "$build/tools/offload-bench" --load-format dummy \
    --model "configs/models/qwen3.8-flash-next-$layers.json" "$@"
  rows+=("$(grep -E '^(prefill|decode|roofs|NOT)' "$out/$name.log" | sed 's/^/    /')")
}

if wants build || [ ! -x "$build/tools/offload-bench" ]; then
  check configure cmake -S . -B "$build" -G Ninja -DOFFLOAD_CUDA=ON "${configure[@]}"
  check build cmake --build "$build" --target cuda_ops_test cuda_model_test cuda_group_test cuda_ranks_test \
    offload-bench offload-parity offload-probe offload-stress offload-run
fi
if wants parity; then
  rm -rf "$build/demo-qwen4-exp-stressed"
  check twin "$build/tools/offload-stress" --out "$build/demo-qwen4-exp-stressed"
  for plan in native 75; do
    flags=(--device cuda --oracle --evidence "$out/evidence")
    if [ "$plan" != native ]; then flags+=(--force-sm "$plan"); fi
    beside "parity-$plan" "$build/tools/offload-parity" "${flags[@]}"
    beside "parity-twin-$plan" "$build/tools/offload-parity" "${flags[@]}" --model "$build/demo-qwen4-exp-stressed"
  done
fi
if wants test; then
  beside ops "$build/tests/cuda_ops_test" -s
  beside model "$build/tests/cuda_model_test" -s
fi
if wants sanitize; then
  # Without the cases that take minutes under a sanitizer; a test asks for more memory than there is, on purpose.
  fast=(--test-case-exclude='every_case*,prefill_of*,rows_that_fill*,results_beyond*,kernels_that_start*')
  beside memcheck compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
    "$build/tests/cuda_ops_test" "${fast[@]}"
  beside racecheck compute-sanitizer --tool racecheck --error-exitcode 9 "$build/tests/cuda_ops_test" "${fast[@]}"
fi
join
if wants ranks; then
  check group "$build/tests/cuda_group_test"
  check fault "$build/tests/cuda_group_test" --no-skip --test-case='a_kernel_fault_*'
  check ranks "$build/tests/cuda_ranks_test"
  if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
    check all-reduce "$build/tools/offload-bench" all-reduce --tp 2 --repeat 7
    rows+=("$(grep -E ' us| ms' "$out/all-reduce.log" | sed 's/^/    /')")
  fi
fi
if wants bench; then
  check pinning "$build/tools/offload-probe" --pin-gib 56.25 -o "$out/machine.json"
  rows+=("$(grep -E '"(pin_gib_s|h2d_gib_s)": [0-9]' "$out/machine.json")")
  bench resident-8k 12 --chunk 8192 --prompt-tokens 8192 --decode-tokens 64
  bench cold-8k 12 --vram-budget 22 --cold-cache --chunk 8192 --prompt-tokens 8192 --decode-tokens 0
  bench cold-32k 12 --vram-budget 22 --cold-cache --chunk 32768 --prompt-tokens 32768 --decode-tokens 0 --repeat 2
  # 10 slots hold one layer's experts of one token: every expert of every token comes over the link.
  bench link-decode 12 --vram-budget 22 --expert-slots 10 --prompt-tokens 16 --decode-tokens 16 --repeat 2
  bench forced-75 12 --force-sm 75 --chunk 8192 --prompt-tokens 8192 --decode-tokens 32 --repeat 1
  prompt=(--chunk 8192 --prompt-tokens 8192 --decode-tokens 0 --repeat 5)
  bench arms-control 4 "${prompt[@]}" --arms bf16,control,control_dense,control_hc,control_moe
  bench arms-all 4 "${prompt[@]}" --arms bf16,scaled_fp16,fp16,scaled_moe,fp16_moe
  bench arms-dense 4 "${prompt[@]}" --arms bf16,scaled_fp16_dense,scaled_hc,fp16_dense,fp32_out_dense
  bench arms-other 4 "${prompt[@]}" --arms bf16,hc_fused
  bench arms-75 4 "${prompt[@]}" --force-sm 75 --arms bf16,scaled_fp16,fp16
  check products-75 "$build/tools/offload-bench" ops --case 'prompt/*' --force-sm 75
  rows+=("$(grep -E '^prompt/(linear|swiglu_experts)' "$out/products-75.log" | sed 's/^/    /')")
  check profile-75 "$build/tools/offload-bench" --load-format dummy --force-sm 75 --profile --chunk 8192 \
    --prompt-tokens 8192 --decode-tokens 1 --model "configs/models/qwen3.8-flash-next-4.json"
  rows+=("$(grep -m 2 -E '^(linear|swiglu_routed) ' "$out/profile-75.log" | sed 's/^/    /')")
fi

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
printf '%s\n' "${rows[@]}"
exit $failed
