// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <gradsync/bootstrap/tcp_rendezvous.hpp>

#include "support/ports.hpp"

/// Programs whose ranks are processes that may share one device, with no launcher. CUDA does not survive a fork, so the ranks are made
/// before its first call, and all of them run all test cases.

namespace gradsync_test {

/// Devices of this machine, asked for in a process of their own; -1 with a `reason` where there is no driver.
inline int count_devices(std::string& reason) {
    int ends[2];
    if (::pipe(ends) != 0) return -1;
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
        int count = 0;
        const cudaError_t code = cudaGetDeviceCount(&count);
        const std::string text = code == cudaSuccess ? std::to_string(count) : std::string("x") + cudaGetErrorString(code);
        [[maybe_unused]] const auto written = ::write(ends[1], text.data(), text.size());
        ::_exit(0);
    }
    ::close(ends[1]);
    char text[256] = {};
    const ssize_t got = ::read(ends[0], text, sizeof text - 1);
    ::close(ends[0]);
    ::waitpid(child, nullptr, 0);
    if (got <= 0 || text[0] == 'x') {
        reason = got <= 0 ? "the CUDA runtime does not start" : text + 1;
        return -1;
    }
    return std::atoi(text);
}

/// For a test program that needs a device: 77, and says why, where there is none; else -1.
inline int skip_without_device() {
    std::string reason;
    const int devices = count_devices(reason);
    if (devices > 0) return -1;
    std::printf("skipped: no CUDA device (%s)\n", devices == 0 ? "there are 0" : reason.c_str());
    return 77;
}

/// Several ranks of NCCL's on one device, for correctness only: it refuses those that look as if they were on one host. To be set before
/// its first call in a process.
inline void look_like_a_host(int rank) {
    ::setenv("NCCL_HOSTID", ("rank" + std::to_string(rank)).c_str(), 1);
    ::setenv("NCCL_NET", "Socket", 1);
    ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    ::setenv("NCCL_MNNVL_ENABLE", "0", 1);
    ::setenv("NCCL_MAX_CTAS", "2", 1);
    ::setenv("NCCL_RAS_ENABLE", "0", 1);
}

/// This process's rank among those of the test program.
struct GpuRanks {
    int rank = 0;
    int size = 1;
    gradsync::TcpRendezvous rendezvous;
};

inline GpuRanks*& gpu_ranks_place() {
    static GpuRanks* only = nullptr;
    return only;
}
inline GpuRanks& gpu_ranks() { return *gpu_ranks_place(); }

/// Turns the process into as many as GRADSYNC_TEST_RANKS says (1, if it says nothing) and returns -1 in each; the parent waits for them,
/// and returns what the program is to exit with. The output of ranks other than 0 is shown if they fail.
inline int fork_ranks() {
    if (const int skipped = skip_without_device(); skipped >= 0) return skipped;
    const char* const text = std::getenv("GRADSYNC_TEST_RANKS");
    const int size = text != nullptr ? std::atoi(text) : 1;
    const char* const limit_text = std::getenv("GRADSYNC_TEST_TIMEOUT");
    const int limit = limit_text != nullptr ? std::atoi(limit_text) : 600;
    const std::uint16_t port = free_port();
    std::vector<pid_t> children;
    std::vector<std::FILE*> outputs;
    std::fflush(nullptr);
    for (int rank = 0; rank < size; ++rank) {
        outputs.push_back(rank == 0 ? nullptr : std::tmpfile());
        const pid_t child = ::fork();
        if (child == 0) {
            ::prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (outputs.back() != nullptr) {
                ::dup2(::fileno(outputs.back()), STDOUT_FILENO);
                ::dup2(::fileno(outputs.back()), STDERR_FILENO);
            }
            look_like_a_host(rank);
            gpu_ranks_place() = new GpuRanks{rank, size, gradsync::TcpRendezvous({.rank = rank, .size = size, .port = port})};
            return -1;
        }
        children.push_back(child);
    }
    int result = 0;
    const std::time_t deadline = std::time(nullptr) + limit + 3;  // each has a limit of its own
    for (std::size_t r = 0; r < children.size(); ++r) {
        int status = 0;
        while (::waitpid(children[r], &status, WNOHANG) == 0) {
            if (std::time(nullptr) > deadline)
                for (const pid_t child : children) ::kill(child, SIGKILL);
            ::usleep(20'000);
        }
        const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        if (code == 0) continue;
        std::printf("rank %zu exited with %d\n", r, code);
        if (outputs[r] != nullptr) {
            std::rewind(outputs[r]);
            for (int c; (c = std::fgetc(outputs[r])) != EOF;) std::putchar(c);
        }
        result = code > result ? code : result;
    }
    return result;
}

}  // namespace gradsync_test
