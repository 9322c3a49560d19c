#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Kills ranks of an elastic training (gradsync_run --spares, gradsync_train --elastic), and compares its weights with an undisturbed run's.

usage: chaos.py GRADSYNC_RUN GRADSYNC_TRAIN [--kills N | --minutes M] [--seed S] [--stage none] [--etcd | --fixed] [--verbose]
       chaos.py GRADSYNC_RUN GRADSYNC_TRAIN --hosts 1,1,2,2 [--kills N] [--seed S] [--steps N] [--stage none] [--etcd] [--verbose]
       chaos.py GRADSYNC_RUN GRADSYNC_TRAIN --cost FAULTS [--steps N] [--hosts 1,1]

Each job is a training of 4 ranks and a spare one, in which some 12 faults happen, drawn from seed S, S + 1, ...: a rank is killed or stopped,
at any moment: when it starts, while the ranks meet, get their state or step, two at once, the first rank, or one right after another. Ends
with 1 if a job hangs, ends with other bits, loses a step, fails a rank that had no fault, or leaves a process or a folder behind. Its last
line but one names the seeds, the last one has the counts, and the longest time between two lines about steps, also for the jobs in which no
rank was stopped: a stopped rank holds the others up for the time limit of 2 s.

--minutes: one job after another for so long.

--stage: the trainings shard their state. Two faults at once may take a part along; then the job goes on from its checkpoint, and the last line counts
that. Otherwise at most one step is done again. On hosts a job is bad, too, if it goes on from its checkpoint although no part was lost.

--fixed: the trainings are not elastic (gradsync_run --restarts): always 4 ranks, which go on from the memory that their launcher keeps. All of them may
be killed at once.

--etcd: the ranks meet in etcd, not in a folder. One of its three members is killed every six seconds, and started again three seconds later. With
--hosts the members are at the bridge that joins the hosts: a host that is cut off does not reach them.

--hosts: the ranks are on emulated hosts (root), so many on each. Some 40 faults a job, N in all: ranks are killed ("kill"), stopped ("stop") and
stopped for a while ("pause"); a host's link is down for a while ("cut"); what hosts of one half send to the other half is lost ("part"), or what
one host sends to another ("lose"); all processes of a host are killed, and its launcher starts again ("host"), also with the link down ("power").
A job is bad, too, if ranks of two generations train at once, or if the ranks do not come together again. --steps: of a job, 1200 by default. The
last line counts the faults by kind.

--cost kills a rank of two every other second, so often, and says how much longer N steps of the trainer's default transformer take for each
kill. The lost rank is started again. With --hosts it says how long it takes until the others go on, and until all ranks train again, with a state
of 25 MB.
"""
import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from emulated_hosts import CLUSTER, Disturbance, HostsJob, await_checkpoint, children, with_checkpoints
from stores import EtcdStore

RANKS, SPARES, FAULTS, LIMIT = 4, 1, 12, 180
HOSTS_FAULTS, HOSTS_LIMIT = 40, 400
TRAINING = ["--backend", "tcp", "--elastic", "--model", "mlp", "--micro-batch", "16", "--timeout", "2"]
# Short steps; and a state of 25 MB, which takes a while to travel.
HOSTS_KIND = [*TRAINING, "--hidden", "64", "--d-model", "8", "--context", "8", "--global-batch", "768", "--steps", "1200"]
KINDS = [[*TRAINING, "--hidden", "64", "--d-model", "8", "--context", "8", "--global-batch", "768", "--steps", "3000"],
         [*TRAINING, "--hidden", "1024,1024", "--global-batch", "192", "--steps", "250"]]


class Job:
    """A running job, and what it prints."""

    def __init__(self, ranks, spares, kind, least=1):
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        results = os.path.join(self.folder.name, "results")
        if not OPTIONS.fixed: kind = with_checkpoints(kind, self.folder.name)
        if "--checkpoint" in kind: os.makedirs(self.folder.name + "/checkpoint")
        self.store = EtcdStore() if OPTIONS.etcd and not OPTIONS.hosts else None
        store = ["--store", self.store.address] if self.store else []
        coming = [] if OPTIONS.fixed else ["--spares", str(spares), "--min-ranks", str(least)]
        if OPTIONS.fixed: kind = [word for word in kind if word != "--elastic"]
        command = [OPTIONS.gradsync_run, "-n", str(ranks), *coming, "--restarts", "100000", "--grace", "5", *store, "--", OPTIONS.gradsync_train, *kind,
                   "--data", TEXT.name, "--json", results]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"})
        self.lines, self.stores, self.longest_pause = [], set(), 0.0
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        """The trainer says a line for every twentieth of the steps that a generation of ranks has before it."""
        last = None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if re.match(r"\[\d+\] step +\d+/", line):
                said = time.monotonic()
                self.longest_pause = max(self.longest_pause, said - (last or said))
                last = said

    def await_checkpoint(self): await_checkpoint(self.folder.name, lambda: self.process.poll() is None)

    def ranks(self):
        """The processes of the ranks, by number, from the processes that the supervisor has started."""
        found = {}
        with contextlib.suppress(OSError):
            for supervisor in children(self.process.pid):
                for process in children(supervisor):
                    with contextlib.suppress(OSError, StopIteration):
                        variables = open(f"/proc/{process}/environ", "rb").read().split(b"\0")
                        found[next(int(v[5:]) for v in variables if v.startswith(b"RANK="))] = process
                        self.stores.update(os.path.dirname(v[15:].decode()) for v in variables if v.startswith(b"GRADSYNC_STORE=/"))
        return found

    def wait(self, seconds):
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired): status = self.process.wait(seconds)
        if status is None: self.process.kill()
        self.process.wait(), self.reader.join(), self.process.stdout.close()
        if self.store:
            self.store.end()
            COUNTS["kills of etcd"] += self.store.kills
        return status

    def digest(self):
        return next((line.split()[-1] for line in self.lines if "parameters digest" in line), None)

    def left_behind(self):
        until = time.monotonic() + 5
        while time.monotonic() < until:
            left = subprocess.run(["pgrep", "-f", self.folder.name], capture_output=True, text=True).stdout.split()
            if not left: return []
            time.sleep(0.05)
        return left


def disturb(job, draw):
    """Injects faults while the job lasts. Returns for each rank how many it had, and descriptions."""
    hits, done, gone = {}, [], {}
    job.await_checkpoint()
    for _ in range(FAULTS):
        time.sleep(draw.choice([draw.uniform(0, 0.005), draw.uniform(0, 0.03), draw.uniform(0.03, 0.6), draw.uniform(0.3, 1.2)]))
        for _ in range(draw.choice([1, 1, 1, 2])):
            ranks = job.ranks()
            if job.process.poll() is not None or len(ranks) < 2: continue
            whom = min(ranks) if draw.random() < 0.25 else draw.choice(sorted(ranks))
            fault = draw.choice(["kill"] * 11 + ["stop"])
            if gone.get(ranks[whom]) == "kill": continue  # it may take some time to end
            # Somebody has to be left who has the state: two that have been there for a while, as one of them may be a spare one.
            if not OPTIONS.fixed and len([rank for rank, process in ranks.items() if rank != whom and process not in gone and is_old(process)]) < 2: continue
            try:
                os.kill(ranks[whom], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            except ProcessLookupError:
                continue
            gone[ranks[whom]] = fault
            hits[whom] = hits.get(whom, 0) + 1
            done.append(f"{fault} {whom}")
    return hits, done


def is_old(process, seconds=4):
    """Does the process run, and for so long?"""
    with contextlib.suppress(OSError):
        fields = open(f"/proc/{process}/stat").read().rpartition(")")[2].split()
        age = float(open("/proc/uptime").read().split()[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return fields[0] not in "TZX" and age > seconds
    return False


def failures_of(job):
    failures = [int(match[1]) for line in job.lines if (match := re.match(r"gradsync_run: rank (\d+) failed", line))]
    return {rank: failures.count(rank) for rank in set(failures)}


def losses_of(job):
    """What is wrong with what was lost. A lost rank takes a part of a sharded state along, and at most the step that it has just done."""
    again = [int(match[1]) for line in job.lines if (match := re.search(r"and (\d+) that lost ranks had done are done again", line))]
    from_checkpoints = sum("from the checkpoint" in line for line in job.lines)
    COUNTS["again"] += sum(again)
    COUNTS["from checkpoints"] += from_checkpoints
    if OPTIONS.stage != "none": return [f"lost steps: {again}"] if max(again, default=0) > 1 else []
    return ["lost the state"] if again or from_checkpoints or any("were lost" in line for line in job.lines) else []


def sizes_of(job):
    return [int(match[1]) for line in job.lines if (match := re.search(r"gradsync_train: (\d) ranks? goe?s? on", line))]


def run(seed, kind, expected):
    """Returns the faults, how often a rank joined, the longest time without a step, and what is wrong."""
    draw = random.Random(seed)
    job = Job(RANKS, SPARES, kind)
    hits, done = disturb(job, draw)
    status, wrong = job.wait(LIMIT), []
    if status is None: wrong.append("hang")
    # A fault may come when all have their results and only have to leave: then the launcher says so.
    elif status != 0 and not any("the ranks had ended the job" in line for line in job.lines): wrong.append(f"ended with status {status}")
    elif job.digest() != expected: wrong.append(f"another digest: {job.digest()}")
    for rank, failures in failures_of(job).items():
        if failures > hits.get(rank, 0): wrong.append(f"rank {rank} failed {failures} times, with {hits.get(rank, 0)} faults")
    sizes = sizes_of(job)
    joins = sum(max(0, after - before) for before, after in zip([RANKS, *sizes], sizes))
    wrong += losses_of(job)
    if left := job.left_behind(): wrong.append(f"left processes behind: {left}")
    job.folder.cleanup()
    if left := [store for store in job.stores if os.path.exists(store)]: wrong.append(f"left behind: {left}")
    if OPTIONS.verbose or wrong: print(f"seed {seed}: {', '.join(done)}; sizes {sizes}; longest pause {job.longest_pause:.2f} s", flush=True)
    for what in wrong: print(f"   {what}", flush=True)
    if wrong: print("      " + "\n      ".join(line[:220] for line in job.lines if not re.match(r"\[\d\] (step|  step|$)", line)), flush=True)
    return done, joins, job.longest_pause, wrong


def on_hosts(kind, least=1):
    return HostsJob(OPTIONS.gradsync_run, [OPTIONS.gradsync_train, *kind, "--data", TEXT.name], OPTIONS.hosts, OPTIONS.spares, least, OPTIONS.etcd)


def run_on_hosts(seed, faults, expected):
    """Returns a Disturbance, and what is wrong."""
    job, wrong = on_hosts(HOSTS_KIND), []
    disturbance = Disturbance(job, random.Random(seed))
    disturbance.run(faults, HOSTS_LIMIT)
    calm_at = time.monotonic()
    status = job.wait(HOSTS_LIMIT)
    if OPTIONS.etcd: COUNTS["kills of etcd"] += job.store.kills
    calm = time.monotonic() - calm_at
    if status is None: wrong.append("hang")
    elif status != 0 and not any("the ranks had ended the job" in line for line in job.lines): wrong.append(f"ended with statuses {job.statuses}")
    elif job.digest() != expected: wrong.append(f"another digest: {job.digest()}")
    for rank, failures in failures_of(job).items():
        if failures > disturbance.hits.get(rank, 0): wrong.append(f"rank {rank} failed {failures} times, with {disturbance.hits.get(rank, 0)} faults")
    wrong += losses_of(job) + [f"lost the state needlessly: {line}" for line in job.needless_losses()]
    if split := job.split(): wrong.append(f"split: {split}")
    if left := job.left_behind(): wrong.append(f"left processes behind: {left}")
    sizes = sizes_of(job)
    if calm > 30 and sizes[-1] != sum(OPTIONS.hosts): wrong.append("not all ranks have come together again")
    if OPTIONS.verbose or wrong: print(f"seed {seed}: {', '.join(disturbance.done)}; sizes {sizes}", flush=True)
    for what in wrong: print(f"   {what}", flush=True)
    if wrong:
        words = [f"{when - job.times[0]:8.3f} {line[:220]}" for when, line in zip(job.times, job.lines) if not re.match(r"\[\d+\] (  |$)", line)]
        for number, (members, has_met, when) in enumerate(job.generations(), 1):
            words.append(f"generation {number}: {', '.join(f'{place} ({one:x})' for one, place, *_ in members)}{f'; has met at {when - job.times[0]:.3f}' if has_met else ''}")
        print("      " + "\n      ".join(words), flush=True)
    job.folder.cleanup()
    return disturbance, wrong


def main_on_hosts():
    if os.geteuid() != 0 or subprocess.run([CLUSTER, "1", "1gbit", "--no-mpi", "--", "true"]).returncode != 0:
        print("hosts cannot be emulated here")
        return 77
    undisturbed = Job(1, 0, HOSTS_KIND)
    if undisturbed.wait(LIMIT) != 0: sys.exit("a job without faults failed:\n" + "\n".join(undisturbed.lines))
    counts, jobs, bad = {}, 0, {"digest": 0, "hang": 0, "split": 0, "failed": 0, "others": 0}
    while sum(counts.values()) < OPTIONS.kills:
        disturbance, wrong = run_on_hosts(OPTIONS.seed + jobs, min(HOSTS_FAULTS, OPTIONS.kills - sum(counts.values())), undisturbed.digest())
        jobs += 1
        for kind, count in disturbance.counts.items(): counts[kind] = counts.get(kind, 0) + count
        for what in wrong: bad[next((kind for kind in bad if kind in what.split(":")[0]), "others")] += 1
    print(f"seeds {OPTIONS.seed} to {OPTIONS.seed + jobs - 1}")
    print(f"{jobs} jobs, {sum(counts.values())} faults, {', '.join(f'{count} {kind}' for kind, count in counts.items())}, {bad['digest']} other digests, "
          f"{bad['hang']} hangs, {bad['split']} splits, {bad['failed']} wrong culprits, {bad['others']} others{more_counts()}")
    return 1 if any(bad.values()) else 0


def cost_on_hosts():
    """Kills a rank again and again, and says how long it takes until the others go on, and until all ranks train again."""
    job, draw, seconds = on_hosts(["1000000" if word == "250" else word for word in KINDS[1]]), random.Random(OPTIONS.seed), []
    most = sum(OPTIONS.hosts)

    def await_ranks(count, since):
        until = time.time() + LIMIT
        while time.time() < until:
            for when, line in list(zip(job.times, job.lines)):
                if when > since and (match := re.search(r"gradsync_train: (\d+) ranks? goe?s? on", line)) and int(match[1]) in count: return when
            time.sleep(0.002)
        job.process.terminate()
        sys.exit("the ranks do not go on:\n" + "\n".join(job.lines[-20:]))

    while len(ranks := job.ranks()) < most or not all(is_old(process, 4) for process in ranks.values()): time.sleep(0.1)
    for _ in range(OPTIONS.cost):
        time.sleep(draw.uniform(2, 4))
        ranks, since = job.ranks(), time.time()
        os.kill(ranks[draw.choice(sorted(ranks))], signal.SIGKILL)
        seconds.append((await_ranks(range(1, most + 1), since) - since, await_ranks([most], since) - since))
    for host in range(job.hosts): job.kill_host(host)
    job.wait(10), job.folder.cleanup()
    for name, times in zip(("the others go on", "all ranks train again"), zip(*seconds)):
        print(f"from a kill until {name}: median {sorted(times)[len(times) // 2]:.2f} s, largest {max(times):.2f} s")
    return 0


def cost():
    steps = OPTIONS.steps or 400
    kind = ["--backend", "tcp", "--elastic", "--timeout", "10", "--steps", str(steps)]
    draw, seconds, digests = random.Random(OPTIONS.seed), [], []
    for faults in 0, OPTIONS.cost:
        job, begin, kills = Job(2, 0, kind), time.monotonic(), 0
        while kills < faults and job.process.poll() is None:
            time.sleep(2)
            ranks = job.ranks()
            if len(ranks) < 2 or not all(is_old(process, 0.5) for process in ranks.values()): continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[draw.choice(sorted(ranks))], signal.SIGKILL)
                kills += 1
        if job.wait(3600) != 0: sys.exit("the job failed:\n" + "\n".join(job.lines[-20:]))
        seconds.append(time.monotonic() - begin), digests.append(job.digest())
        if kills < faults: print(f"only {kills} kills; raise --steps")
    sizes = [line for line in job.lines if " on after step " in line]
    print(f"{steps} steps: {seconds[0]:.1f} s; with {kills} kills {seconds[1]:.1f} s, {len(sizes)} times other ranks; digests {digests}")
    print(f"a kill costs {(seconds[1] - seconds[0]) / kills:.2f} s")
    return 0 if digests[0] == digests[1] else 1


def more_counts():
    counts = {what: count for what, count in COUNTS.items() if (OPTIONS.etcd if "etcd" in what else OPTIONS.stage != "none")}
    return "; " * bool(counts) + ", ".join(f"{count} {what}" for what, count in counts.items())


def text():
    """A file for the training; the project's own sources may change."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(500)]
    file = tempfile.NamedTemporaryFile("w", suffix=".txt")
    file.write(" ".join(draw.choices(words, k=40_000)))
    file.flush()
    return file


def main():
    expected = []
    for kind in KINDS:
        undisturbed = Job(RANKS if OPTIONS.fixed else 1, 0, kind)
        if undisturbed.wait(LIMIT) != 0: sys.exit("a job without faults failed:\n" + "\n".join(undisturbed.lines))
        expected.append(undisturbed.digest())
    kills = joins = jobs = equal = hangs = wrong_culprits = other = longest_pause = longest_of_kills = 0
    until = time.monotonic() + 60 * OPTIONS.minutes
    while time.monotonic() < until if OPTIONS.minutes else kills < OPTIONS.kills:
        seed = OPTIONS.seed + jobs
        done, joined, pause, wrong = run(seed, KINDS[seed % 3 == 2], expected[seed % 3 == 2])
        longest_pause = max(longest_pause, pause)
        if not any(fault.startswith("stop") for fault in done): longest_of_kills = max(longest_of_kills, pause)
        kills, joins, jobs = kills + len(done), joins + joined, jobs + 1
        equal += not any("digest" in what or "status" in what or "hang" in what for what in wrong)
        hangs += any("hang" in what for what in wrong)
        wrong_culprits += any("failed" in what for what in wrong)
        other += any("lost" in what or "left" in what for what in wrong)
    print(f"seeds {OPTIONS.seed} to {OPTIONS.seed + jobs - 1}")
    print(f"{jobs} jobs, {kills} kills, {joins} joins, {equal} equal digests, {hangs} hangs, {wrong_culprits} wrong culprits, {other} others, "
          f"{longest_pause * 1000:.0f} ms longest pause; without a stop {longest_of_kills * 1000:.0f} ms{more_counts()}")
    return 0 if equal == jobs and hangs + wrong_culprits + other == 0 else 1


parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("gradsync_run")
parser.add_argument("gradsync_train")
for name, value in ("kills", 12), ("minutes", 0), ("seed", 0), ("cost", 0), ("steps", 0), ("spares", 0): parser.add_argument("--" + name, type=int, default=value)
for name in "verbose", "etcd", "fixed": parser.add_argument("--" + name, action="store_true")
parser.add_argument("--hosts", type=lambda words: [int(word) for word in words.split(",")])
parser.add_argument("--stage", choices=("none", "optimizer", "gradients", "parameters"), default="none")
OPTIONS = parser.parse_args()
if OPTIONS.fixed and (OPTIONS.hosts or OPTIONS.etcd or OPTIONS.cost): parser.error("--fixed goes with neither --hosts, --etcd nor --cost")
if OPTIONS.minutes and (OPTIONS.hosts or OPTIONS.cost): parser.error("--minutes goes with neither --hosts nor --cost")
if OPTIONS.steps and not (OPTIONS.hosts or OPTIONS.cost): parser.error("--steps goes with --hosts or --cost")
for kind in HOSTS_KIND, *KINDS: kind += ["--shard", OPTIONS.stage]
COUNTS = {"again": 0, "from checkpoints": 0, "kills of etcd": 0}  # steps, times, times
if OPTIONS.stage != "none": HOSTS_KIND += ["--global-batch", "192"]  # the ranks wait for one another in each micro-batch
if OPTIONS.steps: HOSTS_KIND += ["--steps", str(OPTIONS.steps)]
TEXT = text()
sys.exit((cost_on_hosts() if OPTIONS.hosts else cost()) if OPTIONS.cost else main_on_hosts() if OPTIONS.hosts else main())
