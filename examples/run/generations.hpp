// SPDX-License-Identifier: BSL-1.0
#pragma once
// The store in which ranks that go on after a failure meet (gradsync::Membership), as their launcher sees it.

#include <stdlib.h>
#include <sys/inotify.h>

#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <gradsync/bootstrap/store/file_store.hpp>
#include <gradsync/elastic/machine.hpp>

#include "processes.hpp"
#include "state_files.hpp"

namespace gradsync_run {

/// A folder in memory, for as long as this object lives.
class StoreFolder {
public:
    StoreFolder() {
        std::string name =
            (std::filesystem::exists("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path().string()) + "/gradsync_run-XXXXXX";
        if (::mkdtemp(name.data()) == nullptr) fail("cannot make a folder in which ranks meet");
        path_ = name;
    }
    StoreFolder(const StoreFolder&) = delete;
    ~StoreFolder() { remove(); }
    void remove() const {
        std::error_code error;
        std::filesystem::remove_all(path_, error);
    }
    const std::filesystem::path& path() const { return path_; }

private:
    std::filesystem::path path_;
};

/// The generations of one start of a job. Ranks of programs that do not use the store have none.
class Generations {
public:
    /// `state`: what ranks find as kept; or none.
    Generations(const std::filesystem::path& folder, const std::optional<SavedState>& state)
        : folder_{make(folder)}, store_{folder_.string()} {
        if (state)
            for (std::size_t r = 0; r < state->ranks.size(); ++r) {
                const SavedState::Rank& rank = state->ranks[r];
                KeptMemory memory = KeptMemory::make(rank.bytes, rank.layout);
                memory.write(state->number, {{const_cast<std::byte*>(rank.state.data()), rank.bytes}});
                hold(static_cast<int>(r), std::move(memory));
            }
        if (watch_) ::inotify_add_watch(watch_.get(), folder_.c_str(), IN_CREATE);
    }

    const std::filesystem::path& folder() const { return folder_; }
    /// Readable when the store has something new.
    int descriptor() const { return watch_.get(); }

    void refresh() {
        char events[4096];
        while (::read(watch_.get(), events, sizeof events) > 0) {
        }
        while (const auto found = store_.read(gradsync::elastic::name_of_generation(newest_ + 1))) {
            ++newest_;
            members_.clear();
            for (const auto& member : gradsync::elastic::members_in(*found)) {
                members_.insert(member.process.process());
                processes_[member.id] = member.process.process();
            }
        }
        ended_ = ended_ || store_.read("end").has_value();
        hold_memory();
    }

    std::uint32_t newest() const { return newest_; }
    /// Does the newest generation have this process?
    bool has(pid_t process) const { return members_.contains(process); }
    bool ended() const { return ended_; }

    /// Processes that others have waited for in vain.
    std::set<pid_t> silent() { return processes_in("out/"); }
    /// Processes that have left the generation, and wait for the next one.
    std::set<pid_t> back_from(std::uint32_t generation) { return processes_in(gradsync::elastic::name_of_return(generation)); }

    /// Ranks that wait for others learn why they wait no longer.
    void end(const std::string& reason) { (void)store_.create("end", std::as_bytes(std::span(reason))); }

    /// The memory of each of `ranks` ranks; nothing unless all have some.
    std::vector<const KeptMemory*> memory(std::size_t ranks) const {
        std::vector<const KeptMemory*> all;
        for (const auto& [rank, memory] : memory_) all.push_back(&memory);
        if (all.size() != ranks) all.clear();
        return all;
    }

private:
    void hold(int rank, KeptMemory memory) {
        const auto handle = memory.handle();
        memory_[rank] = std::move(memory);
        (void)store_.create(gradsync::elastic::name_of_memory(rank), std::as_bytes(std::span(&handle, 1)));
    }
    /// Holds what ranks keep, so that it outlives them.
    void hold_memory() {
        const std::string prefix = "keep/";
        for (const std::string& name : store_.names(prefix)) {
            if (!offers_.insert(name).second) continue;
            const auto offer = store_.read(name);
            gradsync::shared_memory::Segment::IpcHandle handle;
            if (!offer || offer->size() != sizeof handle) continue;
            std::memcpy(&handle, offer->data(), sizeof handle);
            try {
                hold(std::stoi(name.substr(prefix.size())), KeptMemory::take_over(handle));
            } catch (const std::system_error&) {
                // The rank has died meanwhile; another one will make its own.
            }
        }
    }
    std::set<pid_t> processes_in(const std::string& prefix) {
        std::set<pid_t> all;
        for (const std::string& name : store_.names(prefix))
            if (const auto found = processes_.find(std::stoull(name.substr(prefix.size()), nullptr, 16)); found != processes_.end())
                all.insert(found->second);
        return all;
    }
    static const std::filesystem::path& make(const std::filesystem::path& folder) {
        if (::mkdir(folder.c_str(), 0700) != 0) fail("cannot make " + folder.string());
        return folder;
    }

    std::filesystem::path folder_;
    gradsync::FileStore store_;
    Descriptor watch_{::inotify_init1(IN_CLOEXEC | IN_NONBLOCK)};
    std::uint32_t newest_ = 0;
    std::set<pid_t> members_;
    std::map<std::uint64_t, pid_t> processes_;  // by the member's number
    std::set<std::string> offers_;
    std::map<int, KeptMemory> memory_;  // by rank
    bool ended_ = false;
};

}  // namespace gradsync_run
