#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Faults of jobs that gradsync_run starts, and that go on.

usage: restarts.py GRADSYNC_RUN RESTART_RANK [--runs N] [--seed S] [--jobs J] [--verbose]
       restarts.py GRADSYNC_RUN RESTART_RANK --times FAULTS --ranks N [--elements E] [--keep]

Each run is a training of 2 to 4 ranks, which go on from a checkpoint or from kept memory. In each one to three faults happen, drawn from seed
S, S + 1, ...: a rank is killed, stopped, stopped for a while, told to exit or aborted, or a launcher is killed; at any moment, also two at
once. Every fifth job has two launchers, as if on two hosts, whose ranks all start again. A run is bad if it hangs, ends with other bits than
one without faults, loses a step that was kept, blames a rank without a fault, or leaves a process or a folder behind. Ends with 1 if there
are any.

--times kills a rank again and again, and reports by the ranks' clocks: from the kill to the error on each other rank, from the last error to
the new communicator, less the time that the new process needs to come, from the kill until all have their state again (from a checkpoint, or
with --keep from memory), and the construction of a Reducer of E elements.
"""
import argparse
import concurrent.futures
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP, "exit": signal.SIGUSR1, "abort": signal.SIGABRT}
STEPS, RESTARTS, LIMIT = 60, 12, 60


class Job:
    """A running job, and what its ranks have said so far: (word, process, time, rest), in order."""

    def __init__(self, ranks, steps, elements, microseconds, restarts, way=(), hosts=1):
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.said, self.errors, self.rank_of, self.stores = [], [], {}, set()
        place = ["--hosts", str(hosts), "--store", self.folder.name, "--address", "127.0.0.1", "--wait", "10", "--host-index"]
        self.launchers = [subprocess.Popen(
            [OPTIONS.gradsync_run, "-n", str(ranks // hosts), "--restarts", str(restarts), "--grace", "3", *(hosts > 1) * [*place, str(host)], "--",
             OPTIONS.restart_rank, self.folder.name, str(steps), str(elements), str(microseconds), *way],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace") for host in range(hosts)]
        self.threads = [threading.Thread(target=read, args=[one]) for one in self.launchers for read in (self.read_out, self.read_err)]
        for thread in self.threads: thread.start()

    def read_out(self, launcher):
        for line in launcher.stdout:
            words = line.split(" ", 4)
            if len(words) == 5 and words[1] in ("store", "start", "meet", "met", "from", "face", "error", "failure", "digest", "end"):
                self.rank_of[int(words[2])] = int(words[0][1:-1])
                if words[1] == "store": self.stores.add(os.path.dirname(words[4].strip()))
                self.said.append((words[1], int(words[2]), float(words[3]), words[4].strip()))

    def read_err(self, launcher):
        for line in launcher.stderr: self.errors.append(line.rstrip())

    def living(self):
        """Processes by rank, the newest of each."""
        newest = {rank: process for process, rank in self.rank_of.items()}
        return {rank: process for rank, process in newest.items() if os.path.exists(f"/proc/{process}")}

    def children(self):
        return [int(p) for p in subprocess.run(["pgrep", "-f", self.folder.name], capture_output=True, text=True).stdout.split()]

    def wait(self, seconds):
        """Returns the status of each launcher; None if it did not end by itself."""
        statuses, until = [], time.monotonic() + seconds
        for launcher in self.launchers:
            try:
                statuses.append(launcher.wait(max(0.1, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                statuses.append(None)
                for process in self.children(): os.kill(process, signal.SIGKILL)
                launcher.wait()
        for thread in self.threads: thread.join()
        for launcher in self.launchers: launcher.stdout.close(), launcher.stderr.close()
        return statuses


def expected(ranks, elements):
    """The digest of a job without faults."""
    job = Job(ranks, STEPS, elements, 0, 0)
    if job.wait(LIMIT) != [0]: sys.exit("a job without faults failed:\n" + "\n".join(job.errors))
    return next(rest for word, _, _, rest in job.said if word == "digest")


def run(seed):
    """Returns what is wrong, as (kind, text), and what was done."""
    draw = random.Random(seed)
    hosts = 2 if seed % 5 == 0 else 1
    ranks = draw.choice([2, 4] if hosts == 2 else [2, 3, 4])
    plan, at = [], 0
    for _ in range(draw.choice([1, 1, 2, 3])):
        at += draw.choice([0, draw.uniform(0, 0.03), draw.uniform(0, 0.4)])
        plan.append((at, draw.choice(["kill", "kill", "stop", "pause", "exit", "abort"]), draw.randrange(ranks)))
        # Ranks wait for 2 s: it wakes when the others have just given it up, or are about to.
        if plan[-1][1] == "pause": plan.append((at + draw.choice([0.1, draw.uniform(1.9, 2.3)]), "wake", plan[-1][2]))
    if draw.random() < (0.3 if hosts == 2 else 0.08): plan.append((at + draw.uniform(0, 0.2), "launcher", draw.choice(["launcher", "supervisor"])))
    way, lost_host = draw.choice([(), ("keep",), ("own",)]) if hosts == 1 else (), draw.randrange(hosts)
    plan.sort(key=lambda fault: fault[0])
    job = Job(ranks, STEPS, 1000, 4000, RESTARTS, way, hosts)
    begin, hit = time.monotonic(), set()
    description = f"{ranks} ranks, {way[0] if way else 'checkpoints'}{', 2 hosts' if hosts == 2 else ''}:"
    launcher_killed, stopped = False, set()
    for at, fault, whom in plan:  # without those that would leave nobody to notice
        time.sleep(max(0, begin + at - time.monotonic()))
        if fault == "launcher":
            if hosts == 2 and {rank for rank in range(ranks) if rank // (ranks // 2) != lost_host} <= stopped: continue
            launcher = job.launchers[lost_host].pid
            pids = [int(p) for p in subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True).stdout.split()]
            victim = launcher if whom == "launcher" or not pids else pids[0]
            launcher_killed = True
        else:
            until = time.monotonic() + 0.2
            while (victim := job.living().get(whom)) is None and time.monotonic() < until: time.sleep(0.001)
            if victim is None: continue
            if fault == "wake":
                for process, rank in job.rank_of.items():
                    if rank == whom and os.path.exists(f"/proc/{process}"):
                        with contextlib.suppress(ProcessLookupError): os.kill(process, signal.SIGCONT)
                continue
            if fault in ("stop", "pause") and len(stopped := stopped | {whom}) == ranks: continue
            hit.add(whom)
        description += f" {fault} {whom} after {time.monotonic() - begin:.3f} s;"
        with contextlib.suppress(ProcessLookupError): os.kill(victim, FAULTS.get(fault, signal.SIGKILL))
    statuses = job.wait(LIMIT)
    wrong = []
    if None in statuses: wrong.append(("hang", "did not end within %d s" % LIMIT))
    digests = {rest for word, _, _, rest in job.said if word == "digest"}
    if digests - {EXPECTED[ranks]}: wrong.append(("wrong number", f"digests {digests}"))
    # A fault may come when all have their results and only have to leave: then the launcher says so.
    had_ended = any("the ranks had ended the job" in line for line in job.errors)
    if not launcher_killed and set(statuses) - {0, None} and not had_ended: wrong.append(("lost", f"ended with status {statuses}"))
    if not digests and any(status == 0 for host, status in enumerate(statuses) if not launcher_killed or host != lost_host):
        wrong.append(("lost", "no digest"))
    begins = [int(rest) for word, _, _, rest in sorted(job.said, key=lambda said: said[2]) if word == "from"]
    if begins != sorted(begins): wrong.append(("lost", f"goes on from steps {begins}"))
    for word, process, when, rest in job.said:
        if word not in ("error", "failure"): continue
        peer = int(rest.split()[0])
        if peer >= 0 and peer not in hit and not launcher_killed and "met again" not in rest:
            # A rank that has left the others because of a fault is named by who learns of it later.
            left = job.rank_of.get(process) != peer and any(
                w in ("error", "failure") and job.rank_of[p] == peer and t < when for w, p, t, _ in job.said)
            if not left: wrong.append(("wrong culprit", f"rank {job.rank_of[process]}: {rest}"))
    time.sleep(0.05)
    until = time.monotonic() + 5
    while job.children() and time.monotonic() < until: time.sleep(0.05)
    if job.children(): wrong.append(("left behind", f"processes {job.children()}"))
    for store in job.stores:
        if os.path.exists(store): wrong.append(("left behind", store))
    for process in job.children(): os.kill(process, signal.SIGKILL)
    if wrong and OPTIONS.verbose:
        for line in sorted(job.said, key=lambda said: said[2]): print(f"   {line[2] - begin:8.3f} [{job.rank_of[line[1]]}] {line[0]} {line[1]} {line[3][:150]}")
        print("   " + "\n   ".join(line[:200] for line in job.errors))
    job.folder.cleanup()
    return seed, description, wrong


def faults():
    counts = {"hang": 0, "wrong number": 0, "wrong culprit": 0, "lost": 0, "left behind": 0}
    with concurrent.futures.ThreadPoolExecutor(OPTIONS.jobs) as pool:
        for seed, description, wrong in pool.map(run, range(OPTIONS.seed, OPTIONS.seed + OPTIONS.runs)):
            if OPTIONS.verbose or wrong: print(f"seed {seed}: {description}", flush=True)
            for kind, text in wrong:
                counts[kind] += 1
                print(f"   {kind}: {text[:300]}", flush=True)
    print(f"seeds {OPTIONS.seed} to {OPTIONS.seed + OPTIONS.runs - 1}")
    print(f"{OPTIONS.runs} runs, {counts['hang']} hangs, {counts['wrong number']} wrong numbers, {counts['wrong culprit']} wrong culprits, "
          f"{counts['lost']} lost, {counts['left behind']} left behind")
    return 1 if any(counts.values()) else 0


def percentiles(name, seconds):
    ordered = sorted(1000 * s for s in seconds)
    at = lambda part: ordered[min(len(ordered) - 1, int(part * len(ordered)))]
    print(f"{name}: median {at(0.5):.1f} ms, 99 % {at(0.99):.1f} ms, largest {ordered[-1]:.1f} ms ({len(ordered)})")


def times():
    """Kills a rank, waits until all train again, and so on."""
    job = Job(OPTIONS.ranks, 10**9, OPTIONS.elements, 200, OPTIONS.times + 10, ["keep"] if OPTIONS.keep else [])
    draw = random.Random(OPTIONS.seed)
    to_error, to_met, to_step, faces = [], [], [], []

    def await_all(word, since, count):
        until = time.monotonic() + 30
        while True:
            found = [said for said in job.said if said[0] == word and said[2] > since]
            if len(found) >= count: return found
            if time.monotonic() > until: sys.exit("the ranks do not go on:\n" + "\n".join(job.errors[-20:]))
            time.sleep(0.005)

    since = time.monotonic()
    await_all("face", since, OPTIONS.ranks)
    for _ in range(OPTIONS.times):
        time.sleep(draw.uniform(0.02, 0.08))
        victim = draw.choice(list(job.living().values()))
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        errors = await_all("error", killed, OPTIONS.ranks - 1)
        met = await_all("met", killed, OPTIONS.ranks)
        faces += [float(said[3]) for said in await_all("face", killed, OPTIONS.ranks)]
        begins = await_all("from", killed, OPTIONS.ranks)
        start, meet = (next(said[2] for said in job.said if said[0] == word and said[2] > killed and said[1] not in [e[1] for e in errors])
                       for word in ("start", "meet"))
        last = max(said[2] for said in errors)
        to_error += [said[2] - killed for said in errors]
        to_met += [said[2] - last - max(0, meet - max(start, last)) for said in met]
        to_step.append(max(said[2] for said in begins) - killed - (meet - start))
    job.launchers[0].send_signal(signal.SIGTERM)
    job.wait(LIMIT)
    print(f"{OPTIONS.ranks} ranks, {OPTIONS.times} faults")
    percentiles("from the kill to the error", to_error)
    percentiles("from the last error to the communicator, less what the new process needs to come", to_met)
    percentiles("from the kill until all have their state, less what the new process does before it comes", to_step)
    percentiles(f"construction of a Reducer of {OPTIONS.elements} elements", faces)
    return 0


parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("gradsync_run")
parser.add_argument("restart_rank")
for name, value in ("runs", 20), ("seed", 0), ("jobs", 4), ("times", 0), ("ranks", 2), ("elements", 1000): parser.add_argument("--" + name, type=int, default=value)
for name in "verbose", "keep": parser.add_argument("--" + name, action="store_true")
OPTIONS = parser.parse_args()
if OPTIONS.times: sys.exit(times())
EXPECTED = {ranks: expected(ranks, 1000) for ranks in (2, 3, 4)}
sys.exit(faults())
