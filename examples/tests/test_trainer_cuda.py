#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Tests of gradsync_train --device cuda: on a device, or over the fakes of tests/support/fake, where it is slow.

usage: test_trainer_cuda.py device PROGRAM                     exit code 77: there is no device
       test_trainer_cuda.py fakes PROGRAM PROGRAM_OF_RANKS     the latter has several ranks over NCCL in one process
"""
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import unittest

PROGRAM = PROGRAM_OF_RANKS = None
ON_DEVICE = False
TRANSFORMER = "--model transformer --d-model 16 --blocks 1 --heads 2 --context 8 --micro-batch 2 --warmup 2".split()
MLP = "--model mlp --d-model 4 --context 4 --hidden 16,12 --micro-batch 4 --warmup 2".split()
MODELS = {"transformer": TRANSFORMER, "mlp": MLP, "tied": TRANSFORMER + ["--tied", "--recompute"]}
STAGES = ("optimizer", "gradients", "parameters")
CUDA = ["--device", "cuda"]


def no_device():
    """What the program says where there is no device."""
    return subprocess.run([PROGRAM, *CUDA, "--steps", "1"], capture_output=True, text=True, timeout=60)


class OnCuda(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        words = "a rank holds the gradient of its bucket until every other rank has reduced it".split()
        chance = random.Random(1)
        self.text = self.folder / "text"
        self.text.write_text(" ".join(chance.choice(words) for _ in range(600)))
        self.steps = ["--steps", 20 if ON_DEVICE else 4]

    def start(self, *arguments, environment={}, program=None):
        command = [program or PROGRAM, *map(str, self.steps), *map(str, arguments), "--data", str(self.text), "--timeout", "60"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})

    def finish(self, process):
        self.addCleanup(process.kill)
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err

    def train(self, *arguments, environment={}):
        code, out, err = self.finish(self.start(*arguments, "--json", "-", environment=environment))
        self.assertEqual(code, 0, err)
        return json.loads(out)

    def refused(self, expected, *arguments, environment={}):
        code, out, err = self.finish(self.start(*arguments, environment=environment))
        self.assertEqual((code, out, len(err.strip().splitlines())), (2, "", 1), (arguments, err))
        for part in expected:
            self.assertIn(part, err)

    def same_curve(self, found, expected, delta, about, fields=("train_loss", "validation_loss")):
        for field in fields:
            self.assertAlmostEqual(found[field], expected[field], delta=delta, msg=(*about, field))

    def over_nccl(self, ranks, *arguments):
        """Every rank's exit code and output; over the fakes, whose NCCL connects threads only, that of the process of several ranks."""
        if ranks > 1 and not ON_DEVICE:
            return [self.finish(self.start("--backend", "nccl", *CUDA, *arguments, environment={"WORLD_SIZE": str(ranks)}, program=PROGRAM_OF_RANKS))]
        # All are on one device, so each has to look like a host of its own.
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        lookalike = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0", "NCCL_MAX_CTAS": "2", "NCCL_RAS_ENABLE": "0"}
        processes = [self.start("--backend", "nccl", *CUDA, *arguments, environment={
            **lookalike, "NCCL_HOSTID": f"rank{r}", "RANK": str(r), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(r),
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}) for r in range(ranks)]
        return [self.finish(p) for p in processes]

    def test_losses_are_those_of_the_cpu(self):
        for name, flags in MODELS.items():
            flags = [*flags, "--weight-decay", 50]  # it shows after a few steps whether biases decay, too
            expected = self.train(*flags, "--ranks", 2)
            found = self.train(*flags, *CUDA, "--ranks", 2, "--precision", "f32")
            self.same_curve(found, expected, 1e-4, (name, "f32"))
            self.assertIn("through the host", found["transport"])
            self.same_curve(self.train(*flags, *CUDA, "--ranks", 2), expected, 0.05, (name, "bf16"))

    def test_policies_and_memory(self):
        expected = self.train(*TRANSFORMER, "--ranks", 2, "--accumulate", 2)
        for flags in (["--gradients", "borrowed"], ["--overlap", "forward"], ["--overlap", "backward-thread", "--buckets", "flat"], ["--overlap", "none"]):
            found = self.train(*TRANSFORMER, *CUDA, "--precision", "f32", "--ranks", 2, "--accumulate", 2, *flags)
            self.same_curve(found, expected, 1e-4, flags)

    def test_one_rank_of_nccl(self):
        expected = self.train(*TRANSFORMER, "--ranks", 1)
        (code, out, err), = self.over_nccl(1, *TRANSFORMER, "--precision", "f32", "--json", "-")
        self.assertEqual(code, 0, err)
        self.same_curve(json.loads(out), expected, 1e-4, ("nccl",))

    def test_two_ranks_of_nccl(self):
        for name, flags in MODELS.items():
            expected = self.train(*flags, "--ranks", 2)
            ranks = self.over_nccl(2, *flags, "--precision", "f32", "--json", "-")
            for code, out, err in ranks:
                self.assertEqual(code, 0, err)
            self.same_curve(json.loads(ranks[0][1]), expected, 1e-4, (name, "nccl"))

    def test_shards(self):
        """Every stage trains as the CPU does; over the fakes, where products have one order, too, to the bits of --shard none."""
        runs = [("transformer", 2, ["--accumulate", 2])]
        if not ON_DEVICE:
            runs += [("transformer", 1, []), ("tied", 2, []), ("transformer", 3, []), ("mlp", 3, [])]
        small = ["--bucket-mib", 0.004, "--first-bucket-mib", 0.001]
        for name, ranks, more in runs:
            run = [*MODELS[name], "--ranks", ranks, "--weight-decay", 50, *more]
            expected = self.train(*run)
            # Without clipping: with it --shard none takes the norm on the device, and adds up in another order.
            unclipped = [*run, *CUDA, "--precision", "f32", "--clip", 0]
            whole = None if ON_DEVICE else self.train(*unclipped)["params_digest"]
            for stage in STAGES:
                flags = ["--shard", stage, *(["--replicate-below", 20] if stage == "parameters" else small)]
                found = self.train(*run, *CUDA, "--precision", "f32", *flags)
                self.same_curve(found, expected, 1e-4, (name, ranks, stage))
                if whole and not (more and stage != "optimizer"):  # sharded gradients: micro-batches are added up in another order
                    self.assertEqual(self.train(*unclipped, *flags)["params_digest"], whole, (name, ranks, stage))

    @unittest.skipIf("device" in sys.argv, "a device has seen every stage in the tests above")
    def test_policies_of_shards(self):
        expected = self.train(*TRANSFORMER, "--ranks", 2)
        for flags in (["--shard", "optimizer", "--overlap", "forward"], ["--shard", "gradients", "--overlap", "backward-thread", "--buckets", "per-parameter"],
                      ["--shard", "parameters", "--no-reshard", "--overlap", "none", "--prefetch", 3]):
            self.same_curve(self.train(*TRANSFORMER, *CUDA, "--precision", "f32", "--ranks", 2, *flags), expected, 1e-4, flags)
        found = self.train(*TRANSFORMER, *CUDA, "--ranks", 2, "--shard", "parameters")
        self.same_curve(found, expected, 0.05, ("bf16",))

    def test_gradients_travel_in_bf16(self):
        """Through the host and over NCCL: the curve of the CPU, and as many bytes."""
        for stage in ("none", *STAGES):
            run = [*TRANSFORMER, "--shard", stage, "--reduce-dtype", "bf16"]
            expected = self.train(*run, "--ranks", 2)
            found = self.train(*run, *CUDA, "--precision", "f32", "--ranks", 2)
            self.same_curve(found, expected, 1e-3, ("staged", stage))
            self.assertEqual(found["comm_bytes"], expected["comm_bytes"], stage)
            for code, out, err in (outcomes := self.over_nccl(2, *run, "--precision", "f32", "--json", "-")):
                self.assertEqual(code, 0, err)
            self.same_curve(json.loads(outcomes[0][1]), expected, 1e-3, ("nccl", stage))
            self.assertEqual(json.loads(outcomes[0][1])["comm_bytes"], expected["comm_bytes"], stage)

    def test_planned_buckets(self):
        self.steps = ["--steps", 6]
        expected = self.train(*TRANSFORMER, "--ranks", 2)
        found = self.train(*TRANSFORMER, *CUDA, "--precision", "f32", "--ranks", 2, "--buckets", "optimal")
        self.same_curve(found, expected, 1e-4, ("planned",))

    def test_shards_over_nccl(self):
        for ranks in (2,) if ON_DEVICE else (1, 2, 3):
            run = [*TRANSFORMER, *(["--global-batch", 10] if ranks == 3 else [])]  # unevenly shared
            expected = self.train(*run, "--ranks", ranks)
            for stage in STAGES:
                outcomes = self.over_nccl(ranks, *run, "--precision", "f32", "--shard", stage, "--json", "-")
                for code, out, err in outcomes:
                    self.assertEqual(code, 0, err)
                self.same_curve(json.loads(outcomes[0][1]), expected, 1e-4, ("nccl", ranks, stage))

    @unittest.skipIf("device" in sys.argv, "it is the same over the fakes")
    def test_memory_is_that_of_the_cpu(self):
        """Of weights, gradients and the optimizer's state, by --shard."""
        self.steps = ["--steps", 1]
        for stage in ("none", *STAGES):
            run = [*TRANSFORMER, "--ranks", 2, "--shard", stage, *([] if stage == "parameters" else ["--bucket-mib", 0.004])]
            expected, found = self.train(*run), self.train(*run, *CUDA, "--precision", "f32")
            for part in ("parameters", "gradients", "optimizer"):
                self.assertEqual(found["bytes_" + part], expected["bytes_" + part], (stage, part))
            # Copies in bf16: of all matrices but the tables of the embedding, or of the largest one at a time.
            copies = 2 * 256 * 16 if stage == "parameters" else 2 * (12 * 16 * 16 + 256 * 16)
            self.assertEqual(self.train(*run, *CUDA)["bytes_parameters"], expected["bytes_parameters"] + copies, stage)

    def test_a_sharded_run_is_resumed_elsewhere(self):
        """On another device, with another stage and number of ranks; three micro-batches, which two ranks share unevenly."""
        run = [*TRANSFORMER, "--global-batch", 6]
        whole = self.train(*run, "--ranks", 3)
        on_cuda = [*CUDA, "--precision", "f32"]
        parts = [[*on_cuda, "--ranks", 3, "--shard", "parameters"], ["--ranks", 2, "--shard", "gradients"],
                 [*on_cuda, "--ranks", 2, "--shard", "gradients"], ["--ranks", 1]]
        last = self.steps[1]
        for first in (2,) if ON_DEVICE else (0, 2):  # from a device to the CPU and back, and on either at last
            folder = self.folder / str(first)
            for stop, part in zip((1, 2, 3, last), parts[first:] + parts[:first]):
                found = self.train(*run, *part, "--checkpoint", folder, "--stop-after", stop, *(["--resume"] if stop > 1 else []))
            self.same_curve(found, whole, 1e-4, (first,), ["validation_loss"])
        folder = self.folder / "from the CPU"
        self.train(*run, "--ranks", 3, "--shard", "optimizer", "--checkpoint", folder, "--stop-after", 2)
        found = self.train(*run, *on_cuda, "--ranks", 2, "--shard", "parameters", "--checkpoint", folder, "--resume")
        self.same_curve(found, whole, 1e-4, ("from the CPU",), ["validation_loss"])

    def test_a_resumed_run(self):
        """Over a device as on the CPU; and what one has written the other reads."""
        folder = self.folder / "run"
        run = [*TRANSFORMER, "--ranks", 1, "--checkpoint", folder]
        cuda = [*run, *CUDA, "--precision", "f32"]
        whole = self.train(*cuda)
        self.train(*cuda, "--stop-after", 2)
        self.assertEqual(self.train(*cuda, "--resume")["params_digest"], whole["params_digest"])
        self.train(*cuda, "--stop-after", 2)
        self.same_curve(self.train(*run, "--resume"), whole, 1e-4, ("on the CPU",), ["validation_loss"])
        self.train(*run, "--stop-after", 2)
        self.same_curve(self.train(*cuda, "--resume"), whole, 1e-4, ("from the CPU",), ["validation_loss"])

    def test_validation_and_sample(self):
        for stage in ("none", "parameters"):
            weights = self.folder / f"{stage}.safetensors"
            code, out, err = self.finish(self.start(*TRANSFORMER, *CUDA, "--ranks", 2, "--validate-every", 2, "--sample", 12, "--shard", stage,
                                                    "--save-weights", weights))
            self.assertEqual(code, 0, err)
            self.assertIn("validation loss", out)
            self.assertIn("cuda, matrix products of bf16", out)
            self.assertEqual(out.count("----"), 2)
        self.assertEqual((self.folder / "none.safetensors").stat().st_size, weights.stat().st_size)

    def test_a_trace(self):
        trace = self.folder / "trace.json"
        self.train(*TRANSFORMER, *CUDA, "--ranks", 2, "--trace", trace)
        self.assertEqual(len({event["pid"] for event in json.loads(trace.read_text())["traceEvents"]}), 2)

    def test_what_is_refused(self):
        self.refused(("--overlap step", "--device cpu"), *CUDA, "--shard", "optimizer", "--overlap", "step")
        self.refused(("--shared-weights", "--device cpu"), *CUDA, "--shard", "optimizer", "--shared-weights")
        self.refused(("--precision", "--device cuda"), "--precision", "bf16")
        self.refused(("--backend nccl", "--device cuda"), "--backend", "nccl")
        self.refused(("--ranks 3", "WORLD_SIZE"), *CUDA, "--backend", "nccl", "--ranks", "3")
        self.refused(("--backend nccl", "RANK"), *CUDA, "--backend", "nccl", environment={"WORLD_SIZE": "2"})


if __name__ == "__main__":
    kind, PROGRAM = sys.argv[1:3]
    ON_DEVICE = kind == "device"
    PROGRAM_OF_RANKS = None if ON_DEVICE else sys.argv[3]
    if ON_DEVICE and "no CUDA device" in (said := no_device()).stderr:
        # What can be tested without one: one sentence, and the code of what the user can mend.
        assert said.returncode == 2 and said.stdout == "" and len(said.stderr.strip().splitlines()) == 1, said
        nccl = subprocess.run([PROGRAM, *CUDA, "--backend", "nccl"], capture_output=True, text=True, timeout=60)
        assert nccl.returncode == 2 and nccl.stderr == said.stderr, nccl
        print("skipped: " + said.stderr.strip())
        sys.exit(77)
    unittest.main(argv=sys.argv[:1], verbosity=2)
