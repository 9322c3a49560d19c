# SPDX-License-Identifier: BSL-1.0
"""gradsync_run as its users see it.

usage: test_run.py GRADSYNC_RUN GRADSYNC_RESTART GRADSYNC_ELASTIC [GRADSYNC_TRAIN]
"""

import collections
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

LIMIT = 240 * int(os.environ.get("GRADSYNC_TEST_TIMEOUT_FACTOR", 1))


def until(condition):
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(process):
    try:
        state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


class RunTest(unittest.TestCase):
    def setUp(self):
        # In memory: a store waits for the disk at each record, and jobs here do little else than meet.
        folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def call(self, *arguments, **more):
        return subprocess.run([RUN, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT, **more)

    def begin(self, *arguments, stdout=subprocess.PIPE):
        started = subprocess.Popen([RUN, *map(str, arguments)], stdout=stdout, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.addCleanup(lambda: (started.kill(), started.wait(), started.stdout and started.stdout.close(), started.stderr.close()))
        return started

    def script(self, text):
        return ["--", "sh", "-c", text]

    def numbers_in(self, name, count):
        """The process numbers that ranks write to files of that name, once there are so many."""
        found = lambda: [int(text) for p in self.folder.glob(name) if (text := p.read_text().strip())]
        self.assertTrue(until(lambda: len(found()) == count), f"{count} files {name}")
        return found()

    def supervisor_of(self, launcher):
        return int(pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[0])

    def ranks_of(self, launcher):
        supervisor = self.supervisor_of(launcher)
        return [int(p) for p in pathlib.Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()]

    def await_ranks(self, launcher, count, without):
        """Waits until there are so many processes, without one that was killed."""
        self.assertTrue(until(lambda: len(ranks := self.ranks_of(launcher)) == count and without not in ranks))

    def kill_at_once(self, launcher, ranks):
        """The launcher learns of one when all are gone."""
        supervisor = self.supervisor_of(launcher)
        os.kill(supervisor, signal.SIGSTOP)
        for rank in ranks: os.kill(rank, signal.SIGKILL)
        self.assertTrue(until(lambda: not any(map(alive, ranks))))
        os.kill(supervisor, signal.SIGCONT)


class Output(RunTest):
    def test_every_rank_knows_who_it_is(self):
        done = self.call("-n", 3, *self.script("echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $GRADSYNC_JOB_TOKEN $GRADSYNC_RESTART"))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        lines = sorted(done.stdout.splitlines())
        rests = set()
        for rank, line in enumerate(lines):
            self.assertRegex(line, rf"^\[{rank}\] {rank} {rank} 3 3 127\.0\.0\.1:\d+ [0-9a-f]{{32}} 0$")
            rests.add(line.split(" 3 3 ")[1])
        self.assertEqual((len(lines), len(rests)), (3, 1))

    def test_lines_stay_whole_and_none_is_lost(self):
        line = "x" * 300
        done = self.call("-n", 4, *self.script(f"i=0; while [ $i -lt 2500 ]; do printf '%s' $i; printf ' {line}\\n'; i=$((i+1)); done; printf end"))
        self.assertEqual(done.returncode, 0)
        of_rank = collections.defaultdict(list)
        for text in done.stdout.splitlines():
            rank, rest = re.fullmatch(r"\[(\d)\] (.*)", text).groups()
            of_rank[rank].append(rest)
        self.assertEqual(len(of_rank), 4)
        for rests in of_rank.values():
            self.assertEqual(rests, [*(f"{i} {line}" for i in range(2500)), "end"])

    def test_both_streams_and_the_log(self):
        done = self.call("-n", 2, "--no-prefix", "--log-dir", self.folder / "logs", *self.script("echo out; echo err >&2"))
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "out\nout\n", "err\nerr\n"))
        for rank in (0, 1):
            for stream in ("out", "err"):
                self.assertEqual((self.folder / f"logs/start-0/rank-{rank}.{stream}").read_text(), stream + "\n")

    def test_rank_0_reads_standard_input(self):
        done = self.call("-n", 2, *self.script("cat"), input="a line\n")
        self.assertEqual((done.returncode, done.stdout), (0, "[0] a line\n"))

    def test_a_reader_that_goes_ends_nothing(self):
        done = subprocess.run(f"'{RUN}' -n 2 -- sh -c 'echo a; sleep 0.2; echo b; touch {self.folder}/$RANK' | head -n 1", shell=True,
                              capture_output=True, text=True, timeout=LIMIT)
        self.assertEqual(done.returncode, 0)
        self.assertTrue(until(lambda: len(list(self.folder.iterdir())) == 2))

    def test_cores_of_ones_own(self):
        cores = sorted(os.sched_getaffinity(0))
        self.assertIn("fewer cores than ranks", self.call("-n", len(cores) + 1, "--bind", "--", "true").stderr)
        done = self.call("-n", len(cores), "--bind", *self.script("echo $(sed -n 's/^Cpus_allowed_list:\\t//p' /proc/self/status)"))
        self.assertEqual(sorted(int(line.split()[1]) for line in done.stdout.splitlines()), cores)

    def test_a_slow_reader_costs_no_memory(self):
        launcher = self.begin("-n", 1, "--no-prefix", "--", "yes", "a line that comes again and again, faster than anybody reads it")
        for _ in range(1500):
            self.assertEqual(len(launcher.stdout.read(1 << 15)), 1 << 15)
            time.sleep(0.001)  # the launcher always has more to write
        status = pathlib.Path(f"/proc/{self.supervisor_of(launcher)}/status").read_text()
        self.assertLess(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]), 24 << 10, "of 48 MiB that it has passed on")


class Ends(RunTest):
    def script_of_2_and_others(self, first, others):
        """Rank 2 ends by itself, and the others when the launcher has noted that: until then it answers to signals as a zombie."""
        return self.script("[ $RANK = 2 ] && {{ echo $$ > {0}/rank2; {1}; }}; until [ -s {0}/rank2 ] && ! kill -0 $(cat {0}/rank2) 2>/dev/null; do sleep 0.02; done; {2}"
                           .format(self.folder, first, others))

    def test_the_exit_status_is_that_of_the_first_to_fail(self):
        for script, status in ((self.script("exit 0"), 0), (self.script("[ $RANK != 1 ] || exit 7"), 7), (self.script("[ $RANK != 0 ] || kill -KILL $$"), 137),
                               (self.script_of_2_and_others("exit 3", "exit 4"), 3)):
            done = self.call("-n", 3, *script)
            self.assertEqual(done.returncode, status, (script, done.stderr))
            self.assertEqual(done.stderr == "", status == 0)

    def test_who_failed_first_and_what_the_others_said(self):
        done = self.call("-n", 4, *self.script_of_2_and_others("echo the disk is full >&2; exit 9", "echo rank 2 is gone >&2; exit 1"))
        self.assertEqual(done.returncode, 9)
        own = [line for line in done.stderr.splitlines() if line.startswith("gradsync_run: ")]
        self.assertRegex(own[0], r"^gradsync_run: rank 2 failed first: it ended with exit status 9 after \d+\.\d s: the disk is full$")
        self.assertEqual(own[1:], ["gradsync_run: ranks 0, 1, 3 ended with exit status 1: rank 2 is gone"])

    def test_the_first_to_fail_is_known_however_late_the_launcher_looks(self):
        for repeat in range(5):
            for p in self.folder.iterdir():
                p.unlink()
            launcher = self.begin("-n", 4, *self.script("echo $$ > {0}/ready$RANK; while [ ! -e {0}/go$RANK ]; do sleep 0.01; done; exit 1$RANK".format(self.folder)))
            processes = [int((self.folder / f"ready{rank}").read_text()) for rank in range(4) if self.numbers_in("ready*", 4)]
            supervisor = self.supervisor_of(launcher)
            os.kill(supervisor, signal.SIGSTOP)
            order = [3, 1, 0, 2] if repeat % 2 else [2, 3, 0, 1]
            for rank in order:
                (self.folder / f"go{rank}").touch()
                self.assertTrue(until(lambda: not alive(processes[rank])))
            os.kill(supervisor, signal.SIGCONT)
            self.assertEqual(launcher.wait(LIMIT), 10 + order[0])

    def test_a_rank_that_hangs_is_ended(self):
        for trap in ("", "trap '' TERM; "):
            done = self.call("-n", 2, "--grace", 0.3, *self.script(f"{trap}[ $RANK = 0 ] && exit 5; while :; do sleep 1; done"))
            self.assertEqual(done.returncode, 5)
            self.assertIn("rank 1 did not end within 0.3 s of that, and was ended", done.stderr)

    def test_what_cannot_be_started_is_said(self):
        done = self.call("-n", 2, "--", self.folder / "missing")
        self.assertEqual((done.returncode, done.stderr), (127, f"gradsync_run: cannot start {self.folder}/missing: No such file or directory\n"))
        for arguments, word in ((("-n", 0, "--", "true"), "--ranks"), (("-n", 2), "name a program"), (("--bogus", "true"), "no option --bogus"),
                                (("-n", "many", "--", "true"), "--ranks")):
            done = self.call(*arguments)
            self.assertEqual((done.returncode, done.stdout, len(done.stderr.splitlines())), (2, "", 1), arguments)
            self.assertIn(word, done.stderr)

    SESSIONS = "setsid sh -c 'echo $$ > {0}/grandchild$RANK; exec sleep 1000' & echo $$ > {0}/child$RANK; "

    def test_nothing_outlives_the_job(self):
        done = self.call("-n", 2, *self.script(self.SESSIONS.format(self.folder) + "while [ ! -s {0}/grandchild$RANK ]; do sleep 0.01; done".format(self.folder)))
        self.assertEqual(done.returncode, 0)
        for process in self.numbers_in("*child*", 4):
            self.assertFalse(alive(process))

    def test_nothing_outlives_a_launcher_that_is_killed(self):
        for victim in ("launcher", "supervisor", "both"):
            for p in self.folder.iterdir():
                p.unlink()
            launcher = self.begin("-n", 2, *self.script(self.SESSIONS.format(self.folder) + "sleep 1000"))
            processes = self.numbers_in("*child*", 4)
            supervisor = self.supervisor_of(launcher)
            if victim == "launcher":
                launcher.kill()
            elif victim == "supervisor":
                os.kill(supervisor, signal.SIGKILL)
                self.assertEqual(launcher.wait(LIMIT), 137)
            else:
                os.kill(supervisor, signal.SIGKILL)
                launcher.kill()
                processes = self.numbers_in("child*", 2)  # nobody is left to look for theirs
            for process in [supervisor, *processes]:
                self.assertTrue(until(lambda: not alive(process)), (victim, process))

    def test_signals_reach_every_rank_once(self):
        launcher = self.begin("-n", 3, *self.script("trap 'echo got >> {0}/got$RANK' USR1; trap 'echo end >> {0}/got$RANK; exit 0' TERM; "
                                                    "echo $$ > {0}/ready$RANK; while :; do sleep 0.02; done".format(self.folder)))
        self.numbers_in("ready*", 3)
        launcher.send_signal(signal.SIGUSR1)
        self.assertTrue(until(lambda: len(list(self.folder.glob("got*"))) == 3))
        launcher.send_signal(signal.SIGTERM)
        self.assertEqual(launcher.wait(LIMIT), 0)  # they have ended well
        self.assertEqual({p.read_text() for p in self.folder.glob("got*")}, {"got\nend\n"})
        self.assertEqual(launcher.stderr.read(), "")

    def test_a_job_can_be_stopped_and_go_on(self):
        launcher = self.begin("-n", 2, *self.script("echo $$ > {0}/ready$RANK; while [ ! -e {0}/go ]; do sleep 0.02; done".format(self.folder)))
        processes = [launcher.pid, *self.numbers_in("ready*", 2)]
        stopped = lambda p: pathlib.Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        launcher.send_signal(signal.SIGTSTP)
        self.assertTrue(until(lambda: all(map(stopped, processes))))
        (self.folder / "go").touch()
        launcher.send_signal(signal.SIGCONT)
        self.assertEqual(launcher.wait(LIMIT), 0)

    def test_a_hangup_under_nohup_ends_nothing(self):
        launcher = subprocess.Popen(["nohup", RUN, "-n", "1", "--", "sh", "-c", f"echo $$ > {self.folder}/ready; sleep 1; echo survived"],
                                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.numbers_in("ready", 1)
        launcher.send_signal(signal.SIGHUP)
        self.assertEqual(launcher.communicate(timeout=LIMIT)[0], "[0] survived\n")

    def test_a_background_job_is_interrupted_if_it_is_asked(self):
        script = f"'{RUN}' -n 2 -- sh -c 'echo $$ > {self.folder}/ready$RANK; exec sleep 1000' & echo $!; wait $!; echo $?"
        shell = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
        launcher = int(shell.stdout.readline())
        self.numbers_in("ready*", 2)
        os.kill(launcher, signal.SIGINT)
        self.assertEqual(shell.communicate(timeout=LIMIT)[0], "130\n")

    def test_an_interrupt_ends_the_job_and_a_second_one_at_once(self):
        launcher = self.begin("-n", 2, "--restarts", 5, *self.script("echo $$ > {0}/ready$RANK; exec sleep 1000".format(self.folder)))
        processes = self.numbers_in("ready*", 2)
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does it
        self.assertEqual(launcher.wait(LIMIT), 130)
        self.assertEqual(launcher.stderr.read(), "")
        self.assertFalse(any(map(alive, processes)))
        launcher = self.begin("-n", 2, *self.script("trap '' INT TERM; echo $$ > {0}/stubborn$RANK; while :; do sleep 0.02; done".format(self.folder)))
        self.numbers_in("stubborn*", 2)
        launcher.send_signal(signal.SIGINT)
        time.sleep(1.5)
        self.assertIsNone(launcher.poll())
        launcher.send_signal(signal.SIGINT)
        self.assertEqual(launcher.wait(LIMIT), 137)

    def test_a_request_that_comes_twice_at_once_is_one(self):
        launcher = self.begin("-n", 2, *self.script("trap 'sleep 0.5; echo saved > {0}/saved$RANK; exit 0' TERM; "
                                                    "echo $$ > {0}/ready$RANK; while :; do sleep 0.02; done".format(self.folder)))
        self.numbers_in("ready*", 2)
        for process in (launcher.pid, self.supervisor_of(launcher)):  # as systemd does it
            os.kill(process, signal.SIGTERM)
        self.assertEqual(launcher.wait(LIMIT), 0)
        self.assertEqual(len(list(self.folder.glob("saved*"))), 2)

    def test_signals_are_heard_while_nobody_reads_the_output(self):
        launcher = self.begin("-n", 2, *self.script("echo $$ > {0}/ready$RANK; exec yes 'a line that fills the pipe'".format(self.folder)))
        self.numbers_in("ready*", 2)
        time.sleep(1)
        for _ in range(20):  # one that comes within a second of another counts as the same
            launcher.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired): launcher.wait(1.5)
        self.assertIn(launcher.returncode, (130, 137))

    def test_what_failed_before_an_interrupt_is_said(self):
        launcher = self.begin("-n", 2, *self.script("echo $$ > {0}/ready$RANK; [ $RANK = 1 ] && {{ echo the disk is full >&2; exit 9; }}; exec sleep 1000".format(self.folder)))
        self.numbers_in("ready*", 2)
        self.assertTrue(until(lambda: "disk" in launcher.stderr.readline()))
        failed = (self.folder / "ready1").read_text().strip()
        self.assertTrue(until(lambda: not os.path.exists(f"/proc/{failed}")))  # not even as a zombie: the launcher knows
        launcher.send_signal(signal.SIGINT)
        self.assertEqual(launcher.wait(LIMIT), 9)
        self.assertIn("rank 1 failed first", launcher.stderr.read())

    def test_it_runs_where_ends_of_children_are_ignored(self):
        done = self.call("-n", 2, "--", "true", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
        self.assertEqual(done.returncode, 0)


class Restarts(RunTest):
    def test_a_job_is_started_again_with_another_token(self):
        done = self.call("-n", 2, "--restarts", 3, "--log-dir", self.folder, *self.script("echo $GRADSYNC_RESTART $GRADSYNC_JOB_TOKEN; [ $GRADSYNC_RESTART = 2 ] || exit 6"))
        self.assertEqual(done.returncode, 0, done.stderr)
        starts = collections.defaultdict(set)
        for line in done.stdout.splitlines():
            _, number, token = line.split()
            starts[number].add(token)
        self.assertEqual(sorted(starts), ["0", "1", "2"])
        self.assertEqual(len(set.union(*starts.values())), 3)
        self.assertIn("gradsync_run: starts again, 2 of at most 3", done.stderr)
        self.assertTrue(done.stderr.endswith("gradsync_run: the job succeeded. It was started again 2 times.\n"), done.stderr)
        self.assertEqual(len(list(self.folder.glob("start-*/rank-*.out"))), 6)

    def test_no_restart_is_left(self):
        done = self.call("-n", 2, "--restarts", 1, *self.script("exit 6"))
        self.assertEqual(done.returncode, 6)
        self.assertTrue(done.stderr.endswith("gradsync_run: no restart is left of 1.\n"), done.stderr)

    def test_a_job_that_fails_at_once_again_and_again_is_not_started_for_ever(self):
        begin = time.monotonic()
        done = self.call("-n", 1, "--restarts", 1000, *self.script("echo no such file >&2; exit 6"))
        self.assertEqual(done.returncode, 6)
        self.assertIn("the job has failed 5 times in a row within 5 s of its start; the job is not started again", done.stderr)
        self.assertGreater(time.monotonic() - begin, 7)  # it has waited longer and longer


    def test_what_is_wrong_with_several_hosts_is_said(self):
        for options, words in [(["--hosts", 2], "--hosts needs --store"),
                               (["--hosts", 2, "--host-index", 2, "--store", self.folder], "there are 2 hosts, so say 0 to 1"),
                               (["--hosts", 2, "--store", self.folder / "none"], "cannot be opened"),
                               (["--hosts", 2, "--store", "redis://here"], "there is no store of the kind redis://"),
                               (["--hosts", 2, "--host-index", 1, "--store", self.folder, "--wait", 1], "host 0 has not come to"),
                               (["--hosts", 2, "--host-index", 1, "--store", self.folder], "has a host 1 already, perhaps of a job that has ended; give each job a folder or a prefix of its own, and each host another"),
                               (["--hosts", 3, "--host-index", 0, "--store", self.folder, "--address", "127.0.0.1", "--wait", 1], "host 2 has not come to")]:
            done = self.call(*options, *self.script("true"))
            self.assertIn(done.returncode, (2, 127))
            self.assertIn(words, done.stderr)

    def on_hosts(self, *arguments):
        """Two launchers on this machine, as if it were two."""
        started = [self.begin("-n", 2, "--hosts", 2, "--host-index", host, "--store", self.folder, "--address", "127.0.0.1", *arguments) for host in (0, 1)]
        return [(*host.communicate(timeout=LIMIT), host.returncode) for host in started]

    def test_ranks_of_two_hosts_know_who_they_are(self):
        done = self.on_hosts(*self.script("echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $GRADSYNC_JOB_TOKEN"))
        lines = sorted(line for output, _, status in done for line in output.splitlines())
        self.assertEqual([line.split()[:6] for line in lines], [[f"[{r}]", str(r), str(r % 2), "4", "2", "127.0.0.1"] for r in range(4)])
        self.assertEqual(len({tuple(line.split()[6:]) for line in lines}), 1)

    def test_a_failure_on_one_host_starts_both_again(self):
        done = self.on_hosts("--restarts", 2, "--grace", 1, *self.script("[ $RANK = 3 ] && [ $GRADSYNC_RESTART = 0 ] && { echo oops >&2; exit 7; }; "
                                                                          "[ $GRADSYNC_RESTART = 1 ] || sleep 1000"))
        for _, errors, status in done:
            self.assertEqual(status, 0, errors)
            self.assertIn("rank 3 failed first: it ended with exit status 7", errors)
            self.assertIn("the job succeeded. It was started again 1 time.", errors)

    def test_ranks_do_not_wait_for_those_of_a_host_that_has_still_to_end_its_own(self):
        script = ("[ $GRADSYNC_RESTART = 0 ] && { [ $RANK = 0 ] && exit 7; [ $RANK = 1 ] || sleep 1000; exit; }; touch FOLDER/here$RANK; i=0; "
                  "for other in 0 1 2 3; do while [ ! -e FOLDER/here$other ]; do i=$((i+1)); [ $i = 300 ] && exit 1; sleep 0.02; done; done")
        for _, errors, status in self.on_hosts("--restarts", 1, "--grace", 10, *self.script(script.replace("FOLDER", str(self.folder)))):
            self.assertEqual(status, 0, errors)

    def test_a_failure_after_the_other_host_has_succeeded_starts_both_again(self):
        for _, errors, status in self.on_hosts("--restarts", 1, *self.script("[ $RANK = 3 ] && [ $GRADSYNC_RESTART = 0 ] && { sleep 1; exit 7; }; true")):
            self.assertEqual(status, 0, errors)
            self.assertIn("the job succeeded. It was started again 1 time.", errors)

    def test_a_signal_to_one_host_ends_the_other(self):
        script = self.script("echo $$ > {0}/ready$RANK; exec sleep 1000".format(self.folder))
        started = [self.begin("-n", 1, "--restarts", 3, "--hosts", 2, "--host-index", host, "--store", self.folder, "--address", "127.0.0.1", "--grace", 1, *script)
                   for host in (0, 1)]
        self.numbers_in("ready*", 2)
        started[0].send_signal(signal.SIGTERM)
        for host in started:
            _, errors = host.communicate(timeout=LIMIT)
            self.assertEqual(host.returncode, 128 + signal.SIGTERM, errors)
            self.assertNotIn("starts again", errors)

    def test_a_signal_ends_hosts_that_wait_for_others(self):
        launcher = lambda host: self.begin("-n", 1, "--restarts", 3, "--hosts", 2, "--host-index", host, "--store", self.folder, "--address", "127.0.0.1",
                                           *self.script("echo started"))
        first = launcher(0)
        self.assertTrue(until(lambda: any("host" in file.name for file in self.folder.iterdir())))
        first.send_signal(signal.SIGTERM)
        for host in (first, launcher(1)):
            output, errors = host.communicate(timeout=LIMIT)
            self.assertEqual((host.returncode, output), (128 + signal.SIGTERM, ""), errors)

    def test_a_signal_between_two_starts_ends_the_other_host(self):
        started = [self.begin("-n", 1, "--restarts", 3, "--hosts", 2, "--host-index", host, "--store", self.folder, "--address", "127.0.0.1",
                              *self.script("exit 7")) for host in (0, 1)]
        self.assertTrue(until(lambda: "starts again, 3 of" in started[0].stderr.readline()))  # after the longest pause
        started[0].send_signal(signal.SIGTERM)
        _, errors = started[1].communicate(timeout=LIMIT)
        self.assertEqual(started[1].returncode, 128 + signal.SIGTERM, errors)

    def test_both_hosts_end_with_the_status_of_the_first_failure(self):
        for _, errors, status in self.on_hosts("--grace", 1, *self.script("[ $RANK = 1 ] && exit 9; sleep 1000")):
            self.assertEqual(status, 9, errors)

    def test_a_store_that_takes_no_names_ends_no_rank_and_changes_no_status(self):
        for name in "failed+", "done+":  # where the store would make folders
            (self.folder / name).touch()
        first, second = self.on_hosts("--wait", 6, *self.script("[ $RANK = 1 ] && exit 9; sleep 1; echo succeeded"))
        for output, errors, status in first, second:
            self.assertIn("Not a directory", errors)
        self.assertEqual((first[2], first[0]), (9, "[0] succeeded\n"), first[1])
        self.assertIn("gradsync_run: rank 1 failed first: it ended with exit status 9", first[1])
        self.assertEqual((second[2], sorted(second[0].split())), (0, ["[2]", "[3]", "succeeded", "succeeded"]), second[1])


class GoingOn(RunTest):
    """Ranks that meet again when one of them is started again."""

    def job(self, *options):
        launcher = self.begin("-n", 3, *options, "--", RESTART, self.folder)
        self.assertTrue(until(lambda: (self.folder / "checkpoint").exists()))
        variables = pathlib.Path(f"/proc/{self.ranks_of(launcher)[0]}/environ").read_bytes().split(b"\0")
        self.stores += [pathlib.Path(v.decode().partition("=")[2]).parent for v in variables if v.startswith(b"GRADSYNC_STORE=")]
        self.assertTrue(self.stores[-1].exists())
        return launcher

    def setUp(self):
        super().setUp()
        self.plain = self.call("-n", 3, "--", RESTART, tempfile.mkdtemp(dir=self.folder)).stdout
        self.assertRegex(self.plain, "y = 0x1.")
        self.stores = []

    def tearDown(self):
        self.assertTrue(until(lambda: not any(store.exists() for store in self.stores)), "a folder is left in /dev/shm")

    def test_the_others_go_on_and_the_result_is_the_same(self):
        launcher = self.job("--restarts", 2)
        before = self.ranks_of(launcher)
        os.kill(before[1], signal.SIGKILL)
        self.assertTrue(until(lambda: len(self.ranks_of(launcher)) == 3 and before[1] not in self.ranks_of(launcher)))
        self.assertEqual([self.ranks_of(launcher)[i] for i in (0, 1)], [before[0], before[2]])
        output, errors = launcher.communicate(timeout=LIMIT)
        self.assertEqual((launcher.returncode, output), (0, self.plain), errors)
        self.assertIn("rank 1 failed: it was killed by signal 9 (Killed)", errors)
        self.assertIn("starts it again, 1 of at most 2", errors)
        self.assertIn("[0] goes on after: rank 0: the process of rank 1 died", errors)
        self.assertIn("the job succeeded. It was started again 1 time.", errors)

    def test_two_at_once_are_one_restart(self):
        launcher = self.job("--restarts", 1)
        self.kill_at_once(launcher, self.ranks_of(launcher)[:2])
        output, errors = launcher.communicate(timeout=LIMIT)
        self.assertEqual((launcher.returncode, output), (0, self.plain), errors)
        self.assertIn("the job succeeded. It was started again 1 time.", errors)

    def test_when_no_restart_is_left_the_others_learn_it(self):
        launcher = self.job("--restarts", 1)
        first = self.ranks_of(launcher)[2]
        os.kill(first, signal.SIGKILL)
        self.await_ranks(launcher, 3, without=first)
        os.kill(self.ranks_of(launcher)[2], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=LIMIT)
        self.assertEqual(launcher.returncode, 128 + signal.SIGKILL, errors)
        # They may look before the launcher has said that it is over, or after.
        self.assertRegex(errors, r"ranks 0, 1 ended with exit status 1: .*(rank 2 died while|the job was ended: no restart is left of 1)")
        self.assertTrue(errors.endswith("gradsync_run: no restart is left of 1.\n"), errors)

    def test_a_signal_ends_a_job_that_waits_for_a_rank(self):
        launcher = self.job("--restarts", 2)
        os.kill(self.ranks_of(launcher)[0], signal.SIGKILL)
        launcher.send_signal(signal.SIGINT)
        output, errors = launcher.communicate(timeout=LIMIT)
        self.assertNotEqual(launcher.returncode, 0, errors)
        self.assertNotIn("the job succeeded", errors)
        self.assertNotIn("y =", output)

    def test_nothing_outlives_a_launcher_that_is_killed(self):
        for whom in "launcher", "supervisor":
            launcher = self.job("--restarts", 2)
            ranks = self.ranks_of(launcher)
            os.kill(launcher.pid if whom == "launcher" else self.supervisor_of(launcher), signal.SIGKILL)
            self.assertTrue(until(lambda: not any(map(alive, ranks))), whom)
            (self.folder / "checkpoint").unlink()

    def test_a_rank_that_does_not_leave_a_job_that_has_ended_is_ended(self):
        script = "import os, signal, subprocess, sys; subprocess.run(sys.argv[1:], check=True); os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGSTOP)"
        launcher = self.begin("-n", 2, "--restarts", 1, "--grace", 1, "--", sys.executable, "-c", script, RESTART, self.folder)
        output, errors = launcher.communicate(timeout=LIMIT)
        self.assertEqual(launcher.returncode, 128 + signal.SIGTERM, errors)
        self.assertEqual(output.count("y = "), 1)  # it is not trained again
        self.assertIn("the ranks had ended the job, so it is not started again.", errors)
        self.assertIn("rank 1 did not end within 1.0 s of that, and was ended", errors)

    def test_a_job_goes_on_from_its_state_on_disk_after_the_launcher_was_killed(self):
        state = ["--state", self.folder / "state", "--state-every", 0.2]
        launcher = self.job("--restarts", 1, *state)
        self.assertTrue(until(lambda: any((self.folder / "state").glob("state.[1-9]*"))))
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.communicate(timeout=LIMIT)
        (self.folder / "checkpoint").unlink()
        done = self.call("-n", 3, *state, "--", RESTART, self.folder)
        self.assertEqual((done.returncode, done.stdout), (0, self.plain), done.stderr)
        self.assertRegex(done.stderr, r"gradsync_run: goes on after step [1-9][0-9]*, from ")

    def test_a_job_that_is_asked_to_end_leaves_its_state(self):
        state = ["--state", self.folder / "state", "--state-every", 1000]
        launcher = self.job(*state)
        time.sleep(0.5)
        launcher.terminate()
        _, errors = launcher.communicate(timeout=LIMIT)
        self.assertEqual(launcher.returncode, 0, errors)
        self.assertIn("the job was asked to end; the next start goes on from ", errors)
        done = self.call("-n", 3, *state, "--", RESTART, self.folder)
        self.assertEqual((done.returncode, done.stdout), (0, self.plain), done.stderr)
        self.assertEqual([file.name for file in (self.folder / "state").iterdir() if file.name == "state.300"], ["state.300"])
        self.assertLessEqual(len(list((self.folder / "state").iterdir())), 2)

    def test_a_damaged_state_is_said_and_an_older_one_taken(self):
        folder = self.folder / "state"
        done = self.call("-n", 3, "--state", folder, "--state-every", 0.5, "--", RESTART, self.folder)
        self.assertEqual((done.returncode, done.stdout), (0, self.plain), done.stderr)
        newest, older = sorted(folder.iterdir(), key=lambda file: -int(file.suffix[1:]))
        whole = newest.read_bytes()
        for broken in (whole[:-1], whole[:20], b"", whole[:30] + bytes([whole[30] ^ 1]) + whole[31:], whole + b"x"):
            newest.write_bytes(broken)
            done = self.call("-n", 3, "--state", folder, "--state-every", 1000, "--", RESTART, self.folder)
            self.assertEqual((done.returncode, done.stdout), (0, self.plain), done.stderr)
            self.assertIn("state.300 is damaged; going on from an older state", done.stderr)
            self.assertIn(f"goes on after step {older.suffix[1:]}, from", done.stderr)

    def test_what_is_wrong_with_a_state_is_said(self):
        folder = self.folder / "state"
        self.assertEqual(self.call("-n", 3, "--state", folder, "--", RESTART, self.folder).returncode, 0)
        done = self.call("-n", 2, "--state", folder, "--", RESTART, self.folder)
        self.assertEqual(done.returncode, 127)
        self.assertIn("has the state of 3 ranks; start as many, or name another folder", done.stderr)
        done = self.call("-n", 3, "--state", "/dev/null/here", "--", RESTART, self.folder)
        self.assertIn("--state: cannot make /dev/null/here", done.stderr)

    def test_a_disk_that_is_full_ends_no_job(self):
        if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0: self.skipTest("cannot mount a small disk here")
        disk = self.folder / "disk"
        disk.mkdir()
        command = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=4k tmpfs {disk} && dd if=/dev/zero of={disk}/fill bs=4k count=1 2>/dev/null; exec \"$@\"", "sh",
                   RUN, "-n", "3", "--state", disk, "--state-every", "0.5", "--", RESTART, self.folder]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=LIMIT)
        self.assertEqual((done.returncode, done.stdout), (0, self.plain), done.stderr)
        self.assertIn("the state was not written: cannot write", done.stderr)

    def test_ranks_may_be_started_by_a_program_around_them(self):
        launcher = self.begin("-n", 2, "--restarts", 3, "--grace", 1, *self.script(f"{RESTART} {self.folder}; exit $?"))
        self.assertTrue(until(lambda: (self.folder / "checkpoint").exists()))
        time.sleep(0.3)
        os.kill(self.ranks_of(launcher)[1], signal.SIGKILL)
        output, errors = launcher.communicate(timeout=LIMIT)
        self.assertEqual(launcher.returncode, 0, errors)
        self.assertIn("the job succeeded. It was started again 1 time.", errors)

    def test_children_of_a_lost_rank_end_with_it(self):
        script = f"(sleep 1000 & echo $! >> {self.folder}/child$RANK); echo $$ > {self.folder}/rank$RANK; exec {RESTART} {self.folder}"
        launcher = self.begin("-n", 2, "--restarts", 1, *self.script(script))
        self.assertTrue(until(lambda: (self.folder / "checkpoint").exists()))
        child = int((self.folder / "child1").read_text())
        os.kill(int((self.folder / "rank1").read_text()), signal.SIGKILL)  # the launcher has other children, too
        self.assertTrue(until(lambda: not alive(child)))
        self.assertTrue(alive(int((self.folder / "child0").read_text())))
        _, errors = launcher.communicate(timeout=LIMIT)
        self.assertEqual(launcher.returncode, 0, errors)

    def test_a_state_folder_has_one_job_at_a_time(self):
        self.job("--restarts", 1, "--state", self.folder / "state")
        done = self.call("-n", 3, "--state", self.folder / "state", "--", RESTART, self.folder)
        self.assertEqual(done.returncode, 127)
        self.assertIn("is used by another job; name another folder", done.stderr)

    def test_programs_that_fail_by_themselves_are_not_started_for_ever(self):
        launcher = self.begin("-n", 2, "--restarts", 1000, "--", RESTART, self.folder / "no-such")
        _, errors = launcher.communicate(timeout=LIMIT)
        self.assertEqual(launcher.returncode, 1, errors)
        self.assertIn("ranks have failed 5 times in a row within 5 s of their start; the job is not started again", errors)


class ElasticTest(RunTest):
    """Ranks of an elastic job."""

    @classmethod
    def setUpClass(cls):
        cls.LONG = "--", ELASTIC, "40"  # a job that others have time to come to
        cls.result = subprocess.run([ELASTIC], capture_output=True, text=True, timeout=LIMIT).stdout.splitlines()[-1]
        assert cls.result.startswith("y = 0x1."), cls.result

    def job(self, ranks, *options, program=None):
        self.output = self.folder / "output"
        with open(self.output, "w") as output: launcher = self.begin("-n", ranks, *options, "--no-prefix", *(program or ("--", ELASTIC)), stdout=output)
        self.assertTrue(until(lambda: f"{ranks} ranks from step 0" in self.output.read_text()))
        return launcher

    def comes_to(self, ranks, times=1):
        """Waits until so many ranks have met for the `times`th time, and are the ones that go on."""
        lines = lambda: [line.split()[0] for line in self.output.read_text().splitlines() if " from step " in line]
        self.assertTrue(until(lambda: lines()[-1] == str(ranks) and lines().count(str(ranks)) >= times))

    def ends(self, launcher):
        _, errors = launcher.communicate(timeout=LIMIT)
        lines = self.output.read_text().splitlines()
        self.assertEqual((launcher.returncode, lines[-1]), (0, self.result), errors)
        return [int(line.split()[0]) for line in lines[:-1]], errors


class ComingAndGoing(ElasticTest):
    def test_a_spare_process_takes_the_place_of_a_lost_rank(self):
        launcher = self.job(2, "--spares", 1)
        os.kill(self.ranks_of(launcher)[0], signal.SIGKILL)
        sizes, errors = self.ends(launcher)
        # It may not have answered yet, or have come before rank 0 in the beginning.
        self.assertIn(sizes, ([2, 2], [2, 1, 2], [2]))
        self.assertIn("rank 0 failed: it was killed by signal 9 (Killed)", errors)
        self.assertIn("a rank has failed, so the others go on without it", errors)

    def test_the_others_go_on_and_get_the_rank_back(self):
        launcher = self.job(3, "--min-ranks", 1, "--restarts", 1, program=self.LONG)
        os.kill(self.ranks_of(launcher)[1], signal.SIGKILL)
        sizes, errors = self.ends(launcher)
        self.assertEqual(sizes[-1], 3)
        self.assertIn("the job succeeded. It was started again 1 time.", errors)

    def test_blacklisted_and_back_a_rank_that_fails_again_and_again_is_started_after_a_pause(self):
        launcher = self.job(2, "--min-ranks", 1, "--restarts", 9,
                            program=self.script(f"case $GRADSYNC_RESTART in 1 | 2) exit 6 ;; esac; exec {' '.join(self.LONG[1:])}"))
        os.kill(self.ranks_of(launcher)[1], signal.SIGKILL)
        sizes, errors = self.ends(launcher)
        self.assertIn(sizes, ([2, 1, 2], [2, 2]))
        self.assertIn("starts it again, 3 of at most 9, in 0.5 s", errors)
        self.assertIn("the job succeeded. It was started again 3 times.", errors)

    def test_reset_limit_the_others_go_on_when_no_restart_is_left_down_to_the_minimum(self):
        launcher = self.job(3, "--min-ranks", 2, "--restarts", 1)
        for ranks, times in (3, 2), (2, 1):
            os.kill(self.ranks_of(launcher)[2], signal.SIGKILL)
            self.comes_to(ranks, times)
        os.kill(self.ranks_of(launcher)[1], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=LIMIT)
        self.assertEqual(launcher.returncode, 128 + signal.SIGKILL, errors)
        self.assertIn("no restart is left of 1, so the others go on without it", errors)
        self.assertTrue(errors.endswith("gradsync_run: no restart is left of 1.\n"), errors)
        self.assertNotIn("y =", self.output.read_text())

    def test_a_rank_that_does_not_answer_is_ended_and_replaced(self):
        launcher = self.job(2, "--spares", 1, "--restarts", 1)
        os.kill(self.ranks_of(launcher)[1], signal.SIGSTOP)
        os.kill(self.ranks_of(launcher)[2], signal.SIGKILL)  # a spare process is missed by nobody
        time.sleep(1)
        os.kill(self.ranks_of(launcher)[1], signal.SIGCONT)
        sizes, errors = self.ends(launcher)
        self.assertEqual(sizes[0], 2)
        self.assertNotIn("did not end within", errors)

    def test_a_rank_that_fails_before_they_have_met_is_started_again(self):
        fails = self.script(f"[ $RANK.$GRADSYNC_RESTART != 1.0 ] || exit 6; {ELASTIC}")
        _, errors = self.ends(self.job(2, "--min-ranks", 2, "--restarts", 1, program=fails))
        self.assertIn("the job succeeded. It was started again 1 time.", errors)
        done = self.call("-n", 2, "--min-ranks", 2, *fails)
        self.assertEqual(done.returncode, 6)
        self.assertIn("the job was ended: a rank has failed", done.stderr)

    def test_a_rank_that_was_stopped_before_it_joined_is_ended_and_started_again(self):
        for stop in "kill -STOP $$", "sh -c 'kill -STOP $$'":  # the process that was started, and one of its own
            with self.subTest(stop):
                launcher = self.job(2, "--min-ranks", 1, "--restarts", 1, "--grace", 0.3, program=self.script(
                    f"[ $RANK.$GRADSYNC_RESTART != 1.0 ] || {stop}; {ELASTIC}"))
                _, errors = self.ends(launcher)
                self.assertIn("gradsync_run: rank 1 was stopped before it joined the others, and is ended\n", errors)
                self.assertIn("the job succeeded. It was started again 1 time.", errors)

    def test_a_lost_spare_process_ends_nobody(self):
        launcher = self.job(2, "--spares", 1, "--restarts", 5, "--grace", 5, program=self.LONG)  # longer than the grace time
        for _ in range(3):
            lost = self.ranks_of(launcher)[2]
            os.kill(lost, signal.SIGKILL)
            self.await_ranks(launcher, 3, without=lost)
        sizes, errors = self.ends(launcher)
        self.assertEqual(sizes[-1], 2)  # whoever came first is a rank, so the third may be one
        self.assertIn("the job succeeded. It was started again 3 times.", errors)

    def test_if_all_are_lost_the_job_ends_and_says_so(self):
        launcher = self.job(2, "--min-ranks", 1, "--restarts", 5)
        self.kill_at_once(launcher, self.ranks_of(launcher))
        _, errors = launcher.communicate(timeout=LIMIT)
        self.assertNotEqual(launcher.returncode, 0)
        self.assertIn("all ranks that had the state of the training were lost, and there is no checkpoint; start it anew", errors)
        self.assertIn("the ranks had ended the job, so it is not started again", errors)

    def test_if_all_are_lost_and_no_restart_is_left_the_job_ends(self):
        launcher = self.job(2, "--min-ranks", 1)
        self.kill_at_once(launcher, self.ranks_of(launcher))
        _, errors = launcher.communicate(timeout=LIMIT)
        self.assertEqual(launcher.returncode, 128 + signal.SIGKILL, errors)
        self.assertNotIn("starts it again", errors)

    def test_a_rank_that_leaves_ends_well(self):
        launcher = self.job(2, "--min-ranks", 1)
        os.kill(self.ranks_of(launcher)[1], signal.SIGTERM)
        sizes, errors = self.ends(launcher)
        self.assertEqual((sizes, errors), ([2, 1], ""))

    def test_somebody_starts_one_more_by_hand(self):
        launcher = self.job(2, "--min-ranks", 1, program=self.LONG)
        os.kill(self.ranks_of(launcher)[1], signal.SIGKILL)
        variables = pathlib.Path(f"/proc/{self.ranks_of(launcher)[0]}/environ").read_bytes().split(b"\0")
        store = next(v.decode().partition("=")[2] for v in variables if v.startswith(b"GRADSYNC_STORE="))
        more = subprocess.Popen(self.LONG[1:], env={**os.environ, "GRADSYNC_STORE": store, "GRADSYNC_RANKS": "1:2", "RANK": "2", "WORLD_SIZE": "3"},
                                stdout=subprocess.DEVNULL)
        sizes, _ = self.ends(launcher)
        self.assertEqual(more.wait(LIMIT), 0)
        self.assertEqual(sizes[-1], 2)

    def host(self, index, *options, program=None):
        """Launchers of several hosts on this machine. All write to one file."""
        (self.folder / "store").mkdir(mode=0o700, exist_ok=True)
        self.output = self.folder / "output"
        with open(self.output, "a") as output:
            return self.begin("--host-index", index, "--store", self.folder / "store", "--address", "127.0.0.1", *options, "--no-prefix", *(program or ("--", ELASTIC)), stdout=output)

    def await_output(self, text):
        self.assertTrue(until(lambda: text in self.output.read_text()), self.output.read_text())

    def test_a_host_goes_and_comes_back(self):
        options = ["-n", "1,2", "--hosts", 2, "--min-ranks", 1, "--restarts", 1]
        hosts = [self.host(index, *options, program=self.LONG) for index in (0, 1)]
        self.await_output("3 ranks from step 0")
        hosts[1].kill()
        self.await_output("\n1 ranks from step")
        again = self.host(1, *options, program=self.LONG)
        self.assertTrue(until(lambda: "3 ranks from step" in self.output.read_text()[20:] or hosts[0].poll() is not None))
        self.assertIsNone(hosts[0].poll(), self.output.read_text())
        os.kill(self.ranks_of(again)[0], signal.SIGKILL)
        for launcher in hosts[0], again:
            _, errors = launcher.communicate(timeout=LIMIT)
            self.assertEqual(launcher.returncode, 0, errors)
        self.assertIn("rank 1 failed: it was killed by signal 9 (Killed)", errors)
        lines = self.output.read_text().splitlines()
        self.assertEqual(lines[-1], self.result)
        self.assertEqual(lines[-2].split()[0], "3")
        self.assertEqual(len(list((self.folder / "store/gone+").iterdir())), 3)  # two with their launcher, and one
        late = self.host(1, *options)
        _, errors = late.communicate(timeout=LIMIT)
        self.assertEqual(late.returncode, 0)
        self.assertIn("has ended well already", errors)

    def test_a_host_leaves_and_another_one_is_lost(self):
        hosts = [self.host(index, "-n", 1, "--hosts", 3, "--min-ranks", 1) for index in range(3)]
        self.await_output("3 ranks from step 0")
        hosts[0].terminate()
        self.assertEqual(hosts[0].communicate(timeout=LIMIT)[1], "")
        self.await_output("2 ranks from")
        os.kill(self.ranks_of(hosts[2])[0], signal.SIGKILL)
        _, errors = hosts[2].communicate(timeout=LIMIT)
        self.assertRegex(errors, "gradsync_run: rank 2 failed first: it was killed by signal 9")
        self.assertIn("no rank of this host is left", errors)
        self.assertEqual([launcher.wait(LIMIT) for launcher in hosts], [0, 0, 128 + signal.SIGKILL])
        self.assertEqual(self.output.read_text().splitlines()[-1], self.result)

    def test_options_that_do_not_fit_are_refused(self):
        for options, words in ((("--min-ranks", 3), "there are 2 ranks only"), (("--spares", 1, "--state", self.folder), "for a fixed number of ranks"),
                               (("--hosts", 2, "--store", self.folder, "-n", "1,1,1"), "-n: there are 2 hosts, so give one number, or one for each")):
            done = self.call(*(() if "-n" in options else ("-n", 2)), *options, "--", ELASTIC)
            self.assertEqual(done.returncode, 2)
            self.assertIn(words, done.stderr)


    def test_one_host_may_have_a_store_too(self):
        launcher = self.job(2, "--min-ranks", 1, "--store", self.folder)
        os.kill(self.ranks_of(launcher)[1], signal.SIGKILL)
        sizes, _ = self.ends(launcher)
        self.assertEqual(sizes, [2, 1])
        self.assertTrue((self.folder / "0").is_dir())
        self.assertIn("has a host 0 already, perhaps of a job that has ended", self.call("--store", self.folder, "--", ELASTIC).stderr)

    def test_if_the_program_cannot_be_started_again_the_others_go_on_and_it_is_said(self):
        program = self.folder / "program"
        shutil.copy(ELASTIC, program)
        launcher = self.job(2, "--min-ranks", 1, "--restarts", 9, program=("--", program))
        program.unlink()
        os.kill(self.ranks_of(launcher)[1], signal.SIGKILL)
        sizes, errors = self.ends(launcher)
        self.assertEqual(sizes, [2, 1])
        self.assertIn(f"gradsync_run: cannot start {program}: No such file or directory\n", errors)
        self.assertIn("gradsync_run: rank 1 failed: it ended with exit status 127 after 0.0 s\n", errors)

    def test_a_job_that_ends_well_while_a_rank_waits_for_its_next_start_has_succeeded(self):
        launcher = self.job(2, "--min-ranks", 1, "--restarts", 9, program=self.script(f"[ $GRADSYNC_RESTART = 0 ] || exit 6; exec {ELASTIC}"))
        time.sleep(0.5)
        os.kill(self.ranks_of(launcher)[1], signal.SIGKILL)  # its starts fail after 0, 0, 0.5 and 1.5 s; the next one is due after 3.5 s
        sizes, errors = self.ends(launcher)
        self.assertEqual(sizes, [2, 1])
        self.assertIn("starts it again, 4 of at most 9, in 1.0 s", errors)
        self.assertTrue(errors.endswith("gradsync_run: the job succeeded. It was started again 5 times.\n"), errors)


@unittest.skipUnless(shutil.which("etcd"), "needs etcd")
class OverEtcd(ElasticTest):
    """The same, where ranks meet in etcd."""

    def setUp(self):
        super().setUp()
        kept = [socket.socket() for _ in range(2)]  # bound, so that nobody else gets the ports; etcd may reuse them
        for one in kept:
            self.addCleanup(one.close)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        self.urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in kept]
        self.store = self.urls[0].replace("http", "etcd") + "/job"
        self.start_etcd()

    def start_etcd(self):
        clients, peers = self.urls
        self.etcd = subprocess.Popen(["etcd", "--data-dir", self.folder / "etcd", "--listen-client-urls", clients, "--advertise-client-urls", clients,
                                      "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"],
                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(lambda etcd: (etcd.kill(), etcd.wait()), self.etcd)

    def job(self, ranks, *options):
        return super().job(ranks, *options, "--store", self.store)

    def test_etcd_that_is_killed_or_stopped_delays_the_job(self):
        launcher = self.job(3, "--min-ranks", 1, "--restarts", 5, "--grace", 1)
        self.etcd.kill()
        self.etcd.wait()
        os.kill(self.ranks_of(launcher)[1], signal.SIGKILL)
        time.sleep(1.5)
        self.start_etcd()
        self.assertTrue(until(lambda: len(self.output.read_text().splitlines()) > 1), "the ranks do not meet again")
        self.assertTrue(until(lambda: len(self.ranks_of(launcher)) == 3), "the lost rank is not started again")
        self.etcd.send_signal(signal.SIGSTOP)
        ranks = self.ranks_of(launcher)
        os.kill(ranks[2], signal.SIGKILL)
        time.sleep(3)  # the launcher ends nobody meanwhile, although the grace time is over
        self.assertLessEqual({ranks[0], ranks[1]}, set(self.ranks_of(launcher)))
        self.etcd.send_signal(signal.SIGCONT)
        _, errors = self.ends(launcher)
        self.assertNotIn("starts it again, too", errors)
        self.assertIn("the job succeeded. It was started again 2 times.", errors)
        self.assertIn("did not answer within 0.5 s", errors)
        self.assertIn("the store answers again", errors)
        again = self.call("-n", 1, "--min-ranks", 1, "--store", self.store, "--", ELASTIC)
        self.assertEqual(again.returncode, 127)
        self.assertIn(f"{self.store} has a host 0 already, perhaps of a job that has ended", again.stderr)

    def test_two_hosts_meet_in_etcd_while_it_is_away(self):
        started = [self.begin("-n", 1, "--restarts", 3, "--hosts", 2, "--host-index", host, "--store", self.store, "--address", "127.0.0.1",
                              *self.script("touch {0}/$GRADSYNC_RESTART.$RANK; [ $GRADSYNC_RESTART.$RANK = 0.1 ] || exit 0; while [ ! -e {0}/go ]; do sleep 0.1; done; exit 3"
                                           .format(self.folder))) for host in (0, 1)]
        self.assertTrue(until(lambda: (self.folder / "0.1").exists()))
        self.etcd.send_signal(signal.SIGSTOP)
        (self.folder / "go").touch()
        time.sleep(2)
        self.etcd.send_signal(signal.SIGCONT)
        for launcher in started:
            _, errors = launcher.communicate(timeout=LIMIT)
            self.assertEqual(launcher.returncode, 0, errors)
        self.assertTrue((self.folder / "1.0").exists() and (self.folder / "1.1").exists())

    def test_a_store_that_nobody_has_is_said(self):
        launcher = self.begin("--store", "etcd://127.0.0.1:1/job", "--", "true")
        self.assertIn("did not answer within 3 s: 127.0.0.1:1: Failed to connect", launcher.stderr.readline())


@unittest.skipUnless(len(sys.argv) > 4, "needs gradsync_train")
class Training(RunTest):
    def test_a_killed_rank_costs_a_restart_and_no_bits(self):
        train = [PROGRAM, *"--backend tcp --d-model 32 --blocks 1 --heads 2 --context 16 --micro-batch 2 --global-batch 12 --timeout 3".split()]
        plain = self.folder / "plain.json"
        done = self.call("-n", 3, "--", *train, "--steps", 400, "--json", plain)
        self.assertEqual(done.returncode, 0, done.stderr)
        for stops in False, True:  # the rank that takes its place, before it joins the others: they wait for it in vain, and are not to blame
            with self.subTest(stops=stops):
                run, json_file = self.folder / f"run{stops}", self.folder / f"restarted{stops}.json"
                stop = "[ $RANK.$GRADSYNC_RESTART != 1.1 ] || kill -STOP $$; " if stops else ""
                command = [*train, "--steps", 400, "--json", json_file, "--checkpoint", run, "--checkpoint-every", 5, "--resume"]
                launcher = self.begin("-n", 3, "--restarts", 2, *self.script(f"{stop}exec {' '.join(map(str, command))}"))
                self.assertTrue(until(lambda: (run / "checkpoint.gradsync").exists()))
                children = pathlib.Path(f"/proc/{self.supervisor_of(launcher)}/task/{self.supervisor_of(launcher)}/children")
                os.kill(int(children.read_text().split()[1]), signal.SIGKILL)
                output, errors = launcher.communicate(timeout=LIMIT)
                self.assertEqual(launcher.returncode, 0, errors)
                self.assertEqual(errors.count("rank 1 failed: it was killed by signal 9 (Killed)"), 1 + stops, errors)
                self.assertEqual("rank 1 was stopped before it joined the others, and is ended" in errors, stops, errors)
                self.assertNotRegex(errors, "rank [02] failed")
                self.assertIn(f"the job succeeded. It was started again {1 + stops} time", errors)
                self.assertEqual(json.loads(json_file.read_text())["params_digest"], json.loads(plain.read_text())["params_digest"])

    def test_a_rank_that_stops_answering_at_each_start_uses_up_the_restarts(self):
        train = [PROGRAM, *"--backend tcp --d-model 32 --blocks 1 --heads 2 --context 16 --micro-batch 2 --global-batch 12 --steps 100000 --timeout 2".split()]
        stop = "[ $RANK != 1 ] || (sleep 1; kill -STOP $$) & "
        launcher = self.begin("-n", 3, "--restarts", 2, "--grace", 2, *self.script(f"{stop}exec {' '.join(map(str, train))}"))
        _, errors = launcher.communicate(timeout=LIMIT)
        self.assertNotEqual(launcher.returncode, 0, errors)
        self.assertIn("rank 1 did not answer the others in time, and is ended", errors)
        self.assertIn("no restart is left of 2", errors)
        self.assertNotIn("rank 1 has waited", errors)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    RUN, RESTART, ELASTIC, PROGRAM = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else None
    unittest.main(argv=sys.argv[:1], verbosity=2)
