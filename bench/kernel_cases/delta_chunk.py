"""Bench of the gated delta rule over prompts, proven (and printed) against float64 at full length."""

from functools import partial

import torch

from kernel_cases.case import Case, Target, assert_bits
from moeyard_kernels.linear_attention import delta_chunk
from moeyard_kernels.ops.linear_attention import gated_delta_rule, rule_inputs
from moeyard_kernels.types.state_slots import CHUNK, PromptChunks

PROMPTS = ((1024,), (4096,), (16384,), (3000, 17, 1200, 64, 1, 2100, 700, 1110))
_DIM = 128
# Times of flash-linear-attention 0.6 for one prompt (an H200), divided by the wanted speedup.
_KDA_US = ((1024, 590 / 2), (4096, 643 / 1.5), (16384, 2137 / 1.4))


def chunk_prefill(op: str, lengths: tuple[int, ...], k_heads: int, heads: int, *, strong: bool = False) -> Case:
    """Return a case with prompts of `lengths`; every second one continues from its slot's state.

    With ordinary gates most chunks are one product. With `strong` gates none is (`delta_scores`), which is the longest
    time. Otherwise the first head forgets almost nothing (a_log -6), which accumulates the most error.
    """
    by_row, num_rows, num = op == "kda_chunk_prefill", sum(lengths), len(lengths)
    gates, width = heads * (_DIM if by_row else 1), (2 * k_heads + heads) * _DIM
    wide = torch.randn(num_rows, width + heads + gates, device="cuda", dtype=torch.bfloat16)
    qkv, b, a = wide.split((width, heads, gates), 1)
    a_log = torch.linspace(*((3, 4) if strong else (-6, 1)), heads, device="cuda")
    dt_bias = torch.randn(*((heads, _DIM) if by_row else (heads,)), device="cuda")
    state = torch.randn(num, heads, _DIM, _DIM, device="cuda")
    starts = [CHUNK * (i % 2) for i in range(num)]
    chunks = PromptChunks.plan(lengths, starts, range(num), device="cuda")
    kernel = delta_chunk.kda_chunk_prefill if by_row else delta_chunk.gdn_chunk_prefill
    run = partial(kernel, qkv, b, a, a_log, dt_bias, state, chunks=chunks)

    def prefill(rows: slice, kept: torch.Tensor, these: PromptChunks, **more: object) -> tuple[torch.Tensor, ...]:
        """Return (out, the states after it) of some rows, over a copy of the states."""
        own = kept.clone()
        return kernel(qkv[rows], b[rows], a[rows], a_log, dt_bias, own, chunks=these, **more), own  # type: ignore[arg-type]

    def prove() -> None:
        whole, left = prefill(slice(None), state, chunks)
        for config in delta_chunk.CONFIGS:
            assert_bits(str(config), prefill(slice(None), state, chunks, config=config), (whole, left))
        slot, begin, end, fresh, _ = chunks.parts[-1]
        start = 0 if fresh else CHUNK
        cut = min(end - begin, CHUNK * max(1, (end - begin) // CHUNK // 2))
        kept, parts, states, at = state, [], [], 0
        for length in (cut, end - begin - cut):
            if length:
                plan = PromptChunks.plan([length], [start + at], [slot], device="cuda")
                part, kept = prefill(slice(begin + at, begin + at + length), kept, plan)
                parts.append(part)
                states.append(kept[slot])
                at += length
        assert_bits("prompt alone, in two steps", (torch.cat(parts), states[-1]), (whole[begin:end], left[slot]))
        some = [[(start + cut, num)] if n == num - 1 else [] for n in range(num)]
        taking = PromptChunks.plan(lengths, starts, range(num), some, device="cuda")
        with_room = torch.cat((state, state[:1]))
        out, taken = prefill(slice(None), with_room, taking)
        assert_bits("a snapshot on the way", (out, taken[:num], taken[num]), (whole, left, states[0]))
        here_qkv, here_b, here_a = (x[begin:end].cpu().double() for x in (qkv, b, a))
        rate, bias, exact = a_log.cpu(), dt_bias.cpu(), state.cpu().double()
        inputs = rule_inputs(here_qkv, here_b, here_a, rate, bias, exact)
        q, k, v, g, beta = (x.cuda() for x in inputs)
        first = torch.zeros_like(exact[slot]) if fresh else exact[slot]
        wanted, behind = gated_delta_rule(q, k, v, g, beta, first.cuda())
        for what, got, right, per in (("out", whole[begin:end], wanted, (0, 2)), ("state", left[slot], behind, (1, 2))):
            apart = got.double() - right
            error, worst = apart.norm() / right.norm(), (apart.norm(dim=per) / right.norm(dim=per)).max()
            said = f"{op} T{end - begin}: {what} {error:.1e} from float64, {worst:.1e} of a head"
            assert error < 5e-3, said
            print(said, flush=True)

    targets = dict(_KDA_US) if by_row else {}
    square = CHUNK * CHUNK
    # pairs and scores; w, u and scores V; w S, qg S and kg V.
    flops = 2 * (2 * square * _DIM + 3 * square * _DIM + 3 * CHUNK * _DIM * _DIM)
    return Case(
        op=op,
        shape=f"T{num_rows} of {num} H{k_heads}/{heads} {_DIM}x{_DIM}" + (" strong gates" if strong else ""),
        run=run,
        prove=prove,
        num_bytes=wide.nbytes + 2 * num_rows * heads * _DIM + 2 * state.nbytes,
        num_flops=flops * chunks.table.shape[0] * heads,
        target=Target("us", targets[num_rows]) if num_rows in targets and not strong else None,
        variants=[(config, partial(run, config=config)) for config in delta_chunk.CONFIGS],
        # Strong gates share a class with ordinary ones, which decide the config.
        tune_key=None if strong else (op, delta_chunk.shape_class(chunks.table.shape[0], num, heads, _DIM, _DIM)),
    )
