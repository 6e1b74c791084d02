"""Draw training.json's curve as SVG for the demo model's card, with the standard library alone."""

import math
from collections.abc import Sequence
from typing import Any

PANEL_WIDTH, PANEL_HEIGHT, PANEL_STEP = 230, 170, 300
MAX_POINTS = 250


def nice_ticks(low: float, high: float) -> list[float]:
    """Return three to seven round values within [low, high]."""
    unit = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(s for s in (unit, 2 * unit, 5 * unit, 10 * unit) if (high - low) / s <= 6)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def panel(title: str, lines: Sequence[tuple[str, str, list[tuple[float, float]]]], bound: float | None) -> str:
    """Return one plot as SVG elements. `lines` are (name, colour, points [(step, value)]), `bound` a dashed line."""
    points = [point for _, _, line in lines for point in line]
    right = max(x for x, _ in points)
    values = [y for _, y in points] + ([] if bound is None else [bound])
    low, high = min(values), max(values)
    margin = 0.06 * ((high - low) or 1.0)
    low, high = low - margin, high + margin

    def px(x: float) -> float:
        return round(PANEL_WIDTH * x / right, 1)

    def py(y: float) -> float:
        return round(PANEL_HEIGHT * (high - y) / (high - low), 1)

    out = [f'<text y="-10" font-weight="bold">{title}</text>']
    for y in nice_ticks(low, high):
        out.append(f'<path d="M0 {py(y)}H{PANEL_WIDTH}" stroke="#ddd"/>')
        out.append(f'<text x="-6" y="{py(y) + 4}" text-anchor="end">{y:g}</text>')
    for x in nice_ticks(0, right):
        label = f"{x / 1000:g}k" if x and right >= 2000 else f"{x:g}"
        out.append(f'<text x="{px(x)}" y="{PANEL_HEIGHT + 16}" text-anchor="middle">{label}</text>')
    out.append(f'<text x="{PANEL_WIDTH / 2}" y="{PANEL_HEIGHT + 32}" text-anchor="middle">step</text>')
    out.append(f'<path d="M0 0V{PANEL_HEIGHT}H{PANEL_WIDTH}" fill="none" stroke="#555"/>')
    if bound is not None:
        out.append(f'<path d="M0 {py(bound)}H{PANEL_WIDTH}" stroke="#b00" stroke-dasharray="5 4"/>')
        out.append(
            f'<text x="{PANEL_WIDTH}" y="{py(bound) - 4}" text-anchor="end" fill="#b00">at most {bound:g}</text>'
        )
    for i, (name, colour, line) in enumerate(lines):
        shown = line[:: -(-len(line) // MAX_POINTS)]
        path = "L".join(f"{px(x)} {py(y)}" for x, y in ([*shown, line[-1]] if shown[-1] != line[-1] else shown))
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if len(lines) > 1:
            out.append(f'<text x="{PANEL_WIDTH - 4}" y="{16 + 16 * i}" text-anchor="end" fill="{colour}">{name}</text>')
    return "\n".join(out)


def draw(curve: Sequence[dict[str, Any]], max_bits_per_byte: float, max_busiest: float) -> str:
    """Return the picture of the card as SVG: losses, held-out bits per byte and the busiest expert over the steps."""

    def points(key: str) -> list[tuple[float, float]]:
        return [(row["step"], row[key]) for row in curve if row.get(key) is not None]

    panels = [
        (
            "training loss, nats per token",
            [("MTP layer", "#c60", points("mtp_loss")), ("main model", "#06c", points("loss"))],
            None,
        ),
        ("held-out bits per byte", [("", "#06c", points("heldout_bpb"))], max_bits_per_byte),
        ("busiest expert / mean, held-out", [("", "#06c", points("max_load"))], max_busiest),
    ]
    width, height = PANEL_STEP * len(panels), PANEL_HEIGHT + 80
    groups = [
        f'<g transform="translate({48 + i * PANEL_STEP} 36)">\n{panel(*arguments)}\n</g>'
        for i, arguments in enumerate(panels)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' font-family="sans-serif" font-size="12" fill="#222">\n<rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(groups)
        + "\n</svg>\n"
    )
