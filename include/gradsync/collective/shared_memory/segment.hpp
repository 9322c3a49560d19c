// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdio>

#include "../../bootstrap/rendezvous.hpp"
#include "../../core/math.hpp"
#include "../../core/shared.hpp"
#include "../../core/unique_handle.hpp"

namespace gradsync::inline v0_2::shared_memory {

using gradsync::detail::Shared, gradsync::detail::text;

/// Memory that several processes of one machine map, initially zeroed. It has no name in the file system: nothing is
/// left behind when the processes die, for any reason, and the size of /dev/shm does not limit it.
///
/// One process creates it and sends its `ipc_handle()` to the others, which open it while the creator's object lives.
/// Afterwards each has its own mapping. Not thread-safe.
class Segment {
public:
    /// `page`: the largest of any system's pages, which have 4 to 64 KiB.
    static constexpr std::size_t page = std::size_t{64} << 10, huge_page = std::size_t{2} << 20;

    /// Another process of this machine opens the segment with this. Trivially copyable, to be sent.
    struct IpcHandle {
        std::uint64_t bytes = 0;
        std::uint64_t token = 0;
        std::int64_t process = 0;
        std::int64_t descriptor = -1;
    };

    Segment() = default;

    /// Creates a segment of `bytes` bytes. Throws std::system_error if the system cannot provide it. A process that
    /// asks for huge pages delays others: it stops after `for_huge_pages`, and takes small pages for the rest.
    [[gnu::cold]] static Segment create(std::size_t bytes,
                                        std::chrono::nanoseconds for_huge_pages = std::chrono::milliseconds(100)) {
        Segment segment;
        constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING, no_exec = 8;  // MFD_NOEXEC_SEAL, since Linux 6.3
        segment.descriptor_ = Descriptor(::memfd_create("gradsync", flags | no_exec));
        if (!segment.descriptor_ && errno == EINVAL)
            segment.descriptor_ = Descriptor(::memfd_create("gradsync", flags));
        const int descriptor = segment.descriptor_.get();
        if (descriptor < 0) refuse("cannot make shared memory");
        const std::size_t whole = bytes + data_offset(bytes);
        // Sealed: if one process could shrink it, the others would die of SIGBUS.
        if (::ftruncate(descriptor, static_cast<off_t>(whole)) != 0 || ::fcntl(descriptor, F_ADD_SEALS, seals) != 0)
            refuse("cannot make shared memory of ", whole, " bytes");
        if (is_accounting_strict()) reserve(descriptor, whole);
        void* const mapping = segment.map(descriptor, bytes, for_huge_pages);
        segment.ipc_handle_ = {bytes, bootstrap::random_token(), ::getpid(), descriptor};
        std::memcpy(mapping, &segment.ipc_handle_.token, sizeof segment.ipc_handle_.token);
        return segment;
    }

    /// Reserves all of its memory, so that writing it never fails. On the creator. Throws std::system_error if the
    /// system has not enough.
    [[gnu::cold]] void reserve() const { reserve(descriptor_.get(), bytes() + data_offset(bytes())); }

    /// Opens the memory as its creator does: others can open it at this process, also when the creator has died. Throws
    /// like `open`.
    [[gnu::cold]] static Segment take_over(const IpcHandle& handle) {
        Descriptor descriptor = open_descriptor(handle);
        Segment segment = open(handle, std::chrono::nanoseconds(0));
        segment.ipc_handle_.process = ::getpid();
        segment.ipc_handle_.descriptor = descriptor.get();
        segment.descriptor_ = std::move(descriptor);
        return segment;
    }

    /// Maps the creator's memory. Throws std::system_error if this process cannot reach it: another machine, another
    /// process namespace, another user.
    [[gnu::cold]] static Segment open(const IpcHandle& handle,
                                      std::chrono::nanoseconds for_huge_pages = std::chrono::milliseconds(100)) {
        const Descriptor descriptor = open_descriptor(handle);
        // In another process namespace the same number is another process.
        Segment segment;
        struct stat status {};
        const int has = ::fcntl(descriptor.get(), F_GET_SEALS);  // the system may have added some
        if (::fstat(descriptor.get(), &status) != 0 || handle.bytes > static_cast<std::uint64_t>(status.st_size) ||
            static_cast<std::uint64_t>(status.st_size) != handle.bytes + data_offset(handle.bytes) || has < 0 ||
            (has & seals) != seals ||
            std::memcmp(segment.map(descriptor.get(), handle.bytes, for_huge_pages), &handle.token,
                        sizeof handle.token) != 0)
            throw std::system_error(std::make_error_code(std::errc::no_such_file_or_directory),
                                    path_of(handle) + " is not the expected shared memory");
        segment.ipc_handle_ = handle;
        return segment;
    }

    const IpcHandle& ipc_handle() const noexcept { return ipc_handle_; }
    /// Aligned to a page. The address differs between processes.
    std::byte* data() const noexcept { return memory_.get(); }
    std::size_t bytes() const noexcept { return ipc_handle_.bytes; }
    /// The same address; the pointer keeps this process's mapping alive.
    const Shared<std::byte>& memory() const noexcept { return memory_; }

private:
    using Descriptor = UniqueHandle<int, static_cast<int (*)(int)>(::close), -1>;  // a program may overload the name
    static constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

    /// Offset of the data, behind the token that identifies the segment. Large data begins
    /// at a huge page, behind a hole.
    static constexpr std::size_t data_offset(std::size_t bytes) noexcept {
        return bytes >= 2 * huge_page ? huge_page : page;
    }

    [[noreturn, gnu::cold, gnu::noinline]] static void refuse(const auto&... what) {
        const int error = errno;
        throw std::system_error(error, std::generic_category(), text(what...));
    }

    /// With strict accounting (vm.overcommit_memory=2) the first write to a page that is not reserved may end in
    /// SIGBUS. Without it nothing is reserved, so that pages lie near the rank that writes them first.
    static bool is_accounting_strict() noexcept {
        const Descriptor mode(::open("/proc/sys/vm/overcommit_memory", O_RDONLY | O_CLOEXEC));
        char digit = 0;
        return mode && ::read(mode.get(), &digit, 1) == 1 && digit == '2';
    }
    /// In small parts: a signal interrupts the call, which then gives back all that it has reserved.
    static void reserve(int descriptor, std::size_t whole) {
        std::size_t most = huge_page;
        for (std::size_t at = 0; at < whole;) {
            const std::size_t part = detail::smaller(most, whole - at);
            if (::fallocate(descriptor, 0, static_cast<off_t>(at), static_cast<off_t>(part)) == 0) at += part;
            else if (errno != EINTR) refuse("cannot reserve shared memory of ", whole, " bytes");
            else most = detail::larger<std::size_t>(most / 2, 4096);
        }
    }
    static std::string path_of(const IpcHandle& handle) {
        return text("/proc/", handle.process, "/fd/", handle.descriptor);
    }
    [[gnu::cold]] static Descriptor open_descriptor(const IpcHandle& handle) {
        Descriptor descriptor(::open(path_of(handle).c_str(), O_RDWR | O_CLOEXEC));
        if (!descriptor) refuse("cannot open the shared memory " + path_of(handle));
        return descriptor;
    }

    /// Returns the mapping, which begins before the data.
    [[gnu::cold]] void* map(int descriptor, std::size_t bytes, std::chrono::nanoseconds for_huge_pages) {
        const std::size_t offset = data_offset(bytes), whole = offset + bytes;
        // Huge pages need an aligned address. The address space reserved around it takes no memory.
        void* const reserved =
            ::mmap(nullptr, whole + offset, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        const std::uintptr_t aligned = detail::round_up(reinterpret_cast<std::uintptr_t>(reserved), offset);
        void* const address = reserved == MAP_FAILED
                                  ? reserved
                                  : ::mmap(reinterpret_cast<void*>(aligned), whole, PROT_READ | PROT_WRITE,
                                           MAP_SHARED | MAP_FIXED, descriptor, 0);
        if (address == MAP_FAILED) refuse("cannot map shared memory of ", bytes, " bytes");
        memory_ = Shared<std::byte>::of(static_cast<std::byte*>(address) + offset,
                                        [reserved, all = whole + offset](std::byte*) { ::munmap(reserved, all); });
        if (offset == huge_page) use_huge_pages(bytes, for_huge_pages);
        return address;
    }

    /// Many systems give shared memory huge pages only on request, page by page, once it was touched.
    /// Each takes 0.2 ms, or 40 ms if memory is fragmented. Passes over huge pages take half the time or less.
    void use_huge_pages(std::size_t bytes, std::chrono::nanoseconds limit) const noexcept {
        const auto until = std::chrono::steady_clock::now() + limit;
        constexpr int collapse = 25;  // MADV_COLLAPSE, since Linux 6.1: not in all headers
        for (std::size_t at = 0; at + huge_page <= bytes && std::chrono::steady_clock::now() < until; at += huge_page) {
            std::byte* const begin = data() + at;
            static_cast<void>(*static_cast<volatile std::byte*>(begin));
            if (::madvise(begin, huge_page, collapse) != 0) return;  // small pages work, too
        }
    }

    Shared<std::byte> memory_;
    Descriptor descriptor_;  ///< on the creator only; others need only their mapping
    IpcHandle ipc_handle_;
};

/// Whole pages of a process that are replaced, at their address, by pages that others have mapped; the destructor
/// restores private pages. The contents stay the same both times. Nothing else may use the pages during construction
/// and destruction.
class AdoptedPages {
public:
    /// Says why these bytes cannot be adopted; "" if they can. The program must have mapped them for itself, with mmap,
    /// in whole pages. Memory of malloc shares its pages, and their bookkeeping, with other memory.
    [[gnu::cold]] static std::string problem_of(std::span<const std::byte> region) {
        const auto begin = reinterpret_cast<std::uintptr_t>(region.data()), end = begin + region.size();
        const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
        if (region.empty() || begin % page != 0 || region.size() % page != 0)
            return text("memory is adopted by whole pages of ", page,
                        " bytes; map it with mmap, not with malloc or new");
        std::FILE* const maps = std::fopen("/proc/self/maps", "re");
        if (maps == nullptr) return "the system does not show its mappings";
        std::string problem = "this memory is not mapped";
        std::uintptr_t done = begin;  // end of the bytes found adoptable
        for (char line[512]; done < end && std::fgets(line, sizeof line, maps) != nullptr;) {
            unsigned long first = 0, last = 0, inode = 0;
            char rights[5] = "", name[64] = "";
            if (std::sscanf(line, "%lx-%lx %4s %*s %*s %lu %63[^\n]", &first, &last, rights, &inode, name) < 4 ||
                last <= done || first > done)
                continue;
            const bool is_heap = name[0] == '[' && std::strncmp(name, "[anon", 5) != 0;
            if (std::strcmp(rights, "rw-p") != 0 || inode != 0 || is_heap) {
                problem =
                    "this memory is not the program's own alone; adopt memory that mmap made with MAP_PRIVATE | "
                    "MAP_ANONYMOUS";
                break;
            }
            done = last;
        }
        std::fclose(maps);
        return done >= end ? std::string() : problem;
    }

    /// `shared`: as many bytes of shared pages. Throws std::system_error; the process then keeps
    /// its own pages, with their contents.
    [[gnu::cold]] AdoptedPages(std::span<std::byte> region, std::byte* shared) : region_(region) {
        std::memcpy(shared, region.data(), region.size());
        // A length of 0 maps shared pages once more (mremap(2)).
        if (::mremap(shared, 0, region.size(), MREMAP_MAYMOVE | MREMAP_FIXED, region.data()) == MAP_FAILED)
            throw std::system_error(errno, std::generic_category(),
                                    std::string("cannot map shared memory at its new place"));
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

/// A segment that one rank makes for others on its machine.
struct SharedSegment {
    Segment segment;           ///< empty if there is none
    std::uint64_t number = 0;  ///< the creator's
    int without = -1;          ///< the first rank that could not make or open its segment; -1: all have theirs
    std::string problem = {};  ///< why this rank could not

    /// Rank `creator`, whose `make()` is called, makes the segment of this rank; `number` travels along.
    /// `exchange(value)` returns the values of all ranks. Several ranks may create; each keeps its segment until all
    /// have opened it. Collective.
    template <class Exchange, class Make>
    [[gnu::cold]] static SharedSegment share(Exchange&& exchange, int rank, int creator, Make&& make,
                                             std::uint64_t number = 0,
                                             std::chrono::nanoseconds for_huge_pages = std::chrono::milliseconds(100)) {
        struct Offer {
            Segment::IpcHandle handle;
            std::uint64_t number;
        };
        SharedSegment shared;
        // Mostly system errors. After any error this rank cannot share memory with the others.
        const auto attempt = [&](auto&& get) -> Segment {
            try {
                return get();
            } catch (const std::exception& error) {
                shared.problem = error.what();
                return {};
            }
        };
        const Segment created = rank == creator ? attempt(make) : Segment();
        const Offer offer = exchange(Offer{created.ipc_handle(), number})[creator];
        if (offer.handle.descriptor >= 0)
            shared.segment = attempt([&] { return Segment::open(offer.handle, for_huge_pages); });
        shared.number = offer.number;
        // A rank whose creator has no segment is not to blame.
        const auto blameless =
            exchange(static_cast<std::uint8_t>(shared.segment.data() != nullptr || shared.problem.empty()));
        for (std::size_t r = blameless.size(); r-- > 0;)
            if (blameless[r] == 0) shared.without = static_cast<int>(r);
        return shared;
    }
};

}  // namespace gradsync::inline v0_2::shared_memory
