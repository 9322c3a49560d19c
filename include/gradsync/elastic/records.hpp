// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../bootstrap/store/any_store.hpp"
#include "machine.hpp"

/// @file
/// Internal: a job's records, as a process reads them from the store.

namespace gradsync::inline v0_2::elastic {

/// Is it certain that a member has ended? As a process of the same machine sees it.
struct IsDead {
    collective::ProcessIdentity self;
    bool operator()(const Member& one) const noexcept { return !one.process.alive(self); }
};

/// Returns how long to leave a store alone after a look at it that began at `begin`: at least `least`, and so long that
/// a process spends at most a fifth of its time on looks, because other jobs may use the store, too.
inline std::chrono::microseconds pause_after_look(std::chrono::steady_clock::time_point begin,
                                                  std::chrono::microseconds least) noexcept {
    const auto look = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin);
    return detail::larger(least, detail::smaller(4 * look, std::chrono::microseconds(100'000)));
}

/// Tells a Machine what is new in a store. Not thread-safe.
class Records {
public:
    /// `address`: of the store.
    Records(const std::string& address, Machine machine)
        : store_(AnyStore::open(address)), address_(address), machine_(std::move(machine)) {}
    /// A reader of its own, for another thread, which knows what this one knows.
    Records another() const { return Records(address_, machine_); }

    AnyStore& store() noexcept { return *store_; }
    Machine& machine() noexcept { return machine_; }
    const Machine& machine() const noexcept { return machine_; }
    /// What `end` says; nothing while the job goes on, and no text if it has ended well.
    const std::optional<Blob>& end() const noexcept { return end_; }

    /// Throws Error(storage) if the store cannot be reached, or holds something else.
    void refresh() {
        for (;;) {
            const std::string name = name_of_generation(machine_.newest().number + 1);
            const auto found = store_->read(name);
            if (!found) break;
            machine_.see(members(*found, name));
        }
        if (!end_) end_ = store_->read("end");
        if (end_) machine_.see_end();
        for_each("join/", [&](std::uint64_t member, const std::string& name) {
            if (machine_.knows(member)) return;
            if (const auto found = store_->read(name)) machine_.see(members(*found, name)[0]);  // it may be late
        });
        if (!machine_.changes()) return;
        for_each("here/", [&](std::uint64_t member, const std::string&) { machine_.see_ready(member); });
        for_each("gone/", [&](std::uint64_t member, const std::string&) { machine_.see_gone(member); });
        for_each("leave/", [&](std::uint64_t member, const std::string&) { machine_.see_leaving(member); });
    }

    /// Asks those that wait whether they answer.
    void call_waiting(const IsDead& is_dead) {
        for (const Member& one : machine_.waiting())
            if (!called_.contains(one.id) && !is_dead(one)) {
                (void)store_->create(name_of("call/", one.id), {});
                called_.insert(one.id);
            }
    }

private:
    List<Member> members(const Blob& bytes, const std::string& name) const {
        List<Member> all = members_in(bytes);
        if (all.empty())
            bootstrap::raise(Errc::storage, {.operation = "store"}, "the store ", address_,
                             " holds something else under ", name,
                             "; give each job a store of its own, and all ranks one version of gradsync");
        return all;
    }
    template <class F>
    void for_each(const std::string& prefix, F&& f) {
        for (const std::string& name : store_->names(prefix))
            f(std::strtoull(name.c_str() + prefix.size(), nullptr, 16), name);
    }

    std::unique_ptr<AnyStore> store_;
    std::string address_;
    Machine machine_;
    std::optional<Blob> end_;
    MemberSet called_;
};

}  // namespace gradsync::inline v0_2::elastic
