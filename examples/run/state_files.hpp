// SPDX-License-Identifier: BSL-1.0
#pragma once
// Files of the state that ranks keep in memory (gradsync::KeptState). A job can go on from them after its launcher or its host has failed. The
// launcher writes them; ranks do not wait.
//
// A file state.STEP: magic, number of ranks, step (8 bytes each); for each rank the bytes and the layout of its state; the states; a digest of
// everything before. It appears under its name as a whole.

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gradsync/elastic/kept_memory.hpp>

#include "processes.hpp"

namespace gradsync_run {

using gradsync::elastic::KeptMemory;

/// The states of all ranks after one step.
struct SavedState {
    std::uint64_t number = 0;  // as in KeptMemory: one more than the step
    struct Rank {
        std::uint64_t bytes = 0, layout = 0;
        std::vector<std::byte> state = {};
    };
    std::vector<Rank> ranks = {};
};

class StateFiles {
public:
    explicit StateFiles(std::filesystem::path folder) : folder_{std::move(folder)} {
        std::error_code error;
        std::filesystem::create_directories(folder_, error);
        if (error) throw std::runtime_error("--state: cannot make " + folder_.string() + ": " + error.message());
        handle_ = Descriptor{::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
        if (!handle_ || ::flock(handle_.get(), LOCK_EX | LOCK_NB) != 0)
            throw std::runtime_error("--state: " + folder_.string() +
                                     (handle_ && errno == EWOULDBLOCK ? " is used by another job; name another folder"
                                                                      : " cannot be opened: " + std::string(std::strerror(errno))));
    }

    /// Returns the newest state that is whole; `say` tells of others.
    template <class Say>
    std::optional<SavedState> load(Say&& say) const {
        for (const std::uint64_t number : numbers()) {
            if (auto state = read(file(number))) return state;
            say(file(number).string() + " is damaged; going on from an older state");
            std::error_code error;
            std::filesystem::rename(file(number), folder_ / ("damaged." + std::to_string(number - 1)), error);
        }
        return std::nullopt;
    }

    /// The number of the newest state; 0: there is none.
    std::uint64_t newest() const {
        const auto all = numbers();
        return all.empty() ? 0 : all.front();
    }

    /// Takes a copy of the newest step that all ranks have kept, if they have one after `newer_than`. They may go on meanwhile: what is
    /// overwritten is taken anew. Throws if that happens again and again. `memory`: by rank.
    static std::optional<SavedState> copy(const std::vector<const KeptMemory*>& memory, std::uint64_t newer_than) {
        for (int attempt = 0; attempt < 8; ++attempt) {
            SavedState state{.number = newest_of_all(memory)};
            if (state.number <= newer_than) return std::nullopt;
            bool is_whole = true;
            for (const KeptMemory* one : memory) {
                const int slot = one->slot_of(state.number);
                SavedState::Rank& rank = state.ranks.emplace_back(one->bytes(), one->layout(), std::vector<std::byte>(one->bytes()));
                if (slot >= 0) one->read(slot, {{rank.state.data(), rank.state.size()}});
                std::atomic_thread_fence(std::memory_order_acquire);
                is_whole = is_whole && slot >= 0 && one->step(slot) == state.number;
            }
            if (is_whole) return state;
        }
        throw std::runtime_error("the ranks overwrite it faster than it can be copied; let them keep it less often");
    }

    /// Writes a state, and removes all but the one before. Throws, and leaves what was there.
    void save(const SavedState& state) const {
        for (const auto& entry : std::filesystem::directory_iterator(folder_))
            if (entry.path().filename().string().starts_with(unfinished)) std::filesystem::remove(entry.path());
        const auto own = folder_ / (unfinished + std::to_string(::getpid()));
        try {
            write(state, own);
            if (::rename(own.c_str(), file(state.number).c_str()) != 0 || ::fsync(handle_.get()) != 0)
                fail("cannot write " + file(state.number).string());
        } catch (...) {
            ::unlink(own.c_str());
            throw;
        }
        const auto all = numbers();
        for (std::size_t i = 2; i < all.size(); ++i) std::filesystem::remove(file(all[i]));
    }

private:
    static constexpr std::uint64_t magic = 0x31657461747367u;  // "gstate1"
    static constexpr const char *prefix = "state.", *unfinished = "unfinished.";

    std::filesystem::path file(std::uint64_t number) const { return folder_ / (prefix + std::to_string(number - 1)); }

    /// Those that have files, greatest first.
    std::vector<std::uint64_t> numbers() const {
        std::vector<std::uint64_t> all;
        for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
            const std::string name = entry.path().filename(), step = name.substr(std::min(name.size(), std::string(prefix).size()));
            if (name.starts_with(prefix) && !step.empty() && step.size() < 19 && step.find_first_not_of("0123456789") == std::string::npos)
                all.push_back(std::stoull(step) + 1);
        }
        std::ranges::sort(all, std::greater());
        return all;
    }

    static std::uint64_t newest_of_all(const std::vector<const KeptMemory*>& memory) {
        std::uint64_t newest = 0;
        for (int slot = 0; slot < 2 && !memory.empty(); ++slot) {
            const std::uint64_t number = memory[0]->step(slot);
            const auto has = [&](const KeptMemory* one) { return one->slot_of(number) >= 0; };
            if (number > newest && std::ranges::all_of(memory, has)) newest = number;
        }
        return newest;
    }

    /// Eight bytes at a time: the digest of a large state must not take longer than its file.
    static std::uint64_t digest_of(std::uint64_t digest, std::span<const std::byte> bytes) {
        std::size_t i = 0;
        for (std::uint64_t word = 0; i + sizeof word <= bytes.size(); i += sizeof word) {
            std::memcpy(&word, bytes.data() + i, sizeof word);
            digest = (digest ^ word) * 1099511628211u;
            digest ^= digest >> 32;
        }
        for (; i < bytes.size(); ++i) digest = (digest ^ static_cast<std::uint64_t>(bytes[i])) * 1099511628211u;
        return digest;
    }
    template <class T>
    static std::span<const std::byte> bytes_of(const std::vector<T>& values) {
        return std::as_bytes(std::span(values));
    }
    static std::vector<std::uint64_t> head_of(const SavedState& state) {
        std::vector<std::uint64_t> head{magic, state.ranks.size(), state.number};
        for (const auto& rank : state.ranks) head.insert(head.end(), {rank.bytes, rank.layout});
        return head;
    }

    static void write(const SavedState& state, const std::filesystem::path& name) {
        const Descriptor out{::open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600)};
        std::uint64_t digest = magic;
        const auto add = [&](std::span<const std::byte> bytes) {
            digest = digest_of(digest, bytes);
            if (!write_all(out.get(), {reinterpret_cast<const char*>(bytes.data()), bytes.size()})) fail("cannot write " + name.string());
        };
        if (!out) fail("cannot write " + name.string());
        add(bytes_of(head_of(state)));
        for (const auto& rank : state.ranks) add(bytes_of(rank.state));
        const std::uint64_t end = digest;
        add(std::as_bytes(std::span(&end, 1)));
        if (::fsync(out.get()) != 0) fail("cannot write " + name.string());
    }

    static bool read_all(int descriptor, void* data, std::size_t bytes) {
        for (char* at = static_cast<char*>(data); bytes != 0;) {
            const ssize_t n = ::read(descriptor, at, bytes);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) return false;
            at += n;
            bytes -= static_cast<std::size_t>(n);
        }
        return true;
    }
    static std::optional<SavedState> read(const std::filesystem::path& name) {
        const Descriptor in{::open(name.c_str(), O_RDONLY | O_CLOEXEC)};
        std::error_code error;
        std::uint64_t left = std::filesystem::file_size(name, error), first[3] = {};
        if (!in || error || !read_all(in.get(), first, sizeof first) || first[0] != magic || first[1] > left / 16) return std::nullopt;
        SavedState state{.number = first[2], .ranks = std::vector<SavedState::Rank>(first[1])};
        left -= sizeof first;
        for (auto& rank : state.ranks) {
            if (!read_all(in.get(), &rank.bytes, 8) || !read_all(in.get(), &rank.layout, 8)) return std::nullopt;
            left -= 16;
        }
        for (auto& rank : state.ranks) {
            if (rank.bytes > left) return std::nullopt;
            rank.state.resize(rank.bytes);
            if (!read_all(in.get(), rank.state.data(), rank.bytes)) return std::nullopt;
            left -= rank.bytes;
        }
        std::uint64_t digest = digest_of(magic, bytes_of(head_of(state))), end = 0;
        for (const auto& rank : state.ranks) digest = digest_of(digest, bytes_of(rank.state));
        if (left != sizeof end || !read_all(in.get(), &end, sizeof end) || end != digest) return std::nullopt;
        return state;
    }

    std::filesystem::path folder_;
    Descriptor handle_;  // locked, so that no other job uses the folder
};

}  // namespace gradsync_run
