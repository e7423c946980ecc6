#!/usr/bin/env python3
"""An independent GPT-2 in plain PyTorch, to compare `tessera train` with.

Shares no code with the library: its own model, safetensors reader and writer (struct and json), token files and
batches. Needs torch and numpy only; Debian 12's python3-torch will do.

    reference_gpt2.py --init init.safetensors --data TEXT_OR_BIN --steps 30 --global-batch 16 --seq-len 128 --n-head 6
        [--lr 1e-3 --betas 0.9 0.95 --weight-decay 0.1] [--ranks 2] [--log log.jsonl] [--save out.safetensors]

Sizes other than the number of heads are read off the weights. The batches follow the contract of `order: sequential`:
with L training tokens, sequence j of step s is number i = s*G + j; position k is p = (i*T + k) mod (L - 1), its input
token p, its target token p + 1; rank r of W takes j in [r*G/W, (r+1)*G/W). Text is read as bytes, of which the first
floor(N * (1 - val_fraction)) are for training; *.bin is a token file of llm.c.

--ranks K > 1 runs PyTorch's DistributedDataParallel and ZeroRedundancyOptimizer over Gloo. --init random draws an
initial model (then --n-embd, --n-layer, --n-positions and --vocab-size count) and --save-init writes it. One JSON
object a step: step, loss (mean over the global batch, before the update), grad_norm.
"""
import argparse
import glob
import json
import math
import os
import socket
import struct
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "U8": np.uint8,
          "BOOL": np.bool_}


def read_safetensors(path):
    with open(path, "rb") as file:
        blob = file.read()
    (size,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8:8 + size].decode("utf-8"))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = np.frombuffer(blob, dtype=DTYPES[entry["dtype"]], offset=8 + size + begin,
                            count=(end - begin) // np.dtype(DTYPES[entry["dtype"]]).itemsize)
        tensors[name] = torch.from_numpy(raw.reshape(entry["shape"]).copy())
    return tensors


def write_safetensors(path, tensors):
    header, offset, chunks = {"__metadata__": {"format": "pt"}}, 0, []
    for name in sorted(tensors):
        data = tensors[name].detach().cpu().contiguous().numpy().astype(np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape),
                        "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
        chunks.append(data)
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(chunks))


class Conv1D(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.02)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (y.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
                   for y in self.c_attn(x).split(width, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(width, 4 * width), Conv1D(4 * width, width)

    def forward(self, x):
        y = self.c_fc(x)
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * y ** 3)))
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width, eps=1e-5), Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width, eps=1e-5), MLP(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Parameter names are those of GPT2LMHeadModel without the `transformer.` prefix; the head is wte."""

    def __init__(self, vocab, positions, width, layers, heads):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, eps=1e-5)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.t()


def random_model(args):
    torch.manual_seed(args.seed)
    model = GPT2(args.vocab_size, args.n_positions, args.n_embd, args.n_layer, args.n_head)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                scale = 1 / math.sqrt(2 * args.n_layer) if name.endswith("c_proj.weight") else 1
                parameter.normal_(0.0, 0.02 * scale)
    return model


def stored_model(path, heads):
    weights = {}
    for name, value in read_safetensors(path).items():
        name = name[len("transformer."):] if name.startswith("transformer.") else name
        if name != "lm_head.weight" and not name.endswith((".attn.bias", ".attn.masked_bias")):
            weights[name] = value
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("h."))
    vocab, width = weights["wte.weight"].shape
    model = GPT2(vocab, weights["wpe.weight"].shape[0], width, layers, heads)
    model.load_state_dict(weights)
    return model


def training_tokens(path, val_fraction):
    if path.endswith(".bin"):
        header = np.fromfile(path, dtype="<i4", count=256)
        assert header[0] == 20240520 and header[1] == 1, path
        return np.fromfile(path, dtype="<u2", offset=1024, count=header[2]).astype(np.int64)
    if os.path.isdir(path):
        files = sorted(os.path.join(path, name) for name in os.listdir(path))
        files = [name for name in files if os.path.isfile(name) and not os.path.islink(name)]
    else:
        files = [path] if os.path.exists(path) else sorted(glob.glob(path))
    text = b"".join(open(name, "rb").read() for name in files)
    return np.frombuffer(text, dtype=np.uint8)[:int(len(text) * (1.0 - val_fraction))].astype(np.int64)


def batch(tokens, step, global_batch, length, rank, world):
    own = global_batch // world
    numbers = step * global_batch + np.arange(rank * own, (rank + 1) * own)
    positions = (numbers[:, None] * length + np.arange(length)[None, :]) % (len(tokens) - 1)
    return torch.from_numpy(tokens[positions]), torch.from_numpy(tokens[positions + 1])


def make_optimizer(model, args, world):
    options = {"lr": args.lr, "betas": tuple(args.betas), "eps": args.eps, "weight_decay": args.weight_decay}
    if world == 1:
        return torch.optim.AdamW(model.parameters(), **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)


def train(rank, world, args, port):
    torch.set_num_threads(1)
    plain = random_model(args) if args.init == "random" else stored_model(args.init, args.n_head)
    if rank == 0 and args.save_init:
        write_safetensors(args.save_init, {"transformer." + n: p for n, p in plain.named_parameters()})
    model = plain
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
        model = nn.parallel.DistributedDataParallel(plain)
    optimizer = make_optimizer(model, args, world)
    tokens = training_tokens(args.data, args.val_fraction)
    log = open(args.log, "w") if args.log and rank == 0 else sys.stdout
    for step in range(args.steps):
        inputs, targets = batch(tokens, step, args.global_batch, args.seq_len, rank, world)
        logits = model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        mean = loss.detach().clone()
        if world > 1:
            torch.distributed.all_reduce(mean)
            mean /= world
        norm = torch.norm(torch.stack([p.grad.norm() for p in plain.parameters()]))
        optimizer.step()
        if rank == 0:
            print(json.dumps({"step": step, "loss": mean.item(), "grad_norm": norm.item()}), file=log, flush=True)
    if rank == 0 and args.save:
        write_safetensors(args.save, {"transformer." + n: p for n, p in plain.named_parameters()})
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--init", required=True, help="model.safetensors, or 'random'")
    parser.add_argument("--data", required=True, help="text file, folder or pattern; or *.bin")
    parser.add_argument("--val-fraction", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--n-head", type=int, required=True)
    parser.add_argument("--n-embd", type=int, default=192)
    parser.add_argument("--n-layer", type=int, default=4)
    parser.add_argument("--n-positions", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.999))
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--log")
    parser.add_argument("--save")
    parser.add_argument("--save-init")
    args = parser.parse_args()
    if args.global_batch % args.ranks:
        parser.error("--ranks does not divide --global-batch")
    if args.ranks == 1:
        train(0, 1, args, 0)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(train, (args.ranks, args, port), args.ranks)


if __name__ == "__main__":
    os.environ.setdefault("USE_LIBUV", "0")
    main()
