# SPDX-License-Identifier: BSL-1.0
"""Who takes part: what they are called on charts and tables, in which order they stand, and their colours (Okabe and Ito's, which
colour-blind people can tell apart). A contestant has one colour on all charts."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    label: str
    colour: str
    marker: str = "o"
    line: str = "-"


INK = "#1f2328"  # text, axes, the limit: the page replaces it by the reader's own text colour

# By the names of bench_all_reduce.
WHO = {
    "limit": Look("bandwidth limit", INK, "", "--"),
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
BACKENDS = {"threads": Look("gradsync, threads", WHO["threads"].colour, "o"),
            "mpi": Look("gradsync, MPI, shared memory", WHO["mpi"].colour, "s"),
            "mpi_messages": Look("gradsync, MPI, messages", WHO["mpi_messages"].colour, "^"),
            "gloo": Look("PyTorch, Gloo", WHO["gloo"].colour, "X")}

MODELS = ("transformer", "mlp")
STRATEGIES = {
    "independent": "no synchronisation",
    "meeting": "a barrier after the backward",
    "naive": "naive: each parameter alone",
    "flat": "flat: one collective",
    "overlap_per_parameter": "overlap, each parameter alone",
    "buckets_1MB": "overlap, buckets of 1 MB",
    "buckets_10MB": "overlap, buckets of 10 MB",
    "buckets_25MB": "overlap, buckets of 25 MB",
    "buckets_100MB": "overlap, buckets of 100 MB",
    "buckets_1000MB": "overlap, buckets of 1000 MB",
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
# Of these, those that docs show.
BRIEFLY = ("independent", "buckets_25MB", "zero1", "zero3", "torch_independent", "torch_ddp")
WATCHED = "timeline"  # the default with a Timeline, paired with the default: what watching costs
INDEPENDENT = ("independent", "torch_independent")
# Weights are still gathered when a step has ended, while others take theirs: no figure of overlap is of their own steps alone.
GATHER_BETWEEN_STEPS = ("forward", "zero3")
DEFAULT, PEER_DEFAULT = "buckets_25MB", "torch_ddp"  # what a user gets who chooses nothing
SHARDED = "zero1"  # what a user chooses who wants the step shorter: each rank steps its share of the parameters

STAGES = {"none": "nothing sharded", "optimizer": "optimizer", "gradients": "+ gradients", "parameters": "+ parameters"}
# By the names of bench_reducer.
OVERLAPS = {"NoOverlap": "`NoOverlap`", "OverlapBackward": "`OverlapBackward`", "OverlapBackwardThread": "`OverlapBackward{Progress::thread}`"}
# By the fields of gradsync_train's results.
MEMORY = {"bytes_parameters": Look("parameters", "#0072B2"), "bytes_gradients": Look("gradients", "#E69F00"),
          "bytes_optimizer": Look("optimizer state", "#009E73"), "bytes_activations": Look("activations", "#CC79A7")}


def ordered(present, all_of):
    """Those of `all_of` that are present, in its order, and then what it does not know."""
    known = list(all_of)
    return [name for name in known if name in present] + sorted(name for name in present if name not in all_of)
