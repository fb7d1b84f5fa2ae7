"""Show me the run: one HTML file with curves, times, completions, the audit and the settings.

    python report.py RUN                 writes RUN/report.html
    python report.py RUN --out FILE

The file stands alone: drawings are inline SVG, nothing is fetched and there is no script (a content security policy in
the page says so to the browser). What a model wrote is shown as text: escaped, cut where it is long, and with every
character that is not printable (controls, bidirectional overrides, zero-width marks, lone surrogates) as its number.
A run that is going on is shown as far as it is; writing the page changes nothing else in RUN.

`draw_curve` is the picture that run.py leaves at its end. Exit codes: 0 done; 1 a fault; 2 bad input.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import audit
import checkpoint

PHASES = ("publish", "rollout", "grade", "train", "checkpoint", "evaluate")
MOST_POINTS = 400  # of a curve, and of bars a third: more are averaged in bins
MOST_CHARACTERS = 1500  # of a prompt or a response
SHOWN = 6  # completions an update

# --- the picture of the reward curve ---------------------------------------------------------------------------------


def draw_curve(run: str | Path) -> Path:
    """Write RUN/reward.png from RUN/metrics.jsonl and return its path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = checkpoint.read_metrics(run)
    figure, axes = plt.subplots(figsize=(7, 4))
    done = [row["update"] + 1 for row in rows]
    rewards = [row["reward_mean"] for row in rows]
    axes.plot(done, rewards, color="0.75", linewidth=1, label="reward of an update")
    width = min(10, max(1, len(rows) // 5))
    axes.plot(done, smoothed(rewards, width), color="C0", label=f"mean of the last {width}")
    evaluations = [e for row in rows for e in row.get("eval", {}).values()]
    for key, colour, label in (("accuracy", "C3", "held-out, sampled"), ("greedy", "C2", "held-out, greedy")):
        if evaluations:
            axes.plot([e["updates"] for e in evaluations], [e[key] for e in evaluations], "o-", color=colour, label=label)
    axes.set_xlabel("updates")
    axes.set_ylabel("reward, accuracy")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path = Path(run) / "reward.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def smoothed(values: list[float], width: int) -> list[float]:
    """Mean of each value and the `width` - 1 before it."""
    windows = [values[max(0, i - width + 1) : i + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]


# --- text that may be hostile ----------------------------------------------------------------------------------------


def shown(value: Any, limit: int = MOST_CHARACTERS) -> str:
    """HTML of a text: escaped, unprintable characters as their numbers, cut after `limit` characters.

    Line feeds stay. More than two combining marks in a row, or any at the start, are numbers too: they would be drawn
    over other text.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    parts, marks = [], 2
    for c in text[:limit]:
        marks = marks + 1 if unicodedata.category(c).startswith("M") else 0
        if c == "\n" or (c.isprintable() and marks <= 2):
            parts.append(html.escape(c))
        else:
            name = {"\t": "\\t", "\r": "\\r"}.get(c, f"U+{ord(c):04X}")
            parts.append(f'<span class="ctl">{name}</span>')
    if len(text) > limit:
        parts.append(f' <span class="dim">… {len(text) - limit:,} more characters</span>')
    return "".join(parts)


def number(value: Any) -> float | None:
    """A finite float, or None for anything else that a metrics file may hold."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if good else None


def short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


# --- drawings --------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 190, 52, 8, 8, 24
Points = list[tuple[float, float | None]]


def binned(points: Points, most: int, combine: Callable[[list[float]], float]) -> Points:
    """At most `most` points: each the last x of its bin and `combine` of its values."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return points
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return [(b[-1][0], combine(ys) if (ys := [y for _, y in b if y is not None]) else None) for b in bins]


def average(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def ticks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers that span low..high, about four steps of 1, 2 or 5; powers of ten on a logarithmic axis."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**e for e in range(first, max(last, first + 1) + 1, max(1, (last - first) // 4))]
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-12):
        low, high = min(0.0, 2 * low), max(0.0, 2 * high) or (1.0 if low == 0 else 0.0)
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    count = math.ceil(high / step - 1e-9) - first
    return [(first + i) * step for i in range(count + 1)]


def frame(last_x: float, marks: list[float], log: bool) -> tuple[str, Callable[[float], float], Callable[[float], float]]:
    """(SVG of grid and labels, x to pixels, y to pixels). x runs from 0 to last_x, y over `marks`."""
    scale = math.log10 if log else float
    low, high = scale(marks[0]), scale(marks[-1])

    def at_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / max(last_x, 1)

    def at_y(y: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - scale(y)) / ((high - low) or 1)

    parts = []
    for mark in marks:
        y = at_y(mark)
        text = f"{mark:.0e}" if log else short(0.0 if abs(mark) < 1e-9 * abs(marks[-1] - marks[0]) else mark)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    steps = [t for t in ticks(0, max(last_x, 1), False) if t <= max(last_x, 1) and t == int(t)]
    for mark in steps:
        anchor = "end" if at_x(mark) > WIDTH - RIGHT - 8 else "middle"
        parts.append(f'<text x="{at_x(mark):.1f}" y="{HEIGHT - 7}" text-anchor="{anchor}">{mark:,.0f}</text>')
    return "".join(parts), at_x, at_y


def figure(title: str, legend: Iterable[tuple[str, str, str]], drawing: str) -> str:
    """A card. legend: (CSS class of the colour, label, last value)."""
    keys = "".join(f'<span class="key {c}">{html.escape(label)} <b>{value}</b></span>' for c, label, value in legend)
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><div class="keys">{keys}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{drawing}</svg></figure>'
    )


def curves(
    title: str, lines: list[tuple[str, str, Points]], last_x: float, log: bool = False, bound: float | None = None
) -> str:
    """A figure of curves over updates; "" when there is no number at all.

    lines: (CSS class, label, points); a point without y is a gap. bound: a level that is drawn dashed.
    """
    lines = [(c, label, [(x, y if y is None or not log or y > 0 else None) for x, y in points]) for c, label, points in lines]
    lines = [line for line in lines if any(y is not None for _, y in line[2])]
    if not lines:
        return ""
    combine = max if log else average
    values = [y for _, _, points in lines for _, y in points if y is not None] + ([bound] if bound else [])
    grid, at_x, at_y = frame(last_x, ticks(min(values), max(values), log), log)
    parts, legend = [grid], []
    if bound:
        parts.append(f'<line class="bound" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(bound):.1f}" y2="{at_y(bound):.1f}"/>')
    for colour, label, points in lines:
        legend.append((colour, label, short([y for _, y in points if y is not None][-1])))
        piece: list[str] = []
        few = len(points) <= 30
        for x, y in [*binned(points, MOST_POINTS, combine), (0, None)]:
            if y is not None:
                piece.append(f"{at_x(x):.1f},{at_y(y):.1f}")
                if few:
                    note = f"<title>{x:g}: {short(y)}</title>"
                    parts.append(f'<circle class="{colour}" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="2.6">{note}</circle>')
            elif piece:
                parts.append(f'<polyline class="{colour}" points="{" ".join(piece)}"/>')
                piece = []
    return figure(title, legend, "".join(parts))


def bars(title: str, stacks: list[tuple[str, str, list[float]]], unit: str) -> str:
    """A figure of stacked bars, one an update. stacks: (CSS class, label, value of each update), from the bottom."""
    count = len(stacks[0][2])
    most = MOST_POINTS // 3
    layers = [[y or 0.0 for _, y in binned(list(enumerate(values)), most, average)] for _, _, values in stacks]
    highest = max(sum(column) for column in zip(*layers, strict=True))
    grid, at_x, at_y = frame(count, ticks(0, highest or 1, False), False)
    parts, width = [grid], count / len(layers[0])
    bottoms = [0.0] * len(layers[0])
    for (colour, _, _), layer in zip(stacks, layers, strict=True):
        for i, y in enumerate(layer):
            x0, x1, y0, y1 = at_x(i * width), at_x((i + 0.88) * width), at_y(bottoms[i]), at_y(bottoms[i] + y)
            if y0 - y1 > 0.05:
                parts.append(f'<rect class="{colour}" x="{x0:.1f}" y="{y1:.1f}" width="{x1 - x0:.2f}" height="{y0 - y1:.1f}"/>')
            bottoms[i] += y
    legend = [(colour, label, f"{short(average(values))} {unit}") for colour, label, values in stacks]
    return figure(title, legend, "".join(parts))


def rows_table(head: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    """An HTML table; cells are HTML already. It scrolls by itself where it is wider than the page."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}">{f"<thead><tr>{top}</tr></thead>" if top else ""}{body}</table></div>'


# --- the parts of the page -------------------------------------------------------------------------------------------


def evaluations(rows: list[dict]) -> list[dict]:
    """The held-out evaluations in order, as far as they have numbers."""
    found = [e for row in rows if isinstance(row.get("eval"), dict) for e in row["eval"].values() if isinstance(e, dict)]
    return [e for e in found if number(e.get("updates")) is not None]


def best_of(evaluation: dict) -> tuple[int, float | None]:
    """(k, pass@k) for the largest k of an evaluation; (0, None) where it has none."""
    there = evaluation.get("pass_at")
    found = [(int(k), number(v)) for k, v in there.items() if k.isdecimal()] if isinstance(there, dict) else []
    return max(found, default=(0, None))


def source_section(rows: list[dict]) -> str:
    """The held-out figures of each source, from the first evaluation to the last; "" where rows have no source."""
    held = [e for e in evaluations(rows) if isinstance(e.get("sources"), dict) and e["sources"]]
    if not held:
        return ""

    def moved(name: str, value: Callable[[dict], float | None]) -> str:
        ends = [e["sources"].get(name) for e in (held[0], held[-1])]
        before, after = (percent(value(end)) if isinstance(end, dict) else "–" for end in ends)
        return after if len(held) == 1 else f"{before} → {after}"

    k, _ = best_of(held[-1])
    cells = [
        (shown(name, 60), short(number(part.get("rows"))), moved(name, lambda e: number(e.get("accuracy"))),
         moved(name, lambda e: number(e.get("greedy"))), moved(name, lambda e: best_of(e)[1]))
        for name, part in held[-1]["sources"].items() if isinstance(part, dict)
    ]  # fmt: skip
    title = "Held-out accuracy by source, " + ("one evaluation" if len(held) == 1 else "first evaluation to last")
    return f"<h2>{title}</h2>{rows_table(('source', 'rows', 'sampled', 'greedy', f'pass@{k}'), cells, 'numbers')}"


def curve_section(rows: list[dict], recipe: dict) -> str:
    last = max(row["update"] + 1 for row in rows)

    def points(key: str) -> Points:
        return [(row["update"] + 1, number(row.get(key))) for row in rows]

    rewards = points("reward_mean")
    width = min(10, max(1, len(rows) // 5))
    plain = [y for _, y in rewards]
    smooth = list(zip([x for x, _ in rewards], smoothed(plain, width), strict=True)) if width > 1 and None not in plain else []
    held = evaluations(rows)
    most, _ = best_of(held[-1] if held else {})
    drawn = [
        curves("Reward", [("c0" if smooth else "c1", "an update", rewards), ("c1", f"mean of {width}", smooth)], last),
        curves(
            "Held-out accuracy",
            [
                ("c2", "sampled", [(e["updates"], number(e.get("accuracy"))) for e in held]),
                ("c3", "greedy", [(e["updates"], number(e.get("greedy"))) for e in held]),
                ("c4", f"pass@{most}", [(e["updates"], best_of(e)[1]) for e in held] if most > 1 else []),
            ],
            last,
        ),
        curves("Policy loss", [("c1", "loss", points("loss"))], last),
        curves("Entropy, nats a token", [("c4", "entropy", points("entropy"))], last),
        curves(
            "KL, nats a token",
            [("c1", "to the rollout policy", points("kl_rollout")), ("c2", "full vocabulary", points("categorical_kl"))],
            last,
        ),
        curves(
            "Log-probability gap, trainer to rollout",
            [("c2", "largest", points("max_logprob_error")), ("c0", "mean", points("mean_logprob_error"))],
            last,
            log=True,
            bound=number(recipe.get("max_logprob_error")),
        ),
        curves("Gradient norm", [("c1", "actor", points("grad_norm")), ("c2", "critic", points("critic_grad_norm"))], last),
        curves("Value loss", [("c4", "critic", points("value_loss"))], last),
        curves("Response tokens", [("c1", "mean", points("response_tokens_mean"))], last),
        curves("Truncated completions", [("c2", "share", points("truncated_fraction"))], last),
    ]
    return f'<h2>Curves</h2><div class="figures">{"".join(drawn)}</div>'


def time_section(rows: list[dict]) -> str:
    """Bars and a table of seconds by phase."""
    timed = [row["seconds"] for row in rows if isinstance(row.get("seconds"), dict)]
    if not timed:
        return ""
    spent = {phase: [number(s.get(phase)) or 0.0 for s in timed] for phase in PHASES}
    totals = [number(s.get("total")) or sum(spent[p][i] for p in PHASES) for i, s in enumerate(timed)]
    spent["rest"] = [max(0.0, t - sum(spent[p][i] for p in PHASES)) for i, t in enumerate(totals)]
    whole = math.fsum(totals) or 1.0
    cells = [
        (f'<span class="key p{n}">{phase}</span>', short(average(v)), short(sorted(v)[len(v) // 2]), short(math.fsum(v)),
         percent(math.fsum(v) / whole))
        for n, (phase, v) in enumerate(spent.items())
    ]  # fmt: skip
    cells.append(("total", short(average(totals)), short(sorted(totals)[len(totals) // 2]), short(math.fsum(totals)), ""))
    drawing = bars("Seconds of an update", [(f"p{n}", phase, v) for n, (phase, v) in enumerate(spent.items())], "s")
    table = rows_table(("phase", "mean, s", "median, s", "all, s", "share"), cells, "numbers")
    note = '<p class="dim">rest: what lies between the phases</p>'
    return f'<h2>Time</h2><div class="figures wide">{drawing}<div>{table}{note}</div></div>'


def completion_section(run: Path, count: int) -> str:
    """Of the first, the middle and the last update: the completions with the highest and the lowest rewards."""
    parts = []
    for update in sorted({0, (count - 1) // 2, count - 1}):
        parts.append(f"<h3>Update {update + 1}</h3>")
        try:
            there = checkpoint.read_rollouts(run, update)
        except ValueError as error:
            parts.append(f'<p class="dim">{shown(str(error))}</p>')
            continue
        order = sorted(range(len(there)), key=lambda i: (-(number(there[i].get("reward")) or 0.0), i))
        picked = order if len(order) <= SHOWN else order[: SHOWN // 2] + order[-(SHOWN // 2) :]
        parts.append(f'<div class="completions">{"".join(completion(there[i]) for i in picked)}</div>')
    return f"<h2>Completions</h2><p class='dim'>Highest and lowest rewards of each update.</p>{''.join(parts)}"


def completion(c: dict) -> str:
    reward = number(c.get("reward"))
    tokens = c.get("response_tokens")
    facts = f"{len(tokens) if isinstance(tokens, list) else '–'} tokens, {shown(c.get('finish_reason', '–'), 40)}"
    tone = "good" if reward is not None and reward > 0 else "bad"
    texts = "".join(
        f'<dt>{key}</dt><dd><pre dir="auto">{shown(c[key])}</pre></dd>' for key in ("prompt", "response", "label") if key in c
    )
    head = f'<span class="chip {tone}">reward {short(reward)}</span> sample {shown(c.get("sample", "–"), 20)} · {facts}'
    return f"<article><header>{head}</header><dl>{texts}</dl></article>"


def audit_section(run: Path) -> str:
    words = {True: ("good", "good"), False: ("WRONG", "bad"), None: ("note", "note")}
    cells = [
        (shown(row.what), f'<span class="chip {words[row.good][1]}">{words[row.good][0]}</span>', shown(row.detail))
        for row in audit.check(run)
    ]
    return f"<h2>Audit</h2>{rows_table((), cells, 'audit')}"


def settings_section(record: dict, recipe: dict) -> str:
    def flat(value: Any, name: str = "") -> Iterable[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from flat(item, f"{name} {key}".strip())
        else:
            yield name, value

    def part(title: str, value: Any) -> str:
        cells = [(shown(name, 80), f"<code>{shown(item, 300)}</code>") for name, item in flat(value)]
        return f"<div><h3>{title}</h3>{rows_table((), cells, 'settings')}</div>" if cells else ""

    used = {key: record.get(key) for key in ("device", "transport", "threads", "rows") if key in record}
    parts = [
        part("Settings", recipe),
        part("Versions", record.get("versions") or {}),
        part("Used", {**used, **(record.get("facts") if isinstance(record.get("facts"), dict) else {})}),
        part("Inputs, by content", record.get("contents") or {}),
    ]
    return f'<h2>Settings and versions</h2><div class="columns">{"".join(parts)}</div>'


def tiles(rows: list[dict], recipe: dict) -> str:
    found = [("updates", f"{len(rows)} of {shown(recipe.get('updates', '?'), 20)}")]
    rewards = [r for row in rows if (r := number(row.get("reward_mean"))) is not None]
    if rewards:
        width = max(1, min(10, len(rewards) // 2))
        found.append(("reward", f"{average(rewards[:width]):.3f} → {average(rewards[-width:]):.3f}"))
    held = evaluations(rows)
    for key, name in (("accuracy", "held-out, sampled"), ("greedy", "held-out, greedy")):
        values = [percent(number(e.get(key))) for e in held]
        if values:
            found.append((name, " → ".join(dict.fromkeys((values[0], values[-1])))))
    gaps = [g for row in rows if (g := number(row.get("max_logprob_error"))) is not None]
    if gaps:
        found.append(("largest gap", short(max(gaps))))
    times = [t for row in rows if isinstance(row.get("seconds"), dict) and (t := number(row["seconds"].get("total"))) is not None]
    if times:
        found.append(("seconds an update", short(sorted(times)[len(times) // 2])))
    return '<div class="tiles">' + "".join(f"<div><span>{name}</span><b>{value}</b></div>" for name, value in found) + "</div>"


# --- the page --------------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --back: #f7f7f5; --card: #fff; --text: #1d1f23; --dim: #666b74; --line: #e2e2de;
  --c0: #b4b9c2; --c1: #2f6fde; --c2: #c8501e; --c3: #1f8a4c; --c4: #7a4fc9; --c5: #b08900; --good: #1f8a4c; --bad: #c22f2f; }
@media (prefers-color-scheme: dark) { :root { --back: #15171b; --card: #1d2026; --text: #e6e7ea; --dim: #9aa0ab;
  --line: #31353d; --c0: #596070; --c1: #79a6ff; --c2: #ff9a68; --c3: #69cf92; --c4: #b79bff; --c5: #e0bd4f;
  --good: #69cf92; --bad: #ff8080; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 2rem 1.2rem 4rem; }
h1 { font-size: 1.7rem; margin: 0; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .8rem; }
h3 { font-size: .95rem; margin: 1.4rem 0 .5rem; color: var(--dim); font-weight: 600; }
p { margin: .4rem 0; overflow-wrap: anywhere; } .dim { color: var(--dim); } .empty { font-size: 1.1rem; margin: 2rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: .8rem; margin-top: 1.4rem; }
.tiles div, figure, article, .scroll { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tiles div { padding: .7rem .9rem; } .tiles span { display: block; color: var(--dim); font-size: .82rem; }
.tiles b { font-size: 1.08rem; white-space: nowrap; font-weight: 600; font-variant-numeric: tabular-nums; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 1rem; }
.figures.wide { grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); align-items: start; }
figure { margin: 0; padding: .8rem .9rem .4rem; min-width: 0; } figcaption { font-weight: 600; font-size: .92rem; }
.keys { display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-size: .8rem; color: var(--dim); min-height: 1.3em; }
.key { white-space: nowrap; } .key b { color: var(--text); font-weight: 600; font-variant-numeric: tabular-nums; }
.key::before { content: ""; display: inline-block; width: .75em; height: .75em; border-radius: 3px; margin-right: .4em;
  background: var(--k); vertical-align: -.05em; }
svg { display: block; width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--dim); }
.grid { stroke: var(--line); } .bound { stroke: var(--bad); stroke-dasharray: 5 4; }
polyline { fill: none; stroke: var(--k); stroke-width: 1.7; stroke-linejoin: round; } circle, rect { fill: var(--k); }
.c0, .p5 { --k: var(--c0); } .c1, .p1 { --k: var(--c1); } .c2, .p3 { --k: var(--c2); } .c3, .p0 { --k: var(--c3); }
.c4, .p2 { --k: var(--c4); } .p4 { --k: var(--c5); } .p6 { --k: var(--dim); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: .38rem .8rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 600; white-space: nowrap; } tr:last-child td { border-bottom: 0; }
td { overflow-wrap: anywhere; } td:first-child { overflow-wrap: normal; }
.figures > * { min-width: 0; }
.numbers td, .numbers th { padding: .38rem .5rem; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.numbers td:first-child, .numbers th:first-child { text-align: left; } .audit td:first-child { white-space: nowrap; }
code, pre { font: .86em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.columns { columns: 2 440px; column-gap: 1.2rem; } .columns > div { break-inside: avoid; }
.columns h3 { margin-top: 0; padding-top: 1rem; }
.completions { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: .8rem; }
article { padding: .7rem .9rem; min-width: 0; overflow: hidden; } article header { font-size: .82rem; color: var(--dim); }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .25rem .8rem; margin: .5rem 0 0; }
dt { color: var(--dim); font-size: .82rem; } dd { margin: 0; min-width: 0; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 16em; overflow: auto; unicode-bidi: isolate; }
.chip { display: inline-block; padding: 0 .55em; border-radius: 1em; font-size: .82em; font-weight: 600; white-space: nowrap;
  border: 1px solid currentColor; color: var(--dim); } .chip.good { color: var(--good); } .chip.bad { color: var(--bad); }
.ctl { font-size: .82em; padding: 0 .25em; margin: 0 .1em; border-radius: 3px; color: var(--bad);
  border: 1px solid currentColor; unicode-bidi: isolate; white-space: nowrap; }
@media print { figure, article { break-inside: avoid; } }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(run: Path | str) -> tuple[str, int]:
    """(HTML of the report, updates in it). ValueError: no run directory, or files that cannot be read as a run's."""
    run = Path(run)
    files = audit.RunFiles(run)
    record = files.record
    recipe = record.get("recipe") if isinstance(record.get("recipe"), dict) else {}
    rows = [row for row in checkpoint.read_metrics(run) if isinstance(row.get("update"), int)]
    if any(row["update"] != i for i, row in enumerate(rows)):
        raise ValueError(f"{run / 'metrics.jsonl'}: the updates are not 0, 1, 2, …; `python audit.py RUN` says more")
    wanted = files.wanted()
    state, tone = ("going on", "note") if files.live else ("finished", "good")
    if not files.live and (wanted is None or len(rows) < wanted):
        state, tone = "stopped", "note"
    name = shown(run.absolute().name, 120)
    about = [recipe.get("algorithm"), recipe.get("model"), record.get("device"), recipe.get("precision")]
    line = " · ".join(shown(str(one), 120) for one in about if one)
    if rows:
        parts = [tiles(rows, recipe), curve_section(rows, recipe), source_section(rows)]
        parts += [time_section(rows), completion_section(run, len(rows))]
    else:
        parts = ['<p class="empty">No update is complete yet.</p>']
    body = "\n".join([*parts, audit_section(run), settings_section(record, recipe)])
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{name}</title><style>{STYLE}</style></head>
<body><main><h1>{name}</h1><p class="dim"><span class="chip {tone}">{state}</span> {line}</p>
{body}
</main></body></html>
"""
    return text, len(rows)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="run directory (the --output of run.py)")
    parser.add_argument("--out", metavar="FILE", help="where the page goes (default: RUN/report.html)")
    asked = parser.parse_args(argv)
    text, updates = page(asked.run)
    path = Path(asked.out) if asked.out else Path(asked.run) / "report.html"
    checkpoint.write_atomic(path, text.encode("utf-8", "backslashreplace"))
    print(f"{path}: {updates} updates" if updates else f"{path}: no update is complete yet")
    return 0


if __name__ == "__main__":
    from export import exit_code

    sys.exit(exit_code("report.py", main, sys.argv[1:]))
