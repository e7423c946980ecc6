#!/usr/bin/env python3
"""Draws the loss of a run that was stopped and went on elsewhere, from its log and its events, as an SVG. Each start has a colour
of its own, and a label of its ranks and its wrapper.

    scripts/draw_resume.py LOG.jsonl OUT.svg

The picture of README.md is drawn from the run of scripts/resume_elsewhere.sh. Standard library only."""
import json
import pathlib
import sys
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 820, 300, 56, 16, 42, 44
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499")


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(steps, starts):
    first, last = steps[0]["step"], steps[-1]["step"]
    losses = [line["loss"] for line in steps if line["loss"] is not None]
    losses += [line["eval_loss"] for line in steps if line.get("eval_loss") is not None]
    low, high = min(losses), max(losses)
    x = lambda step: LEFT + (step - first) / max(last - first, 1) * (WIDTH - LEFT - RIGHT)
    y = lambda loss: TOP + (high - loss) / (high - low or 1) * (HEIGHT - TOP - BOTTOM)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
           'font-family="system-ui, sans-serif" font-size="13">',
           f'<title>Loss of a run on {escape(", then on ".join(str(start["ranks"]) for start in starts))} ranks</title>',
           f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>']
    for loss in range(int(low) + 1, int(high) + 1):
        out.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#e0e3e6"/>'
                   f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end" fill="#57606a">{loss}</text>')
    for tick in range(first, last + 2, max((last - first + 1) // 6 // 10 * 10, 1)):
        out.append(f'<text x="{x(min(tick, last)):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#57606a">{tick}</text>')
    out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle" fill="#57606a">step</text>')
    out.append(f'<text x="{LEFT - 40}" y="{TOP - 16}" fill="#57606a">loss</text>')
    for i, start in enumerate(starts):
        begin = start["step"]
        end = starts[i + 1]["step"] if i + 1 < len(starts) else last + 1
        colour = COLOURS[i % len(COLOURS)]
        part = [line for line in steps if begin <= line["step"] < end and line["loss"] is not None]
        if not part:
            continue
        path = "M" + "L".join(f"{x(line['step']):.1f} {y(line['loss']):.1f}" for line in part)
        out.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"/>')
        for line in part:
            if line.get("eval_loss") is not None:
                out.append(f'<circle cx="{x(line["step"]):.1f}" cy="{y(line["eval_loss"]):.1f}" r="3.4" fill="#ffffff" stroke="{colour}"/>')
        if i > 0:
            out.append(f'<path d="M{x(begin):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#57606a" stroke-dasharray="4 4"/>')
        out.append(f'<text x="{(x(begin) + x(end - 1)) / 2:.1f}" y="{TOP - 16}" text-anchor="middle" font-weight="600" fill="{colour}">'
                   f'{start["ranks"]} ranks, {escape(start["parallel"])}</text>')
    return "\n".join(out) + "\n</svg>\n"


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    log, out = map(pathlib.Path, sys.argv[1:])
    steps = [line for line in read(log) if "step" in line]
    events = log.with_name(log.stem + ".events.jsonl")
    starts = [event for event in read(events) if event["event"] == "start"]
    if not steps or not starts:
        sys.exit(f"draw_resume: {log}: expected steps, and starts in {events}")
    out.write_text(draw(steps, starts))


if __name__ == "__main__":
    main()
