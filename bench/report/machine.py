"""On what was measured: the machine, the compiler, the sources, what else was going on."""
import os
import pathlib
import platform
import re
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
