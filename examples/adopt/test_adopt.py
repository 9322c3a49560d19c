#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""The trainings of this folder, against what they are to be equal to. Also prints the figures of the torch suite's last lines.

    test_adopt.py plain PLAIN PLAIN_DATA_PARALLEL
    test_adopt.py cxx14 PLAIN_DATA_PARALLEL CXX14
    test_adopt.py processes PLAIN_DATA_PARALLEL PLAIN_PROCESSES [MPIEXEC PLAIN_MPI]
    test_adopt.py mpi MPIEXEC MPI_ALLREDUCE MPI_GRADSYNC
    test_adopt.py nccl NCCL_ALLREDUCE NCCL_GRADSYNC     exits with 77 without a device
    test_adopt.py packed PACKED_PLAIN PACKED PACKED_ZERO1 [PACKED_MPI PACKED_ZERO1_MPI MPIEXEC]
    test_adopt.py iris IRIS
    test_adopt.py dlib DLIB_TRAIN
    test_adopt.py ensmallen ENSMALLEN_TRAIN
    test_adopt.py torch ADOPT_TORCH [MPIEXEC [PYTHON]]     PYTHON: one that may have torch
"""

import array
import difflib
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
TEXT = HERE / "torch_train.cpp"
RANKS = 2


def run(*command, **environment):
    environment = dict(os.environ, OPENBLAS_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                       OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none", **environment)
    result = subprocess.run([str(c) for c in command], env=environment, capture_output=True, text=True, timeout=100)
    return result.returncode, result.stdout, result.stderr


def output(*command, **environment):
    code, out, err = run(*command, **environment)
    assert code == 0, f"{command} exited with {code}:\n{out}{err}"
    return out


def losses(out):
    values = [float(x) for x in re.findall(r"loss (?:of rank 0 )?(\S+?)[,\n]", out)]
    assert values, f"no losses in: {out}"
    return values


def distance(a, b):
    """Of two lists of numbers, relative to the first."""
    assert len(a) == len(b) > 0, f"{len(a)} and {len(b)} numbers"
    return (sum((x - y) ** 2 for x, y in zip(a, b)) / sum(x * x for x in a)) ** 0.5


def usage_error(*command):
    code, _, err = run(*command)
    assert code == 2 and err, f"{command} exited with {code} and said: {err}"


def check_changes(before, after, most):
    """Prints the lines of code that `after` has and `before` has not."""
    sources = [(HERE / name).read_text().splitlines() for name in (before, after)]
    changed = [line[2:] for line in difflib.ndiff(*sources) if line.startswith("+ ")]
    changed = [line for line in changed if line.strip() and not line.strip().startswith("//")]
    print(f"{after}: {len(changed)} lines added or changed:", *changed, sep="\n")
    assert len(changed) <= most


def plain(before, after):
    check_changes("plain.cpp", "plain_data_parallel.cpp", 15)

    batch, rate = 16, 0.5
    assert output(after, TEXT, batch, rate, 1) == output(before, TEXT, batch, rate)
    for ranks in (2, 3):
        whole = losses(output(before, TEXT, batch * ranks, rate * ranks))
        parts = losses(output(after, TEXT, batch, rate, ranks))
        print(f"{ranks} ranks: the losses differ by {distance(whole, parts):.1e} from those of one rank on the whole batch")
        assert distance(whole, parts) < 1e-5
    assert whole[-1] < whole[0] - 1, whole
    for program in (before, after):
        usage_error(program, "no such file")
        usage_error(program, TEXT, 0)


KEPT = []


def free_port():
    """A port that nobody else gets before this program ends; who listens there may reuse it."""
    KEPT.append(socket.socket())
    KEPT[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    KEPT[-1].bind(("localhost", 0))
    return str(KEPT[-1].getsockname()[1])


def outputs(ranks, *command):
    """Of the ranks of a job without a launcher."""
    port = free_port()

    def start(rank):
        job = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        return subprocess.Popen([str(c) for c in command], env={**os.environ, **job}, stdout=subprocess.PIPE, text=True)
    jobs = [start(rank) for rank in range(ranks)]
    texts = [job.communicate(timeout=100)[0] for job in jobs]
    assert all(job.returncode == 0 for job in jobs), f"{command} wrote {texts}"
    return texts


def as_over_threads(threads, program):
    for ranks in (1, 2, 3):
        texts = [output(threads, TEXT, 16, 0.5, ranks)] + [""] * (ranks - 1)
        assert outputs(ranks, program, TEXT, 16, 0.5) == texts, f"other losses with {ranks} ranks"
    code, _, err = run(program, TEXT, RANK="2", WORLD_SIZE="2")
    assert code == 1 and "RANK must be a number from 0 to 1" in err, f"exit code {code}, and: {err}"


cxx14 = as_over_threads


def processes(threads, program, mpiexec=None, over_mpi=None):
    check_changes("plain_data_parallel.cpp", "plain_processes.cpp", 7)
    as_over_threads(threads, program)
    if not mpiexec:
        return
    check_changes("plain_processes.cpp", "plain_mpi.cpp", 4)
    for ranks in (1, 2, 3):
        expected = output(threads, TEXT, 16, 0.5, ranks)
        for launched in (program, over_mpi):  # mpirun tells any program its rank
            out = output(mpiexec, "-n", ranks, launched, TEXT, 16, 0.5, MASTER_PORT=free_port())
            assert out == expected, f"{launched}: other losses with {ranks} ranks"


def mpi(mpiexec, before, after):
    for ranks in (1, 2, 3):
        whole, parts = (losses(output(mpiexec, "-n", ranks, program)) for program in (before, after))
        assert len(whole) == 10 and whole[-1] < whole[0] / 2, whole
        assert parts == whole if ranks < 3 else distance(whole, parts) < 1e-5, f"{ranks} ranks: {whole}, {parts}"


def nccl(before, after):
    if not any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        sys.exit(77)
    with tempfile.TemporaryDirectory() as folder:
        alone = output(before, 0, 1, pathlib.Path(folder, "id"))
    assert output(after) == alone and losses(alone)[-1] < losses(alone)[0] / 2, alone


def peak(out):
    """In KiB, of all ranks that say it."""
    return sum(map(int, re.findall(r"peak memory: (\d+) KiB", out)))


def packed(alone, overlapped, zero1, overlapped_mpi=None, zero1_mpi=None, mpiexec=None):
    check_changes("packed_plain.cpp", "packed.cpp", 16)
    check_changes("packed_plain.cpp", "packed_zero1.cpp", 26)
    small, wide = (TEXT, 32, 64), (TEXT, 2, 512)
    expected, threads = losses(output(alone, *small)), losses(output(overlapped, *small, 2))
    assert sum(expected[-10:]) / 10 < expected[0] - 1, expected  # single steps differ by the text they see
    print(f"losses of 2 ranks differ by {distance(expected, threads):.1e} from those of one program")
    assert distance(expected, threads) < 1e-4
    others = {"ZeRO 1, threads": output(zero1, *small, 2), "TCP": outputs(2, overlapped, *small)[0], "ZeRO 1, TCP": outputs(2, zero1, *small)[0]}
    if mpiexec:
        others |= {"MPI": output(mpiexec, "-n", 2, overlapped_mpi, *small), "ZeRO 1, MPI": output(mpiexec, "-n", 2, zero1_mpi, *small)}
    for name, out in others.items():
        assert losses(out) == threads, f"{name}: other losses than over threads"
    peaks = [(peak(output(program, *wide, 2)), peak("".join(outputs(2, program, *wide)))) for program in (overlapped, zero1)]
    print("peak memory, KiB (threads, processes): plain", peaks[0], "ZeRO 1", peaks[1])
    assert all(sharded < 0.9 * whole for whole, sharded in zip(*peaks)), peaks


def iris(program):
    data = HERE / "iris.csv"
    alone = output(program, 1, data)
    for ranks in (2, 4):
        assert distance(losses(alone), losses(output(program, ranks, data))) < 1e-5
    right, plants = map(int, re.findall(r"right (\d+) of (\d+)", alone)[-1])
    assert plants == 150 and right >= 145, alone
    usage_error(program, 0, data)
    usage_error(program, 2, TEXT)


def somebody_elses(source, ranks, command, *arguments):
    assert len((HERE / source).read_text().splitlines()) <= 40
    alone = losses(output(command, 1, *arguments))
    assert alone[-1] < alone[0] / 2, alone
    for n in ranks:
        out = output(command, n, *arguments)
        digests = re.findall(r"rank (\d+): .*digest (\w+)", out)
        assert len(digests) == n and len({digest for _, digest in digests}) == 1, out
        per_rank = losses(out)[: len(alone)]
        print(f"{source}, {n} ranks: the losses differ by {distance(alone, per_rank):.1e} from those of one rank")
        assert distance(alone, per_rank) < 1e-5, (alone, out)


def dlib(program):
    somebody_elses("dlib_train.cpp", (2, 4), program)


def ensmallen(program):
    somebody_elses("ensmallen_train.cpp", (2, 3, 5), program, HERE / "iris.csv")


def torch(program, mpiexec=None, python=None):
    runs = {"threads": [program, "threads", RANKS]}
    if mpiexec:
        runs["MPI"] = [mpiexec, "-n", RANKS, program, "mpi", RANKS]
    if python and run(python, "-c", "import torch.distributed")[0] == 0:
        runs["PyTorch DDP (gloo)"] = [python, HERE / "torch_ddp.py", RANKS]
    with tempfile.TemporaryDirectory() as folder:

        def train(command):
            weights = pathlib.Path(folder, "weights")
            out = output(*command, 20, TEXT, weights)
            values = array.array("d")
            values.frombytes(weights.read_bytes())
            return losses(out), values, re.search(r"step time: (\S+) ms", out)[1]

        alone_losses, alone_weights, time = train([program, "threads", 1])
        assert alone_losses[-1] < alone_losses[0] - 0.1 and len(alone_losses) == 20, alone_losses
        print(f"{'1 rank':24} {time} ms a step")
        trained = None
        for name, command in runs.items():
            some_losses, weights, time = train(command)
            apart = max(abs(x - y) / x for x, y in zip(alone_losses, some_losses)), distance(alone_weights, weights)
            print(f"{f'{RANKS} ranks, {name}':24} {time} ms a step; from 1 rank, losses differ by {apart[0]:.1e}, weights by {apart[1]:.1e}")
            assert max(apart) < 1e-6
            trained = trained or (some_losses, weights)
            assert trained == (some_losses, weights), f"{name}: other bits than over threads"
    usage_error(program, "threads", 3)
    usage_error(program, "threads", 1, 1, "no such file")


if len(sys.argv) < 3 or sys.argv[1] not in ("plain", "cxx14", "processes", "mpi", "nccl", "packed", "iris", "dlib", "ensmallen", "torch"):
    sys.exit(__doc__)
globals()[sys.argv[1]](*sys.argv[2:])
