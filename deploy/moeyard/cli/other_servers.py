"""Flags of vLLM, SGLang and llama.cpp that `moeyard serve` does not have, and what to use instead.

From the servers' own lists of arguments (vLLM 0.33, SGLang 0.6, llama.cpp, 2026-11).
"""

from collections.abc import Mapping
from types import MappingProxyType

# An advice and the flags that it is for. One that begins with dashes is a flag of ours; others say what we do.
_ADVICE = (
    ("MODEL needs no flag: `moeyard serve MODEL`", "model model-path m hf-repo hf"),
    (
        "--workers N",
        "tensor-parallel-size tp-size tp data-parallel-size dp-size dp data-parallel-rank enable-expert-parallel ep "
        "expert-parallel-size ep-size enable-ep-moe moe-ep-size enable-dp-attention data-parallel-size-local "
        "tensor-split num-gpus",
    ),
    ("there is no pipeline parallelism; --workers N spreads the experts", "pipeline-parallel-size pp-size pp"),
    (
        "--kv-memory SIZE or --expert-memory SIZE",
        "gpu-memory-utilization mem-fraction-static kv-cache-memory-bytes num-gpu-blocks-override max-total-tokens "
        "swap-space memory-ratio kv-offloading-size",
    ),
    ("--expert-memory SIZE", "cpu-offload-gb n-cpu-moe cpu-moe num-experts-on-gpu"),
    ("--max-model-len N", "context-length ctx-size c max-seq-len max-context-len max-seq-len-to-capture"),
    ("--max-batch-tokens N", "max-num-batched-tokens max-prefill-tokens batch-size b"),
    ("--max-num-seqs N", "max-running-requests max-batch-size parallel np"),
    ("--prefill-chunk N", "chunked-prefill-size long-prefill-token-threshold max-prefill-length ubatch-size ub"),
    ("--max-waiting N", "max-queued-requests max-waiting-requests"),
    ("prefix caching is on; --no-prefix-caching switches it off", "enable-prefix-caching enable-radix-cache"),
    ("--no-prefix-caching", "no-enable-prefix-caching disable-radix-cache"),
    ("--enforce-eager", "disable-cuda-graph disable-cudagraph"),
    ("--no-async-scheduling", "disable-overlap-schedule"),
    ("--speculate mtp or dspark", "speculative-config speculative-algorithm speculative-algo speculative-model"),
    ("--draft-tokens K", "speculative-num-draft-tokens speculative-num-steps num-speculative-tokens"),
    ("--generation-config WHICH", "override-generation-config sampling-defaults"),
    (
        "reasoning is read where --reasoning-parser, or the chat template, knows its format",
        "enable-reasoning reasoning-format",
    ),
    ("--routers N", "api-server-count"),
    (
        "--access-log or --no-access-log",
        "disable-log-requests enable-log-requests disable-uvicorn-access-log max-log-len",
    ),
    (
        "--otlp-traces-endpoint URL, which shows phases of requests, not of steps",
        "collect-detailed-traces enable-trace",
    ),
    ("--log-level LEVEL", "uvicorn-log-level log-level-http verbose"),
    ("--exchange HOW", "moe-a2a-backend all2all-backend moe-runner-backend"),
    (
        "--expert-placement FILE, as `moeyard experts plan` writes it",
        "enable-eplb eplb-config init-expert-location ep-num-redundant-experts",
    ),
    ("--ray-address HOST:PORT", "dist-init-addr distributed-executor-backend nnodes master-addr"),
    ("--step-deadline S", "watchdog-timeout dist-timeout"),
    ("--device cuda", "n-gpu-layers gpu-layers ngl"),
    ("--served-model-name NAME", "alias model-name"),
    ("--ssl-certfile FILE", "ssl-cert-file"),
    ("--ssl-keyfile FILE", "ssl-key-file"),
    ("--allowed-origins ORIGIN", "cors-allow-origins allowed-origin"),
    (
        "config.json says how weights are quantised, and `moeyard quantize` quantises them; activations never are",
        "q kv-cache-quantization torchao-config",
    ),
    ("the KV cache has the dtype of the weights; see --dtype", "kv-cache-dtype cache-type-k cache-type-v"),
    ("no code of a checkpoint is ever run", "trust-remote-code"),
    (
        "the tokenizer is the checkpoint's; --tokenizer DIR gives a GGUF file another one",
        "tokenizer-path tokenizer-mode tokenizer-revision",
    ),
    ("adapters are not served", "enable-lora lora-modules lora-paths max-loras"),
    ("this is always on", "enable-chunked-prefill enable-metrics continuous-batching cont-batching jinja"),
    ("the seed is a field of each request", "seed random-seed"),
    ("the hub's cache is where the environment variable HF_HUB_CACHE says", "download-dir cache-dir"),
    ("the hub's token is that of `hf auth login`, or of the variable HF_TOKEN", "hf-token"),
)
# By flag, without the dashes before it.
INSTEAD: Mapping[str, str] = MappingProxyType({flag: advice for advice, flags in _ADVICE for flag in flags.split()})
