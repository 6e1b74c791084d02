"""Write the tables of docs/models.md from the memory plan that a worker makes.

Run `python deploy/tools/model_table.py` after a change of the plan or of the published shapes.
`tests/deploy/test_model_table.py` fails while the page is out of date.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moeyard_kernels.cuda import footprint
from moeyard_worker.config.engine_config import DEVICE_DEFAULTS, EngineConfig
from moeyard_worker.config.placement import partition
from moeyard_worker.engine.memory.plan import MemoryPlan, plan_memory
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.shapes import SHAPES, served_model
from moeyard_worker.models.spec import model_spec

PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
BEGIN, END = "<!-- {}: written by deploy/tools/model_table.py -->\n", "<!-- end -->\n"
GIB = 1 << 30
# Free bytes of a GPU before anything is loaded.
CARDS = {"H100 80 GB": 78 * GIB, "H200 141 GB": 139 * GIB}
WORKERS = (1, 2, 4, 8)
# The tables are in bfloat16, in which nobody serves DeepSeek-V4.
ON_GPUS = [name for name, shape in SHAPES.items() if name != "moeyard-demo" and shape["model_type"] != "deepseek_v4"]


def serving(shape: str, workers: int = 1) -> EngineConfig:
    """Return the defaults of `moeyard serve` on GPUs of one host, for a published shape."""
    config = EngineConfig(
        model_path=None, load_format="dummy", shape=shape, device="cuda", num_workers=workers, **DEVICE_DEFAULTS["cuda"]
    )
    return replace(config, exchange="nvlink") if workers > 1 else config


def planned(config: EngineConfig, model: ModelConfig, available: int) -> MemoryPlan:
    """Return the plan of rank 0, which has as many experts as any other."""
    dtype = model.served_dtype(config.dtype)
    return plan_memory(
        config=config,
        model=model,
        dtype=dtype,
        resident_bytes=model_spec(model, ()).resident_bytes(dtype, footprint),
        num_local_experts=len(model.moe_layers) * len(partition(model.num_experts, config.num_workers)[0]),
        available=available,
        footprints=footprint,
    )


def gib(num_bytes: float) -> str:
    """Return a size in GiB, with a decimal below 10."""
    size = num_bytes / GIB
    return f"{size:.1f}" if size < 10 else f"{size:,.0f}"


def sizes() -> Iterator[str]:
    """Yield the rows of the table of weights and state."""
    yield "| shape | experts, GiB | other weights, GiB | KV, KiB per token | state, MiB per sequence | positions |"
    yield "|---|--:|--:|--:|--:|--:|"
    for shape in ON_GPUS:
        config = serving(shape)
        model = served_model(config)
        dtype = model.served_dtype(config.dtype)
        experts = len(model.moe_layers) * model.num_experts * model.expert_form(dtype).blob_bytes
        dense = model_spec(model, ()).resident_bytes(dtype, footprint)
        state = model.state_spec(2)
        per_sequence = f"{state.bytes_per_sequence / 2**20:.0f}" if state.bytes_per_sequence else "none"
        yield (
            f"| {shape} | {gib(experts)} | {gib(dense)} | {state.bytes_per_token / 1024:.1f} | "
            f"{per_sequence} | {model.max_position:,} |"
        )


def gpus(available: int) -> Iterator[str]:
    """Yield the rows of a card's table: one GPU, and the fewest that hold all experts, or the most of a host."""
    yield "| shape | flags | experts on GPUs | host memory, GiB | KV tokens per GPU | longest sequence |"
    yield "|---|---|--:|--:|--:|--:|"
    for shape in ON_GPUS:
        plans = {}
        for workers in WORKERS:
            config = serving(shape, workers)
            plans[workers] = planned(config, served_model(config), available)
        fewest = next((workers for workers, plan in plans.items() if not plan.host_bytes), WORKERS[-1])
        for workers in sorted({1, fewest}):
            plan, model = plans[workers], served_model(serving(shape))
            owned = len(model.moe_layers) * len(partition(model.num_experts, workers)[0])
            host = gib(workers * plan.host_bytes) if plan.host_bytes else "none"
            yield (
                f"| {shape} | `--workers {workers}` | {100 * plan.expert_slots // owned} % | {host} | "
                f"{plan.num_pages * DEVICE_DEFAULTS['cuda']['page_size']:,} | {plan.max_model_len:,} |"
            )


def with_tables(page: str) -> str:
    """Return the page with its tables written again. Raises ValueError if it lacks the place of one."""
    tables = {"sizes": sizes(), **{card: gpus(available) for card, available in CARDS.items()}}
    for name, rows in tables.items():
        before, begin, rest = page.partition(BEGIN.format(name))
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{PAGE.name} has no place for the table {name!r}")
        page = "".join([before, begin, "\n", *(f"{row}\n" for row in rows), "\n", end, after])
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
