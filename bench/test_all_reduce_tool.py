#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Does bench_all_reduce --backend print nccl-tests' columns, with figures that agree with one another, and refuse bad input?

    test_all_reduce_tool.py BENCH_ALL_REDUCE
"""
import os
import socket
import subprocess
import sys
import unittest

PROGRAM = sys.argv.pop(1) if len(sys.argv) > 1 else None
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "GRADSYNC_")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}


def start(*arguments, **environment):
    return subprocess.Popen([PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT | environment)


def finish(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@unittest.skipUnless(PROGRAM, "which program? See above")
class ToolTest(unittest.TestCase):
    def check(self, answer, header, ranks, dtype, redop, element, sizes):
        code, out, err = answer
        self.assertEqual((code, err), (0, ""))
        first, how, _, names, units, *rows = out.splitlines()
        for words in header: self.assertIn(words, first + how)
        self.assertEqual(names.split(), ["#", "size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"])
        self.assertEqual(units.split(), ["#", "(B)", "(elements)", "(us)", "(GB/s)", "(GB/s)"])
        self.assertEqual([int(row.split()[0]) for row in rows], sizes)
        for row in rows:
            size, count, *kind, time, algbw, busbw, wrong = row.split()
            self.assertEqual((int(count) * element, kind, wrong), (int(size), [dtype, redop], "0"), row)
            expected = int(size) / float(time) / 1000
            self.assertAlmostEqual(float(algbw), expected, delta=expected * 0.006 / float(time) + 0.001, msg=row)
            self.assertAlmostEqual(float(busbw), float(algbw) * 2 * (ranks - 1) / ranks, delta=0.002, msg=row)

    def test_threads(self):
        answer = finish(start("--backend", "threads", "--iterations", "3", "--min-bytes", "4K", "--max-bytes", "64KiB"))
        self.check(answer, ("--backend threads: 2 ranks, 3 iterations, warm-up 1", "2 threads"), 2, "f32", "sum", 4, [4096, 16384, 65536])

    def test_processes_started_by_the_program(self):
        for flags, words in ((["--messages"], "messages over TCP"), (["--borrowed"], "borrowed memory")):
            answer = finish(start("--backend=tcp", "--ranks=3", "--iterations=2", "--warmup=0", "--dtype=bf16", "--op=mean", "--min-bytes=1001",
                                  "--max-bytes=1M", "--factor=1000", *flags))
            self.check(answer, ("--backend tcp: 3 ranks, 2 iterations, warm-up 0", "3 processes", words), 3, "bf16", "mean", 2, [1000, 1001000])

    def test_processes_started_by_a_launcher(self):
        with socket.create_server(("127.0.0.1", 0)) as free: port = str(free.getsockname()[1])
        processes = [start("--backend", "tcp", "--iterations", "1", "--max-bytes", "4K", RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=port) for rank in (0, 1)]
        answers = [finish(process) for process in processes]
        self.check(answers[0], ("--backend tcp: 2 ranks", "2 processes"), 2, "f32", "sum", 4, [4096])
        self.assertEqual(answers[1], (0, "", ""))

    def test_bad_input_is_refused_in_one_sentence_that_names_the_option(self):
        for option, flags in {
                "--backend": ["--backend", "smoke"], "--ranks": ["--ranks", "0"], "--min-bytes": ["--min-bytes", "4X"],
                "--max-bytes": ["--max-bytes", "1"], "--factor": ["--factor", "1"], "--iterations": ["--iterations", "-1"],
                "--warmup": ["--warmup", "many"], "--dtype": ["--dtype", "i8"], "--op": ["--op", "xor"], "--borrowed": ["--borrowed"],
                "--messages": ["--messages"], "--typo": ["--typo"]}.items():
            code, out, err = finish(start(*(["--backend", "threads"] if option != "--backend" else []), *flags))
            self.assertEqual((code, out, len(err.splitlines())), (2, "", 1), (option, err))
            self.assertIn(option, err)
        code, out, err = finish(start("--backend", "tcp", "--ranks", "3", RANK="0", WORLD_SIZE="2"))
        self.assertEqual((code, out), (2, ""))
        self.assertIn("--ranks is 3", err)
        self.assertEqual(finish(start("--backend", "tcp", "--ranks", "3", RANK="1", WORLD_SIZE="2")), (2, "", ""))  # rank 0 has said it

    def test_another_program_as_a_peer(self):
        def answer(peer):
            return finish(start(f"--peer={peer}", "--rounds=1", "--benchmark_filter=^other/all_reduce/f32/ranks:4/bytes:4096$", "--benchmark_format=csv"))

        code, out, _ = answer("other=sh -c 'echo it said 1; echo other ${0}e-3; echo other 1e-3' {ranks}")
        self.assertEqual(code, 0)
        self.assertRegex(out, r'(?m)^"other/all_reduce/f32/ranks:4/bytes:4096",1,2500,')
        for peer, words in (("other=false", "this command failed: false 4096 "), ("other=echo one 1 #", "it printed no line 'other SECONDS'")):
            code, out, _ = answer(peer)
            self.assertEqual(code, 1)
            self.assertIn(words, out)
        for peer in ("other", "=true", "other="):
            code, out, err = answer(peer)
            self.assertEqual((code, out), (2, ""))
            self.assertIn(f"--peer takes NAME=COMMAND, not '{peer}'", err)


if __name__ == "__main__":
    unittest.main()
