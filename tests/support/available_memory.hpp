// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <limits>
#include <string>

namespace gradsync_test {

/// Bytes that a program may use without driving others out of memory, or itself over the limit of its container; 0 where the system does
/// not say.
inline std::size_t available_memory() {
    std::size_t within = std::numeric_limits<std::size_t>::max();
    std::ifstream most("/sys/fs/cgroup/memory.max"), now("/sys/fs/cgroup/memory.current");
    if (std::size_t limit = 0, used = 0; most >> limit && now >> used)
        within = limit > used ? limit - used : 0;  // "max" where there is none
    std::ifstream file("/proc/meminfo");
    for (std::string name, unit; file >> name;) {
        std::size_t kib = 0;
        if (!(file >> kib)) return 0;
        std::getline(file, unit);
        if (name == "MemAvailable:") return std::min(within, kib * 1024);
    }
    return 0;
}

}  // namespace gradsync_test
