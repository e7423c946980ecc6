"""A tensor's memory is not always its values: those of a conjugate or negative view are others.

Every source that takes `data_ptr()` is listed here with the reason why that is right. A source with
the reason RESOLVED must call detail::resolved() or detail::is_resolved().
"""
import pathlib
import re
import sys

RESOLVED = "takes tensors of the user, and resolves them first"
CHECKED = "ProcessGroup has resolved or refused the tensors"
OWN = "tensors that this code, or a reader of the library, has made"
KEEPS = "compares or keeps addresses, and reads nothing"
PAGES = "storage of pages and buckets, which the library has made"
FUSED = "negative views are copied before the kernels, and complex tensors have none"

REASONS = {
    "checkpoint/hosts/remote_files.cpp": OWN,
    "checkpoint/io/safetensors_reader.cpp": OWN,
    "checkpoint/io/safetensors_writer.cpp": RESOLVED,
    "checkpoint/io/tensor_source.cpp": RESOLVED,
    "checkpoint/pickle/torch_archive.cpp": OWN,
    "checkpoint/pickle/torch_archive_writer.cpp": RESOLVED,
    "checkpoint/store/checkpoint_impl.cpp": OWN,
    "checkpoint/store/tensor_file.cpp": RESOLVED,
    "checkpoint/weights/weights_tools.cpp": OWN,
    "comm/base/comm_stream.h": KEEPS,
    "comm/base/flat_tensor.h": CHECKED,
    "comm/base/wire_codec.cpp": CHECKED,
    "comm/device/pinned_buffers.cpp": OWN,
    "comm/group/checked_transport.cpp": CHECKED,
    "comm/group/process_group.cpp": "it compares addresses alone",
    "comm/group/process_group_control.cpp": OWN,
    "comm/hosts/sum_to_owners.cpp": CHECKED,
    "comm/p2p/tcp_mailbox.cpp": CHECKED,
    "comm/shm/shm_arena.cpp": KEEPS,
    "comm/shm/shm_collectives.cpp": CHECKED,
    "comm/shm/shm_kernels.cpp": OWN,
    "data/idx_dataset.cpp": OWN,
    "data/sample_buffer.cpp": OWN,
    "data/npy_array.cpp": OWN,
    "data/token_dataset.cpp": OWN,
    "data/tokens.cpp": OWN,
    "deferred/registry.cpp": KEEPS,
    "distributed_optimizer/packed_reduction.cpp": OWN,
    "engine/replicas.cpp": RESOLVED,
    "fsdp/gradient_buffers.cpp": PAGES,
    "fsdp/paging/slot_pool.cpp": PAGES,
    "fsdp/reductions.cpp": KEEPS,
    "fsdp/residency.cpp": OWN,
    "local_sgd/parameters.cpp": KEEPS,
    "memory/placement_allocator.cpp": KEEPS,
    "optim/fused_adam.cpp": FUSED,
    "optim/fused_optimizer.cpp": FUSED,
    "optim/fused_sgd.cpp": FUSED,
    "sharding/bucket.cpp": RESOLVED,
    "sharding/checksum.cpp": RESOLVED,
    "sharding/detection/page.cpp": PAGES,
    "sharding/gradients/gradient_norm.cpp": "the sign of a value does not change its square",
    "sharding/gradients/gradient_placement.cpp": KEEPS,
    "sharding/gradients/reducer.cpp": OWN,
    "sharding/shared_memory_of.cpp": KEEPS,
    "train/groups/separate_groups.cpp": OWN,
    "train/hooks/histogram.cpp": OWN,
    "train/hooks/predictions_hook.cpp": RESOLVED,
    "train/program/training_session.cpp": OWN,
    "train/run/run_contract.cpp": RESOLVED,
    "train/run/run_records.cpp": OWN,
    "train/step/training_step.cpp": OWN,
    "train/wrappers/wrapper_functions.cpp": "the copy is of a parameter in common memory",
    "zero/bucket_update.cpp": OWN,
    "zero/early_reduction.cpp": PAGES,
    "zero/shards/shards.cpp": KEEPS,
}
USE = re.compile(r"\b\w*data_ptr(<[^>]*>)?\(")
RESOLVES = re.compile(r"\b(is_)?resolved\(")


def problems(src):
    found = set()
    for path in sorted(src.rglob("*")):
        if path.suffix not in (".cpp", ".h", ".inc"):
            continue
        code = re.sub(r"//.*|\"[^\"\n]*\"", "", path.read_text())
        if not USE.search(code):
            continue
        name = path.relative_to(src).as_posix()
        found.add(name)
        if name not in REASONS:
            yield (f"{name} takes data_ptr(); expected detail::resolved() of the tensor before, "
                   "and an entry in REASONS")
        elif REASONS[name] == RESOLVED and not RESOLVES.search(code):
            yield f"{name} takes data_ptr() of tensors that it does not resolve"
    for name in sorted(REASONS.keys() - found):
        yield f"{name} takes no data_ptr(); expected no entry in REASONS"


def main():
    found = list(problems(pathlib.Path(sys.argv[1]) / "src"))
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
