# SPDX-License-Identifier: BSL-1.0
"""On what was measured: the machine, the compiler, the sources, what else was going on."""
import os
import pathlib
import platform
import re
import resource
import shutil
import subprocess
import time


def answer(*command, folder=None):
    """What a command prints; empty where it is missing or fails."""
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def text_of(path):
    try:
        return pathlib.Path(path).read_text()
    except OSError:
        return ""


def caches():
    """As "L2 unified 2048K": those of the first core."""
    found = []
    for index in sorted(pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (text_of(index / what).strip() for what in ("level", "type", "size"))
        if size: found.append(f"L{level} {kind.lower()} {size}")
    return found


def cmake_cache(build):
    return dict(re.findall(r"^(\w+):\w+=(.*)$", text_of(build / "CMakeCache.txt"), re.MULTILINE))


def mpi_library(mpiexec):
    """Open MPI and MPICH name themselves in different ways."""
    said = answer(mpiexec, "--version")
    version = re.search(r"(?:\((?:Open MPI|OpenRTE)\)|Version:)\s*([\w.]+)", said)
    name = "MPICH" if "HYDRA" in said else "Open MPI" if "Open" in said else said.partition("\n")[0]
    return f"{name} {version.group(1)}" if version and name else name


def peers(cache, python):
    found = [mpi_library(cache["MPIEXEC_EXECUTABLE"])] if cache.get("MPIEXEC_EXECUTABLE") else []
    if cache.get("Gloo_DIR", "").startswith("/"):
        version = answer("dpkg-query", "--show", "--showformat=${Version}", "libgloo-dev")
        found.append(f"Gloo {version}".strip())
    if shutil.which("mpiexec.mpich") and mpi_library("mpiexec.mpich") not in found: found.append(mpi_library("mpiexec.mpich"))
    torch = answer(python, "-c", "import torch; print(torch.__version__)")
    if torch: found.append(f"PyTorch {torch}")
    return [peer for peer in found if peer]


def cores():
    """That this process was given, as the programs count them: what taskset leaves of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


QUIET = 0.2  # cores, on average: what a system does by itself is less
WAIT_AT_MOST = 180  # seconds


def busy_seconds(root="/"):
    """Of the cores that this process was given, since the system began: what they did not idle, what a hypervisor gave to others included. None
    where it does not say. The load average is no measure of now: it remembers minutes."""
    given = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    found = [ticks.split()[:8] for core, ticks in re.findall(r"^cpu(\d+) +(.*)", text_of(pathlib.Path(root, "proc/stat")), re.MULTILINE)
             if given is None or int(core) in given]
    if not found: return None
    return sum(int(ticks) for of_core in found for place, ticks in enumerate(of_core) if place not in (3, 4)) / os.sysconf("SC_CLK_TCK")


def busy_cores(seconds=3, sleep=time.sleep, clock=time.monotonic, busy=busy_seconds):
    """How many cores were busy, on average, in so many seconds from now. None: unknown."""
    before, begun = busy(), clock()
    if before is None: return None
    sleep(seconds)
    after = busy()
    return None if after is None else max(0.0, (after - before) / (clock() - begun))


def wait_until_quiet(say, measure=busy_cores, clock=time.monotonic):
    """Until at most QUIET cores are busy, or for WAIT_AT_MOST seconds; returns how many were in the end. None: unknown."""
    begun, told = clock(), False
    while (now := measure()) is not None and now > QUIET and clock() - begun < WAIT_AT_MOST:
        if not told: say(f"others use the machine ({now:.1f} of {cores()} cores): waiting until they do not, at most {WAIT_AT_MOST // 60} minutes")
        told = True
    if told: say("it is quiet" if now <= QUIET else f"others use it still ({now:.1f} cores): the figures will say little")
    return now


class Others:
    """What others use of this process's cores from now on: all that was busy, less this process and what it has started and waited for."""

    def __init__(self, busy=busy_seconds, own=None, clock=time.monotonic):
        self.busy, self.own, self.clock = busy, own or self.own_seconds, clock
        self.begun, self.busy_then, self.own_then = clock(), busy(), self.own()

    @staticmethod
    def own_seconds():
        return sum(use.ru_utime + use.ru_stime for use in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))

    def cores(self):
        """On average; None: unknown."""
        busy_now = self.busy()
        if self.busy_then is None or busy_now is None: return None
        return max(0.0, (busy_now - self.busy_then - (self.own() - self.own_then)) / (self.clock() - self.begun))


AS_MUCH_AS_ANYBODY_WANTS = 2 ** 62  # bytes


def available_memory(root="/"):
    """Bytes; as much as anybody could want where the system does not say."""
    found = re.search(r"MemAvailable:\s*(\d+) kB", text_of(pathlib.Path(root, "proc/meminfo")))
    return min(int(found.group(1)) * 1024 if found else AS_MUCH_AS_ANYBODY_WANTS, cgroup_limit(root))


def cgroup_limit(root="/"):
    """Bytes of memory that the process's control group, and those it is in, may use; of version 1 or 2."""
    least = AS_MUCH_AS_ANYBODY_WANTS
    for line in text_of(pathlib.Path(root, "proc/self/cgroup")).splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","): continue
        tree = pathlib.Path(root, "sys/fs/cgroup", "memory" if controllers else "")
        group = tree / own.lstrip("/")
        for folder in (group, *group.parents):
            limit = text_of(folder / ("memory.limit_in_bytes" if controllers else "memory.max")).strip()
            if limit.isdigit(): least = min(least, int(limit))  # or "max"
            if folder == tree: break
    return least


def describe(root, build, python):
    cpu = text_of("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpu)
    system = re.search(r'PRETTY_NAME="?(.*?)"?$', text_of("/etc/os-release"), re.MULTILINE)
    memory = re.search(r"MemTotal:\s*(\d+) kB", text_of("/proc/meminfo"))
    cache = cmake_cache(build)
    native = " -march=native" if cache.get("GRADSYNC_NATIVE") == "ON" else ""
    return {
        "cpu": model.group(1) if model else platform.machine(),
        "cores": cores(),
        "virtual": " hypervisor" in cpu,
        "caches": caches(),
        "memory_bytes": int(memory.group(1)) * 1024 if memory else 0,
        "system": system.group(1) if system else "",
        "kernel": platform.release(),
        "compiler": answer(cache.get("CMAKE_CXX_COMPILER", "c++"), "--version").partition("\n")[0],
        "build": f"{cache.get('CMAKE_BUILD_TYPE', '')} {cache.get('CMAKE_CXX_FLAGS_RELEASE', '')}{native}".strip(),
        "peers": peers(cache, python),
        "commit": answer("git", "rev-parse", "HEAD", folder=root),
        "clean": answer("git", "status", "--porcelain", folder=root) == "",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
