// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <system_error>

#include "../../core/text.hpp"

namespace gradsync::inline v0_2::shared_memory {

/// Whole pages of a process that are replaced, at their address, by pages that others have mapped, and are its own again afterwards. Their
/// contents stay the same both times. Nothing else may use them meanwhile: neither in the constructor nor in the destructor.
class AdoptedPages {
public:
    /// Says why these bytes cannot be adopted; "" if they can: memory that the program mapped for itself, with mmap, by whole pages. Memory of
    /// malloc shares its pages, and their bookkeeping, with other memory.
    [[gnu::cold]] static std::string problem_of(std::span<const std::byte> region) {
        using gradsync::detail::text;
        const auto begin = reinterpret_cast<std::uintptr_t>(region.data()), end = begin + region.size();
        const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
        if (region.empty() || begin % page != 0 || region.size() % page != 0)
            return text("memory is adopted by whole pages of ", page, " bytes; map it with mmap, not with malloc or new");
        std::FILE* const maps = std::fopen("/proc/self/maps", "re");
        if (maps == nullptr) return "the system does not show its mappings";
        std::string problem = "this memory is not mapped";
        std::uintptr_t done = begin;  // the bytes before it are fit
        for (char line[512]; done < end && std::fgets(line, sizeof line, maps) != nullptr;) {
            std::uintptr_t first = 0, last = 0, inode = 0;
            char rights[5] = "", name[64] = "";
            if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*s %*s %" SCNuPTR " %63[^\n]", &first, &last, rights, &inode, name) < 4 ||
                last <= done || first > done)
                continue;
            const bool is_heap = name[0] == '[' && std::strncmp(name, "[anon", 5) != 0;
            if (std::strcmp(rights, "rw-p") != 0 || inode != 0 || is_heap) {
                problem = "this memory is not the program's own alone; adopt memory that mmap made with MAP_PRIVATE | MAP_ANONYMOUS";
                break;
            }
            done = last;
        }
        std::fclose(maps);
        return done >= end ? std::string() : problem;
    }

    /// `shared`: as many bytes of shared pages. Throws std::system_error; the pages are the process's own then, with their contents.
    [[gnu::cold]] AdoptedPages(std::span<std::byte> region, std::byte* shared) : region_(region) {
        std::memcpy(shared, region.data(), region.size());
        // A length of 0 maps shared pages once more (mremap(2)).
        if (::mremap(shared, 0, region.size(), MREMAP_MAYMOVE | MREMAP_FIXED, region.data()) == MAP_FAILED)
            throw std::system_error(errno, std::generic_category(), std::string("cannot map shared memory at its new place"));
    }
    AdoptedPages& operator=(AdoptedPages&&) = delete;
    [[gnu::cold]] ~AdoptedPages() {
        void* const own = ::mmap(nullptr, region_.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (own == MAP_FAILED) return;  // the pages stay shared
        std::memcpy(own, region_.data(), region_.size());
        if (::mremap(own, region_.size(), region_.size(), MREMAP_MAYMOVE | MREMAP_FIXED, region_.data()) == MAP_FAILED)
            ::munmap(own, region_.size());
    }

private:
    std::span<std::byte> region_;
};

}  // namespace gradsync::inline v0_2::shared_memory
