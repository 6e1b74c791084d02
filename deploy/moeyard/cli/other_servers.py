"""Flags of vLLM, SGLang and llama.cpp that `moeyard serve` does not have, and what to use instead.

From the servers' own lists of arguments (vLLM 0.33, SGLang 0.6, llama.cpp, 2026-11). A value that begins with dashes is
a flag of ours; any other is a sentence about what this server does.
"""

from collections.abc import Mapping
from types import MappingProxyType

_MODEL = "MODEL needs no flag: `moeyard serve MODEL`"
_WORKERS = "--workers N"
_KV = "--kv-memory SIZE or --expert-memory SIZE"
_QUANTISED = "weights are served as the checkpoint stores them, in float32 or bfloat16"
_REMOTE_CODE = "no code of a checkpoint is ever run"
_TOKENIZER = "the tokenizer is the checkpoint's"
_ONE_MODEL = "adapters are not served"
_ALWAYS = "this is always on"
_PREFIX = "prefix caching is on; --no-prefix-caching switches it off"
_ACCESS = "--access-log or --no-access-log"
_SEED = "the seed is a field of each request"
_CACHE = "the hub's cache is where the environment variable HF_HUB_CACHE says"
_CLUSTER = "--ray-address HOST:PORT"
_PIPELINE = "there is no pipeline parallelism; --workers N spreads the experts"
_KV_DTYPE = "the KV cache has the dtype of the weights; see --dtype"
_DRAFTS = "--draft-tokens K"

# By flag, without the dashes before it.
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("model", "model-path", "m", "hf-repo", "hf"), _MODEL),
        **dict.fromkeys(
            (
                *("tensor-parallel-size", "tp-size", "tp", "data-parallel-size", "dp-size", "dp", "data-parallel-rank"),
                *("enable-expert-parallel", "ep", "expert-parallel-size", "ep-size", "enable-ep-moe", "moe-ep-size"),
                *("enable-dp-attention", "data-parallel-size-local", "tensor-split", "num-gpus"),
            ),
            _WORKERS,
        ),
        **dict.fromkeys(("pipeline-parallel-size", "pp-size", "pp"), _PIPELINE),
        **dict.fromkeys(
            (
                *("gpu-memory-utilization", "mem-fraction-static", "kv-cache-memory-bytes", "num-gpu-blocks-override"),
                *("max-total-tokens", "swap-space", "memory-ratio", "kv-offloading-size"),
            ),
            _KV,
        ),
        **dict.fromkeys(("cpu-offload-gb", "n-cpu-moe", "cpu-moe", "num-experts-on-gpu"), "--expert-memory SIZE"),
        **dict.fromkeys(
            ("context-length", "ctx-size", "c", "max-seq-len", "max-context-len", "max-seq-len-to-capture"),
            "--max-model-len N",
        ),
        **dict.fromkeys(("max-num-batched-tokens", "max-prefill-tokens", "batch-size", "b"), "--max-batch-tokens N"),
        **dict.fromkeys(("max-running-requests", "max-batch-size", "parallel", "np"), "--max-num-seqs N"),
        **dict.fromkeys(
            ("chunked-prefill-size", "long-prefill-token-threshold", "max-prefill-length", "ubatch-size", "ub"),
            "--prefill-chunk N",
        ),
        **dict.fromkeys(("max-queued-requests", "max-waiting-requests"), "--max-waiting N"),
        **dict.fromkeys(("enable-prefix-caching", "enable-radix-cache"), _PREFIX),
        **dict.fromkeys(("no-enable-prefix-caching", "disable-radix-cache"), "--no-prefix-caching"),
        **dict.fromkeys(("disable-cuda-graph", "disable-cudagraph"), "--enforce-eager"),
        **dict.fromkeys(("disable-overlap-schedule",), "--no-async-scheduling"),
        **dict.fromkeys(
            ("speculative-config", "speculative-algorithm", "speculative-algo", "speculative-model"), "--speculate mtp"
        ),
        **dict.fromkeys(("speculative-num-draft-tokens", "speculative-num-steps", "num-speculative-tokens"), _DRAFTS),
        **dict.fromkeys(("override-generation-config", "sampling-defaults"), "--generation-config WHICH"),
        **dict.fromkeys(
            ("enable-reasoning", "reasoning-format"),
            "reasoning is read where --reasoning-parser, or the chat template, knows its format",
        ),
        **dict.fromkeys(("api-server-count",), "--routers N"),
        **dict.fromkeys(
            (
                *("disable-log-requests", "enable-log-requests", "log-requests", "disable-uvicorn-access-log"),
                "max-log-len",
            ),
            _ACCESS,
        ),
        **dict.fromkeys(("uvicorn-log-level", "log-level-http", "verbose"), "--log-level LEVEL"),
        **dict.fromkeys(("moe-a2a-backend", "all2all-backend", "moe-runner-backend"), "--exchange HOW"),
        **dict.fromkeys(
            ("enable-eplb", "eplb-config", "init-expert-location", "ep-num-redundant-experts"),
            "--expert-placement FILE, as `moeyard experts plan` writes it",
        ),
        **dict.fromkeys(("dist-init-addr", "distributed-executor-backend", "nnodes", "master-addr"), _CLUSTER),
        **dict.fromkeys(("watchdog-timeout", "dist-timeout"), "--step-deadline S"),
        **dict.fromkeys(("n-gpu-layers", "gpu-layers", "ngl"), "--device cuda"),
        **dict.fromkeys(("alias", "model-name"), "--served-model-name NAME"),
        **dict.fromkeys(("ssl-cert-file",), "--ssl-certfile FILE"),
        **dict.fromkeys(("ssl-key-file",), "--ssl-keyfile FILE"),
        **dict.fromkeys(("cors-allow-origins", "allowed-origin"), "--allowed-origins ORIGIN"),
        **dict.fromkeys(("quantization", "q", "kv-cache-quantization", "torchao-config"), _QUANTISED),
        **dict.fromkeys(("kv-cache-dtype", "cache-type-k", "cache-type-v"), _KV_DTYPE),
        **dict.fromkeys(("trust-remote-code",), _REMOTE_CODE),
        **dict.fromkeys(("tokenizer", "tokenizer-path", "tokenizer-mode", "tokenizer-revision"), _TOKENIZER),
        **dict.fromkeys(("enable-lora", "lora-modules", "lora-paths", "max-loras"), _ONE_MODEL),
        **dict.fromkeys(
            ("enable-chunked-prefill", "enable-metrics", "continuous-batching", "cont-batching", "jinja"), _ALWAYS
        ),
        **dict.fromkeys(("seed", "random-seed"), _SEED),
        **dict.fromkeys(("download-dir", "cache-dir"), _CACHE),
        **dict.fromkeys(("hf-token",), "the hub's token is that of `hf auth login`, or of the variable HF_TOKEN"),
    }
)
