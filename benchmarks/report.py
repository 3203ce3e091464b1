"""Tables and a plot for the documentation from what `python -m benchmarks.compare --json` wrote down.

`python -m benchmarks.report` reads `docs/speed/*.json` and writes a table for each and `docs/speed/plot.png`. The
four files come from these commands, each on a machine with nothing else to do:

    python -m benchmarks.compare --rounds 20 --json docs/speed/compare.json
    python -m benchmarks.compare --rounds 10 --busy --no-peers --no-slices --no-checkpoints --json docs/speed/busy.json
    python -m benchmarks.compare --rounds 8 --repeat 10 --scaling --json docs/speed/scaling.json
    python -m benchmarks.compare --memory --json docs/speed/memory.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "speed"
PARTS = ("compare", "busy", "scaling", "memory")
OURS, STOCK = "ours", "stock off"
AGAINST_RAW = {
    "update_priority_if_present": "`update_priority_if_present` against `update_priority`",
    "update_tensordict_priority_if_present": "`update_tensordict_priority_if_present` against its raw twin",
}

Row = dict[str, Any]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def microseconds(value: float) -> str:
    """As many digits as mean something."""
    return f"{value:,.0f}"


def slots(capacity: int) -> str:
    """A power of ten as such."""
    return f"{capacity:.0e}".replace("+0", "")


def source(report: dict[str, Any]) -> str:
    """On what it was measured, and when."""
    machine, versions = report["machine"], report["versions"]
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if "not installed" not in version)
    return (
        f"{report['date'][:10]}, {machine['cores']} cores of a shared virtual machine ({machine['cpu']}) without a "
        f"GPU, {machine['torch_threads']} torch threads; {installed}; batch {report['batch']}.\n"
    )


def compared(report: dict[str, Any]) -> Iterator[str]:
    """Every operation, ours and all others."""
    names = list(dict.fromkeys(row["contender"] for row in report["rows"]))
    cells: dict[tuple[str, int], dict[str, Row]] = {}
    for row in report["rows"]:
        cells.setdefault((row["operation"], row["capacity"]), {})[row["contender"]] = row
    others = [name for name in names if name not in (OURS, STOCK)]
    lines = []
    for (operation, capacity), found in cells.items():
        ours, stock = found[OURS], found[STOCK]
        shown = [f"{found[name]['ratio']:.2f}" if name in found else "-" for name in others]
        name = AGAINST_RAW.get(operation, f"`{operation}`")
        both = f"{microseconds(ours['median_us'])} / {microseconds(stock['median_us'])}"
        lines.append([name, slots(capacity), f"**{ours['ratio']:.2f}**", *shown, both])
    yield table(["operation", "slots", "ours", *others, "microseconds: ours / stock"], lines)


def tails(report: dict[str, Any]) -> Iterator[str]:
    """A sample beside busy cores."""
    rows = {(r["capacity"], r["contender"], r["phase"]): r for r in report["rows"] if r["operation"] == "sample, alone"}
    lines = []
    for capacity, contender, phase in rows:
        if phase == "idle":
            idle, busy = rows[capacity, contender, "idle"], rows[capacity, contender, "busy"]
            times = [idle["median_us"], idle["p90_us"], busy["median_us"], busy["p90_us"]]
            share = busy["p90_us"] / idle["median_us"]
            lines.append([contender, slots(capacity), *map(microseconds, times), f"{share:.1f}"])
    yield table(["`sample` of", "slots", "median", "p90", "busy: median", "busy: p90", "p90 busy / median"], lines)


def scaling(report: dict[str, Any]) -> Iterator[str]:
    """Capacities by batches."""
    cells: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in report["scaling"]:
        cells.setdefault((row["operation"], row["capacity"], row["batch"]), {})[row["contender"]] = row
    batches = sorted({batch for _, _, batch in cells})
    lines = []
    for operation, capacity in dict.fromkeys((operation, capacity) for operation, capacity, _ in cells):
        own = [cells[operation, capacity, batch] for batch in batches]
        shown = [f"{pair[OURS]['ns_per_row']:,.0f} ({pair[OURS]['ratio']:.2f})" for pair in own]
        lines.append([f"`{operation}`", slots(capacity), *shown])
    yield "Nanoseconds per row (ratio to stock), by batch:\n"
    yield table(["operation", "slots", *map(str, batches)], lines)
    growth = report["growth"]
    yield f"A conditional update of 256 rows takes {growth[OURS]:.2f} times as long at 1e7 slots as at 1e5.\n"


def memory(report: dict[str, Any]) -> Iterator[str]:
    """Bytes per slot."""
    rows = report["memory"]
    lines = [
        [r["contender"], *(f"{r[k]:.1f}" for k in ("bytes_per_slot", "bytes_per_slot_over_stock_off"))] for r in rows
    ]
    yield table(
        [f"full ring of {rows[0]['capacity']:.0e} slots".replace("+0", ""), "bytes per slot", "over stock"], lines
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """The ratios of the first table as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if row["contender"] == OURS]
    figure, axes = pyplot.subplots(figsize=(8, 0.32 * len(rows) + 1))
    labels = [f"{row['operation']}, {slots(row['capacity'])}" for row in rows]
    axes.barh(labels[::-1], [row["ratio"] for row in rows][::-1], color="#3a6ea5")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("time of ours / time of stock TorchRL without tracking")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Writes both files."""
    reports = {part: json.loads((FOLDER / f"{part}.json").read_text()) for part in PARTS}
    text = []
    for part, write in zip(PARTS, (compared, tails, scaling, memory), strict=True):
        report = reports[part]
        path = FOLDER / f"{part}.md"
        path.write_text("\n".join([*write(report), source(report)]))
        text.append(path.name)
    plot(reports["compare"], FOLDER / "plot.png")
    print("wrote", ", ".join([*text, "plot.png"]))


if __name__ == "__main__":
    main()
