// SPDX-License-Identifier: BSL-1.0
#pragma once
// The store in which ranks that go on after a failure meet (gradsync::Membership), as their launcher sees it.

#include <stdlib.h>
#include <sys/inotify.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <gradsync/bootstrap/store/any_store.hpp>
#include <gradsync/elastic/machine.hpp>
#include <gradsync/elastic/records.hpp>

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
    std::string path() const { return path_.string(); }

private:
    std::filesystem::path path_;
};

/// The generations of one start of a job. Ranks of programs that do not use the store have none.
class Generations {
public:
    /// Those of a job on several hosts, in a store that all of them see.
    explicit Generations(const std::string& address) : address_{address}, store_{gradsync::AnyStore::open(address)}, is_on_hosts_{true} {}
    /// Those of a job on this host. `address`: of a store that nobody has used yet; a folder is made. `state`: what ranks find as kept; or none.
    Generations(const std::string& address, const std::optional<SavedState>& state) : address_{address}, store_{make(address)} {
        if (state)
            for (std::size_t r = 0; r < state->ranks.size(); ++r) {
                const SavedState::Rank& rank = state->ranks[r];
                KeptMemory memory = KeptMemory::make(rank.bytes, rank.layout);
                memory.write(state->number, {{const_cast<std::byte*>(rank.state.data()), rank.bytes}});
                hold(static_cast<int>(r), std::move(memory));
            }
        if (address.find("://") != std::string::npos) return;
        // The store makes these folders when it needs them, and then nobody would watch them yet.
        watch_ = Descriptor{::inotify_init1(IN_CLOEXEC | IN_NONBLOCK)};
        for (const char* const name : {"", "/join+", "/gen+", "/back+", "/out+", "/keep+"}) {
            const std::string watched = address_ + name;
            if (*name != '\0' && ::mkdir(watched.c_str(), 0700) != 0) fail("cannot make " + watched);
            if (!watch_ || ::inotify_add_watch(watch_.get(), watched.c_str(), IN_CREATE) < 0) watch_ = {};
        }
    }

    const std::string& address() const { return address_; }
    /// Readable when the store has something new; -1 if nobody tells, and one has to look.
    int descriptor() const { return watch_ ? watch_.get() : -1; }
    static constexpr std::chrono::milliseconds interval{50};  // of looks, then

    /// Reads what is new: at once, or if it is time to look. Returns whether it has looked. If it throws, the next call reads all of it again.
    bool refresh(bool at_once) {
        char events[4096];
        const auto begin = Clock::now();
        bool is_new = watch_ ? !std::exchange(has_looked_, false) : at_once || begin >= next_look_;
        while (watch_ && ::read(watch_.get(), events, sizeof events) > 0) is_new = true;
        if (is_new) {
            next_look_ = begin + std::chrono::seconds(1);
            look();
            (void)store_->set_timeout(std::chrono::milliseconds(500));  // for later: nothing else happens meanwhile
            next_look_ = Clock::now() + gradsync::elastic::pause_after_look(begin, interval);
        }
        has_looked_ = true;
        return is_new;
    }

    std::uint32_t newest() const { return newest_; }
    /// Does the newest generation have this member?
    bool has(std::uint64_t member) const { return members_.contains(member); }
    bool ended() const { return end_.has_value(); }
    bool ended_well() const { return end_ && end_->empty(); }
    std::string end_reason() const { return std::string(gradsync::bootstrap::text_of(end_.value())); }

    /// Is this a member for which the others have waited in vain?
    bool is_silent(std::uint64_t member) const { return silent_.contains(member); }
    /// Has this member left the newest generation, and waits for the next one?
    bool is_back(std::uint64_t member) const { return back_.contains(member); }
    /// Returns the members that have joined since the last call, and wait for a generation.
    std::vector<gradsync::elastic::Member> take_joined() { return std::exchange(joined_, {}); }

    /// The members on other hosts need not wait for one whose process has ended.
    void note_gone(std::uint64_t member) { (void)store_->create(gradsync::elastic::name_of("gone/", member), {}); }
    /// Ranks that wait for others learn why they wait no longer.
    void end(const std::string& reason) { (void)store_->create("end", std::as_bytes(std::span(reason))); }

    /// The memory of each of `ranks` ranks; nothing unless all have some.
    std::vector<const KeptMemory*> memory(std::size_t ranks) const {
        std::vector<const KeptMemory*> all;
        for (const auto& [rank, memory] : memory_) all.push_back(&memory);
        if (all.size() != ranks) all.clear();
        return all;
    }

private:
    void look() {
        while (const auto found = store_->read(gradsync::elastic::name_of_generation(newest_ + 1))) {
            ++newest_;
            members_.clear();
            for (const auto& member : gradsync::elastic::members_in(*found)) members_.insert(member.id);
        }
        if (!end_) end_ = store_->read("end");
        silent_ = members_in("out/");
        back_ = members_in(gradsync::elastic::name_of_return(newest_));
        for (const std::string& name : store_->names("join/")) {
            if (known_.contains(name)) continue;
            const auto found = store_->read(name);
            if (!found) continue;
            for (const auto& member : gradsync::elastic::members_in(*found)) joined_.push_back(member);
            known_.insert(name);
        }
        if (is_on_hosts_) return;
        const std::string prefix = "keep/";
        for (const std::string& name : store_->names(prefix)) {
            if (known_.contains(name)) continue;
            hold_offer(std::stoi(name.substr(prefix.size())), store_->read(name));
            known_.insert(name);
        }
    }
    /// Holds what a rank keeps, so that it outlives the rank.
    void hold_offer(int rank, const std::optional<gradsync::Blob>& offer) {
        gradsync::shared_memory::Segment::IpcHandle handle;
        if (memory_.contains(rank) || !offer || offer->size() != sizeof handle) return;
        std::memcpy(&handle, offer->data(), sizeof handle);
        try {
            hold(rank, KeptMemory::take_over(handle));
        } catch (const std::system_error& error) {
            // A rank that has died meanwhile takes its memory along; another one will make its own.
            if (error.code() != std::errc::no_such_file_or_directory) throw;
        }
    }
    void hold(int rank, KeptMemory memory) {
        (void)store_->create(gradsync::elastic::name_of_memory(rank), std::as_bytes(std::span(&memory.handle(), 1)));
        memory_[rank] = std::move(memory);
    }
    /// The members whose numbers stand behind the prefix.
    std::set<std::uint64_t> members_in(const std::string& prefix) {
        std::set<std::uint64_t> all;
        for (const std::string& name : store_->names(prefix)) all.insert(std::stoull(name.substr(prefix.size()), nullptr, 16));
        return all;
    }
    static std::unique_ptr<gradsync::AnyStore> make(const std::string& address) {
        if (address.find("://") == std::string::npos && ::mkdir(address.c_str(), 0700) != 0) fail("cannot make " + address);
        return gradsync::AnyStore::open(address);
    }

    std::string address_;
    std::unique_ptr<gradsync::AnyStore> store_;
    bool is_on_hosts_ = false;
    Descriptor watch_;
    Clock::time_point next_look_ = {};
    std::uint32_t newest_ = 0;
    std::set<std::uint64_t> members_, silent_, back_;
    std::vector<gradsync::elastic::Member> joined_;
    std::set<std::string> known_;       // names that have been read
    std::map<int, KeptMemory> memory_;  // by rank
    bool has_looked_ = false;
    std::optional<gradsync::Blob> end_;
};

}  // namespace gradsync_run
