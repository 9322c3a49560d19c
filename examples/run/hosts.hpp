// SPDX-License-Identifier: BSL-1.0
#pragma once
// Launchers of one job on several hosts, which agree through a store.

#include <optional>
#include <span>
#include <sstream>
#include <string>

#include <gradsync/bootstrap/channel.hpp>
#include <gradsync/bootstrap/store/any_store.hpp>

#include "options.hpp"
#include "processes.hpp"

namespace gradsync_run {

/// The address at which rank 0 listens, and the token that its ranks share.
struct Meeting {
    std::string address;
    int port = 0;
    std::string token;
};

/// Why a start ends early, on whatever host.
struct Failure {
    int host = 0, status = 0;
    bool asked = false;  // a signal asked for it
    std::string account;
};

/// Opens the store of the options for this host, which no other launcher may have been.
inline std::unique_ptr<gradsync::AnyStore> open_store(const Options& options) {
    auto store = gradsync::AnyStore::open(options.store);
    const std::string name = "host/" + std::to_string(options.host_index), own = gradsync::net::Nonce::random().text();
    const auto claim = [&] { return std::string(gradsync::bootstrap::text_of(store->create(name, std::as_bytes(std::span(own))))); };
    const auto limit = store->set_timeout(std::chrono::seconds(3));
    std::string first;
    try {
        first = claim();
    } catch (const gradsync::Error& error) {
        if (error.errc() != gradsync::Errc::storage) throw;
        write_all(STDERR_FILENO, "gradsync_run: " + std::string(error.what()) + "; trying again\n");
        (void)store->set_timeout(limit);
        first = claim();
    }
    (void)store->set_timeout(limit);
    if (first != own)
        throw std::runtime_error("--store: " + options.store + " has a host " + std::to_string(options.host_index) +
                                 " already, perhaps of a job that has ended; give each job a folder or a prefix of its own" +
                                 (options.hosts > 1 ? ", and each host another --host-index" : ""));
    return store;
}

/// The address at which other hosts reach this one.
inline std::string own_address(const Options& options) {
    if (!options.address.empty()) return options.address;
    const auto all = gradsync::net::addresses_of({});
    if (all.empty()) throw std::runtime_error("this host has no network; say its address with --address");
    return all[0].text();
}

class Hosts {
public:
    explicit Hosts(const Options& options) : options_{&options}, store_{open_store(options)} {}

    /// Once all hosts have come, host 0 says where the ranks of a start meet. A host comes when its earlier ranks have ended, because ranks
    /// wait for one another no longer than their own limits. `check()` is called meanwhile; it may throw.
    template <class Check>
    Meeting meet(unsigned number, const Meeting& own, Check&& check) {
        const std::string name = "start/" + std::to_string(number);
        const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_->wait));
        const auto await = [&](int host, const std::string& word) {
            for (; Clock::now() < until; ::usleep(50'000), check())
                if (const auto found = read(word)) return *found;
            throw std::runtime_error("host " + std::to_string(host) + " has not come to " + options_->store + " within the " +
                                     std::to_string(static_cast<int>(options_->wait)) +
                                     " s of --wait; look at its launcher's output, and check that it sees the same store");
        };
        if (options_->host_index != 0) {
            create(here(number, options_->host_index), "");
            return meeting_in(await(0, name));
        }
        for (int host = 1; host < options_->hosts; ++host) await(host, here(number, host));
        return meeting_in(create(name, own.address + " " + std::to_string(own.port) + " " + own.token));
    }

    /// Tells the others of a failure. Returns the first one that anybody has told.
    Failure tell(unsigned number, const Failure& failure) {
        return failure_in(create("failed/" + std::to_string(number), std::to_string(failure.host) + " " + std::to_string(failure.status) +
                                                                         " " + std::to_string(failure.asked) + " " + failure.account));
    }
    std::optional<Failure> failure(unsigned number) {
        if (Clock::now() < next_look_) return {};
        next_look_ = Clock::now() + std::chrono::milliseconds(100);
        const auto found = read("failed/" + std::to_string(number));
        return found ? std::optional(failure_in(*found)) : std::nullopt;
    }

    /// Tells the others that the ranks of this host have succeeded.
    void finish(unsigned number) { create(done(number, options_->host_index), ""); }
    /// Have the ranks of all hosts succeeded?
    bool have_all_finished(unsigned number) {
        for (int host = 0; host < options_->hosts; ++host)
            if (!read(done(number, host))) return false;
        return true;
    }

private:
    static std::string here(unsigned number, int host) { return "here/" + std::to_string(number) + "/" + std::to_string(host); }
    static std::string done(unsigned number, int host) { return "done/" + std::to_string(number) + "/" + std::to_string(host); }
    std::string create(const std::string& name, const std::string& text) {
        return std::string(gradsync::bootstrap::text_of(store_->create(name, std::as_bytes(std::span(text)))));
    }
    /// A store that is away has nothing new.
    std::optional<std::string> read(const std::string& name) {
        std::optional<gradsync::Blob> found;
        const auto limit = store_->set_timeout(std::chrono::milliseconds(500));
        try {
            found = store_->read(name);
            trouble_.clear();
        } catch (const gradsync::Error& error) {
            if (error.errc() != gradsync::Errc::storage) throw;
            if (std::exchange(trouble_, error.what()).empty()) write_all(STDERR_FILENO, "gradsync_run: " + trouble_ + "\n");
            next_look_ = Clock::now() + std::chrono::seconds(1);
        }
        (void)store_->set_timeout(limit);
        return found ? std::optional(std::string(gradsync::bootstrap::text_of(*found))) : std::nullopt;
    }
    static Meeting meeting_in(const std::string& text) {
        std::istringstream words{text};
        Meeting meeting;
        words >> meeting.address >> meeting.port >> meeting.token;
        return meeting;
    }
    static Failure failure_in(const std::string& text) {
        std::istringstream words{text};
        Failure failure;
        words >> failure.host >> failure.status >> failure.asked;
        words.ignore();
        std::getline(words, failure.account);
        return failure;
    }

    const Options* options_;
    std::unique_ptr<gradsync::AnyStore> store_;
    Clock::time_point next_look_ = {};
    std::string trouble_;  // of the store, which was said
};

}  // namespace gradsync_run
