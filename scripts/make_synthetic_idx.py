#!/usr/bin/env python3
"""Writes SYNTHETIC images and labels in MNIST's file format: bright shapes on noise. They are no photographs and no handwriting:
for tests and first steps without a download, never for figures that others compare with.

    scripts/make_synthetic_idx.py OUT [--train 2000] [--test 400] [--size 16] [--classes 10] [--noise 96] [--seed 0]

OUT gets train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte and SYNTHETIC.txt, which says
how they were made. Equal flags give equal files. Standard library only.
"""
import argparse
import pathlib
import random
import struct

# Whether the pixel at (x, y), both in [-1, 1] from the shape's middle, belongs to the shape. The class is the position in this list.
SHAPES = [
    ("square", lambda x, y: max(abs(x), abs(y)) <= 0.8),
    ("ring", lambda x, y: 0.55 <= x * x + y * y <= 1.0),
    ("horizontal bar", lambda x, y: abs(y) <= 0.3),
    ("vertical bar", lambda x, y: abs(x) <= 0.3),
    ("plus", lambda x, y: min(abs(x), abs(y)) <= 0.2),
    ("diagonal cross", lambda x, y: abs(abs(x) - abs(y)) <= 0.25),
    ("falling diagonal", lambda x, y: abs(x - y) <= 0.35),
    ("rising diagonal", lambda x, y: abs(x + y) <= 0.35),
    ("frame", lambda x, y: max(abs(x), abs(y)) >= 0.65),
    ("two bars", lambda x, y: 0.4 <= abs(y) <= 0.9),
]


def image(rng, size, shape, noise):
    """One picture as bytes, row by row: noise below `noise`, the shape at least 160, of random size and place."""
    pixels = bytearray(value * noise // 256 for value in rng.randbytes(size * size))
    radius = rng.uniform(0.28, 0.42) * size
    middle_x, middle_y = (rng.uniform(radius, size - 1 - radius) for _ in range(2))
    brightness = rng.randrange(160, 256)
    for row in range(max(0, int(middle_y - radius)), min(size, int(middle_y + radius) + 2)):
        for column in range(max(0, int(middle_x - radius)), min(size, int(middle_x + radius) + 2)):
            x, y = (column - middle_x) / radius, (row - middle_y) / radius
            if max(abs(x), abs(y)) <= 1 and shape(x, y):
                pixels[row * size + column] = brightness
    return bytes(pixels)


def write(folder, prefix, rng, count, options):
    # As many of each class as of another, give or take one, in random order.
    labels = [i % options.classes for i in range(count)]
    rng.shuffle(labels)
    with open(folder / f"{prefix}-images-idx3-ubyte", "wb") as images:
        images.write(struct.pack(">4B3I", 0, 0, 8, 3, count, options.size, options.size))
        for label in labels:
            images.write(image(rng, options.size, SHAPES[label][1], options.noise))
    with open(folder / f"{prefix}-labels-idx1-ubyte", "wb") as file:
        file.write(struct.pack(">4BI", 0, 0, 8, 1, count) + bytes(labels))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=pathlib.Path, help="folder, made when it is not there")
    parser.add_argument("--train", type=int, default=2000, help="images for training (default 2000)")
    parser.add_argument("--test", type=int, default=400, help="images for testing (default 400)")
    parser.add_argument("--size", type=int, default=16, help="pixels a side (default 16)")
    parser.add_argument("--classes", type=int, default=10, help=f"2 to {len(SHAPES)} (default 10)")
    parser.add_argument("--noise", type=int, default=96, help="the background is random below this, 1 to 160 (default 96)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, value, least, most in (("train", options.train, 1, 10**6), ("test", options.test, 1, 10**6),
                                     ("size", options.size, 8, 256), ("classes", options.classes, 2, len(SHAPES)),
                                     ("noise", options.noise, 1, 160)):
        if not least <= value <= most:
            parser.error(f"--{name} is {value}, expected {least} to {most}")
    options.out.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", options.train), ("t10k", options.test)):
        write(options.out, prefix, random.Random(f"{prefix} {options.seed}"), count, options)
    classes = "\n".join(f"{i}: {name}" for i, (name, _) in enumerate(SHAPES[:options.classes]))
    (options.out / "SYNTHETIC.txt").write_text(
        "SYNTHETIC DATA, made by scripts/make_synthetic_idx.py of Tessera: shapes on noise, no real images.\n"
        f"train {options.train}, test {options.test}, size {options.size}, noise {options.noise}, seed {options.seed}\n"
        f"{classes}\n")


if __name__ == "__main__":
    main()
