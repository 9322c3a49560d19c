#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Tests of gradsync_train as its users meet it: a program with flags, files and exit codes.

usage: test_trainer.py command_line|digests|compression|sharding|checkpoints|weights|report|tcp PROGRAM
       test_trainer.py mpi|cluster PROGRAM MPIEXEC
"""
import fcntl
import itertools
import json
import math
import os
import pathlib
import pty
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata
import unittest
import unittest.mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "build/python"))  # where scripts/test --all installs it
try:
    import safetensors
except ImportError:
    safetensors = None

PROGRAM = None
MPIEXEC = None
TRANSFORMER = "--model transformer --d-model 32 --blocks 2 --heads 2 --context 16 --micro-batch 2 --steps 4 --warmup 2".split()
MLP = "--model mlp --d-model 8 --context 5 --hidden 40,24 --micro-batch 6 --steps 4 --warmup 2".split()
MODELS = {"transformer": TRANSFORMER, "mlp": MLP, "tied": TRANSFORMER + ["--tied"]}
STAGES = ("none", "optimizer", "gradients", "parameters")
POLICIES = list(itertools.product(("per-parameter", "flat", "capped"), ("none", "backward", "backward-thread", "forward"), ("in-buckets", "borrowed")))


def sealed(data):
    """The bytes of a checkpoint, with their checksum: see examples/digest.hpp."""
    mask, state = (1 << 64) - 1, 0x243f6a8885a308d3
    for at in range(0, len(data), 8):
        word = (state ^ int.from_bytes(data[at:at + 8], "little")) * 0x9e3779b97f4a7c15 & mask
        state = (word << 29 | word >> 35) & mask
    z = state ^ len(data)
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & mask
    z = (z ^ z >> 27) * 0x94d049bb133111eb & mask
    return data + (z ^ z >> 31).to_bytes(8, "little")


def read_safetensors(path):
    """{name: (shape, bytes)} by a reader of our own, and by Python's package where there is one."""
    file = pathlib.Path(path).read_bytes()
    length, = struct.unpack("<Q", file[:8])
    header = json.loads(file[8:8 + length])
    assert header.pop("__metadata__", {"format": "pt"}) == {"format": "pt"} and length % 8 == 0
    tensors, end = {}, 0
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, (first, end) = end, tensor["data_offsets"]
        assert (first, tensor["dtype"], end - first) == (begin, "F32", 4 * math.prod(tensor["shape"])), (name, tensor)
        tensors[name] = tensor["shape"], file[8 + length + first:8 + length + end]
    assert 8 + length + end == len(file)
    if safetensors is not None:
        assert {name: (t["shape"], bytes(t["data"])) for name, t in safetensors.deserialize(file)} == tensors
    return tensors


def safetensors_file(header, data):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + data


def write_safetensors(path, tensors):
    """Writes what `read_safetensors` returns: by Python's package where there is one."""
    if safetensors is not None and hasattr(safetensors, "TensorSpec"):
        import ctypes
        memory = {name: ctypes.create_string_buffer(data, len(data)) for name, (_, data) in tensors.items()}
        file = safetensors.serialize({name: safetensors.TensorSpec(dtype="float32", shape=shape, data_ptr=ctypes.addressof(memory[name]), data_len=len(data))
                                      for name, (shape, data) in tensors.items()})
    elif safetensors is not None:
        file = safetensors.serialize({name: {"dtype": "float32", "shape": shape, "data": data} for name, (shape, data) in tensors.items()})
    else:
        header, end = {}, 0
        for name, (shape, data) in tensors.items():
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(data)]}
            end += len(data)
        file = safetensors_file(header, b"".join(data for _, data in tensors.values()))
    pathlib.Path(path).write_bytes(file)


class TrainerTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        words = "a rank holds the gradient of its bucket until every other rank has reduced it".split()
        chance = random.Random(1)
        self.text = self.write("text", " ".join(chance.choice(words) for _ in range(3000)))

    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def call(self, *arguments, data=True):
        data = ["--data", self.text] if data else []
        done = subprocess.run([PROGRAM, *map(str, arguments), *data], capture_output=True, timeout=240)
        # UTF-8 in every locale. text=True would also turn carriage returns into newlines.
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8"))

    def train(self, *arguments):
        done = self.call(*arguments, "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def digest(self, *arguments):
        return self.train(*arguments)["params_digest"]

    def refused(self, expected, *arguments, data=True, code=2):
        """One sentence on standard error that says what is wrong; nothing on standard output."""
        done = self.call(*arguments, data=data)
        self.assertEqual(done.returncode, code, (arguments, done.stderr))
        self.assertEqual(done.stdout, "")
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for part in expected if isinstance(expected, tuple) else (expected,):
            self.assertIn(part, done.stderr)


class CommandLine(TrainerTest):
    def test_help_names_every_flag(self):
        page = self.call("--help", data=False).stdout
        for flag in """model backend ranks micro-batch accumulate steps buckets bucket-mib overlap seed recompute checkpoint
                       checkpoint-every resume sample prompt json data lr warmup optimizer weight-decay clip tied d-model blocks heads context
                       hidden independent gradients validate-every timeout no-shared-memory shard prefetch
                       no-reshard replicate-below device precision compress compress-after
                       compress-rank compress-bits first-bucket-mib reduce-dtype global-batch stop-after trace load-weights save-weights""".split():
            self.assertIn("--" + flag, page)

    def test_wrong_flags_are_refused(self):
        self.refused("--bogus", "--bogus")
        self.refused("--model", "--model", "rnn")
        self.refused("--backend", "--backend", "pigeons")
        self.refused("--buckets", "--buckets", "leaky")
        self.refused("--buckets optimal", "--buckets", "optimal", "--shard", "gradients")
        self.refused("--overlap", "--overlap", "sideways")
        self.refused("--shard", "--shard", "everything")
        self.refused("--prefetch", "--shard", "parameters", "--prefetch", "-1")
        self.refused("--ranks", "--ranks", "0")
        self.refused("--ranks", "--ranks", "two")
        self.refused("--steps", "--steps", "-3")
        for number in ("-1", "nan", "inf", "1e10", "0.1x", ""):
            self.refused(("--lr", "0 to 1e+09"), "--lr", number)
        self.refused(("--bucket-mib", "nan"), "--bucket-mib", "nan")
        for number in ("-1", "18446744073709551616", "1.5", "nan"):
            self.refused(("--seed", "whole number from 0"), "--seed", number)
        self.refused("--bucket-mib", "--bucket-mib", "0")
        self.refused("--hidden", "--model", "mlp", "--hidden", "0")

    def test_flags_that_do_not_fit_together_are_refused(self):
        self.refused(("--d-model 30", "--heads 4"), "--d-model", "30")
        self.refused(("--global-batch 5", "--micro-batch 8", "8"), "--global-batch", "5")
        self.refused(("--global-batch 8", "every rank computes one micro-batch"), "--global-batch", "8", "--ranks", "2")
        self.refused("--accumulate", "--global-batch", "32", "--accumulate", "2")
        self.refused(("--independent", "multiple of 16"), "--global-batch", "24", "--ranks", "2", "--independent")
        self.refused("--tied", "--model", "mlp", "--tied")
        self.refused("--recompute", "--model", "mlp", "--recompute")
        self.refused("--checkpoint", "--resume")
        self.refused("--checkpoint", "--checkpoint-every", "5")
        self.refused("--independent", "--independent", "--sample", "5")
        self.refused("--prompt", "--prompt", "")
        self.refused("--backend mpi", "--no-shared-memory")
        for flags in (["--prefetch", "2"], ["--no-reshard"], ["--replicate-below", "100"]):
            for stage in ("none", "optimizer", "gradients"):
                self.refused((flags[0], "--shard parameters"), *flags, "--shard", stage)
        for flags in (["--buckets", "flat"], ["--bucket-mib", "2"], ["--first-bucket-mib", "2"]):
            self.refused((flags[0], "--shard parameters"), *flags, "--shard", "parameters")
        self.refused(("--overlap forward", "--prefetch"), "--shard", "parameters", "--overlap", "forward")
        self.refused(("--overlap step", "--shard optimizer"), "--shard", "gradients", "--overlap", "step")
        self.refused(("--overlap step", "--optimizer muon"), "--shard", "optimizer", "--overlap", "step", "--optimizer", "muon")
        self.refused("--optimizer", "--optimizer", "shampoo")
        self.refused(("--compress quantize", "--overlap forward"), "--compress", "quantize", "--overlap", "forward")
        for flags in (["--compress-after", "1"], ["--compress-rank", "2"], ["--compress-bits", "4"]):
            self.refused((flags[0], "--compress"), *flags)
        self.refused("--compress quantize", "--compress", "power-sgd", "--compress-bits", "4")
        self.refused(("--compress-bits", "8,4,1"), "--compress", "quantize", "--compress-bits", "2")
        self.refused(("--reduce-dtype", "f32", "bf16"), "--reduce-dtype", "f16")
        self.refused(("--compress quantize", "--reduce-dtype bf16"), "--compress", "quantize", "--reduce-dtype", "bf16")
        for stage in STAGES:
            self.refused(("--gradients in-buckets", "--reduce-dtype bf16"), "--gradients", "in-buckets", "--reduce-dtype", "bf16",
                         "--shard", stage)
        for stage in STAGES[1:]:
            self.refused(("--compress power-sgd", "--shard none"), "--shard", stage, "--compress", "power-sgd")
            self.refused("--gradients borrowed", "--shard", stage, "--gradients", "borrowed")

    def test_every_backend_is_there_or_says_what_is_missing(self):
        done = self.call(*TRANSFORMER, "--backend", "mpi", "--ranks", 1)
        if done.returncode != 0:
            self.refused(("--backend mpi", "libopenmpi-dev", "libboost-mpi-dev"), *TRANSFORMER, "--backend", "mpi")

    def test_a_device_is_there_or_the_program_says_what_is_missing(self):
        done = self.call(*TRANSFORMER, "--device", "cuda", "--ranks", 1)
        if done.returncode != 0:
            missing = "no CUDA device" if "to be found" in done.stderr else "built without CUDA; install"
            self.refused(("--device cuda", missing), *TRANSFORMER, "--device", "cuda")
            self.refused(("--device cuda", missing), *TRANSFORMER, "--backend", "nccl", "--device=cuda")
        self.refused(("--backend nccl", "--device cuda"), *TRANSFORMER, "--backend", "nccl")
        self.refused(("--precision", "--device cuda"), *TRANSFORMER, "--precision", "f32")

    def test_texts_that_cannot_serve_are_refused(self):
        self.refused(("--data", "/does/not/exist"), "--data", "/does/not/exist", data=False)
        self.refused(("directory", str(self.folder)), "--data", self.folder, data=False)
        os.mkfifo(self.folder / "pipe")
        self.refused(("not a regular file", str(self.folder / "pipe")), "--data", self.folder / "pipe", data=False)
        self.refused(("0 bytes", "--context"), "--data", self.write("empty", ""), data=False)
        self.refused(("--context", "--data"), "--data", self.write("short", "short"), data=False)
        self.refused(("32768", "--micro-batch"), *TRANSFORMER, "--micro-batch", "1024", "--accumulate", "16")

    def test_files_that_cannot_be_written_are_refused(self):
        for flag in ("--json", "--trace"):
            self.refused((flag, "/does/not/exist/r.json"), *TRANSFORMER, flag, "/does/not/exist/r.json")
        file = self.folder / "r.json"
        self.refused("--context", *TRANSFORMER, "--context", 100000, "--json", file, "--trace", file, "--checkpoint", file)
        self.assertFalse(file.exists())
        self.refused(("--checkpoint", self.text), *TRANSFORMER, "--checkpoint", pathlib.Path(self.text) / "run1")


class Digests(TrainerTest):
    def test_policies_do_not_change_the_result(self):
        """Every bucket policy with every overlap policy, gradients in buckets or borrowed: the same bits."""
        for (name, flags), ranks in itertools.product(MODELS.items(), (2, 3)):
            digests = {}
            for buckets, overlap, gradients in POLICIES:
                digests[buckets, overlap, gradients] = self.digest(
                    *flags, "--ranks", ranks, "--buckets", buckets, "--overlap", overlap, "--gradients", gradients,
                    "--bucket-mib", 0.02, "--first-bucket-mib", 0.004)
            self.assertEqual(len(set(digests.values())), 1, (name, ranks, digests))

    def test_buckets_planned_on_the_way_do_not_change_the_result(self):
        for model in MODELS.values():
            longer = [*model, "--steps", "8"]
            expected = self.digest(*longer)
            for overlap, gradients in (("none", "in-buckets"), ("backward", "borrowed"), ("backward-polls", "in-buckets"),
                                       ("backward-thread", "in-buckets"), ("forward", "in-buckets")):
                result = self.train(*longer, "--buckets", "optimal", "--overlap", overlap, "--gradients", gradients)
                self.assertEqual(result["params_digest"], expected, (model, overlap, gradients))
                profile = result["profile"]
                self.assertEqual(sum(g["bytes"] for g in profile["gradients"]), 4 * result["parameters"])
                self.assertEqual(min(g["ready"] for g in profile["gradients"]), 0)
                self.assertGreater(profile["fixed"] + profile["per_byte"], 0)
        self.assertEqual(self.digest(*longer, "--buckets", "optimal", "--accumulate", "2", "--ranks", "1"),
                         self.digest(*longer, "--ranks", "2"))
        self.assertNotIn("profile", self.train(*longer))

    def test_checks_of_writes_find_nothing_and_change_nothing(self):
        for flags in MODELS.values():
            expected = self.digest(*flags)
            with unittest.mock.patch.dict(os.environ, GRADSYNC_CHECKS="1"):
                for more in (["--overlap", "forward"], ["--gradients", "borrowed"], ["--shard", "optimizer"], ["--shard", "gradients"], ["--shard", "parameters"]):
                    self.assertEqual(self.digest(*flags, *more, *([] if "parameters" in more else ["--bucket-mib", 0.02])), expected, more)

    def test_ranks_and_accumulation_agree(self):
        """N ranks with one micro-batch each, and fewer ranks that accumulate, sum the same gradients in the same order."""
        for (name, flags), n in itertools.product(MODELS.items(), (2, 3, 4)):
            parallel = self.digest(*flags, "--ranks", n)
            self.assertEqual(parallel, self.digest(*flags, "--ranks", 1, "--accumulate", n), (name, n))
            self.assertEqual(parallel, self.digest(*flags, "--ranks", 1, "--accumulate", n, "--gradients", "borrowed"), (name, n))

    def test_a_step_has_the_same_bits_on_any_number_of_ranks(self):
        small = ["--bucket-mib", 0.02, "--first-bucket-mib", 0.004]
        for stage in ("gradients", "parameters"):  # they reduce every micro-batch by itself
            for overlap in ("none", "backward"):
                found = {self.digest(*TRANSFORMER, "--global-batch", 16, "--ranks", n, "--shard", stage, "--overlap", overlap)
                         for n in (1, 2, 3, 4, 5, 8)}
                self.assertEqual(found, {self.digest(*TRANSFORMER, "--global-batch", 16, "--ranks", 8)}, (stage, overlap))
        ways = {1: ["--gradients", "borrowed", "--buckets", "per-parameter"], 2: ["--overlap", "backward", *small, "--gradients", "borrowed"],
                3: ["--shard", "optimizer", "--overlap", "forward"], 4: ["--overlap", "forward"], 6: ["--buckets", "flat"],
                8: ["--shard", "optimizer", "--buckets", "per-parameter"]}
        for micro_batches, ranks in ((8, (1, 3, 4, 8)), (12, (1, 2, 6)), (24, (3, 4, 6))):
            run = [*TRANSFORMER, "--global-batch", 2 * micro_batches]
            expected = self.digest(*run, "--ranks", ranks[-1])
            for n in ranks:
                for flags in (ways[n], []):
                    self.assertEqual(self.digest(*run, "--ranks", n, *flags), expected, (micro_batches, n, flags))

    def test_muon_has_the_same_bits_on_any_number_of_ranks_in_every_stage(self):
        for flags in MODELS.values():
            run = [*flags, "--optimizer", "muon", "--global-batch", 36, "--steps", 3]
            whole = self.train(*run, "--ranks", 1)
            self.assertNotEqual(whole["params_digest"], self.digest(*run, "--ranks", 1, "--optimizer", "adamw"))
            for stage, n in itertools.product(STAGES, (1, 2, 3, 4, 6)):
                buckets = ["--bucket-mib", 0.05] if stage == "gradients" else []
                result = self.train(*run, "--ranks", n, "--shard", stage, *buckets)
                self.assertEqual(result["params_digest"], whole["params_digest"], (stage, n))
            self.assertEqual(self.digest(*run, "--ranks", 2, "--shard", "optimizer", "--overlap", "forward"), whole["params_digest"])

    def test_recomputation_keeps_less_and_does_not_change_the_result(self):
        kept, computed = self.train(*TRANSFORMER), self.train(*TRANSFORMER, "--recompute")
        self.assertEqual(kept["params_digest"], computed["params_digest"])
        self.assertLess(computed["bytes_activations"], kept["bytes_activations"])
        self.assertEqual(self.digest(*TRANSFORMER, "--accumulate", 2, "--tied"),
                         self.digest(*TRANSFORMER, "--accumulate", 2, "--tied", "--recompute"))

    def test_runs_repeat_and_seeds_matter(self):
        for flags in MODELS.values():
            self.assertEqual(self.digest(*flags), self.digest(*flags))
            self.assertNotEqual(self.digest(*flags), self.digest(*flags, "--seed", 2))


class Compression(TrainerTest):
    """--compress: fewer bytes, other bits, which are the same on all ranks (or a run fails) and in all runs."""

    LOW_RANK = ["--compress", "power-sgd", "--compress-rank", 1]
    FEW_BITS = ["--compress", "quantize", "--compress-bits", 1]
    ALL = (LOW_RANK, FEW_BITS)
    MANY = ["--bucket-mib", 0.02, "--first-bucket-mib", 0.004]

    def test_fewer_bytes_travel(self):
        for flags in MODELS.values():
            whole = self.train(*flags)
            for compress in self.ALL:
                compressed = self.train(*flags, *compress)
                self.assertLess(compressed["comm_bytes"], whole["comm_bytes"] / 2, compress)
                self.assertNotEqual(compressed["params_digest"], whole["params_digest"])
                late = self.digest(*flags, *compress, "--compress-after", 4)
                self.assertEqual(late, whole["params_digest"], compress)

    def test_low_rank_does_not_depend_on_policies(self):
        for ranks in (2, 3):
            expected = self.digest(*TRANSFORMER, *self.LOW_RANK, "--ranks", ranks)
            for buckets, overlap, gradients in (("per-parameter", "backward", "borrowed"), ("flat", "none", "in-buckets"),
                                                ("capped", "backward-thread", "in-buckets"), ("optimal", "backward-polls", "borrowed")):
                found = self.digest(*TRANSFORMER, *self.LOW_RANK, "--ranks", ranks, "--buckets", buckets, "--overlap", overlap,
                                    "--gradients", gradients, *(self.MANY if buckets == "capped" else []))
                self.assertEqual(found, expected, (ranks, buckets, overlap, gradients))

    def test_a_resumed_run_gives_the_same_bits(self):
        for compress in self.ALL:
            run = [*TRANSFORMER, *compress, *self.MANY, "--accumulate", 2, "--ranks", 3, "--compress-after", 1]
            kept = ["--checkpoint", self.folder / compress[1]]
            whole = self.digest(*run)
            self.train(*run, *kept, "--stop-after", 3)
            self.assertEqual(self.digest(*run, *kept, "--resume"), whole, compress)
            self.refused(("another model", "compress=" + compress[1]), *TRANSFORMER, *kept, "--resume")
            self.refused(("another model", "ranks=3"), *run, *kept, "--resume", "--ranks", 2)

    def test_compressed_runs_learn(self):
        for compress in self.ALL:
            begun, longer = (self.train(*MLP, *compress, "--steps", steps, "--lr", 0.003) for steps in (4, 150))
            self.assertLess(longer["validation_loss"], begun["validation_loss"] - 1, compress)

    def test_gradients_travel_in_16_bits(self):
        """Half the bytes of gradients, the others as they were; the same bits by every way, and the curve of f32 but for rounding."""
        half = ["--reduce-dtype", "bf16"]
        for name, flags in MODELS.items():
            digests = {}
            for stage in STAGES:
                run = [*flags, "--steps", 40, "--lr", 0.003, "--shard", stage]
                expected, found = self.train(*run), self.train(*run, *half)
                saved = expected["comm_bytes"] - found["comm_bytes"]
                self.assertAlmostEqual(saved, 2 * expected["parameters"], delta=64 * 30, msg=(name, stage))
                self.assertEqual(found["config"]["reduce_dtype"], "bf16")
                self.assertNotEqual(found["params_digest"], expected["params_digest"])
                for field in ("train_loss", "validation_loss"):
                    self.assertAlmostEqual(found[field], expected[field], delta=0.02, msg=(name, stage, field))
                digests[stage] = found["params_digest"]
            self.assertEqual(len(set(digests.values())), 1, (name, digests))
            expected = self.digest(*flags, *half)
            for more in (["--overlap", "forward", *self.MANY], ["--buckets", "flat", "--overlap", "backward-thread"], ["--buckets", "optimal"],
                         ["--shard", "optimizer", "--overlap", "step", *self.MANY], ["--shard", "optimizer", "--overlap", "forward"],
                         ["--shard", "gradients", "--overlap", "none", *self.MANY], ["--shard", "parameters", "--no-reshard"]):
                self.assertEqual(self.digest(*flags, *half, *more), expected, (name, more))

    def test_micro_batches_are_not_rounded_to_16_bits(self):
        """They add up in f32, so that the error does not grow with their number."""
        for stage in STAGES:
            run = [*TRANSFORMER, "--steps", 20, "--accumulate", 16, "--ranks", 3, "--shard", stage]
            expected, found = self.train(*run), self.train(*run, "--reduce-dtype", "bf16")
            for field in ("train_loss", "validation_loss"):
                self.assertAlmostEqual(found[field], expected[field], delta=0.005, msg=(stage, field))


class Sharding(TrainerTest):
    """--shard: what is split over the ranks changes neither bits nor what the other flags do."""

    def policies(self):
        """Of each stage some that differ as much as they can."""
        small = ["--bucket-mib", 0.02, "--first-bucket-mib", 0.004]
        yield "none", ["--overlap", "forward", *small]
        yield "none", ["--overlap", "forward", "--gradients", "borrowed", "--buckets", "per-parameter"]
        for stage in ("optimizer", "gradients"):
            for overlap in ("none", "backward", "backward-thread", "forward"):
                yield stage, ["--overlap", overlap, *small]
            yield stage, ["--overlap", "forward", "--buckets", "flat"]
            yield stage, ["--overlap", "backward", "--buckets", "per-parameter"]
        yield "optimizer", ["--overlap", "step", *small]
        yield "optimizer", ["--overlap", "step", "--buckets", "flat"]
        for overlap in ("none", "backward", "backward-thread"):
            yield "parameters", ["--overlap", overlap]
        yield "parameters", ["--prefetch", 0]
        yield "parameters", ["--prefetch", 3, "--replicate-below", 100]
        yield "parameters", ["--no-reshard", "--replicate-below", 1000000]
        yield "parameters", ["--no-reshard"]

    def test_every_stage_gives_the_same_bits(self):
        for (name, flags), ranks in itertools.product(MODELS.items(), (1, 2, 3, 4)):
            expected = self.train(*flags, "--ranks", ranks)
            for stage, more in itertools.islice(self.policies(), ranks % 2, None, 2):
                found = self.train(*flags, "--ranks", ranks, "--shard", stage, *more)
                for field in ("params_digest", "validation_loss", "train_loss"):
                    self.assertEqual(found[field], expected[field], (name, ranks, stage, more, field))

    def test_what_is_not_clipped_or_is_recomputed(self):
        for more in (["--clip", 0], ["--recompute", "--clip", 0.01]):
            expected = self.digest(*TRANSFORMER, "--ranks", 3, *more)
            for stage in STAGES[1:]:
                self.assertEqual(self.digest(*TRANSFORMER, "--ranks", 3, "--shard", stage, *more), expected, (stage, more))
            inside = ["--shard", "optimizer", "--overlap", "step"]
            self.assertEqual(self.digest(*TRANSFORMER, "--ranks", 3, *inside, *more), expected, more)

    def test_accumulation(self):
        """The optimizer's shards get the sums of whole gradients. Where gradients are sharded, they are added up over the
        ranks first and over the micro-batches then: rounded otherwise, and no further off than that."""
        for name, flags in MODELS.items():
            flags = [*flags, "--ranks", 3, "--accumulate", 3, "--steps", 8]
            expected = self.train(*flags)
            for overlap in ("backward", "forward"):
                self.assertEqual(self.digest(*flags, "--shard", "optimizer", "--overlap", overlap), expected["params_digest"], name)
            sharded = [self.train(*flags, "--shard", stage) for stage in ("gradients", "parameters")]
            self.assertEqual(sharded[0]["params_digest"], sharded[1]["params_digest"], name)
            for field in ("train_loss", "validation_loss"):
                self.assertAlmostEqual(sharded[0][field], expected[field], delta=1e-4, msg=(name, field))

    def test_validation_sample_and_independence(self):
        for flags in (TRANSFORMER, MLP):
            flags = [*flags, "--ranks", 3, "--validate-every", 1, "--sample", 20]
            said = {}
            for stage in STAGES:
                done = self.call(*flags, "--shard", stage)
                self.assertEqual(done.returncode, 0, done.stderr)
                lines = done.stdout.splitlines()
                said[stage] = ([line for line in lines if "validation" in line], lines[lines.index("----"):])
                self.assertEqual(said[stage], said["none"], stage)
            self.assertEqual(len(said["none"][0]), 4)
        for stage in STAGES:
            self.assertEqual(self.train(*TRANSFORMER, "--shard", stage, "--independent", "--ranks", 2)["comm_ms"], 0)

    def test_bytes_are_those_of_the_formulas(self):
        """fp32: 4 P weights, 4 P gradients, 8 P of Adam's; what is sharded is divided by the ranks. On top: gaps of up to
        60 bytes between parameters and of up to 63 at the end of a shard, and memory for what is whole for a while."""
        flags = "--model transformer --d-model 64 --blocks 6 --heads 2 --context 16 --micro-batch 1 --steps 2".split()
        for ranks, (stage, sharded) in itertools.product((1, 2, 4), zip(STAGES, ("", "o", "og", "ogp"))):
            buckets = [] if stage == "parameters" else ["--bucket-mib", 0.25, "--first-bucket-mib", 0.25]
            r = self.train(*flags, "--ranks", ranks, "--shard", stage, *buckets)
            P, tensors = r["parameters"], 2 + 6 * 12 + 3
            largest = 4 * (12 * 64 * 64 + 13 * 64) if stage == "parameters" else 0.25 * 2**20
            whole = {"parameters": 4 * P, "gradients": 4 * P, "optimizer": 8 * P}
            for part, bytes in whole.items():
                share = bytes / ranks if part[0] in sharded else bytes
                # Two buckets, one that is filled and one that travels; two units, one in use and one on its way.
                passing = 2 * largest if part[0] in sharded and part != "optimizer" else 0
                found = r["bytes_" + part]
                self.assertGreaterEqual(found, share, (ranks, stage, part))
                self.assertLessEqual(found, share + passing + 2 * 64 * tensors, (ranks, stage, part))
            self.assertGreater(r["bytes_activations"], 4 * 16 * 6 * 15 * 64)

    def test_a_checkpoint_of_any_stage_and_ranks_serves_any_other(self):
        """The ranks change, and with them the order of sums: the same curve, not the same bits."""
        for name, flags in MODELS.items():
            run = [*flags, "--steps", 12, "--global-batch", 12 * int(flags[flags.index("--micro-batch") + 1]),
                   "--validate-every", 4]
            whole = self.train(*run, "--ranks", 4)
            stages = [("parameters", 4), ("gradients", 2), ("optimizer", 3), ("parameters", 1)]
            kept = ["--checkpoint", self.folder / name]
            for stop, (stage, ranks) in zip((3, 6, 9, 12), stages):
                r = self.train(*run, *kept, "--shard", stage, "--ranks", ranks, "--stop-after", stop,
                               *(["--resume"] if stop > 3 else []))
            self.assertAlmostEqual(r["validation_loss"], whole["validation_loss"], delta=1e-4, msg=name)

    def test_a_checkpoint_keeps_the_bits(self):
        """From stage to stage on as many ranks, and to one rank that adds up in their order."""
        for name, flags in MODELS.items():
            expected = self.digest(*flags, "--ranks", 3)
            kept = [*flags, "--checkpoint", self.folder / name]
            for stop, (stage, ranks) in enumerate((("parameters", 3), ("none", 3), ("gradients", 3)), 1):
                self.train(*kept, "--ranks", ranks, "--shard", stage, "--stop-after", stop, *(["--resume"] if stop > 1 else []))
            self.assertEqual([p.name for p in (self.folder / name).iterdir()], ["checkpoint.gradsync"])
            for resume in (["--shard", "none", "--overlap", "forward"], ["--shard", "parameters"], ["--shard", "optimizer"]):
                copy = self.folder / "-".join([name, *resume])
                shutil.copytree(self.folder / name, copy)
                kept[-1] = copy
                self.assertEqual(self.digest(*kept, "--ranks", 3, *resume, "--resume"), expected, (name, resume))
            kept[-1] = self.folder / name
            self.assertEqual(self.digest(*kept, "--ranks", 1, "--accumulate", 3, "--shard", "optimizer", "--resume"), expected)

    def test_the_file_is_the_same(self):
        files = []
        for stage in STAGES:
            self.train(*TRANSFORMER, "--tied", "--ranks", 3, "--shard", stage, "--checkpoint", self.folder / stage)
            files.append((self.folder / stage / "checkpoint.gradsync").read_bytes())
        self.assertEqual(len(set(files)), 1)

    def test_a_rank_that_stops_in_a_checkpoint_leaves_the_old_one(self):
        """Rank 0 stops as it begins to write; rank 1 cannot keep what it has only a part of, and says what there is."""
        for flags in (["--shard", "optimizer"], ["--shard", "parameters"]):
            run = self.folder / flags[-1]
            flags = [*TRANSFORMER, *flags, "--checkpoint", str(run)]
            self.train(*flags, "--stop-after", 2)
            before = (run / "checkpoint.gradsync").read_bytes()
            os.mkfifo(run / "checkpoint.gradsync.new0")
            said = self.folder / "said"
            with open(said, "w") as stderr:
                process = subprocess.Popen([PROGRAM, *flags, "--data", self.text, "--resume", "--checkpoint-every", "1",
                                            "--timeout", "3"], stdout=subprocess.DEVNULL, stderr=stderr)
            self.addCleanup(process.kill)
            self.assertTrue(wait_for(lambda: "cannot keep" in said.read_text()), said.read_text())
            with open(run / "checkpoint.gradsync.new0", "rb") as pipe:
                pipe.read()
            self.assertEqual(process.wait(timeout=240), 1)
            self.assertIn("rank 1 cannot keep the state after step 3", said.read_text())
            self.assertIn("go on with --resume from step 2", said.read_text())
            self.assertEqual((run / "checkpoint.gradsync").read_bytes(), before)
            self.assertEqual(self.digest(*flags, "--resume"), self.digest(*TRANSFORMER))


class Checkpoints(TrainerTest):
    def kept(self, *more):
        return ["--checkpoint", str(self.folder / "run"), *more]

    def test_a_run_goes_on_with_another_number_of_ranks_to_the_same_bits(self):
        run = [*TRANSFORMER, "--steps", 6]
        expected = self.digest(*run, "--global-batch", 16, "--ranks", 1)
        for stage in STAGES:
            for ranks in ((4, 3, 1), (1, 8, 2)):
                kept = [*run, "--shard", stage, "--checkpoint", self.folder / f"{stage}-{ranks[0]}"]
                self.train(*kept, "--global-batch", 16, "--ranks", ranks[0], "--stop-after", 2)
                self.train(*kept, "--ranks", ranks[1], "--stop-after", 4, "--resume")
                self.assertEqual(self.digest(*kept, "--ranks", ranks[2], "--resume"), expected, (stage, ranks))

    def test_a_run_with_muon_goes_on_with_another_number_of_ranks_to_the_same_bits(self):
        run = [*TRANSFORMER, "--optimizer", "muon", "--steps", 4]
        expected = self.digest(*run, "--global-batch", 16, "--ranks", 1)
        for stage in STAGES:
            kept = [*run, "--shard", stage, "--checkpoint", self.folder / stage]
            self.train(*kept, "--global-batch", 16, "--ranks", 3, "--stop-after", 2)
            self.refused("optimizer=muon", *kept, "--optimizer", "adamw", "--resume")
            self.assertEqual(self.digest(*kept, "--ranks", 2, "--resume"), expected, stage)

    def test_a_run_begins_anew_while_there_is_no_checkpoint(self):
        resume = [*TRANSFORMER, *self.kept("--resume")]
        done = self.call(*resume)
        self.assertEqual((done.returncode, done.stderr), (0, f"gradsync_train: there is no checkpoint in {self.folder}/run yet; beginning anew\n"))
        self.assertEqual(self.call(*resume).stderr, "")
        self.assertEqual(self.digest(*resume), self.digest(*TRANSFORMER))

    def test_another_batch_from_a_checkpoint_on_is_said(self):
        kept = [*TRANSFORMER, "--checkpoint", self.folder / "run"]
        self.train(*kept, "--global-batch", 12, "--ranks", 2, "--stop-after", 2)
        done = self.call(*kept, "--ranks", 2, "--accumulate", 1, "--resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2 micro-batches of 2 samples from here on, and had 6 of 2", done.stderr)
        done = self.call(*kept, "--ranks", 1, "--resume")
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_the_loss_is_that_of_all_micro_batches(self):
        first, second = (self.train(*TRANSFORMER, "--global-batch", 14, "--ranks", n)["train_loss"] for n in (1, 3))
        self.assertAlmostEqual(first, second, places=9)

    def test_a_resumed_run_gives_the_same_bits(self):
        for name, flags in MODELS.items():
            whole = self.digest(*flags, "--accumulate", 2)
            run = ["--accumulate", 2, "--checkpoint", self.folder / name]
            first = self.train(*flags, *run, "--stop-after", 2)
            self.assertEqual(first["steps"], 2)
            self.assertNotEqual(first["params_digest"], whole)
            self.assertEqual(self.digest(*flags, *run, "--resume"), whole)
            # Once more, from the end: nothing is left to train.
            self.assertEqual(self.digest(*flags, *run, "--resume"), whole)

    def test_resuming_on_other_ranks_keeps_the_data_order(self):
        whole = self.digest(*TRANSFORMER, "--ranks", 2)
        self.train(*TRANSFORMER, *self.kept("--stop-after", 3, "--ranks", 2))
        self.assertEqual(self.digest(*TRANSFORMER, *self.kept("--resume", "--ranks", 1, "--accumulate", 2)), whole)

    def test_nothing_is_left_but_the_checkpoint(self):
        self.train(*TRANSFORMER, *self.kept("--checkpoint-every", 1))
        self.assertEqual([p.name for p in (self.folder / "run").iterdir()], ["checkpoint.gradsync"])

    def test_torn_and_foreign_files_are_refused(self):
        self.train(*TRANSFORMER, *self.kept("--stop-after", 2))
        file = self.folder / "run" / "checkpoint.gradsync"
        good = file.read_bytes()
        resume = (*TRANSFORMER, *self.kept("--resume"))
        for cut in (0, 7, 8, 20, 56, len(good) // 2, len(good) - 8, len(good) - 1):
            file.write_bytes(good[:cut])
            self.refused("--resume", *resume)
        for place in (9, 30, 60, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1:])
            self.refused("--resume", *resume)
        file.write_bytes(good + b"more")
        self.refused("torn", *resume)
        file.write_bytes(b"PK\x03\x04" + bytes(100))
        self.refused("not a checkpoint", *resume)
        file.unlink()
        os.mkfifo(file)  # it waits for no writer
        self.refused("cannot read", *resume)
        file.unlink()
        file.write_bytes(good)
        self.refused("--steps", *resume, "--steps", "1")
        self.refused("another model", *TRANSFORMER, *self.kept("--resume", "--tied"))
        self.refused("another model", *MLP, *self.kept("--resume"))
        self.assertEqual(self.call(*resume).returncode, 0)

    def test_a_file_made_to_mislead_is_refused(self):
        """Its checksum is right, and its numbers are not."""
        self.train(*TRANSFORMER, *self.kept("--stop-after", 2))
        file = self.folder / "run" / "checkpoint.gradsync"
        good = file.read_bytes()
        for place, value, said in ((56, 1 << 40, "its description"), (56, len(good), "its description"), (56, (1 << 64) - 8, "its description"),
                                   (56, 7, "its description"), (56, 0, "another model"), (40, 1 << 40, "micro-batches")):
            file.write_bytes(sealed(good[:place] + value.to_bytes(8, "little") + good[place + 8:-8]))
            self.refused(said, *TRANSFORMER, *self.kept("--resume"))
        file.write_bytes(sealed(good[:-8]))
        self.assertEqual(file.read_bytes(), good)

    def test_a_full_disk_leaves_the_last_checkpoint(self):
        self.train(*TRANSFORMER, *self.kept("--stop-after", 2))
        file = self.folder / "run" / "checkpoint.gradsync"
        good = file.read_bytes()
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) // 2, resource.RLIM_INFINITY))
        done = subprocess.run([PROGRAM, *TRANSFORMER, *map(str, self.kept("--resume")), "--data", self.text], capture_output=True, timeout=240,
                              text=True, preexec_fn=limit, restore_signals=False)  # Python ignores SIGXFSZ
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("the last checkpoint is unchanged; cannot write", done.stderr)
        self.assertIn("File too large", done.stderr)
        self.assertEqual(file.read_bytes(), good)
        self.assertEqual([p.name for p in file.parent.iterdir()], ["checkpoint.gradsync"])

    def test_a_changed_text_is_mentioned(self):
        self.train(*TRANSFORMER, *self.kept("--stop-after", 2))
        self.text = self.write("other", "quite another text " * 500)
        done = self.call(*TRANSFORMER, *self.kept("--resume"))
        self.assertEqual(done.returncode, 0)
        self.assertIn("text has changed", done.stderr)


    def test_a_rank_that_does_not_come_is_survived_by_the_state(self):
        """Rank 0 stops in its first checkpoint, which nobody reads from; rank 1 waits for it, and then keeps the state."""
        run = self.folder / "run"
        run.mkdir()
        os.mkfifo(run / "checkpoint.gradsync.new0")
        flags = [*TRANSFORMER, "--checkpoint", str(run)]
        process = subprocess.Popen([PROGRAM, *flags, "--data", self.text, "--checkpoint-every", "2", "--timeout", "3"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        self.assertTrue(wait_for(lambda: (run / "checkpoint.gradsync").exists()))
        with open(run / "checkpoint.gradsync.new0", "rb") as pipe:
            pipe.read()
        errors = process.communicate(timeout=240)[1]
        self.assertEqual(process.returncode, 1, errors)
        self.assertEqual(errors.count("has kept the state"), 1, errors)
        self.assertIn("has kept the state after step 2", errors)
        (run / "checkpoint.gradsync.new0").unlink(missing_ok=True)
        self.assertEqual(self.digest(*flags, "--resume"), self.digest(*TRANSFORMER))

    def test_a_rank_that_was_stopped_as_it_wrote_changes_no_later_checkpoint(self):
        run = self.folder / "run"
        run.mkdir()
        stopped = run / "checkpoint.gradsync.new0"
        with open(stopped, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.train(*TRANSFORMER, *self.kept("--stop-after", 2))
            file.write(b"late")
        self.assertEqual(stopped.read_bytes(), b"late")
        self.assertEqual(sorted(p.name for p in run.iterdir()), ["checkpoint.gradsync", stopped.name])
        self.assertEqual(self.digest(*TRANSFORMER, *self.kept("--resume")), self.digest(*TRANSFORMER))
        self.assertFalse(stopped.exists())  # nobody has its lock any more


class Weights(TrainerTest):
    """Weights as .safetensors."""

    KEPT = ["--lr", 0, "--steps", 1]  # no step changes anything

    def setUp(self):
        super().setUp()
        self.file, self.parts = self.folder / "weights.safetensors", self.folder / "parts"
        if safetensors is None:
            print("without Python's package safetensors", file=sys.stderr)

    def read_parts(self):
        index = json.loads((self.parts / "model.safetensors.index.json").read_text())
        tensors = {}
        for part in sorted(set(index["weight_map"].values())):
            for name, tensor in read_safetensors(self.parts / part).items():
                self.assertEqual(index["weight_map"].pop(name), part)
                tensors[name] = tensor
        self.assertEqual(index["weight_map"], {})
        self.assertEqual(index["metadata"]["total_size"], sum(len(data) for _, data in tensors.values()))
        return tensors

    def test_the_file_holds_every_weight_of_the_checkpoint(self):
        for name, flags in MODELS.items():
            run = self.folder / name
            result = self.train(*flags, "--save-weights", self.file, "--checkpoint", run)
            tensors = read_safetensors(self.file)
            weights = b"".join(data for _, data in tensors.values())
            self.assertEqual(len(weights), 4 * result["parameters"])
            self.assertEqual(sealed(weights)[-8:], bytes.fromhex(result["params_digest"])[::-1])
            checkpoint = (run / "checkpoint.gradsync").read_bytes()
            at = 64 + int.from_bytes(checkpoint[56:64], "little")
            for tensor, (_, data) in tensors.items():
                self.assertEqual(checkpoint[at:at + len(data)], data, tensor)
                at += 3 * ((len(data) + 7) // 8 * 8)
            self.assertEqual(at + 8, len(checkpoint))
        self.assertEqual(tensors["embedding.weight"][0], [256, 32])
        self.assertEqual([p.name for p in self.folder.glob("weights*")], [self.file.name])

    def test_every_stage_saves_the_same(self):
        for flags in MODELS.values():
            self.train(*flags, "--ranks", 2, "--global-batch", 36, "--save-weights", self.file)
            expected = read_safetensors(self.file)
            for stage, ranks in itertools.product(STAGES, (1, 2, 3)):
                run = [*flags, "--shard", stage, "--ranks", ranks, "--global-batch", 36]
                self.train(*run, "--save-weights", self.file)
                self.assertEqual(read_safetensors(self.file), expected, (stage, ranks))
                self.train(*run, "--save-weights", self.parts)
                names = sorted(p.name for p in self.parts.iterdir())
                if stage == "parameters" and ranks > 1:
                    self.assertEqual(self.read_parts(), expected, (stage, ranks))
                    self.assertEqual(len(names), 1 + ranks, names)  # and nothing of what was there before
                else:
                    self.assertEqual(names, ["model.safetensors"])
                    self.assertEqual(read_safetensors(self.parts / names[0]), expected)
            self.train(*flags, "--shard", "parameters", "--ranks", 2, "--save-weights", self.parts)
            self.assertEqual(len(list(self.parts.iterdir())), 3)

    def test_weights_of_python_are_loaded_to_the_bit(self):
        self.train(*MLP, *self.KEPT, "--save-weights", self.file)
        chance = random.Random(5)
        tensors = {name: (shape, struct.pack(f"<{len(data) // 4}f", *(chance.gauss(0, 0.1) for _ in range(len(data) // 4))))
                   for name, (shape, data) in sorted(read_safetensors(self.file).items())}
        given = self.folder / "given.safetensors"
        write_safetensors(given, tensors)
        for stage, ranks in itertools.product(STAGES, (1, 3)):
            self.train(*MLP, *self.KEPT, "--shard", stage, "--ranks", ranks, "--load-weights", given, "--save-weights", self.parts)
            self.assertEqual(self.read_parts() if stage == "parameters" and ranks > 1 else read_safetensors(self.parts / "model.safetensors"), tensors)
        digests = set()
        for path in (given, self.parts, self.parts / "model.safetensors.index.json"):
            for stage in STAGES:
                digests.add(self.digest(*MLP, "--load-weights", path, "--shard", stage))
        self.assertEqual(len(digests), 1)

    def test_weights_of_16_bits_are_converted(self):
        self.train(*MLP, *self.KEPT, "--save-weights", self.file)
        chance = random.Random(6)
        exact, files = {}, {"F16": ({}, b""), "BF16": ({}, b"")}
        for name, (shape, data) in sorted(read_safetensors(self.file).items()):
            values = [chance.randint(-100, 100) / 256 for _ in range(len(data) // 4)]  # exact in both types
            exact[name] = (shape, struct.pack(f"<{len(values)}f", *values))
            for dtype, (header, given) in files.items():
                packed = (struct.pack(f"<{len(values)}e", *values) if dtype == "F16" else
                          b"".join(struct.pack("<f", value)[2:] for value in values))
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(given), len(given) + len(packed)]}
                files[dtype] = header, given + packed
        for header, given in files.values():
            self.file.write_bytes(safetensors_file(header, given))
            for ranks in (1, 3):
                self.train(*MLP, *self.KEPT, "--ranks", ranks, "--load-weights", self.file, "--save-weights", self.parts)
                self.assertEqual(read_safetensors(self.parts / "model.safetensors"), exact)

    def test_loaded_weights_are_those_of_the_seed(self):
        for flags in MODELS.values():
            self.train(*flags, *self.KEPT, "--save-weights", self.file)
            for overlap in ("backward", "forward"):
                self.assertEqual(self.digest(*flags, "--seed", 1, "--load-weights", self.file, "--overlap", overlap), self.digest(*flags))

    def test_wrong_files_are_refused(self):
        self.train(*MLP, *self.KEPT, "--save-weights", self.file)
        good = self.file.read_bytes()
        length = int.from_bytes(good[:8], "little")
        header, data = json.loads(good[8:8 + length]), good[8 + length:]
        bias, table = header["layers.0.bias"], header["embedding.weight"]
        end = len(data)

        def changed(**tensors):
            return safetensors_file({**header, **tensors}, data)

        def without(name, **more):
            return {**{n: t for n, t in header.items() if n != name}, **more}

        wrong = {
            "it has 0 bytes": b"", "it has 7 bytes": good[:7], "and 42 follow": good[:50],
            "its header would have 100000001 bytes": struct.pack("<Q", 100_000_001) + good[8:],
            "its header would have 18446744073709551615 bytes": b"\xff" * 8 + good[8:],
            "its header is no JSON object": safetensors_file(b"[1]", b""), "no JSON object": safetensors_file(b"", b""),
            "has no JSON where": safetensors_file(b'{"a":', b""), "has no JSON where it should": safetensors_file(b'{"a\xff":{}}', b""),
            "names 'a' twice": safetensors_file(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', b""),
            "names 'shape' twice": safetensors_file(b'{"a":{"shape":[0],"shape":[0]}}', b""),
            "something else of 'a'": safetensors_file(b'{"a":' + b"[" * 100_000, b""), "something else of 'b'": safetensors_file({"b": {"shape": [[1]]}}, b""),
            "something else of 'c'": safetensors_file({"c": {"shape": [-1]}}, b""), "something else of 'd'": safetensors_file({"d": {"shape": [1.0]}}, b""),
            "something else of 'e'": safetensors_file({"e": 5}, b""), "something else of 'f'": safetensors_file(b'{"f":{"shape":[18446744073709551616]}}', b""),
            "something else of '__metadata__'": safetensors_file({"__metadata__": {"a": 1}}, b""),
            "says of 'g' too little": safetensors_file({"g": {"dtype": "F32", "shape": [0]}}, b""),
            "says of 'h' too little": safetensors_file({"h": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0, 0]}}, b""),
            "its dtype is 'F7'": changed(**{"layers.0.bias": {**bias, "dtype": "F7"}}),
            f"of {end}": changed(**{"layers.0.bias": {**bias, "data_offsets": [end - 80, end + 80]}}),
            "its data are bytes 8 to 4": changed(**{"layers.0.bias": {**bias, "data_offsets": [8, 4]}}),
            "its shape and dtype make": changed(**{"layers.0.bias": {**bias, "shape": [41]}}), "make 80": changed(**{"layers.0.bias": {**bias, "dtype": "F16"}}),
            "more elements than there can be": changed(**{"layers.0.bias": {**bias, "shape": [1 << 40, 1 << 40]}}),
            "an overlap before": changed(**{"layers.0.bias": {**bias, "data_offsets": [0, 160]}}),
            "a hole before": safetensors_file(without("embedding.weight"), data), f"has {len(data)} bytes that belong to no tensor": safetensors_file({}, data),
            "has 4 bytes that belong to no tensor": good + bytes(4),
            "it has no 'embedding.weight'": safetensors_file({}, b""), "it has 'another', which is unknown": changed(another={"dtype": "F32", "shape": [0], "data_offsets": [end, end]}),
            "the shape [8, 256] there, and [256, 8] here": changed(**{"embedding.weight": {**table, "shape": [8, 256]}}),
            "as I32, and only F32, F16 and BF16": changed(**{"layers.0.bias": {**bias, "dtype": "I32"}}),
        }
        for said, file in wrong.items():
            self.file.write_bytes(file)
            self.refused(("--load-weights", said, str(self.file)), *MLP, "--load-weights", self.file)
        self.refused("cannot read", *MLP, "--load-weights", self.folder / "missing")
        self.refused("cannot read", *MLP, "--load-weights", self.folder)  # neither an index nor a file in it
        os.mkfifo(self.folder / "pipe")
        self.refused("cannot read", *MLP, "--load-weights", self.folder / "pipe")
        self.file.write_bytes(good)
        self.refused("is of another model", *TRANSFORMER, "--load-weights", self.file)
        self.assertEqual(self.file.read_bytes(), good)

    def test_wrong_indices_are_refused(self):
        self.train(*MLP, *self.KEPT, "--shard", "parameters", "--save-weights", self.parts)
        file = self.parts / "model.safetensors.index.json"
        good = file.read_text()
        index = json.loads(good)
        first, last = (index["weight_map"][name] for name in ("embedding.weight", "layers.2.bias"))
        self.assertNotEqual(first, last)

        def mapped(**more):
            return json.dumps({"weight_map": {**index["weight_map"], **more}})

        for said, text in (("has no weight_map", "{}"), ("has no JSON", good[:-9]), ("no table of files", '{"weight_map": [1]}'), ("no table of files", '{"weight_map": {"a": 1}}'),
                           ("too many levels", "[" * 1000), ("names 'weight_map' twice", '{"weight_map": {}, "weight_map": {}}'),
                           ("not beside it", mapped(a="../weights.safetensors")), ("not beside it", mapped(a="/etc/passwd")), ("not beside it", mapped(a="..")),
                           ("cannot read", mapped(a="missing.safetensors")), ("which it does not", mapped(a=first)),
                           ("the index does not say so", mapped(**{"embedding.weight": last})), ("it has no 'embedding.weight'", '{"weight_map": {}}')):
            file.write_text(text)
            self.refused(("--load-weights", said), *MLP, "--load-weights", self.parts)
        file.write_text(good)
        self.train(*MLP, "--load-weights", self.parts)
        # A header of nearly the length that is allowed.
        (self.parts / first).write_bytes(safetensors_file(b'{"a":{"shape":[' + b"0," * 49_000_000 + b"0]}}", b""))
        self.refused("says something else of 'a'", *MLP, "--load-weights", self.parts)

    def test_flags(self):
        # With --resume they are for the first start only.
        self.train(*MLP, "--save-weights", self.file)
        again = [*MLP, "--load-weights", self.file, "--resume", "--checkpoint", self.folder / "run"]
        self.train(*again, "--stop-after", 2)
        self.assertEqual(self.digest(*again), self.digest(*MLP, "--load-weights", self.file))
        self.refused("--save-weights", *MLP, "--save-weights", self.file, "--independent")
        self.refused(("--save-weights", "/does/not/exist"), *MLP, "--save-weights", "/does/not/exist/w.safetensors")
        self.refused(("--save-weights", self.text), *MLP, "--save-weights", pathlib.Path(self.text) / "folder")
        self.refused(("--save-weights", self.text), *MLP, "--save-weights", self.text)

    def test_a_full_disk_leaves_the_last_weights(self):
        self.train(*MLP, "--save-weights", self.file)
        good = self.file.read_bytes()
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) // 2, resource.RLIM_INFINITY))
        done = subprocess.run([PROGRAM, *MLP, "--seed", "2", "--save-weights", self.file, "--data", self.text], capture_output=True, timeout=240,
                              text=True, preexec_fn=limit, restore_signals=False)  # Python ignores SIGXFSZ
        self.assertEqual(done.returncode, 1)
        self.assertIn("the last file of weights is unchanged; cannot write", done.stderr)
        self.assertEqual(self.file.read_bytes(), good)
        self.assertEqual([p.name for p in self.folder.glob("weights*")], [self.file.name])

    def test_a_rank_that_cannot_write_its_part_leaves_the_last_weights(self):
        run = [*MLP, "--shard", "parameters", "--save-weights", self.parts]
        self.train(*run, "--seed", 2)
        second = [p.name for p in self.parts.iterdir() if "-00002-of-" in p.name]
        shutil.rmtree(self.parts)
        self.train(*run)
        expected = self.read_parts()
        (self.parts / (second[0] + ".new1")).mkdir()
        done = self.call(*run, "--seed", 2)
        self.assertEqual(done.returncode, 1)
        self.assertIn("the last file of weights is unchanged; cannot write", done.stderr)
        self.assertIn(second[0], done.stderr)
        self.assertEqual(self.read_parts(), expected)


class Report(TrainerTest):
    def test_fields(self):
        r = self.train(*TRANSFORMER, "--ranks", 3, "--accumulate", 2, "--steps", 7)
        self.assertEqual((r["world_size"], r["global_batch"], r["steps"]), (3, 12, 7))
        self.assertEqual(r["transport"], "3 threads")
        self.assertEqual(r["parameters"], 2 * 256 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32)
        self.assertLessEqual(r["step_ms"]["min"], r["step_ms"]["median"])
        self.assertLessEqual(r["step_ms"]["median"], r["step_ms"]["max"])
        self.assertAlmostEqual(r["tokens_per_second"] / r["samples_per_second"], 16)
        self.assertGreater(r["comm_ms"], 0)
        self.assertGreater(r["exposed_comm_ms"], 0)
        self.assertTrue(0 <= r["overlap_ratio"] <= 1)
        self.assertEqual(sum(r["bucket_bytes"]), 4 * r["parameters"])
        self.assertGreater(r["peak_rss_bytes"], 1 << 20)
        self.assertRegex(r["params_digest"], "^[0-9a-f]{16}$")
        self.assertEqual(r["config"]["model"], "transformer")

    def test_both_models_learn(self):
        for flags in (TRANSFORMER, MLP):
            r = self.train(*flags, "--steps", 150, "--lr", 0.01, "--micro-batch", 8)
            self.assertLess(r["train_loss"], 2.0)   # from log 256 = 5.5; byte frequencies alone give 2.7
            self.assertLess(r["validation_loss"], 2.0)

    def test_independent_ranks_go_their_own_ways(self):
        r = self.train(*TRANSFORMER, "--independent", "--ranks", 2)
        self.assertEqual(r["world_size"], 2)
        self.assertEqual(r["comm_ms"], 0)

    def test_lines_table_and_sample(self):
        done = self.call(*TRANSFORMER, "--sample", 50, "--prompt", "rank ", "--validate-every", 2)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for part in ("step 4/4", "samples/s", "tokens/s", "exposed", "left", "validation loss", "parameters digest", "rank "):
            self.assertIn(part, done.stdout)
        self.assertNotIn("\r", done.stdout)

    def test_a_terminal_gets_one_line_that_is_written_anew(self):
        ours, theirs = pty.openpty()
        self.addCleanup(os.close, ours)
        job = subprocess.Popen([PROGRAM, *TRANSFORMER, "--data", self.text], stdout=theirs, stderr=subprocess.PIPE)
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            said += part
        self.assertEqual((job.communicate(timeout=240)[1], job.returncode), (b"", 0))
        lines = said.decode().replace("\r\n", "\n").split("\n")
        progress = [line for line in lines if "step 4/4" in line]
        self.assertEqual(len(progress), 1, said)
        self.assertGreaterEqual(progress[0].count("\r"), 1, said)
        for part in ("loss", "samples/s", "tokens/s", "exposed"):
            self.assertIn(part, progress[0].split("\r")[-1])
        self.assertFalse(any("\r" in line for line in lines if line not in progress), said)

    def test_json_file(self):
        file = self.folder / "r.json"
        self.assertEqual(self.call(*MLP, "--json", file).returncode, 0)
        self.assertTrue(math.isfinite(json.loads(file.read_text())["validation_loss"]))

    def check_trace(self, file, ranks, steps, gathers=False):
        """One process a rank; in each step a backward pass, a finish, a mark for every parameter, each bucket's collective in order."""
        events = json.loads(file.read_text())["traceEvents"]
        self.assertEqual({e["pid"] for e in events}, set(range(ranks)))
        self.assertGreaterEqual(min(e["ts"] for e in events if "ts" in e), 0)
        for rank in range(ranks):
            own = [e for e in events if e["pid"] == rank]
            spans = lambda name: [e for e in own if e["ph"] == "X" and e["name"] == name]
            for name in ("forward", "backward", "finish", "optimizer step"):
                self.assertEqual(len(spans(name)), steps, name)
            marks = [e["name"] for e in own if e["ph"] == "i"]
            self.assertEqual({marks.count(name) for name in marks}, {steps})
            for category in ("collective", *(("gather",) if gathers else ())):
                begins = {e["id2"]["local"]: e for e in own if e["ph"] == "b" and e["cat"] == category}
                ends = {e["id2"]["local"]: e for e in own if e["ph"] == "e" and e["cat"] == category}
                self.assertEqual(begins.keys(), ends.keys())
                self.assertEqual(len(begins) % steps if category == "collective" else 0, 0)
                self.assertTrue(begins or ranks == 1, category)
                for key, e in begins.items():
                    self.assertLessEqual(e["ts"], ends[key]["ts"])
                    self.assertGreater(e["args"]["bytes"], 0)
            for backward, finish in zip(spans("backward"), spans("finish")):
                self.assertLessEqual(backward["ts"] + backward["dur"], finish["ts"] + 0.002)

    def test_a_trace(self):
        file = self.folder / "trace.json"
        for flags in (["--ranks", 1], ["--ranks", 3], ["--buckets", "per-parameter", "--gradients", "borrowed"]):
            done = self.call(*TRANSFORMER, "--trace", file, *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.check_trace(file, flags[1] if flags[0] == "--ranks" else 2, 4)
            self.assertRegex(done.stdout, r"finish +4 ")
            self.assertIn("4 steps; a step: communication", done.stdout)
        for flags in (["--overlap", "forward"], ["--shard", "optimizer"], ["--shard", "parameters"]):
            self.assertEqual(self.call(*MLP, "--trace", file, *flags).returncode, 0)
            self.check_trace(file, 2, 4, gathers=True)
        self.assertEqual(self.digest(*MLP, "--trace", file), self.digest(*MLP))

    def test_a_trace_as_a_picture(self):
        draw = str(pathlib.Path(__file__).resolve().parents[2] / "scripts/draw-trace")
        # Debian's matplotlib belongs to Debian's python3, whichever else may come first in the path.
        python = next((p for p in ("/usr/bin/python3", sys.executable) if subprocess.run([p, "-c", "import matplotlib"], capture_output=True).returncode == 0), None)
        trace, picture = str(self.folder / "trace.json"), self.folder / "step.svg"
        self.assertEqual(self.call(*TRANSFORMER, "--ranks", 3, "--trace", trace).returncode, 0)
        run = lambda *arguments: subprocess.run([python or sys.executable, draw, *arguments], capture_output=True, text=True)
        done = run(trace, str(picture))
        if python is None:
            self.assertIn("draw-trace: needs matplotlib", done.stderr)
            return
        self.assertEqual(done.stderr, "")
        drawn = picture.read_text()
        for text in ("rank 0", "rank 2", "gradients ready", "1 bucket travels", "backward"): self.assertIn(f">{text}<", drawn)
        # Another rank may have been busy for long when the step begins.
        busy = [{"pid": rank, "tid": 0, "ph": "X", "name": name, "ts": ts, "dur": dur}
                for rank, name, ts, dur in ((0, "backward", 1e6, 900), (0, "finish", 1000900, 100), (1, "finish", 0, 1000900))]
        done = run(self.write("busy.json", json.dumps({"traceEvents": busy})), str(picture))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        done = run(trace, str(picture), "--above", trace, "--step", "median", "--names", "without overlap,with overlap")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        drawn = picture.read_text()
        for text in ("without overlap", "with overlap"): self.assertIn(f">{text}<", drawn)
        self.assertEqual(len(re.findall(r">\d+ ms<", drawn)), 2)
        self.assertNotIn(">rank 0<", drawn)
        self.assertIn("has no complete step 99", run(trace, str(picture), "--step", "99").stderr)
        for content in ("no JSON", "{}", '{"traceEvents": [1]}'):
            self.assertRegex(run(self.write("other", content), str(picture)).stderr, "^draw-trace: .* is not a trace of gradsync's: ")

    def sample(self, output, count, prompt="\n"):
        """The sample in a run's output: printable, and of `count` bytes after the prompt."""
        self.assertRegex(output, r"(?s)\n----\n.*\n----\n\Z")
        text = output.partition("\n----\n")[2].rpartition("\n----\n")[0]  # the sample itself may hold such a line
        self.assertTrue(text.startswith(prompt), text)
        self.assertTrue(all(c in "\n\t" or unicodedata.category(c) != "Cc" for c in text), text)
        # U+FFFD stands for one byte that is not printable. If the model wrote that character itself, for three.
        bytes = len(prompt.encode()) + count
        self.assertLessEqual(sum(1 if c == "\ufffd" else len(c.encode()) for c in text), bytes, text)
        self.assertGreaterEqual(len(text.encode()), bytes, text)
        return text

    def test_a_sample_has_the_length_that_was_asked_for(self):
        """It is printable, too, even if the model has learned nothing and writes all kinds of bytes."""
        for flags in MODELS.values():
            for count, prompt in ((1, "\n"), (500, "rank "), (7, "a prompt longer than the context of any of the models")):
                done = self.call(*flags, "--steps", 1, "--sample", count, "--prompt", prompt)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.sample(done.stdout, count, prompt)

    def test_a_sample_shows_what_was_learned(self):
        """In this text each byte determines the next one, so even a lucky or unlucky training leaves a wide margin."""
        self.text = self.write("cycle", "0123456789" * 1000)
        for name, flags in MODELS.items():
            done = self.call(*flags, "--steps", 150, "--lr", 0.01, "--micro-batch", 8, "--sample", 200, "--prompt", "4")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            text = self.sample(done.stdout, 200, "4")
            right = sum(before + after in "01234567890" for before, after in zip(text, text[1:]))
            self.assertGreater(right, 100, (name, text))  # of 200: 197 or more with any kernels and seed so far, 1 by chance

    def test_the_default_text_serves(self):
        """The project's own sources: a small model learns more of them in seconds than which bytes are frequent.

        The words of a sample depend on the sources and on the BLAS kernels of the processor. Only its form is checked.
        """
        done = self.call("--d-model", 64, "--blocks", 2, "--context", 64, "--steps", 300, "--lr", 0.004, "--sample", 500, data=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        loss, frequencies = map(float, re.search(r"([\d.]+) nats a byte \(byte frequencies alone: ([\d.]+)\)", done.stdout).groups())
        self.assertLess(loss, frequencies - 0.25)  # measured: lower by 0.97, by 0.65 with docs/ as the only text
        self.sample(done.stdout, 500)


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


class Processes(TrainerTest):
    """Ranks that are the processes of one mpirun instead of threads."""

    def setUp(self):
        super().setUp()
        # What Open MPI asks for to run as root in a container, with more ranks than cores.
        self.environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                                OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none")

    def program(self, *arguments):
        return [PROGRAM, "--backend", "mpi", "--data", self.text, *map(str, arguments)]

    def expect_recovery(self):
        version = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True).stdout
        if "Open MPI" not in version and "OpenRTE" not in version:  # as it calls itself by the name of mpiexec
            self.skipTest("Open MPI's launcher is needed to let the others live on")

    def launcher(self):
        """Of four processes, which goes on when one has died."""
        return [MPIEXEC, "--enable-recovery", "-n", "4"]

    def lose(self, victims, *arguments, stop=False):
        """Kills some of four processes after some steps, or stops them; returns what the others had to say."""
        # The launcher itself returns 0 from a job that it let go on, or (Open MPI 4.1) does not return at all.
        # Nor does it always pass on what its processes say once one has died: they write to the file themselves.
        file, launcher, gate = self.folder / "errors", self.folder / "launcher", self.folder / "gate"
        file.write_text("")
        gate.unlink(missing_ok=True)
        # The run takes less than a second: its processes wait until those to be killed have been found.
        waiting = ["sh", "-c", 'until [ -e "$0" ]; do sleep 0.02; done; exec "$@"', str(gate)]
        telling = ["sh", "-c", 'exec 2>>"$0"; "$@"; echo "exit code $?" >&2', file, *waiting]
        found = lambda: [self.process_of(victim, waiting) for victim in victims]
        for _ in range(3):  # mpirun of Open MPI 4.1 has been seen to start no process at all
            with open(launcher, "w") as stderr:
                job = subprocess.Popen([*self.launcher(), *telling, *self.program(*arguments)],
                                       stdout=subprocess.PIPE, stderr=stderr, text=True, env=self.environment)
            if wait_for(lambda: all(found()), seconds=20):
                break
            job.terminate()
            job.communicate(timeout=240)
        processes = []
        try:
            self.assertTrue(all(found()), file.read_text() + launcher.read_text())
            processes = found()
            gate.touch()
            job.stdout.readline()  # a line every twentieth of the run
            for process in processes:
                os.kill(process, signal.SIGSTOP if stop else signal.SIGKILL)
            exits = 4 - len(victims) if stop else 4
            self.assertTrue(wait_for(lambda: file.read_text().count("exit code ") >= exits), file.read_text() + launcher.read_text())
        finally:
            for process in processes if stop else []:
                os.kill(process, signal.SIGKILL)
            job.terminate()
            job.communicate(timeout=240)
        return file.read_text()

    def process_of(self, rank, command=None):
        """The process of this rank that runs the program, or a command before it."""
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_text().split("\0")
                begins = command or [PROGRAM]
                ours = words[:len(begins)] == begins and self.text in words
                if ours and f"OMPI_COMM_WORLD_RANK={rank}" in (process / "environ").read_text().split("\0"):
                    return int(process.name)
            except OSError:  # gone meanwhile, or not ours
                pass
        return None


class Mpi(Processes):
    """On this machine."""

    def run_processes(self, processes, *arguments):
        return subprocess.run([MPIEXEC, "-n", str(processes), *self.program(*arguments)], capture_output=True, text=True,
                              timeout=240, env=self.environment)

    def train_processes(self, processes, *arguments):
        done = self.run_processes(processes, *arguments, "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_the_same_bits_as_over_threads(self):
        """Each policy with one model: over threads each has all."""
        planned = [("optimal", overlap, "in-buckets") for overlap in ("none", "backward-polls", "forward")]
        expected = [self.digest(*flags, "--ranks", ranks) for ranks, flags in zip((2, 3, 4), MODELS.values())]
        for number, (buckets, overlap, gradients) in enumerate(POLICIES + planned):
            ranks, (name, flags) = number % 3 + 2, list(MODELS.items())[number % 3]
            found = self.train_processes(
                ranks, *flags, "--buckets", buckets, "--overlap", overlap, "--gradients", gradients,
                "--bucket-mib", 0.02, "--first-bucket-mib", 0.004)["params_digest"]
            self.assertEqual(found, expected[number % 3], (name, ranks, buckets, overlap, gradients))

    def test_compressed_to_the_same_bits_as_over_threads(self):
        for compress, ranks in itertools.product(Compression.ALL, (2, 3)):
            run = [*TRANSFORMER, *compress, *Compression.MANY]
            expected = self.digest(*run, "--ranks", ranks)
            for transport in ([], ["--no-shared-memory"]):
                found = self.train_processes(ranks, *run, *transport)["params_digest"]
                self.assertEqual(found, expected, (compress, ranks, transport))

    def test_the_same_bits_by_messages(self):
        some = (("capped", "backward", "in-buckets"), ("per-parameter", "none", "borrowed"), ("flat", "backward", "borrowed"),
                ("per-parameter", "backward-polls", "borrowed"), ("optimal", "backward-thread", "in-buckets"))
        for ranks, (name, flags) in zip((2, 3, 4), MODELS.items()):
            expected = self.digest(*flags, "--ranks", ranks)
            for buckets, overlap, gradients in some:
                found = self.train_processes(
                    ranks, *flags, "--no-shared-memory", "--buckets", buckets, "--overlap", overlap, "--gradients", gradients,
                    "--bucket-mib", 0.02, "--first-bucket-mib", 0.004)
                self.assertIn("send messages", found["transport"])
                self.assertEqual(found["params_digest"], expected, (name, ranks, buckets, overlap, gradients))

    def test_a_step_has_the_same_bits_on_any_number_of_processes(self):
        run = [*TRANSFORMER, "--global-batch", 14]  # 7 micro-batches
        expected = self.digest(*run, "--ranks", 1)
        for ranks, flags in ((2, []), (3, ["--no-shared-memory", "--overlap", "forward"]), (4, ["--shard", "gradients"]),
                             (3, ["--no-shared-memory", "--shard", "parameters"])):
            self.assertEqual(self.train_processes(ranks, *run, *flags)["params_digest"], expected, (ranks, flags))

    def test_sharded(self):
        """The same bits as over threads, through shared memory and by messages; and processes that are smaller."""
        expected = self.digest(*TRANSFORMER, "--tied", "--ranks", 3)
        for flags in (["--shard", "optimizer", "--overlap", "forward"], ["--shard", "gradients"], ["--shard", "parameters"],
                      ["--shard", "parameters", "--no-shared-memory", "--overlap", "backward-thread"],
                      ["--overlap", "forward", "--no-shared-memory"]):
            found = self.train_processes(3, *TRANSFORMER, "--tied", *flags)
            self.assertEqual(found["params_digest"], expected, flags)
        # Memory that processes share counts in each one that has touched it: sizes are compared where they share none.
        large = ["--no-shared-memory", "--model", "mlp", "--hidden", ",".join(8 * ["1024"]), "--micro-batch", 1, "--steps", 2]
        whole, sharded = (self.train_processes(2, *large, "--shard", stage) for stage in ("none", "parameters"))
        self.assertEqual(sharded["params_digest"], whole["params_digest"])
        less = sum(whole["bytes_" + part] - sharded["bytes_" + part] for part in ("parameters", "gradients", "optimizer"))
        self.assertGreater(less, 4 * whole["parameters"])  # 16 P less 8 P and two layers at a time, twice
        self.assertGreater(whole["peak_rss_bytes"] - sharded["peak_rss_bytes"], less / 2)

    def test_a_sharded_run_that_loses_a_process_goes_on_from_its_last_checkpoint(self):
        self.expect_recovery()
        flags = [*TRANSFORMER, "--d-model", 64, "--steps", 400, "--shard", "parameters"]
        expected = self.train_processes(4, *flags)["params_digest"]
        run = ["--checkpoint", self.folder / "run"]
        errors = self.lose([2], *flags, *run, "--checkpoint-every", 5)
        for rank in (0, 1, 3):
            self.assertEqual(errors.count(f"gradsync_train: rank {rank} cannot keep the state"), 1, errors)
        self.assertEqual(errors.count("go on with --resume from step "), 3, errors)
        self.assertEqual(errors.count("exit code 1\n"), 3, errors)
        self.assertEqual(self.train_processes(4, *flags, *run, "--resume")["params_digest"], expected)

    def test_fields(self):
        r = self.train_processes(3, *TRANSFORMER, "--accumulate", 2, "--ranks", 3)
        self.assertEqual((r["world_size"], r["global_batch"], r["steps"]), (3, 12, 4))
        self.assertEqual(r["config"]["backend"], "mpi")
        self.assertEqual(r["transport"], "3 processes that share memory")
        trace = self.folder / "trace.json"
        self.train_processes(2, *TRANSFORMER, "--trace", trace)
        Report.check_trace(self, trace, 2, 4)
        r = self.train_processes(2, *TRANSFORMER, "--independent")
        self.assertEqual((r["world_size"], r["comm_ms"]), (2, 0))

    def test_usage_errors_are_said_once(self):
        for part, flags in (("--bogus", ["--bogus"]), ("mpirun has started 3", ["--ranks", 2]),
                            ("cannot read", ["--load-weights", self.folder / "none"])):
            done = self.run_processes(3, *TRANSFORMER, *flags)
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            said = [line for line in done.stderr.splitlines() if line.startswith("gradsync_train:")]
            self.assertEqual(len(said), 1, done.stderr)
            self.assertIn(part, said[0])
        done = self.run_processes(3, "--help")
        self.assertEqual((done.returncode, done.stdout.count("--backend"), done.stderr), (0, 1, ""))

    def test_a_run_that_loses_a_process_goes_on(self):
        """One of four is killed within a step: the others say so, one keeps the state, which leads to the same bits."""
        self.check_losses(([2], [4]), ([0], [1, "--accumulate", 4]))

    def test_a_run_that_loses_two_processes_goes_on(self):
        """Also without rank 0, and without the one that comes next."""
        self.check_losses(([0, 1], [4]))

    def test_a_run_by_messages_that_loses_a_process_goes_on(self):
        self.check_losses(([0], [4]), ([3], [1, "--accumulate", 4]), flags=["--no-shared-memory"])

    def test_a_run_in_which_a_process_stops_goes_on(self):
        """It lives, but does not go on (SIGSTOP): the others name it at the time limit."""
        self.check_losses(([2], [4]), flags=["--timeout", 5], stop=True)

    def test_a_run_by_messages_in_which_a_process_stops_goes_on(self):
        self.check_losses(([0], [4]), flags=["--timeout", 5, "--no-shared-memory"], stop=True)

    def check_losses(self, *cases, flags=(), stop=False):
        """Of four processes some are killed, or stopped; the run goes on with others."""
        self.expect_recovery()
        flags = [*TRANSFORMER, "--d-model", 64, "--steps", 400, *flags]
        expected = self.train_processes(4, *flags)["params_digest"]
        for victims, resume in cases:
            run = ["--checkpoint", self.folder / "-".join(map(str, ["without", *victims]))]
            errors = self.lose(victims, *flags, *run, stop=stop)
            said = [line for line in errors.splitlines() if line.startswith("gradsync_train:")]
            left = [rank for rank in range(4) if rank not in victims]
            self.assertEqual(errors.count("exit code 1\n"), len(left), errors)
            for rank in left:
                lost = [line for line in said if line.startswith(f"gradsync_train: rank {rank}: ")]
                self.assertEqual(len(lost), 1, errors)
                self.assertTrue(any(f"rank {victim} " in lost[0] for victim in victims), errors)
                self.assertRegex(lost[0], r"bucket \d+|all_reduce\(|all_gather\(|reduce_scatter\(|broadcast\(|barrier", errors)
            kept = [line for line in said if "has kept" in line]
            self.assertEqual(len(said), len(left) + len(kept), errors)
            # If a rank dies while others have the last step complete and some do not, two states are kept in turn.
            self.assertIn(len(kept), (1, 2), errors)
            resumed = self.train_processes(*resume, *flags, *run, "--resume")
            self.assertEqual(resumed["params_digest"], expected, (victims, errors))

    def test_machines_with_checkpoints_of_their_own(self):
        """They have to be the same."""
        runs = []
        for step in (2, 3):
            runs.append(["--checkpoint", self.folder / f"step{step}"])
            self.train(*TRANSFORMER, *runs[-1], "--stop-after", step)
        flags = [*TRANSFORMER, "--resume"]
        environment = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run([MPIEXEC, "-n", "1", *self.program(*flags, *runs[0]),
                               ":", "-n", "1", *self.program(*flags, *runs[1])], **environment)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("rank 1 finds another checkpoint (after step 3)", done.stderr)


class Tcp(TrainerTest):
    """Ranks that are processes which somebody has started, without MPI."""

    def start(self, processes, *arguments, ranks=None):
        """Some or all `ranks` of a job."""
        kept = socket.socket()  # bound, so that nobody else gets the port; rank 0 may reuse it
        self.addCleanup(kept.close)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("localhost", 0))
        port = kept.getsockname()[1]
        command = [PROGRAM, "--backend", "tcp", "--data", self.text, *map(str, arguments)]
        started = []
        for rank in ranks or range(processes):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}))
            self.addCleanup(started[-1].kill)
        return started

    def finish(self, started):
        return [(process.returncode, out, err) for process in started for out, err in [process.communicate(timeout=240)]]

    def train_processes(self, processes, *arguments):
        done = self.finish(self.start(processes, *arguments, "--json", "-"))
        for rank, (code, out, err) in enumerate(done):
            self.assertEqual(code, 0, err)
            self.assertEqual(out == "", rank != 0)
        return json.loads(done[0][1])

    def test_the_same_bits_as_over_threads(self):
        small = ["--bucket-mib", 0.02, "--first-bucket-mib", 0.004]
        for ranks, (name, flags) in zip((2, 3, 4), MODELS.items()):
            expected = self.digest(*flags, "--ranks", ranks)
            self.assertEqual(self.train_processes(ranks, *flags, "--reduce-dtype", "bf16", *small)["params_digest"],
                             self.digest(*flags, "--ranks", ranks, "--reduce-dtype", "bf16"), name)
            for more in (["--overlap", "none", "--gradients", "borrowed"], small, ["--overlap", "forward"], ["--shard", "parameters"],
                         ["--no-shared-memory", "--overlap", "backward-thread", *small], ["--no-shared-memory", "--shard", "optimizer"]):
                found = self.train_processes(ranks, *flags, *more)
                self.assertEqual(found["params_digest"], expected, (name, ranks, more))
                self.assertEqual(found["transport"], f"{ranks} processes that " + (
                    "send messages over TCP (shared memory is switched off)" if "--no-shared-memory" in more else "share memory"))

    def test_the_debug_log_tells_whom_a_rank_met_and_what_it_does(self):
        for level in ("info", "trace"):
            with unittest.mock.patch.dict(os.environ, GRADSYNC_DEBUG=level):
                done = self.finish(self.start(2, *MLP, "--no-shared-memory"))
            for rank, (code, _, err) in enumerate(done):
                self.assertEqual(code, 0, err)
                said = [line.split("): ", 1)[1] for line in err.splitlines() if re.match(rf"[\d:.]+ gradsync {level}: rank {rank} \(\S+, process \d+\): ", line)]
                wanted = {
                    "info": [f"the environment says: 2 ranks, local rank {rank}, rank 0 at localhost port",
                             "rendezvous: reached rank 0 at localhost:" if rank else "rendezvous: rank 1 arrived",
                             f"is rank {rank} of a communicator of 2 processes that send messages over TCP (shared memory is switched off), with a time limit of",
                             r"SizeCappedBuckets\{.*\} puts 7 gradients of \d+ bytes into \d+ buckets?$", "synchronises 7 parameters: SizeCappedBuckets"],
                    "trace": ["bucket 0: ", r"starts #\d+ all_reduce\(mean, f32, .* for bucket 0 of Reducer #0$", r"ended #\d+ all_reduce\(mean, .* after 0.\d+ s$"]}[level]
                for text in wanted:
                    pattern = text if "\\" in text else re.escape(text)
                    self.assertTrue(any(re.match(pattern, line) for line in said), (text, err))

    def test_weights_are_saved_in_parts_and_loaded(self):
        parts = self.folder / "parts"
        expected = self.digest(*MLP, "--ranks", 2)
        saved = self.train_processes(2, *MLP, "--shard", "parameters", "--save-weights", parts)
        self.assertEqual(saved["params_digest"], expected)
        self.assertEqual(len(list(parts.iterdir())), 3)
        kept = self.train_processes(3, *MLP, *Weights.KEPT, "--shard", "parameters", "--load-weights", parts)
        self.assertEqual(kept["params_digest"], expected)
        done = self.finish(self.start(2, *MLP, "--load-weights", self.text))
        self.assertEqual([code for code, _, _ in done], [2, 2])
        self.assertEqual("".join(err for _, _, err in done).count("--load-weights"), 2, done)  # one sentence, which names it twice

    def test_usage_errors_are_said_once(self):
        for part, flags in (("--bogus", ["--bogus"]), ("WORLD_SIZE (or what the launcher sets instead) is 3", ["--ranks", 2]),
                            ("cannot read", ["--load-weights", self.folder / "none"])):
            done = self.finish(self.start(3, *TRANSFORMER, *flags))
            self.assertEqual([(code, out) for code, out, _ in done], 3 * [(2, "")], done)
            said = "".join(err for _, _, err in done)
            self.assertEqual(len(said.splitlines()), 1, said)
            self.assertIn(part, said)

    def test_a_launcher_that_says_too_little_is_refused(self):
        environment = {**os.environ, "WORLD_SIZE": "2"}
        done = subprocess.run([PROGRAM, "--backend", "tcp", *TRANSFORMER], capture_output=True, text=True, timeout=240, env=environment)
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
        self.assertIn("RANK is not set", done.stderr)

    def test_a_rank_that_does_not_come_is_named(self):
        for _, (code, out, err) in zip((0, 2), self.finish(self.start(3, *TRANSFORMER, "--timeout", 3, ranks=(0, 2)))):
            self.assertEqual((code, out), (1, ""), err)
            self.assertIn("rank 1", err)

    def test_a_run_that_loses_a_process_goes_on(self):
        flags = [*TRANSFORMER, "--d-model", 64, "--steps", 400]
        expected = self.train_processes(3, *flags)["params_digest"]
        for victim, transport in ((1, []), (0, ["--no-shared-memory"])):
            run = ["--checkpoint", self.folder / f"without-{victim}"]
            started = self.start(3, *flags, *transport, *run)
            started[0].stdout.readline()  # a line every twentieth of the run
            started[victim].kill()
            for rank, (code, _, err) in enumerate(self.finish(started)):
                if rank == victim: continue
                self.assertEqual(code, 1, err)
                lost = [line for line in err.splitlines() if line.startswith(f"gradsync_train: rank {rank}: ")]
                self.assertEqual(len(lost), 1, err)
                self.assertIn(f"rank {victim} ", lost[0])
            self.assertEqual(self.train_processes(3, *flags, *transport, *run, "--resume")["params_digest"], expected)

    def test_a_run_that_steps_inside_the_reduction_is_killed_again_and_again(self):
        flags = [*TRANSFORMER, "--steps", 200, "--clip", 0]
        expected = self.digest(*flags, "--ranks", 3)
        run = [*flags, "--shard", "optimizer", "--overlap", "step", "--checkpoint", self.folder / "run", "--checkpoint-every", 3]
        self.assertEqual(self.train_processes(3, *run[:-4])["params_digest"], expected)
        for attempt, victim in enumerate((1, 0, 2, 1)):
            started = self.start(3, *run, *(["--resume"] if attempt > 0 else []))
            started[0].stdout.readline()  # a line every twentieth of the run
            time.sleep(0.01 * attempt)
            started[victim].kill()
            self.finish(started)
        self.assertEqual(self.train_processes(3, *run, "--resume")["params_digest"], expected)


SHARE = "share memory on each machine, and send messages between them"


class Cluster(Processes):
    """On several emulated hosts, between which messages travel by TCP."""

    SCRIPT = str(pathlib.Path(__file__).resolve().parents[2] / "scripts/emulated-cluster")

    @classmethod
    def setUpClass(cls):
        done = subprocess.run([cls.SCRIPT, "1", "1gbit", "--", "true"], capture_output=True, text=True, timeout=240)
        if done.returncode == 2 and any(reason in done.stderr for reason in ("make namespaces", "make the namespaces", "cannot mount", "modprobe", "install it", "has to be that of Open MPI")):
            raise unittest.SkipTest(done.stderr.strip())

    def launcher(self, hosts=2, ranks_per_host=2):
        return [self.SCRIPT, str(hosts), "1gbit", "--ranks-per-host", str(ranks_per_host), "--mpirun", "--enable-recovery",
                "--mpirun", "--mca", "--mpirun", "btl_tcp_progress_thread", "--mpirun", "1", "--"]  # see docs/guides/processes.md

    def train_hosts(self, hosts, ranks_per_host, *arguments):
        done = subprocess.run([*self.launcher(hosts, ranks_per_host), *self.program(*arguments, "--json", "-")], capture_output=True, text=True, timeout=240)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_the_same_bits_as_over_threads(self):
        small = ["--bucket-mib", 0.02, "--first-bucket-mib", 0.004]
        some = (["--overlap", "backward", *small], ["--buckets", "optimal"], ["--shard", "parameters"])
        others = (["--overlap", "none"], ["--overlap", "backward-polls", *small, "--gradients", "borrowed"], ["--overlap", "forward", *small],
                  ["--shard", "parameters"])
        for hosts, ranks_per_host, sent, runs in ((3, 1, "send messages (one on each machine)", some), (2, 2, SHARE, others)):
            expected = self.digest(*TRANSFORMER, "--ranks", hosts * ranks_per_host)
            for flags in runs:
                found = self.train_hosts(hosts, ranks_per_host, *TRANSFORMER, *flags)
                self.assertEqual(found["transport"], f"{hosts * ranks_per_host} processes on {hosts} machines that {sent}")
                self.assertEqual(found["params_digest"], expected, (hosts, flags))

    def test_hosts_with_different_numbers_of_ranks(self):
        """Ranks that the tree of sums puts together share memory."""
        for ranks_per_host, ranks, share in (("2,1", 3, "on each machine"), ("3,1", 4, "in 3 teams")):
            expected = self.digest(*TRANSFORMER, "--ranks", ranks)
            for flags in (["--buckets", "flat"], ["--bucket-mib", 0.02, "--first-bucket-mib", 0.004]):
                found = self.train_hosts(2, ranks_per_host, *TRANSFORMER, *flags)
                self.assertEqual(found["transport"], f"{ranks} processes on 2 machines that {SHARE.replace('on each machine', share)}")
                self.assertEqual(found["params_digest"], expected, (ranks_per_host, flags))
        run = [*TRANSFORMER, "--global-batch", 14]
        self.assertEqual(self.train_hosts(2, "3,1", *run)["params_digest"], self.digest(*run, "--ranks", 1))

    def between_hosts(self, flags, client):
        """What `client` prints on host0; host1 sends back every datagram."""
        program = f"""import os, socket, time
line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
line.bind(("", 7777))
if os.environ["RANK"] == "1":
    while (said := line.recvfrom(100))[0] != b"end": line.sendto(*said)
    raise SystemExit
line.settimeout(0.2)
def ask(said):
    line.sendto(said, ("host1", 7777))
    try:
        while line.recvfrom(100)[0] != said: pass  # the answer to an earlier one
    except TimeoutError: return False
    return True
number = 0
while not ask(b"are you there, %d" % number): number += 1
{client}
for _ in range(50): line.sendto(b"end", ("host1", 7777))
"""
        done = subprocess.run([self.SCRIPT, "2", "100mbit", "--no-mpi", *flags, "--", "python3", "-c", program], capture_output=True, text=True, timeout=240)
        if "tun" in done.stderr and done.returncode == 2: self.skipTest(done.stderr.strip())
        self.assertEqual(done.returncode, 0, done.stderr)
        return float(done.stdout)

    def test_links_take_time_and_lose_packets(self):
        fastest = """def timed(n):
    begun = time.monotonic()
    while not ask(b"x%d" % n): pass
    return time.monotonic() - begun
print(min(timed(n) for n in range(3)))"""
        self.assertGreaterEqual(self.between_hosts(["--delay", "40"], fastest), 0.08)
        losses = "line.settimeout(0.1)\nprint(sum(not ask(b'%d' % i) for i in range(100)))"
        self.assertTrue(10 < self.between_hosts(["--loss", "20"], losses) < 65)  # 36 are expected: a datagram or its answer

    def test_without_mpi(self):
        """Sockets of our own between the same hosts; mpirun starts the processes, no more."""
        for hosts, ranks_per_host, ranks, sent in ((2, 1, 2, "send messages over TCP (one on each machine)"),
                                                   (2, "2,1", 3, SHARE.replace("messages", "messages over TCP"))):
            program = ["env", "MASTER_ADDR=host0", PROGRAM, "--backend", "tcp", "--data", self.text, *map(str, TRANSFORMER), "--json", "-"]
            done = subprocess.run([*self.launcher(hosts, ranks_per_host), *program], capture_output=True, text=True, timeout=240)
            self.assertEqual(done.returncode, 0, done.stderr)
            found = json.loads(done.stdout)
            self.assertEqual(found["transport"], f"{ranks} processes on 2 machines that {sent}")
            self.assertEqual(found["params_digest"], self.digest(*TRANSFORMER, "--ranks", ranks))

    def test_a_run_that_loses_a_process_goes_on(self):
        """Also those on the other host hear of it; and those that send messages to each."""
        self.expect_recovery()
        flags = [*TRANSFORMER, "--d-model", 64, "--steps", 200]
        for more in ([], ["--no-shared-memory"]):
            folder = self.folder / "-".join(["run", *more])
            expected = self.train_hosts(2, 2, *flags, *more)["params_digest"]
            errors = self.lose([2], *flags, *more, "--checkpoint", folder)
            for rank in (0, 1, 3):
                said = [line for line in errors.splitlines() if line.startswith(f"gradsync_train: rank {rank}: ")]
                self.assertEqual(len(said), 1, errors)
                self.assertIn("rank 2 ", said[0])
            self.assertEqual(errors.count("exit code 1\n"), 3, errors)
            resumed = self.train_hosts(2, 2, *flags, *more, "--checkpoint", folder, "--resume")
            self.assertEqual(resumed["params_digest"], expected, errors)

    def test_a_link_is_cut_and_mended(self):
        """A connection over it neither ends nor fails, and what was sent meanwhile arrives later."""
        program = """
import os, socket, sys, time
if os.environ["RANK"] == "1":
    with socket.create_server(("", 5000)) as server:
        peer = server.accept()[0]
        while data := peer.recv(1):
            peer.sendall(data)
    sys.exit()
def order(text):
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as fifo:
            print(text, file=fifo)
        time.sleep(0.3)
def answer(seconds):
    peer.sendall(b"x")
    peer.settimeout(seconds)
    try:
        return peer.recv(1)
    except TimeoutError:
        return "none"
for _ in range(200):
    try:
        peer = socket.create_connection(("host1", 5000), timeout=20)
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
first = answer(20)
order("down host1")
while (last := answer(0.5)) != "none":
    pass
order("up host1")
print(first, last, answer(20))
peer.shutdown(socket.SHUT_WR)
while peer.recv(100):
    pass
"""
        fifo = self.folder / "links"
        os.mkfifo(fifo)
        run = lambda options, *command: subprocess.run([self.SCRIPT, "2", "1gbit", "--no-mpi", *options, "--", *command], capture_output=True, text=True, timeout=240)
        for options, arguments in ((["--control", fifo], [fifo]), (["--cut", "host1@5-8"], [])):
            done = run(options, sys.executable, "-c", program, *arguments)
            self.assertEqual((done.returncode, done.stdout), (0, "b'x' none b'x'\n"), done.stderr)
        done = run(["--control", fifo], "sh", "-c", f"echo sideways host1 > {fifo}; sleep 0.3; exit $((RANK + 3))")
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("'sideways host1' is no order", done.stderr)

    def test_nothing_is_left_of_a_cluster(self):
        interfaces = lambda: sorted(path.name for path in pathlib.Path("/sys/class/net").iterdir() if path.name.startswith(("port", "bridge")))
        before = interfaces()
        job = subprocess.Popen([*self.launcher(), *self.program(*TRANSFORMER, "--steps", 10000)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        job.stdout.readline()
        job.terminate()
        job.communicate(timeout=240)
        self.assertEqual(job.returncode, 143)
        self.assertTrue(wait_for(lambda: not any(map(self.process_of, range(4)))))
        self.assertEqual(interfaces(), before)
        # Also where it cannot clean up itself.
        job = subprocess.Popen([*self.launcher(), *self.program(*TRANSFORMER, "--steps", 10000)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        job.stdout.readline()
        job.kill()
        job.communicate(timeout=240)
        self.assertTrue(wait_for(lambda: not any(map(self.process_of, range(4)))))
        self.assertEqual(interfaces(), before)
        for expected, arguments in (("number of hosts is 1 to 100", ["0", "1gbit", "--", "true"]), ("the rate is a number", ["2", "fast", "--", "true"]), ("a number above 0", ["2", "0mbit", "--", "true"]),
                                    ("no command", ["2", "1gbit"]), ("unknown option --ranks", ["2", "1gbit", "--ranks", "2", "--", "true"]),
                                    ("3 numbers for 2 hosts", ["2", "1gbit", "--ranks-per-host", "2,1,1", "--", "true"]), ("ranks per host: a number", ["2", "1gbit", "--ranks-per-host", "2,", "--", "true"]),
                                    ("a host from host0 to host1", ["2", "1gbit", "--cut", "host2@1", "--", "true"]), ("is no FIFO", ["2", "1gbit", "--control", "missing", "--", "true"])):
            done = subprocess.run([self.SCRIPT, *arguments], capture_output=True, text=True, timeout=240)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
            self.assertIn(expected, done.stderr)
        done = subprocess.run([self.SCRIPT, "2", "1gbit", "--", "sh", "-c", "exit 7"], capture_output=True, text=True, timeout=240)
        self.assertEqual(done.returncode, 7, done.stderr)


if __name__ == "__main__":
    suite, PROGRAM, *rest = sys.argv[1:]
    if len(rest) != (suite in ("mpi", "cluster")):
        sys.exit(__doc__)
    MPIEXEC = rest[0] if rest else None
    classes = {"command_line": CommandLine, "digests": Digests, "compression": Compression, "sharding": Sharding, "checkpoints": Checkpoints, "weights": Weights, "report": Report, "tcp": Tcp, "mpi": Mpi, "cluster": Cluster}
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(classes[suite])
    result = unittest.TextTestRunner(verbosity=2).run(tests)
    sys.exit(1 if not result.wasSuccessful() else 77 if result.skipped and not result.testsRun else 0)
