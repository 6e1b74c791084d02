"""Checks sampling parameters. Pure.

The router checks them, too, but a worker must survive any router: no request may break a step of the fleet.
"""

from moeyard_worker.protocol import KV_METHODS, MAX_GRAMMAR_BYTES, MAX_LOGPROBS, SamplingParams

# The most tokens of one request whose logits are changed individually. Kernels have room for 4095 (`LogitEdits`). That
# includes the end-of-sequence tokens and one entry for the grammar.
MAX_CHANGED = 4000


def sampling_error(params: SamplingParams, vocab_size: int) -> str | None:
    """Return why `params` are invalid by the ranges of `SamplingParams`, or None."""
    infinity = float("inf")

    def in_range(count: int | None) -> bool:
        return count is None or 0 <= count <= MAX_LOGPROBS

    # NaN fails these checks, because it compares false with everything.
    checks = (
        ("max_tokens", params.max_tokens >= 0, "at least 0"),
        ("min_tokens", 0 <= params.min_tokens <= params.max_tokens, f"in [0, max_tokens {params.max_tokens}]"),
        ("temperature", 0 <= params.temperature < infinity, "at least 0 and finite"),
        ("top_p", 0 < params.top_p <= 1, "in (0, 1]"),
        ("top_k", 0 <= params.top_k < 1 << 63, "at least 0 and below 2**63"),
        ("min_p", 0 <= params.min_p <= 1, "in [0, 1]"),
        ("repetition_penalty", 0.01 <= params.repetition_penalty <= 100, "in [0.01, 100]"),
        ("presence_penalty", -2 <= params.presence_penalty <= 2, "in [-2, 2]"),
        ("frequency_penalty", -2 <= params.frequency_penalty <= 2, "in [-2, 2]"),
        ("logprobs", in_range(params.logprobs), f"in [0, {MAX_LOGPROBS}]"),
        ("prompt_logprobs", in_range(params.prompt_logprobs), f"in [0, {MAX_LOGPROBS}]"),
    )
    for name, ok, allowed in checks:
        if not ok:
            return f"{name} must be {allowed}, got {getattr(params, name)}"
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            return f"logit_bias names token id {token_id}, which is outside the vocabulary of {vocab_size}"
        if not -100 <= bias <= 100:
            return f"logit_bias of token id {token_id} must be in [-100, 100], got {bias}"
    changed = len({*params.logit_bias, *params.stop_token_ids})
    if changed > MAX_CHANGED:
        return f"logit_bias and stop_token_ids name {changed} tokens, at most {MAX_CHANGED} are allowed"
    trace = params.trace_decode_token_ids
    if trace and not (min(trace) >= 0 and max(trace) < vocab_size):
        return f"trace_decode_token_ids has an id outside the vocabulary of {vocab_size}"
    if params.as_decoded and (not trace or params.logprobs is None):
        return "as_decoded needs trace_decode_token_ids and logprobs"
    if trace and params.grammar is not None:
        return "trace_decode_token_ids and a grammar exclude each other"
    if params.grammar is not None:
        size = len(params.grammar.text.encode(errors="replace"))
        if size > MAX_GRAMMAR_BYTES:
            return f"the grammar has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed"
    kept = params.kv_compression
    if kept is not None:
        if kept.method not in KV_METHODS:
            return f"kv_compression knows {', '.join(KV_METHODS)}, got {kept.method!r:.80}"
        if not 1 <= kept.window <= kept.budget:
            return f"kv_compression wants 1 <= window <= budget, got window {kept.window} and budget {kept.budget}"
    return None
