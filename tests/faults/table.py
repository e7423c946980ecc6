"""docs/faults.md: written from what was measured, and compared with it."""
import re

from registry import GROUPS

PREAMBLE = """# Faults

`make faults` tries each fault of this page with real processes and writes this page again from what
it measured. It takes some minutes. `tests/faults/run.py build WORD` tries the faults with a word in
their names. A row is one function in `tests/faults/`; `make test` runs a part of them and compares
the page with it. `make soak MINUTES=30` disturbs trainings at random for that time and compares
their weights with those of undisturbed ones. `make operations` makes each file operation of the
writers and readers fail, be short, or end the process, and then random ones of trainings; a part of
that is rows here.

- **Time to detect**: from the fault to the first message that names it. `before step 0`: the run
  ends before it trains. `in the step`: no further step is done.
- **Rank named**: the rank in the message.
- **Exit code**: that of the launcher, or of the command.
- **What is left**: the newest checkpoint, after every byte of it was compared with its digests. All
  trials also check that no process and no temporary file is left.

Most trials train a small net on three ranks for 12 steps, with a checkpoint every 4 steps, and the
fault comes after 6. Stopped and late ranks are noticed after the world's time-out, here 1.5 s. Rows
of one file or one process without ranks have `none` as the rank.
"""
HEAD = "| Fault | Time to detect | Rank named | Exit code | What is left |\n|---|---|---|---|---|\n"


def cells_of(outcome):
    return [outcome.when, outcome.ranks, outcome.code, outcome.left]


def row(fault, cells):
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in [fault.name, *cells]) + " |\n"


def read(text):
    """The cells of a page's rows, by group and fault."""
    rows, group = {}, None
    for line in text.splitlines():
        if line.startswith("## "):
            group = line[3:]
        elif line.startswith("| ") and not line.startswith("| Fault |"):
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            rows[group, cells[0]] = cells[1:]
    return rows


def page(faults, rows):
    """The page of these rows, in the order of `faults`."""
    text = PREAMBLE + f"\nThere are {len(faults)} faults.\n"
    for group in GROUPS:
        lines = [row(fault, rows[group, fault.name]) for fault in faults if fault.group == group and (group, fault.name) in rows]
        text += f"\n## {group}\n\n{HEAD}" + "".join(lines) if lines else ""
    return text


def differences(text, faults, measured):
    """What is wrong with the page `text`."""
    rows, names = read(text), {(fault.group, fault.name) for fault in faults}
    remedy = "; expected what make faults writes"
    problems = [f"the page has the fault {key}, which is not tried{remedy}" for key in rows if key not in names]
    problems += [f"the page lacks the fault {key}{remedy}" for key in sorted(names) if key not in rows]
    for key, outcome in measured.items():
        now = cells_of(outcome)[1:]
        if key in rows and rows[key][1:] != now:
            problems.append(f"the page says {rows[key][1:]} of {key}, measured was {now}{remedy}")
    return problems
