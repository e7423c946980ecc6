#!/usr/bin/env python3
"""Trains a GPT-2-shaped model of a billion parameters with FullyShardedDataParallel, kills it and resumes it with other numbers of ranks.

    large_model.py [--build build] [--width 2048] [--layers 20] [--ranks 2] [--resume 1 3] [--steps 20] [--folder F] [--json out.json]

Construction is deferred, so no rank ever holds the model. The peak of PSS of each rank is sampled every 50 ms until the last step, and compared with
150 MiB + 16 bytes x parameters / ranks + the two largest units, without activations. The run is killed with SIGKILL one step after the
checkpoint of --steps, and two more steps are trained from it for each number of --resume; their losses must agree to 1e-3. The
defaults need 17 GB of memory and 25 GB in the folder, which is a temporary one unless given.
"""
import argparse, json, os, pathlib, shutil, signal, subprocess, tempfile, threading, time

from memory import descendants, sample_ranks

CONFIG = """
model: {{type: GPT2, vocab_size: 256, n_positions: 32, n_embd: {width}, n_layer: {layers}, n_head: 16, dropout: 0, seed: 0, deferred: true}}
data: {{type: ByteText, path: /usr/share/common-licenses/GPL-3, seq_len: 32, order: sequential}}
optimizer: {{type: AdamW, lr: 1e-4}}
parallel: {{type: FullyShardedDataParallel, wrap_policy: {{type: name_based, patterns: transformer.h.*}}}}
train: {{steps: {steps}, global_batch: 6, log: log.jsonl, log_every: 1}}
checkpoint: {{folder: run, every: {every}}}
"""


def train(args, folder, ranks, steps, kill_after=None):
    """Trains until `steps`, or until a step after `kill_after` is logged and SIGKILL ends all. Returns the losses by step and the peaks of the ranks in bytes."""
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    (folder / "c.yaml").write_text(CONFIG.format(width=args.width, layers=args.layers, steps=steps, every=args.steps))
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"} | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([args.build / "bin/tessera", "train", "-n", str(ranks), "c.yaml"], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    output, peaks, losses, killed = [], {}, {}, False
    reader = threading.Thread(target=lambda: output.extend(process.stdout), daemon=True)
    reader.start()
    while process.poll() is None:
        # After the last step a rank may have unmapped what the ranks share, which then counts as the others' alone.
        if max(losses, default=-1) < steps - 1:
            for pid, (_, pss) in sample_ranks(process.pid, ranks).items():
                peaks[pid] = max(pss, peaks.get(pid, 0))
        lines = log.read_text().splitlines() if log.exists() else []
        losses = {record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record}
        if kill_after is not None and not killed and max(losses, default=-1) >= kill_after:
            killed = True
            for pid in descendants(process.pid):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    reader.join(5)
    if process.returncode and not killed:
        raise SystemExit("".join(output))
    return losses, sorted(peaks.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--width", default=2048, type=int)
    parser.add_argument("--layers", default=20, type=int)
    parser.add_argument("--ranks", default=2, type=int)
    parser.add_argument("--resume", default=[1, 3], type=int, nargs="*")
    parser.add_argument("--steps", default=20, type=int)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--json")
    args = parser.parse_args()
    block = 12 * args.width**2 + 13 * args.width
    root = (256 + 32 + 2) * args.width
    parameters = args.layers * block + root
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = pathlib.Path(name)
        print(f"{parameters:,} parameters: {4 * parameters / 2**20:.0f} MiB, with gradients and the state of AdamW {16 * parameters / 2**20:.0f} MiB")
        print(f"{'ranks':>5}{'steps':>10}{'peak PSS MiB a rank':>24}{'formula MiB':>13}{'PSS / formula':>15}  losses")
        for ranks in [args.ranks, *args.resume]:
            first = not rows
            losses, peaks = train(args, folder, ranks, 10**6 if first else args.steps + 2, args.steps + 1 if first else None)
            formula = 150 + (16 * parameters / ranks + 4 * 2 * block) / 2**20
            peak = max(peak for peak in peaks)
            rows.append({"ranks": ranks, "losses": losses, "peak_pss_mib": [round(p) for p in peaks], "formula_mib": round(formula), "pss_to_formula": round(peak / formula, 3)})
            shown = " ".join(f"{loss:.3f}" for loss in losses.values())
            print(f"{ranks:>5}{f'{min(losses)}-{max(losses)}':>10}{', '.join(f'{p:.0f}' for p in peaks):>24}{formula:>13.0f}{peak / formula:>15.3f}  {shown}", flush=True)
            for step in folder.glob("run/step-*"):  # what the end of a resumed run has written
                if int(step.name[5:]) > args.steps:
                    shutil.rmtree(step)
        for row in rows[1:]:
            for step, loss in row["losses"].items():
                seen = rows[0]["losses"].get(step)
                if seen is not None and abs(loss - seen) > 1e-3 * seen:
                    raise SystemExit(f"step {step} on {row['ranks']} ranks: loss {loss}, expected {seen}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"parameters": parameters, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
