# SPDX-License-Identifier: BSL-1.0
"""Who takes part: what they are called on charts and tables, in which order they stand, and their colours (Okabe and Ito's, which colour-blind
people can tell apart)."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    label: str
    colour: str
    marker: str = "o"
    line: str = "-"

    @property
    def ours(self):
        return self.label.startswith("gradsync")

    def style(self):
        """For matplotlib; our lines are thick."""
        return {"label": self.label, "color": self.colour, "marker": self.marker, "linestyle": self.line, "linewidth": 2.8 if self.ours else 1.0}


WHO = {  # by the names of bench_all_reduce
    "limit": Look("bandwidth limit", "#1f2328", "", "--"),
    "threads": Look("gradsync, threads", "#0072B2", "o"),
    "mpi": Look("gradsync, MPI, shared memory", "#D55E00", "s"),
    "mpi_adopted": Look("gradsync, MPI, adopted memory", "#D55E00", "d", ":"),
    "mpi_borrowed": Look("gradsync, MPI, borrowed memory", "#E69F00", "D"),
    "mpi_messages": Look("gradsync, MPI, messages", "#CC79A7", "^"),
    "tcp_messages": Look("gradsync, TCP, messages", "#CC79A7", "<", ":"),
    "nccl": Look("gradsync, NCCL", "#882255", "*"),
    "nccl_library": Look("NCCL's own", "#882255", "*", ":"),
    "deepspeed_shm": Look("DeepSpeed, shared memory", "#117733", "P"),
    "mpi_library": Look("MPI_Allreduce", "#56B4E9", "v"),
    "mpi_library_nonblocking": Look("MPI_Iallreduce", "#56B4E9", "v", ":"),
    "open_mpi": Look("Open MPI 5", "#56B4E9", "h", "--"),
    "open_mpi_tcp": Look("Open MPI 5, sockets", "#56B4E9", "H", ":"),
    "mpich": Look("MPICH 5", "#8A8A8A", "p"),
    "oneccl": Look("oneCCL", "#999933", ">"),
    "gloo": Look("Gloo", "#009E73", "X"),
    "torch_gloo": Look("PyTorch, Gloo", "#009E73", "X", ":"),
}
BRIEFLY_REDUCED = ("limit", "threads", "mpi", "mpi_borrowed", "mpi_messages", "tcp_messages", "deepspeed_shm", "mpi_library", "gloo")  # docs show
# Peers of our messages: MPI's go through shared memory on one host, others through sockets.
SEND_MESSAGES = {"mpi_messages": ("mpi_library", "mpi_library_nonblocking", "open_mpi", "mpich"), "tcp_messages": ("gloo", "torch_gloo", "open_mpi_tcp")}
# By the names of bench_train_step and torch_train_step.py.
BACKENDS = {**{backend: WHO[backend] for backend in ("threads", "mpi", "mpi_messages")}, "tcp": Look("gradsync in PyTorch", "#E69F00", "D"),
            "gloo": Look("PyTorch, Gloo", "#009E73", "X")}
MODELS = ("transformer", "mlp")
OVERLAP, ZERO1, ZERO3 = "overlap, buckets of 25 MB (DDP)", "ZeRO 1: optimizer sharded", "ZeRO 3: parameters, too (FSDP2)"
STRATEGIES = {
    "independent": "no synchronisation",
    "naive": "naive: each parameter alone",
    "flat": "flat: one collective",
    "overlap_per_parameter": "overlap, each parameter alone",
    "buckets_1MB": "overlap, buckets of 1 MB",
    "buckets_10MB": "overlap, buckets of 10 MB",
    "buckets_25MB": OVERLAP,
    "optimal": "overlap, optimal buckets",
    "forward": "overlap with the forward, too",
    "zero1": ZERO1,
    "fused": "ZeRO 1 inside the reduction",
    "fused_shared": "ZeRO 1 inside, one set of weights",
    "zero2": "ZeRO 2: gradients, too",
    "zero3": ZERO3,
    "torch_independent": "no synchronisation",
    "torch_ddp": OVERLAP,
    "torch_ddp_gradient_views": "DDP, gradients as views",
    "torch_zero1": ZERO1,
    "torch_fsdp2": ZERO3,
    "torch_gradsync": OVERLAP,
    "torch_gradsync_zero1": ZERO1,
    "torch_gradsync_fsdp": ZERO3,
}
BRIEFLY = [name for name, label in STRATEGIES.items() if label in (OVERLAP, ZERO1, STRATEGIES["fused"], ZERO3)]  # in docs
WATCHED = "timeline"  # the default with a Timeline, paired with the default: what watching costs
DEFAULT, PEER_DEFAULT, IN_TORCH = "buckets_25MB", "torch_ddp", "torch_gradsync"  # what a user gets who chooses nothing
