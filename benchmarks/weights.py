#!/usr/bin/env python3
"""Reading of sharded weights on 2 ranks beside `cat` of the same bytes, from the page cache.

    weights.py BUILD_FOLDER [GIGABYTES]

Both read every byte once, in two processes at the same time: two `cat`s of half of the files each,
and two ranks that read half of each tensor into memory. The runs take turns; medians and their ratio
are printed.
"""
import json, pathlib, statistics, struct, subprocess, sys, tempfile, time

build, gigabytes = pathlib.Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 2
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

    def cat():
        begin = time.monotonic()
        both = [subprocess.Popen(["cat", *parts[i::2]], stdout=subprocess.DEVNULL) for i in range(2)]
        assert all(process.wait() == 0 for process in both)
        return time.monotonic() - begin

    def ranks():
        command = [build / "bin/tessera", "run", "-n", "2", build / "bin/bench_weights", folder, "2"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
        return float(lines[1].split()[-1])

    cat(), ranks()
    times = [(cat(), ranks()) for _ in range(RUNS)]
    one, two = (statistics.median(column) for column in zip(*times))
    ratio = statistics.median(b / a for a, b in times)
    print(f"{gigabytes:g} GB: cat {one:.3f} s, 2 ranks {two:.3f} s, ratio {ratio:.2f}")
