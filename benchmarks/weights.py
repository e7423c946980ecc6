#!/usr/bin/env python3
"""Reading of sharded weights on 2 ranks beside `cat` of the same bytes.

    weights.py BUILD_FOLDER [--gigabytes 2] [--cold]

Two ranks read half of each tensor into memory that was there before. Beside them: one `cat` of all
files, and two at the same time of half of the files each. All read every byte once, from the page
cache, or from the disk with --cold, which needs root and drops the cache of the whole system before
each run. The runs take turns; medians and their ratios are printed. `cat` writes nowhere, and its
buffer stays in the processor's cache, so that from the page cache two of them show the limit of
reading alone.
"""
import argparse, json, os, pathlib, statistics, struct, subprocess, tempfile, time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("build", type=lambda path: pathlib.Path(path).resolve())
parser.add_argument("--gigabytes", type=float, default=2)
parser.add_argument("--cold", action="store_true")
args = parser.parse_args()
build, gigabytes = args.build, args.gigabytes
FILES, TENSORS, RUNS = 4, 24, 7

with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    each = int(gigabytes * 1e9 / FILES / TENSORS / 4)
    weight_map = {}
    for file in range(FILES):
        header = {f"f{file}.t{i}": {"dtype": "F32", "shape": [each], "data_offsets": [i * each * 4, (i + 1) * each * 4]} for i in range(TENSORS)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        part = f"model-{file + 1:05d}-of-{FILES:05d}.safetensors"
        with open(folder / part, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _ in range(TENSORS):
                out.write(b"\x01" * (each * 4))
        weight_map.update({t: part for t in header})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    parts = sorted(folder.glob("*.safetensors"))

    def prepare():
        if args.cold:
            os.sync()
            pathlib.Path("/proc/sys/vm/drop_caches").write_text("1")

    def cat(processes):
        prepare()
        begin = time.monotonic()
        running = [subprocess.Popen(["cat", *parts[i::processes]], stdout=subprocess.DEVNULL) for i in range(processes)]
        assert all(process.wait() == 0 for process in running)
        return time.monotonic() - begin

    def ranks():
        prepare()
        # From the page cache the second reading counts, into memory that the first has written.
        command = [build / "bin/tessera", "run", "-n", "2", build / "bin/bench_weights", folder, "1" if args.cold else "2"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        return float(lines[-1])

    cat(1), ranks()
    times = [(cat(1), cat(2), ranks()) for _ in range(RUNS)]
    one, two, ours = (statistics.median(column) for column in zip(*times))
    ratios = [statistics.median(run[2] / run[i] for run in times) for i in range(2)]
    print(f"{gigabytes:g} GB: 2 ranks {ours:.3f} s, one cat {one:.3f} s, ratio {ratios[0]:.2f}; two cats {two:.3f} s, ratio {ratios[1]:.2f}")
