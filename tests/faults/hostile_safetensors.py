"""Safetensors files that no writer makes. Each must be refused by an error."""
import json, random, struct

BODY = struct.pack("<4f", 1, 2, 3, 4)


def entry(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def headers():
    """By name: the header's text, for a body of 16 bytes."""
    one = json.dumps
    yield "no bracket", '"w"'
    yield "a list", "[]"
    yield "cut JSON", '{"w": {"dtype": "F32"'
    yield "text behind it", one({"w": entry()}) + "x"
    yield "a NUL in it", '{"w": \0}'
    yield "NaN", '{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 16]}}'
    yield "Infinity", '{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, Infinity]}}'
    yield "an exponent", '{"w": {"dtype": "F32", "shape": [4e0], "data_offsets": [0, 16]}}'
    yield "bytes that are not UTF-8", b'{"w\xff": ' + one(entry()).encode() + b"}"
    yield "a duplicate name", '{"w": %s, "w": %s}' % (one(entry(shape=(2,), offsets=(0, 8))), one(entry(shape=(2,), offsets=(8, 16))))
    yield "deep nesting", "[" * 100000
    yield "metadata that is no map", one({"__metadata__": 3, "w": entry()})
    yield "metadata of numbers", one({"__metadata__": {"a": 3}, "w": entry()})
    for name, value in (("no dtype", {"shape": [4], "data_offsets": [0, 16]}), ("no shape", {"dtype": "F32", "data_offsets": [0, 16]}),
                        ("no offsets", {"dtype": "F32", "shape": [4]}), ("an unknown dtype", entry("F33")), ("a dtype of another size", entry("F64")),
                        ("a dtype that is a number", entry(7)), ("a smaller shape", entry(shape=(3,))), ("a larger shape", entry(shape=(5,))),
                        ("a negative dimension", entry(shape=(-4,))), ("two negative dimensions", entry(shape=(-2, -2))),
                        ("a shape that overflows", entry(shape=(2**32, 2**32))), ("a dimension of 2**63", entry(shape=(2**63,))),
                        ("a dimension of 2**64 + 4", entry(shape=(2**64 + 4,))), ("a shape of texts", entry(shape=("4",))),
                        ("a negative offset", entry(offsets=(-16, 0))), ("offsets in reverse", entry(offsets=(16, 0))),
                        ("offsets behind the end", entry(offsets=(0, 32), shape=(8,))), ("offsets of 2**64", entry(offsets=(2**64 - 16, 2**64))),
                        ("a hole before the tensor", entry(offsets=(4, 16), shape=(3,))), ("bytes behind the tensor", entry(offsets=(0, 8), shape=(2,))),
                        ("three offsets", {**entry(), "data_offsets": [0, 8, 16]}), ("an entry that is a list", [1])):
        yield name, one({"w": value})
    yield "overlapping tensors", one({"v": entry(), "w": entry()})
    yield "tensors that overlap by one", one({"v": entry(shape=(3,), offsets=(0, 12)), "w": entry(shape=(2,), offsets=(8, 16))})
    yield "a hole between tensors", one({"v": entry(shape=(1,), offsets=(0, 4)), "w": entry(shape=(2,), offsets=(8, 16))})


def files():
    """By name: the bytes of the file."""
    for name, text in headers():
        text = text.encode() if isinstance(text, str) else text
        yield name, struct.pack("<Q", len(text)) + text + BODY
    good = json.dumps({"w": entry()}).encode()
    yield "an empty file", b""
    yield "seven bytes", b"\1" * 7
    yield "a header of length 0", struct.pack("<Q", 0) + BODY
    for length in (len(good) + 17, 2**31, 2**63, 2**64 - 1, 2**64 - 8):
        yield f"a header of length {length}", struct.pack("<Q", length) + good + BODY
    yield "a pickle", b"\x80\x02}q\x00X\x06\x00\x00\x00weightq\x01K\x01s."
    yield "a zip", b"PK\x03\x04" + bytes(60)
    chosen = random.Random(3)
    for number in range(5):
        yield f"random bytes {number}", chosen.randbytes(200)


GOOD = struct.pack("<Q", len(json.dumps({"w": entry()}))) + json.dumps({"w": entry()}).encode() + BODY
