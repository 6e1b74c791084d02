"""Reference results of dispatch and combine, as plain loops over (source, token, k) in one process."""

from dataclasses import dataclass
from zlib import crc32

import torch

from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.shape import ExchangeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's input on one rank."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    num_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One rank's view of one layer: the fields of `Dispatched` and the result of `combine`."""

    rows: torch.Tensor
    experts: list[list[int]]
    prompt: list[bool]
    home: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Tokens per rank and their choice of experts; `prefill` is the share of prompt rows."""

    name: str
    tokens: tuple[int, int, int, int]
    routing: str
    prefill: float = 0.0


SCENARIOS = (
    Scenario(name="uneven", tokens=(5, 1, 8, 3), routing="random"),
    Scenario(name="zero_on_some", tokens=(0, 7, 0, 2), routing="random", prefill=0.5),
    Scenario(name="zero_on_all", tokens=(0, 0, 0, 0), routing="random"),
    Scenario(name="one_decode_row", tokens=(1, 0, 0, 0), routing="random"),
    Scenario(name="all_to_first_rank", tokens=(4, 6, 1, 9), routing="first", prefill=1.0),
    Scenario(name="all_to_last_rank", tokens=(4, 6, 1, 9), routing="last", prefill=0.3),
    Scenario(name="duplicates", tokens=(6, 3, 2, 7), routing="duplicates", prefill=0.6),
    Scenario(name="large", tokens=(900, 3, 400, 0), routing="random", prefill=0.9),
)


def generator(*key: object) -> torch.Generator:
    """Return a generator seeded from the text of `key`, the same in every process."""
    return torch.Generator().manual_seed(crc32(repr(key).encode()))


def make_layer(shape: ExchangeShape, scenario: Scenario, rank: int, number: int) -> Layer:
    """Return the input of rank `rank` in layer `number`."""
    random = generator(scenario.name, rank, number)
    num_tokens = scenario.tokens[rank]
    if scenario.routing == "duplicates":
        ids = torch.randint(shape.num_experts, (num_tokens, shape.top_k), generator=random)
    else:
        scores = torch.rand(num_tokens, shape.num_experts, generator=random)
        if scenario.routing == "first":
            scores[:, : shape.top_k] += 1
        elif scenario.routing == "last":
            scores[:, -shape.top_k :] += 1
        ids = scores.topk(shape.top_k, dim=1).indices.contiguous()
    return Layer(
        x=random_rows(shape, num_tokens, random), topk_ids=ids, num_prompt=round(num_tokens * scenario.prefill)
    )


def random_rows(shape: ExchangeShape, num_rows: int, random: torch.Generator) -> torch.Tensor:
    """Return random bits [num_rows, hidden] with NaNs and infinities, because an exchange copies without computing."""
    words = torch.randint(-(2**15), 2**15, (num_rows, shape.row_bytes // 2), generator=random)
    return words.to(torch.int16).view(getattr(torch, shape.dtype))


def expert_outputs(shape: ExchangeShape, experts: torch.Tensor, rank: int, number: int) -> torch.Tensor:
    """Return results of rank `rank` for `experts` [R, K] in layer `number`: arbitrary rows [R, K, hidden], different
    for each (row, k), with other values in the holes."""
    rows = random_rows(shape, experts.numel(), generator("experts", rank, number))
    return rows.view(*experts.shape, shape.hidden)


def reference(
    shape: ExchangeShape, placement: Placement, layers: dict[int, Layer], number: int, index: int
) -> dict[int, Observed]:
    """Return each rank's expected view for the inputs `layers`, in the placement's layer number `index`."""
    seen = {}
    dtype = getattr(torch, shape.dtype)
    homes = {rank: torch.empty(*each.topk_ids.shape, shape.hidden, dtype=dtype) for rank, each in layers.items()}
    for rank in layers:
        experts, owners = placement.experts(rank)[index], placement.owners[index]
        second = dict(placement.copies_of(index))
        rows: list[torch.Tensor] = []
        local: list[list[int]] = []
        prompt: list[bool] = []
        places: list[tuple[int, int]] = []
        for source, layer in layers.items():
            for token, chosen in enumerate(layer.topk_ids.tolist()):
                # Experts with a copy compute every second block of 16 rows of a source there.
                turn = second if token // 16 % 2 else {}
                mine = [expert >= 0 and turn.get(expert, owners[expert]) == rank for expert in chosen]
                if any(mine):
                    rows.append(layer.x[token])
                    local.append([experts.index(e) if here else -1 for e, here in zip(chosen, mine, strict=True)])
                    prompt.append(token < layer.num_prompt)
                    places.append((source, token))
        ids = torch.tensor(local, dtype=torch.int64).view(len(rows), shape.top_k)
        outputs = expert_outputs(shape, ids, rank, number)
        for row, (source, token) in enumerate(places):
            for k in range(shape.top_k):
                if local[row][k] >= 0:
                    homes[source][token, k] = outputs[row, k]
        seen[rank] = Observed(
            rows=torch.stack(rows) if rows else torch.empty(0, shape.hidden, dtype=dtype),
            experts=local,
            prompt=prompt,
            home=homes[rank],
        )
    return seen


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, because NaN differs from NaN but its bits do not."""
    return tensor.contiguous().view(torch.uint8)
