# SPDX-License-Identifier: BSL-1.0
"""An elastic training on emulated hosts (scripts/emulated-cluster), each with a launcher of its own, for chaos.py."""
import contextlib
import os
import pathlib
import re
import signal
import struct
import subprocess
import tempfile
import threading
import time

from stores import EtcdStore, FolderStore

LATE = 0.5  # seconds: a record is on the disk, or known here, so much later than the ranks go on, at most
CLUSTER = pathlib.Path(__file__).resolve().parents[2] / "scripts/emulated-cluster"
HEAD = "10.77.77.254"  # the address of the network's bridge
# A host: starts its launcher when told to, and says how each one has ended.
AGENT = """exec 3<>"$CHAOS_FOLDER/orders$RANK"; export CHAOS_HOST=$RANK
while read -r order store <&3; do
    [ "$order" = start ] || break
    { "$@" --store "$store" --host-index "$CHAOS_HOST" -- $CHAOS_PROGRAM; echo "host $CHAOS_HOST ended with $?"; } <&- 3>&- &
done"""


def with_checkpoints(program, folder):
    """A sharded training writes checkpoints."""
    if "--shard" not in program or program[program.index("--shard") + 1] == "none": return program
    return [*program, "--checkpoint", folder + "/checkpoint", "--checkpoint-every", "20", "--resume"]


def await_checkpoint(folder, is_running):
    """The first one of a job that writes some."""
    while is_running() and os.path.isdir(folder + "/checkpoint") and not os.path.exists(folder + "/checkpoint/checkpoint.gradsync"): time.sleep(0.01)


class HostsJob:
    """A running job, and what it prints. `ranks_on`: the number of ranks by host."""

    def __init__(self, run, program, ranks_on, spares, least, etcd=False, rate="1gbit"):
        self.hosts = len(ranks_on)
        self.host_of = [host for host, count in enumerate(ranks_on) for _ in range(count)]
        self.host_of += [host for host in range(self.hosts) for _ in range(spares)]
        self.folder = tempfile.TemporaryDirectory(dir="/tmp")
        self.control = os.path.join(self.folder.name, "control")
        program = with_checkpoints(program, self.folder.name)
        if "--checkpoint" in program: os.makedirs(self.folder.name + "/checkpoint")
        self.orders = {}  # descriptors of pipes: what is written stays in them until somebody reads it
        for name in "control", *(f"orders{host}" for host in range(self.hosts)):
            os.mkfifo(os.path.join(self.folder.name, name))
            self.orders[name] = os.open(os.path.join(self.folder.name, name), os.O_RDWR)
        launcher = [run, "-n", ",".join(map(str, ranks_on)), "--hosts", str(self.hosts), "--min-ranks", str(least), "--spares", str(spares), "--restarts", "100000", "--grace", "5"]
        self.process = subprocess.Popen(
            [CLUSTER, str(self.hosts), rate, "--no-mpi", "--control", self.control, "--", "bash", "-c", AGENT, "agent", *launcher],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "CHAOS_FOLDER": self.folder.name, "CHAOS_PROGRAM": " ".join(program)})
        self.lines, self.times, self.stores = [], [], set()
        self.is_running = [0] * self.hosts  # launchers of each: a new one may start before one that was killed is known to have ended
        self.statuses = [None] * self.hosts  # of the last launcher of each
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        self.store = EtcdStore(HEAD, enter=self.enter_head()) if etcd else FolderStore(self.folder.name)
        for host in range(self.hosts): self.start(host)

    def enter_head(self):
        """Words before a command, with which it runs in the network that the hosts are joined by, when that is there."""
        while self.process.poll() is None:
            for process in (inner for child in children(self.process.pid) for inner in children(child)):
                enter = ["nsenter", "--target", str(process), "--net", "--"]
                if HEAD in subprocess.run([*enter, "ip", "address"], capture_output=True, text=True).stdout: return enter
            time.sleep(0.05)
        raise RuntimeError("\n".join(self.lines))

    def read(self):
        for line in self.process.stdout:
            self.times.append(time.time()), self.lines.append(line.rstrip())
            if match := re.fullmatch(r"host (\d+) ended with (\d+)", self.lines[-1]):
                self.is_running[int(match[1])] -= 1
                self.statuses[int(match[1])] = int(match[2])

    def tell(self, name, order): os.write(self.orders[name], (order + "\n").encode())

    def start(self, host):
        self.is_running[host] += 1
        self.tell(f"orders{host}", "start " + self.store.address)

    def link(self, order): self.tell("control", order)

    def processes(self, host=None):
        """All processes of launchers and ranks, or those of a host: (process, its variables)."""
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit(): continue
            with contextlib.suppress(OSError):
                variables = open(f"/proc/{name}/environ", "rb").read()
                if f"CHAOS_FOLDER={self.folder.name}\0".encode() not in variables: continue
                variables = dict(v.split("=", 1) for v in variables.decode(errors="replace").split("\0") if "=" in v)
                if "CHAOS_HOST" in variables and (host is None or variables["CHAOS_HOST"] == str(host)): found.append((int(name), variables))
        return found

    def ranks(self):
        """The processes of the ranks, by number."""
        return {int(variables["RANK"]): process for process, variables in self.processes() if "GRADSYNC_STORE" in variables}

    def kill_host(self, host):
        for process, _ in self.processes(host):
            with contextlib.suppress(ProcessLookupError): os.kill(process, signal.SIGKILL)

    def generations(self):
        """(members as (id, place, number of the process on its host, host), whether they had met, when) of each, from 1."""
        found = []
        while record := self.store.read(f"gen/{len(found) + 1:010d}"):
            size = len(self.store.read(self.store.names("join/")[0])[0])
            members = []
            for at in range(0, len(record[0]), size):
                machine, system, number = struct.unpack_from("=QQq", record[0], at + size - 32)
                host = machine << 32 & (1 << 64) - 1 | system & (1 << 32) - 1
                members.append((*struct.unpack_from("=Qq", record[0], at), number & (1 << 22) - 1, host))
            begun = self.store.read(f"begun/{len(found) + 1}")
            found.append((members, begun is not None and begun[0] == b"yes", begun and begun[1]))
        return found

    def holders(self):
        """The ranks that have the state for sure: those of the last generation that had met, less those that were left out since."""
        generations, ids = self.generations(), set()
        while generations and not generations[-1][1]:
            ids.add(frozenset(one[0] for one in generations.pop()[0]))
        holders = {one[1]: one[2] for one in generations[-1][0] if all(one[0] in members for members in ids)} if generations else {}
        ranks = self.ranks()
        return {rank for rank, number in holders.items() if rank in ranks and number_on_host(ranks[rank]) == number}

    def wait(self, seconds):
        """Returns 0 if all launchers have succeeded; None: they did not end."""
        until = time.monotonic() + seconds
        while any(self.is_running) and time.monotonic() < until and self.process.poll() is None: time.sleep(0.05)
        hangs = any(self.is_running)
        self.store.end()
        for host in range(self.hosts): self.tell(f"orders{host}", "quit")
        with contextlib.suppress(subprocess.TimeoutExpired): self.process.wait(10)
        self.process.terminate()
        self.process.wait(), self.reader.join(), self.process.stdout.close()
        for order in self.orders.values(): os.close(order)
        return None if hangs else max(self.statuses, key=lambda status: status or 0)

    def digest(self):
        return next((line.split()[-1] for line in self.lines if "parameters digest" in line), None)

    def split(self):
        """Lines of a rank that trains although other members have gone on: each step is said by the first rank of its generation."""
        begins = [(when, members[0][1]) for members, has_met, when in self.generations() if has_met]
        wrong = []
        for when, line in zip(self.times, self.lines):
            if not (match := re.match(r"\[(\d+)\] step +\d+/", line)): continue
            speakers = {place for i, (begin, place) in enumerate(begins) if begin < when + LATE and (i + 1 == len(begins) or begins[i + 1][0] > when - LATE)}
            if int(match[1]) not in speakers: wrong.append(line)
        return wrong

    def needless_losses(self):
        """Lines of ranks that go on from the checkpoint although each part of the state is there."""
        generations, wrong = self.generations(), []
        for when, line in zip(self.times, self.lines):
            if "from the checkpoint" not in line: continue
            speaker, ranks = re.match(r"\[(\d+)\] gradsync_train: (\d+)", line).groups()
            met = [i for i, (_, has_met, begin) in enumerate(generations) if has_met and begin < when + LATE]
            while met and (len(generations[met[-1]][0]), generations[met[-1]][0][0][1]) != (int(ranks), int(speaker)): met.pop()
            if len(met) < 2: continue
            *_, before, last = met
            # Each of them may be the one whose state the ranks have kept.
            candidates = [members for members, _, _ in generations[before:last]]
            if all(self.has_all_parts(before, generations[last][0]) for before in candidates): wrong.append(line)
        return wrong

    def has_all_parts(self, before, now):
        """Have the members of a generation all parts of the state of one before it? See `elastic::mates_of`."""
        order, half = sorted(range(len(before)), key=lambda r: (before[r][3], r)), max(1, len(before) // 2)
        return len({at % half for at, r in enumerate(order) if before[r][0] in {one[0] for one in now}}) == half

    def left_behind(self):
        return [process for process, _ in self.processes()]


def children(process):
    """The processes that it has started; none if it has ended."""
    with contextlib.suppress(OSError): return [int(p) for p in open(f"/proc/{process}/task/{process}/children").read().split()]
    return []


def number_on_host(process):
    with contextlib.suppress(OSError, StopIteration):
        return int(next(line for line in open(f"/proc/{process}/status") if line.startswith("NSpid:")).split()[-1])


class Disturbance:
    """Faults of a job on hosts. A fault happens only if two ranks are left that have the state, and that reach each other."""

    KINDS = {"kill": 8, "stop": 1, "pause": 2, "cut": 3, "part": 3, "lose": 2, "host": 2, "power": 2}  # and how often

    def __init__(self, job, draw):
        self.job, self.draw = job, draw
        self.done, self.counts, self.hits = [], dict.fromkeys(self.KINDS, 0), {}
        self.down, self.part, self.lost_paths, self.stopped = set(), set(), [], set()
        self.timers = []  # (when, what to do)
        self.begin = time.monotonic()

    def run(self, faults, seconds):
        await_checkpoint(self.job.folder.name, lambda: any(self.job.is_running))
        while len(self.done) < faults and time.monotonic() - self.begin < seconds and any(self.job.is_running):
            self.rest(self.draw.choice([self.draw.uniform(0, 0.02), self.draw.uniform(0, 0.3), self.draw.uniform(0.3, 2), self.draw.uniform(0.5, 4)]))
            kind = self.draw.choices(list(self.KINDS), list(self.KINDS.values()))[0]
            what = self.fault(kind)
            if what is None: continue
            self.counts[kind] += 1
            self.done.append(f"{time.monotonic() - self.begin:.1f}: {kind} {what}")
        while self.timers: self.rest(0.1)
        for host in range(self.job.hosts):
            if not self.job.is_running[host] and self.job.statuses[host] != 0: self.job.start(host)

    def rest(self, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            now = time.monotonic()
            due, self.timers = [one for one in self.timers if one[0] <= now], [one for one in self.timers if one[0] > now]
            for _, action in due: action()
            time.sleep(0.002)

    def later(self, seconds, action): self.timers.append((time.monotonic() + seconds, action))

    def fault(self, kind):
        """Returns whom it has hit; nothing if it was not possible."""
        if kind in ("kill", "stop", "pause"):
            ranks = self.job.ranks()
            if not ranks: return None
            rank = min(ranks) if self.draw.random() < 0.25 else self.draw.choice(sorted(ranks))
            return self.hit(kind, rank, ranks[rank]) if self.leaves_enough({rank}) else None
        # Of links: no member notices, or all do.
        seconds = self.draw.choice([self.draw.uniform(0.05, 1), self.draw.uniform(1, 3), self.draw.uniform(3, 8)])
        if kind == "part":
            one = {0, self.draw.randrange(1, self.job.hosts)}
            if self.part or not self.leaves_enough(part=one): return None
            self.part = one
            self.break_paths([(a, b) for a in range(self.job.hosts) for b in range(self.job.hosts) if (a in one) != (b in one)], seconds)
            self.later(seconds, self.part.clear)
            return f"{sorted(one)} for {seconds:.1f} s"
        if kind == "lose":
            path = tuple(self.draw.sample(range(self.job.hosts), 2))
            if self.part or self.lost_paths or not self.leaves_enough(without_hosts=path): return None
            self.break_paths([path], seconds)
            return f"{path[0]} to {path[1]} for {seconds:.1f} s"
        host = self.draw.randrange(self.job.hosts)
        if host in self.down or not self.job.is_running[host] or not self.leaves_enough(without_hosts={host}): return None
        if kind != "host": self.job.link(f"down host{host}")
        self.down.add(host)

        def mend():
            if kind != "host": self.job.link(f"up host{host}")
            self.down.discard(host)
            if kind != "cut": self.job.start(host)
        self.later(seconds, mend)
        if kind == "cut": return f"{host} for {seconds:.1f} s"
        for rank in range(len(self.job.host_of)):
            if self.job.host_of[rank] == host: self.hits[rank] = self.hits.get(rank, 0) + 1
        self.job.kill_host(host)
        return f"{host} for {seconds:.1f} s"

    def hit(self, kind, rank, process):
        try:
            os.kill(process, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        except ProcessLookupError:
            return None
        self.hits[rank] = self.hits.get(rank, 0) + 1
        if kind == "kill": return rank
        self.stopped.add(rank)
        seconds = self.draw.choice([self.draw.uniform(0.05, 1), self.draw.uniform(1.8, 2.5), self.draw.uniform(2, 6)]) if kind == "pause" else 15

        def wake():  # a member that was stopped for good was ended by its launcher before; nobody ends one that has only waited
            self.stopped.discard(rank)
            members = {(place, number) for generation, _, _ in self.job.generations() for _, place, number, _ in generation}
            if kind == "pause" or (rank, number_on_host(process)) not in members:
                with contextlib.suppress(ProcessLookupError): os.kill(process, signal.SIGCONT)
        self.later(seconds, wake)
        return rank if kind == "stop" else f"{rank} for {seconds:.1f} s"

    def break_paths(self, paths, seconds):
        for a, b in paths: self.job.link(f"cut host{a} host{b}")
        self.lost_paths += paths

        def mend():
            for a, b in paths: self.job.link(f"mend host{a} host{b}")
            self.lost_paths = [path for path in self.lost_paths if path not in paths]
        self.later(seconds, mend)

    def leaves_enough(self, without=(), without_hosts=(), part=()):
        """Are two holders of the state left on each side that may go on?"""
        part = part or self.part
        unsound = self.down | set(without_hosts) | (set() if part else {host for path in self.lost_paths for host in path})
        hosts = [self.job.host_of[rank] for rank in self.job.holders() - self.stopped - set(without) if self.job.host_of[rank] not in unsound]
        inside = sum(host in part for host in hosts)
        return len(hosts) - inside >= 2 and (not part or inside >= 2)
