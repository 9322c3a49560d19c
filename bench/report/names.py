# SPDX-License-Identifier: BSL-1.0
"""Who takes part: what they are called on charts and tables, in which order they stand, and their colours (Okabe and Ito's, which colour-blind
people can tell apart). A contestant has one colour on all charts."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    label: str
    colour: str
    marker: str = "o"
    line: str = "-"


# By the names of bench_all_reduce.
WHO = {
    "limit": Look("bandwidth limit", "#1f2328", "", "--"),
    "threads": Look("gradsync, threads", "#0072B2", "o"),
    "mpi": Look("gradsync, MPI, shared memory", "#D55E00", "s"),
    "mpi_borrowed": Look("gradsync, MPI, borrowed memory", "#E69F00", "D"),
    "mpi_messages": Look("gradsync, MPI, messages", "#CC79A7", "^"),
    "tcp_messages": Look("gradsync, TCP, messages", "#CC79A7", "<", ":"),
    "nccl": Look("gradsync, NCCL", "#882255", "*"),
    "nccl_library": Look("NCCL's own", "#882255", "*", ":"),
    "mpi_library": Look("MPI_Allreduce", "#56B4E9", "v"),
    "mpi_library_nonblocking": Look("MPI_Iallreduce", "#56B4E9", "v", ":"),
    "mpich_library": Look("MPICH, MPI_Allreduce", "#8A8A8A", "P"),
    "mpich_library_nonblocking": Look("MPICH, MPI_Iallreduce", "#8A8A8A", "P", ":"),
    "gloo": Look("Gloo", "#009E73", "X"),
}
PEERS = {"limit", "nccl_library", "mpi_library", "mpi_library_nonblocking", "mpich_library", "mpich_library_nonblocking", "gloo"}
BRIEFLY_REDUCED = {"limit", "threads", "mpi", "mpi_borrowed", "mpi_messages", "tcp_messages", "mpi_library", "gloo"}  # those that docs show
# By the names of bench_train_step.
BACKENDS = {**{backend: WHO[backend] for backend in ("threads", "mpi", "mpi_messages")}, "gloo": Look("PyTorch, Gloo", "#009E73", "X")}
MODELS = ("transformer", "mlp")
STRATEGIES = {
    "independent": "no synchronisation",
    "meeting": "a barrier after the backward",
    "naive": "naive: each parameter alone",
    "flat": "flat: one collective",
    "overlap_per_parameter": "overlap, each parameter alone",
    **{f"buckets_{size}MB": f"overlap, buckets of {size} MB" for size in (1, 10, 25, 100, 1000)},
    "optimal": "overlap, optimal buckets",
    "forward": "overlap with the forward, too",
    "zero1": "ZeRO 1: optimizer sharded",
    "zero2": "ZeRO 2: gradients, too",
    "zero3": "ZeRO 3: parameters, too",
    "torch_independent": "no synchronisation",
    "torch_naive": "naive: each parameter alone",
    "torch_naive_async": "naive, asynchronous",
    "torch_flat": "flat: one collective",
    "torch_ddp": "DDP (25 MB)",
    "torch_ddp_1MB": "DDP, buckets of 1 MB",
    "torch_ddp_gradient_views": "DDP, gradients as views",
    "torch_zero1": "DDP, ZeroRedundancyOptimizer",
}
BRIEFLY = ("independent", "buckets_25MB", "zero1", "zero3", "torch_independent", "torch_ddp")  # those that docs show
WATCHED = "timeline"  # the default with a Timeline, paired with the default: what watching costs
# Weights are still gathered when a step has ended, while others take theirs: no figure of overlap is of their own steps alone.
GATHER_BETWEEN_STEPS = ("forward", "zero3")
DEFAULT, PEER_DEFAULT = "buckets_25MB", "torch_ddp"  # what a user gets who chooses nothing
SHARDED = "zero1"  # what a user chooses who wants the step shorter: each rank steps its share of the parameters
STAGES = {"none": "nothing sharded", "optimizer": "optimizer", "gradients": "+ gradients", "parameters": "+ parameters"}
# By the names of bench_reducer.
OVERLAPS = {"NoOverlap": "`NoOverlap`", "OverlapBackward": "`OverlapBackward`", "OverlapBackwardThread": "`OverlapBackward{Progress::thread}`"}
# By the fields of gradsync_train's results.
MEMORY = {"bytes_parameters": "parameters", "bytes_gradients": "gradients", "bytes_optimizer": "optimizer state", "bytes_activations": "activations",
          "peak_rss_bytes": "peak RSS"}
