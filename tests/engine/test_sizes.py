"""Which steps are captured, and the log line that lists them at the start."""

import re

import pytest
from tests.checkpoints import DEMO
from tests.engine.captured_on_cpu import PLACE, gpu_steps
from tests.rank import Rank

from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.engine.steps.sizes import DECODING, decode_sizes, listed, prompt_sizes


def test_sizes_of_a_single_rank() -> None:
    decode = [*decode_sizes(DECODING, max_sequences=5, max_pages=40)]
    assert [(b.decode, b.width) for b in decode] == [(rows, width) for rows in (1, 2, 4, 5) for width in (8, 32, 40)]
    prompts = [*prompt_sizes(max_sequences=5, max_pages=40, max_prompt=130, flat=False)]
    assert [(b.prompt, b.decode) for b in prompts] == [(64, 0), (128, 0), (130, 0), (128, 5), (130, 5)]
    assert {b.keys for b in prompts} == {0}
    flat = [*prompt_sizes(max_sequences=5, max_pages=40, max_prompt=130, flat=True)]
    assert [b.keys for b in flat if b.prompt == 130 and not b.decode] == [130, 260, 520, 1040]


def test_long_prompts_and_their_keys() -> None:
    sizes = [*prompt_sizes(max_sequences=64, max_pages=40, max_prompt=8192, flat=True)]
    assert max(b.prompt for b in sizes if b.decode) == 2048
    keys = {n: [b.keys for b in sizes if b.prompt == n and not b.decode] for n in (1024, 2048, 2560, 8192)}
    assert keys == {
        1024: [1024],
        2048: [2048, 4096, 8192, 16384],
        2560: [2560, 16384],
        8192: [8192, 16384],
    }
    assert {b.keys for b in sizes if b.prompt == 2048 and b.decode} == {2048, 4096, 8192, 16384}
    long = [*prompt_sizes(max_sequences=64, max_pages=40, max_prompt=32768, flat=True)]
    assert {b.keys for b in long if b.prompt == 32768} == {32768}


def test_log_line_of_captured_sizes() -> None:
    plain = [
        *decode_sizes(DECODING, max_sequences=2, max_pages=9),
        *prompt_sizes(max_sequences=2, max_pages=9, max_prompt=64, flat=False),
    ]
    assert listed(plain, num_graphs=12, seconds=6.66) == (
        "captured 12 CUDA graphs in 6.7 s: decode rows 1, 2; tables of pages 8, 9; prompt rows 64; "
        "prompt rows beside decode rows 64; decode rows beside prompts 2"
    )
    peers = [
        StepSize(sequences=1, width=8, peers=1),
        StepSize(sequences=1, width=8, peers=16),
        StepSize(width=8, peers=64),
    ]
    assert listed(peers, num_graphs=3, seconds=0).endswith(
        ": decode rows 1; tables of pages 8; rows of a peer 1, 16, 64"
    )
    drafts = [StepSize(sequences=count, queries=rows, width=8) for count in (1, 2) for rows in (1, 4)]
    assert listed(drafts, num_graphs=40, seconds=1).endswith(": sequences 1, 2; rows of each 1, 4; tables of pages 8")


@pytest.mark.parametrize("drafts", [{}, {"speculate": "mtp", "draft_tokens": 1}], ids=["plain", "drafts"])
def test_start_logs_captured_sizes_in_one_line(drafts: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    options = {"max_num_seqs": 2, "max_batch_tokens": 64, "max_model_len": 208, **drafts, **PLACE}
    with caplog.at_level("INFO"), gpu_steps(), Rank(DEMO, **options) as rank:
        runner = rank.worker.runner
        [line] = [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]
        found = re.match(r"captured (\d+) CUDA graphs in \d+\.\d s: ", line)
        assert found is not None, line
        assert isinstance(runner, GpuRunner)
        if not drafts:
            # The sampler has six more graphs for each number of rows.
            assert int(found[1]) == len([*runner.sizes()]) + 6 * 2
            assert "decode rows 1, 2; tables of pages" in line
            assert "; prompt rows 64" in line
        else:
            assert "sequences 1, 2; rows of each 1, 2; tables of pages" in line
