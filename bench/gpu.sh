#!/usr/bin/env bash
# Tests and figures that need a GPU, in parts of a few minutes each on an H200 with an empty Triton cache; equality first.
#
#   bench/gpu.sh wheels [DIR]          on a machine with a network: fetch packages that a Python 3.12 with torch and
#                                      transformers lacks
#   OUT=/tmp/out bench/gpu.sh PART...  on the GPU machine, in the root of the tree (with .wheels): equality and figures
#     kernels workers matrix           one GPU: every kernel native; graphs, drafts, hybrids, SnapKV; all combinations
#     state                            part of workers: state of linear attention through graphs and drafts
#     updates codes v4_answers         weight updates, sleep, recorded routing; answers over codes; those of DeepSeek-V4
#     decode prefill                   figures of Qwen3-30B-A3B
#     hybrids snapkv drafts delta fla  figures of linear attention, SnapKV, verify steps; chunk prefill, also against fla
#     packed v4 v4_whole               products over codes and one answer with them; DeepSeek-V4-Flash: equality, its
#                                      kernels, 22 layers; the whole model on one GPU with its host's memory
#     dspark                           DeepSeek-V4's drafter: kernels, definition, captured and launched steps; times
#     newer                            products of few rows in the form for Triton 3.8 and later: equality, and times
#     arrivals                         TTFT of prompts that arrive while others decode, by the planning of steps
#     launches gaps                    time of each launch of steps and prompts; time between two steps
#     contexts                         steps behind long prompts
#     choices                          cost of counting the rows of every expert in a decode step
#     variants                         latent attention of short contexts, products by head, in whole decode steps
#     steps                            the same for linear attention: two launches or three, early reads, tiles
#     splits                           decode attention by the length of its splits: few sequences, and many
#     sums                             the experts' weighted sum of 33 to 64 rows: through shared memory or registers
#     tune tune_rules experts          try all configs and store the best: products and latent decode; linear attention
#     wide_experts                     and the experts' sum; the experts' products; prompts of wide experts
#     shapes shapes_prompts            the kernels at all sizes of the steps of eight models, of 1, 8 and 64 rows and of
#                                      1024 and 8192 (choose with MODELS='Kimi-K2 Mixtral-8x7B' ROWS=256), in $OUT/steps.csv
#     table residency                  the whole table of one GPU; experts without slots
#     loading                          reading files into slots and host memory, with and without codes
#     ranks nccl                       two GPUs: equality, named failures, rows between them
#     whole                            two GPUs or more: one answer of ranks x exchanges x placements
#     links                            two GPUs: experts without slots, each rank alone against all for each other
#     many                             four or eight GPUs: named failures, rows between them
#     four                             four GPUs: many, and figures (Kimi-K2 needs H200s)
#     many_codes many_k2 many_v4       four or eight GPUs: one answer with codes; Kimi-K2 int4; DeepSeek-V4 (H200s)
#     drills                           two GPUs: `moeyard serve` in a Ray cluster, and on its own Ray with killed ranks
#     keep                             copy the compiled Triton kernels to $OUT, which saves a minute of each part
#     A,B/C                            parts A and B on the first GPU while C runs on the second
#   bench/gpu.sh kept FOLDER           copy kept kernels from FOLDER into .wheels for the next run
# Every command has a limit in seconds. Its output is $OUT/NAME.txt, and its last line is printed. Tests report failures
# at once, and a cut run names the tests that still ran (tests/early_reports.py).
set -uo pipefail

wheels() {
  local dir=${1:-.wheels} platforms=() n
  mkdir -p "$dir"
  for n in 5 12 17 24 26 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
  platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
  for package in pyzmq msgpack prometheus-client starlette uvicorn orjson httptools llguidance shtab pydantic \
      pydantic-core annotated-types typing-inspection flash-linear-attention fla-core einops; do
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
      "${platforms[@]}" -d "$dir" "$package" || exit 1
  done
  # Ray is 40 MB as a wheel, of 64 that travel: without symbols and what no worker imports it is 25.
  local ray
  ray=$(mktemp -d)
  for package in ray jsonschema jsonschema-specifications referencing rpds-py; do
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
      "${platforms[@]}" --platform manylinux2014_x86_64 -d "$ray/wheels" "$package" || exit 1
  done
  for wheel in "$ray"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$ray/site" || exit 1; done
  (cd "$ray/site" && rm -rf ray/{serve,data,tune,train,llm,rllib,jars} ray/dashboard/client &&
    strip --strip-unneeded ray/_raylet.so ray/core/src/ray/gcs/gcs_server ray/core/src/ray/raylet/raylet &&
    chmod +x ray/core/src/ray/gcs/gcs_server ray/core/src/ray/raylet/raylet &&
    tar -c . | xz -T0 -6) > "$dir/ray.tar.xz" || exit 1
  rm -r "$ray"
  du -sh "$dir"
}

if [ "${1:-}" = wheels ]; then wheels "${@:2}"; exit; fi
# Kernels are found by the hash of their source, so outdated ones do no harm.
if [ "${1:-}" = kept ]; then
  for name in serving tests; do
    if compgen -G "$2/kernels-$name.tar.xz.*" > /dev/null; then
      cat "$2/kernels-$name.tar.xz."* > .wheels/kept || exit 1
      xz -t .wheels/kept || { echo "gpu.sh: not all parts of kernels-$name.tar.xz came back" >&2; exit 1; }
      mv .wheels/kept ".wheels/kernels-$name.tar.xz"
    fi
  done
  ls -l .wheels/kernels-*
  exit
fi
: "${OUT:?must name the folder for results}"
export PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
SITE=${TMPDIR:-/tmp}/moeyard-site
if [ -d .wheels ] && [ ! -d "$SITE" ]; then
  find .wheels -name '*.whl' -print0 | xargs -0 \
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$SITE" || exit 1
  [ ! -f .wheels/ray.tar.xz ] || tar -xJf .wheels/ray.tar.xz -C "$SITE" || exit 1
fi
# Separate caches, because tests compile thousands of kernels.
KERNELS=${TMPDIR:-/tmp}/moeyard-kernels
for name in serving tests; do
  if [ ! -d "$KERNELS-$name" ]; then
    mkdir -p "$KERNELS-$name"
    [ ! -f ".wheels/kernels-$name.tar.xz" ] || tar -xJf ".wheels/kernels-$name.tar.xz" -C "$KERNELS-$name" || exit 1
    # `keep` keeps only files that are read after this.
    find "$KERNELS-$name" -type f -exec touch -a -d @0 {} +
  fi
done
export TRITON_CACHE_DIR=$KERNELS-serving
export PYTHONPATH=$PWD/worker:$PWD/router:$PWD/kernels:$PWD/deploy:$PWD/bench:$PWD:$SITE
BEGAN=$SECONDS
FAILED=0

# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2 rc=0
  shift 2
  # Workers of xdist need up to ten seconds to end.
  timeout -k 20 "$limit" "$@" > "$OUT/$name.txt" 2>&1 || rc=$?
  echo "[$((SECONDS - BEGAN)) s] $name: exit $rc; $(tail -n 1 "$OUT/$name.txt" | cut -c1-160)"
  [ $rc -eq 0 ] || FAILED=1
}
# pyproject.toml has one -q, which leaves the summary line.
tests() { local name=$1 limit=$2; shift 2
  step "$name" "$limit" env TRITON_CACHE_DIR="$KERNELS-tests" python3 -m pytest --all -p no:cacheprovider -p no:benchmark \
    -p tests.early_reports -rfE --tb=short --durations=12 "$@"; }
engine() { local name=$1 limit=$2; shift 2; step "$name" "$limit" python3 -m moeyard bench engine "$@"; }
ops() { local name=$1 limit=$2 op args=(); shift 2; for op; do args+=(--op "$op"); done
  step "$name" "$limit" python3 bench/kernel_times.py ${TUNE:+--tune} "${args[@]}"; }

kernels() {
  # The longest first (tests/kernels/conftest.py), two per worker. Some files have thirty tests that compile for minutes,
  # and xdist would give all of them to one worker.
  tests kernels 330 -n 16 --maxschedchunk 2 tests/kernels --ignore tests/kernels/cpu --maxfail 60
}
state() {
  tests hybrid_speculation 240 tests/engine/test_hybrid_speculation_cuda.py &
  tests hybrids 240 tests/engine/test_hybrid_cuda.py tests/models/test_hybrid_backends.py &
  wait
}
workers() {
  state &
  tests speculation 200 tests/engine/test_speculation_cuda.py &
  tests compaction 200 tests/engine/test_compaction_cuda.py tests/engine/test_hybrid_compaction_cuda.py &
  tests rows_of_experts 120 tests/engine/test_choices.py tests/engine/test_grammars_cuda.py \
    tests/gpu/test_launches.py &
  # Each rank has its own empty cache.
  tests compile_ahead 240 -n 7 tests/gpu/test_compile_ahead.py &
  tests parity 240 -s tests/gpu/test_parity.py &
  wait
  tests one_answer 240 -n 4 tests/gpu/test_one_answer.py tests/gpu/test_faults.py
  tests on_cuda 240 tests/e2e/test_faults.py tests/e2e/test_gpu_matrix.py tests/deploy/test_bench_engine.py -k cuda
  # Tests that use any available device.
  tests on_device 240 -n 4 tests/engine/test_step_sampler.py tests/exchange/test_staged_exchange.py \
    tests/experts/test_cache.py tests/models/test_verified_rows.py tests/models/test_backends.py
  tests trainer 120 tests/trainer/test_bits.py -k backend_of_a_gpu
}
matrix() { step matrix 240 python3 -m tests.e2e.gpu_matrix --processes 9; }
decode() { engine decode 150 --shape Qwen3-30B-A3B --streams 1 8 64 --prefill; }
prefill() { engine prefill 150 --shape Qwen3-30B-A3B --streams --prefill 1x256 1x1024 1x8192 4x4096; }
# Sizes for a GPU of 80 GB. Eight streams of this model behind 32768 tokens need more.
table() {
  engine qwen3-30b 330 --shape Qwen3-30B-A3B --streams 1 8 64 --prefill 1x256 1x1024 1x2048 1x8192 4x4096 --mixed \
    --json "$OUT/qwen3-30b.json"
  engine v2-lite 120 --shape DeepSeek-V2-Lite --streams 1 64 --prefill
}
residency() {
  engine residency 280 --shape Qwen3-30B-A3B --streams 1 --temperature 1 --prefill 1x8192 --residency 0.5 0.25 0.1
}
hybrids() {
  ops recurrent 120 kda_recurrent gdn_recurrent kda_step gdn_step causal_conv1d_update gated_rms_norm restore_slots
  engine kimi-linear 200 --shape Kimi-Linear-48B-A3B --streams 1 8 64 --prefill 1x1024 1x8192 4x4096
  engine qwen3.5 200 --shape Qwen3.5-35B-A3B --streams 1 8 64 --prefill 1x8192
}
# The first step proves every config, and some compile for a long time.
delta() {
  ops chunk_prefill 150 kda_chunk_prefill gdn_chunk_prefill
  step delta_launches 60 python3 bench/launches.py --op kda_chunk_prefill --op gdn_chunk_prefill --variants
}
# fla tunes itself for each length, about 40 s each and the longest last, before 2 x 4 lines.
fla() { step beside_fla 330 python3 bench/flash_linear_attention.py --folder "$SITE"; }
# The cost of counting the rows of every expert.
choices() {
  ops gate 60 topk_gate
  step choices 200 python3 bench/choices.py
}
updates() {
  tests updates 240 -n 5 tests/engine/test_weights_in_place.py tests/engine/test_sleep.py \
    tests/engine/test_as_decoded_cuda.py tests/engine/test_recording_cuda.py tests/engine/test_routing_cuda.py
}
codes() { tests packed 240 -n 3 tests/gpu/test_packed.py; }
v4_answers() { tests one_answer_v4 240 -n 4 tests/gpu/test_one_answer.py -k v4; }
packed() {
  codes
  step packed_products 240 python3 bench/packed_products.py
}
v4() {
  v4_answers
  step v4_hyper_connections 150 python3 bench/hyper_connections.py
  step v4_decode 150 python3 bench/compressed_attention.py
  step v4_prompts 150 python3 bench/compressed_prompts.py
  ops v4_pairs 60 attend_entries
  engine v4_layers 250 --shape DeepSeek-V4-Flash --layers 22 --quantization fp4 --streams 1 8 64 --prefill 1x8192 \
    --json "$OUT/v4_layers.json"
}
dspark() {
  tests dspark_kernels 150 tests/kernels/test_compressed_blocks.py tests/kernels/test_compressed_attention.py \
    -k "block or keys_without" &
  tests dspark_definition 150 tests/models/test_dspark.py -k "gpu or mean" &
  tests dspark_steps 240 tests/engine/test_hybrid_speculation_cuda.py -k dspark &
  tests dspark_answer 240 tests/gpu/test_one_answer.py -k drafts_of_deepseek &
  wait
  step verify_dspark 250 python3 bench/verify_steps.py --model DeepSeek-V4-Flash-0731:6 --quantization fp4 --streams 1 8 \
    --no-prompts
}
# 147 GB of experts: most have slots, the others are in host memory.
v4_whole() {
  engine v4_whole 580 --shape DeepSeek-V4-Flash --quantization fp4 --streams 1 --output 64 --prefill \
    --json "$OUT/v4_whole.json"
}
# The ops check themselves before they are timed. `moeyard_kernels.common.launch` chooses the form by the version.
newer() {
  local op code='import runpy, sys, triton
triton.__version__ = "3.8.0"
sys.argv = ["bench/kernel_times.py", *sys.argv[1:]]
runpy.run_path(sys.argv[0], run_name="__main__")'
  for op in linear linear_pair head_linear grouped_gemm; do
    ops "usual_$op" 90 "$op"
    step "newer_$op" 90 python3 -c "$code" --op "$op"
  done
}
arrivals() {
  step arrivals 200 python3 bench/gpu_ranks.py --ranks 1 --shape Qwen3-30B-A3B --streams 8 --arrivals 20x512 4x4096
}
# The time between two replays of a step.
gaps() {
  step gaps_qwen 90 python3 bench/step_gaps.py --model Qwen3.5-35B-A3B:8
  step gaps_gqa 90 python3 bench/step_gaps.py --model Qwen3-30B-A3B:12
}
launches() {
  engine launches_kimi 90 --shape Kimi-Linear-48B-A3B --layers 8 --streams 1 64 --prefill 1x1024 1x8192 --profile
  engine launches_qwen 90 --shape Qwen3.5-35B-A3B --layers 8 --streams 1 64 --prefill 1x8192 --profile
  engine launches_gqa 90 --shape Qwen3-30B-A3B --layers 8 --streams 1 --prefill 1x8192 4x4096 --profile
  engine launches_fp8 90 --shape Qwen3-30B-A3B --layers 8 --quantization fp8 --streams 1 8 --prefill 1x8192 --profile
  engine launches_v4 150 --shape DeepSeek-V4-Flash --layers 8 --quantization fp4 --streams 1 8 --prefill 1x8192 --profile
}
# Steps behind long prompts, in which few sequences split their keys over all multiprocessors.
contexts() {
  engine contexts_gqa 120 --shape Qwen3-30B-A3B --layers 12 --streams --prefill --context 1x1024 1x8192 1x32768 8x8192
  engine contexts_mla 120 --shape DeepSeek-V2-Lite --layers 12 --streams --prefill --context 1x1024 1x8192 1x32768 8x8192
}
# Configs that are no defaults: a step of a few layers with each line of the table of stored configs in turn.
variants() {
  local hopper='"kernel": "hopper", "PER_SM": 1, "num_stages": 2' model tiles tile shape fields lines=()
  for model in DeepSeek-V2-Lite:10/16 Kimi-Linear-48B-A3B:8/32 DeepSeek-V3:5/128; do
    tiles=('16, "SWAP": true, "num_warps": 8, "AHEAD": 0' '16, "SWAP": true, "num_warps": 4, "AHEAD": 1' \
      '16, "SWAP": true, "num_warps": 4, "AHEAD": 2' '16, "SWAP": true, "num_warps": 8, "AHEAD": 2')
    case ${model#*/} in
      32) tiles+=('16, "SWAP": true, "num_warps": 4, "AHEAD": 0' '32, "SWAP": true, "num_warps": 8, "AHEAD": 2') ;;
      128) tiles=('64, "SWAP": false, "num_warps": 8, "AHEAD": 0' '64, "SWAP": false, "num_warps": 8, "AHEAD": 2') ;;
    esac
    lines=()
    for tile in "${tiles[@]}"; do lines+=(--line "mla_decode / M${model#*/} few / {$hopper, \"BM\": $tile}"); done
    step "latent_${model#*/}" 90 python3 bench/stored_configs.py --model "${model%/*}" --streams 1 8 "${lines[@]}"
  done
  lines=(--line 'rope_cache_write_mla / few N32 D64 normed / {"kernel": "rows", "num_warps": 4, "num_stages": 3, "BLOCK": 32}')
  # Kimi-Linear's products by head: rates and gate of its linear attention, queries and values of its latent one.
  for shape in "H2 N4096 K128 rows" "H32 N512 K128 columns" "H32 N128 K512 rows"; do
    for tile in 32 64 128; do
      fields="{\"kernel\": \"hopper\", \"BM\": 8, \"BN\": $tile, \"num_warps\": 4, \"num_stages\": 3}"
      lines+=(--line "head_linear / M16 $shape / $fields")
    done
  done
  step heads 90 python3 bench/stored_configs.py --model Kimi-Linear-48B-A3B:8 --streams 1 8 "${lines[@]}"
  lines=()
  for fields in '"num_warps": 8, "PER_SM": 1' '"num_warps": 2, "PER_SM": 2'; do
    fields="\"BM\": 16, \"SWAP\": false, \"EARLY\": true, \"PAGES_AHEAD\": true, \"num_stages\": 4, $fields"
    lines+=(--line "gqa_decode / M8 D256 few short / {\"kernel\": \"triton\", $fields}")
  done
  step wide_heads 60 python3 bench/stored_configs.py --model Qwen3.5-35B-A3B:8 --streams 1 8 "${lines[@]}"
}
# step_line RULE FIELDS: one joined line with all classes of rows.
step_line() { local class lines=()
  for class in one few many; do lines+=("$1_step / $class H32 128x128 / {$2, \"num_stages\": 1}"); done
  local IFS=';'; echo "${lines[*]}"; }
steps() {
  local rule model fields lines
  for rule in kda gdn; do
    lines=()
    for fields in '"kernel": "chain", "num_warps": 4' '"kernel": "two", "BV": 16, "num_warps": 1, "EARLY": true' \
        '"kernel": "two", "BV": 32, "num_warps": 1, "EARLY": true' '"kernel": "two", "BV": 32, "num_warps": 1, "EARLY": false'; do
      lines+=(--line "$(step_line $rule "$fields")")
    done
    model=Kimi-Linear-48B-A3B:8
    [ $rule = kda ] || model=Qwen3.5-35B-A3B:8
    step "steps_$rule" 200 python3 bench/stored_configs.py --model $model --streams 1 8 64 "${lines[@]}"
  done
}
# tuned NAME SECONDS OP...: store the best configs of these ops, and print the table of all.
tuned() { TUNE=yes ops "$@"; cp kernels/moeyard_kernels/configs/*.json "$OUT"; }
splits() { step splits 200 python3 bench/splits.py; }
# In the bench two launches are faster here on an H100 (docs/kernels_h100.csv). This measures them in whole steps.
sums() {
  local model way lines
  for model in Qwen3-30B-A3B:12/K8_H2048 DeepSeek-V2-Lite:12/K6_H2048 Kimi-Linear-48B-A3B:8/K8_H2304; do
    lines=()
    for way in '1, "AHEAD": 4' '1, "AHEAD": 8' '3, "AHEAD": 1' '5, "AHEAD": 1' '9, "AHEAD": 1'; do
      way='{"kernel": "rows", "num_warps": 4, "num_stages": '"$way"'}'
      lines+=(--line "moe_reduce_add_norm / few $(tr _ ' ' <<< "${model#*/}") / $way")
    done
    step "sums_${model%%:*}" 120 python3 bench/stored_configs.py --model "${model%/*}" --streams 48 64 "${lines[@]}"
  done
}
# An interrupted run keeps its rows; `python bench/kernel_times.py --csv docs/FILE.csv --merge steps.csv` adds them here.
shape_rows() { local name=$1 limit=$2 model args=(); shift 2
  for model in ${MODELS:-all}; do args+=(--model "$model"); done
  for rows; do args+=(--rows "$rows"); done
  step "$name" "$limit" python3 bench/kernel_times.py "${args[@]}" --csv "$OUT/steps.csv"; }
shapes() { shape_rows shapes 480 1 8 64; }
shapes_prompts() { shape_rows shapes_prompts 480 ${ROWS:-1024 8192}; }
# All tiles for prompts of the widest experts.
wide_experts() {
  local model args=()
  for model in Mixtral-8x7B DeepSeek-V3 Kimi-K2 Qwen3-235B-A22B; do args+=(--model "$model"); done
  step wide_experts 300 python3 bench/kernel_times.py --tune --op grouped_gemm --rows 1024 --rows 8192 "${args[@]}"
  cp kernels/moeyard_kernels/configs/*.json "$OUT"
}
tune() { tuned tune 400 linear mla_decode; }
experts() { tuned experts 150 grouped_gemm; }
tune_rules() { tuned tune_rules 150 kda_chunk_prefill gdn_chunk_prefill moe_reduce_add_norm; }
# Keep binaries, their descriptions and launchers, without the intermediate stages. Only files that were used since the
# start are kept, because kernels change. A call returns at most 8 files of 16 MB each, and the tree carries 64 MB.
keep() {
  local name archive
  for name in serving tests; do
    archive=$KERNELS-$name.tar.xz
    (cd "$KERNELS-$name" && find . -type f \( -name '*.json' -o -name '*.cubin' -o -name '*.so' \) \
      -newerat @1 -print0 | tar -c --null -T - | xz -T0 -3 > "$archive") || { FAILED=1; continue; }
    echo "$name: $(tar -tJf "$archive" | grep -c 'cubin$') kernels, $(stat -c %s "$archive") bytes"
    if [ "$(stat -c %s "$archive")" -gt 25000000 ]; then
      echo "kernels of $name are too large to keep"
      FAILED=1
    else
      split -d -b 15000000 "$archive" "$OUT/kernels-$name.tar.xz." || FAILED=1
    fi
  done
}
snapkv() {
  ops snapkv_scores 60 snapkv_scores
  engine snapkv 150 --shape Qwen3-30B-A3B --streams --prefill --context 8x32768 --kv-budget 2048
}
drafts() {
  step verify_64 200 python3 bench/verify_steps.py --model DeepSeek-V3:6 Kimi-K2:4 --streams 64 --no-prompts
  step verify_hybrid 200 python3 bench/verify_steps.py --model Qwen3.5-35B-A3B:40 --no-prompts
}
# Through P2P, and as between hosts, without P2P and shared memory. This covers a first communicator.
nccl() {
  local network=(env NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo)
  # Compared with zmq and its staging, from which `auto` chooses one of the two (engine/assembly/topology.py).
  local rows=(python3 bench/exchange.py --kinds nccl zmq --device cuda --ranks 2 --dtypes bfloat16 --top-k 8 --layers 150)
  tests nccl 60 tests/exchange/test_conformance.py -k "nccl and 2gpus"
  tests nccl_lost 90 tests/exchange/test_failures.py -k gpus_wait_no_more
  step nccl_rows 80 "${rows[@]}" --tokens 1 8 64 --hidden 7168 --experts 256
  step nccl_prompts 80 "${rows[@]}" --prompts --tokens 1024 4096 --hidden 2048 --experts 128
  step nccl_network 60 "${network[@]}" TRITON_CACHE_DIR="$KERNELS-tests" python3 -m pytest --all -p no:cacheprovider -rf \
    tests/exchange/test_conformance.py -k "nccl and 2gpus and bfloat16"
  step nccl_network_rows 40 "${network[@]}" "${rows[@]}" --kinds nccl --tokens 8 64 --hidden 7168 --experts 256
  tests nccl_answer 200 tests/gpu/test_one_answer_ranks.py -k "nccl and gqa-bfloat16"
  step nccl_tokens 100 python3 bench/gpu_ranks.py --exchange nccl --shape Qwen3-30B-A3B --layers 8 --streams 1 8 64 --check
  tests nccl_failures 150 tests/gpu/test_failures.py -k nccl
}
# Kill a rank; then run a step with a token whose embedding is NaN.
drills() {
  tests cluster 400 tests/gpu/test_cluster.py
  local fault serve=(--workers 2 --serve "--device cuda")
  for fault in kill:5 exception:3; do
    step "drills_${fault%:*}" 330 python3 bench/drills.py --fault "${fault%:*}" --faults "${fault#*:}" "${serve[@]}" \
      --json "$OUT/drills-${fault%:*}.json" --log "$OUT/drills-${fault%:*}-server.txt"
  done
}
whole() { step whole 500 python3 -m tests.e2e.gpu_matrix --ranks 1 2 4; }
ranks() {
  tests puts 90 -n 14 --maxschedchunk 1 tests/kernels/test_peer_exchange.py tests/kernels/test_result_rows.py
  tests ranks 300 tests/gpu/test_one_answer_ranks.py -k "not nccl"
  tests failures 180 tests/gpu/test_failures.py -k "not nccl"
  step rows 60 python3 bench/nvlink.py --ranks 2
  step two_gpus 150 python3 bench/gpu_ranks.py --shape Qwen3-30B-A3B
}
gpus() { nvidia-smi --list-gpus | wc -l; }
many() {
  tests many_failures 330 tests/gpu/test_failures.py -k all_others
  step many_rows 80 python3 bench/nvlink.py --ranks "$(gpus)" --parts eager,times,faults
}
four() {
  local four=(python3 bench/gpu_ranks.py --ranks 4 --streams 1 8 16 64)
  many
  step four_qwen 260 "${four[@]}" --shape Qwen3-30B-A3B --prefill 4x4096 16x4096 --mixed 4096 --budgets 2048 1024 --check \
    --uneven 8,0,0,0 --arrivals 20x512
  step four_k2 160 "${four[@]}" --shape Kimi-K2 --layers 12
}
many_codes() { tests many_codes 500 tests/gpu/test_one_answer_ranks.py -k test_quantised; }
# many_streams NAME ARGUMENT...: 1, 8 and 64 streams per rank, and 1, 8, 16 and 64 in all
many_streams() {
  local name=$1 ranks idle
  shift
  ranks=$(gpus)
  idle=$(printf ',0%.0s' $(seq 2 "$ranks"))
  step "$name" 580 python3 bench/gpu_ranks.py --ranks "$ranks" --uneven "1$idle" \
    --streams $(printf '%d\n' 1 8 64 $((8 / ranks)) $((16 / ranks)) $((64 / ranks)) | sort -nu) "$@"
}
many_k2() {
  local cut=()
  # Eight GPUs hold all 571 GB of experts.
  [ "$(gpus)" -ge 8 ] || cut=(--layers 24)
  many_streams many_k2 --shape Kimi-K2 "${cut[@]}" --quantization int4-g32
}
many_v4() { many_streams many_v4 --shape DeepSeek-V4-Flash --quantization fp4 --prefill 4x8192; }
loading() {
  step loading 300 python3 bench/gpu_loading.py --directory /tmp/loading --layers 4 --quantization fp8 int4-g128 \
    --residency 1 0.25
}
# Experts without a slot, read by each rank alone and by all ranks for each other: equality, then tokens/s of both.
links() {
  tests fetch_kernel 90 tests/kernels/test_fetch_experts.py tests/kernels/test_host_experts.py
  ops fetch_launches 60 fetch_experts gather_experts
  tests fetch 200 tests/gpu/test_one_answer_ranks.py -k "nvlink and gqa-bfloat16 and not all"
  tests fetch_lost 120 tests/gpu/test_failures.py -k half
  step fetch_gain 400 python3 bench/gpu_ranks.py --shape Qwen3-30B-A3B --residency 0.25 --fetch alone shared --check
}

for part in ${@//[,\/]/ }; do
  declare -F "$part" > /dev/null || { echo "gpu.sh: unknown part '$part'" >&2; exit 2; }
done
mkdir -p "$OUT"
python3 - <<'PY' || exit 1
import torch

a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
b = torch.empty_like(a)
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for i in range(13):
    if i == 3:
        begin.record()
    b.copy_(a)
end.record()
end.synchronize()
rate = 10 * 2 * a.numel() / begin.elapsed_time(end) * 1e-9
print(f"{torch.cuda.get_device_name()}: copy {rate:.2f} TB/s (read and write), torch {torch.__version__}")
# On 2026-11-23 one machine copied at half of the usual rate, and its figures would have been useless.
raise SystemExit(rate < 2.6)
PY
# in_turn PART,PART: run the parts in sequence.
in_turn() { local part; for part in ${1//,/ }; do "$part"; done; }
for parts; do
  if [ "$parts" = "${parts/\//}" ]; then in_turn "$parts"; continue; fi
  (export CUDA_VISIBLE_DEVICES=0; in_turn "${parts%%/*}"; exit $FAILED) &
  (export CUDA_VISIBLE_DEVICES=1; in_turn "${parts#*/}"; exit $FAILED) || FAILED=1
  wait $! || FAILED=1
done
exit $FAILED
