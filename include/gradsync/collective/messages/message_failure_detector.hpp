// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../engine.hpp"
#include "message_world.hpp"
#include "rounds.hpp"

namespace gradsync::inline v0_2::message_passing {

/// Finds the ranks that hold up a collective, as far as one rank can tell from its messages, and ends the world for it.
/// Requires the world's mutex.
class MessageFailureDetector {
    using Clock = std::chrono::steady_clock;
    using Late = collective::Late;

public:
    /// All references must outlive the object.
    MessageFailureDetector(MessageWorld& world, const collective::Member& self, int communicator, const Rounds& rounds)
        : world_(world),
          self_(self),
          communicator_(communicator),
          rounds_(rounds),
          gone_since_(self.world_ranks()->size()) {}

    /// The ranks that hold up `pending`.
    [[gnu::cold]] Late late(const PendingCollective& pending) const {
        using Did = Late::Did;
        List<int> missing;
        for (int r = 0; r < size(); ++r)
            if (!pending.arrived(r)) missing.push_back(world_rank(r));
        if (!missing.empty())
            return {.ranks = std::move(missing),
                    .did = pending.waits_for_hub() ? Did::wait_itself : Did::not_start,
                    .certain = !pending.waits_for_hub()};
        List<int> late;
        auto worst = Round::Debt::none;
        for (int r = 0; r < size(); ++r) {
            const Round::Debt debt = pending.owes(r) ? Round::Debt::contribution : rounds_.debt(pending, r);
            if (debt > worst) late.clear();
            worst = larger(worst, debt);
            if (debt == worst) late.push_back(world_rank(r));
        }
        const bool certain = worst > Round::Debt::result;
        if (worst == Round::Debt::none || (!certain && late.size() > 1)) late.clear();
        return {.ranks = std::move(late), .did = Did::not_go_on, .certain = certain};
    }

    /// Ends the world if a rank does not start `oldest`, the first incomplete collective, because it has left or died.
    /// Opens files, and may send messages.
    [[gnu::cold]] void report_missing(const PendingCollective& oldest) {
        const auto what = [&] { return collective::name_of(oldest.call(), oldest.number()); };
        for (int r = 0; r < size(); ++r) {
            if (r == self_.rank()) continue;
            const auto left = world_.left(communicator_, world_rank(r));
            if (left && *left <= oldest.number()) return world_.fail(collective::left_early(what(), world_rank(r)));
            if (!left && is_dead(r)) return world_.fail(world_.end_of(world_rank(r), what()));
        }
    }

    /// The world rank of the first rank that died without a good-bye, or -1. Opens files.
    int first_dead() {
        for (int r = 0; r < size(); ++r)
            if (r != self_.rank() && !world_.left(communicator_, world_rank(r)) && is_dead(r)) return world_rank(r);
        return -1;
    }

    /// Called repeatedly once the time limit has passed, `by` ago. An uncertain rank waits for a better informed one to
    /// report first. `unheard`: the first collective that some rank may not have started; null if there is none.
    [[gnu::cold]] void report_timeout(const PendingCollective& oldest, const PendingCollective* unheard,
                                      std::chrono::nanoseconds by, std::chrono::nanoseconds limit) {
        const PendingCollective* open = &oldest;
        Late who = late(*open);
        const bool names_none = who.ranks.empty() && unheard == nullptr;
        if (!who.certain &&
            collective::Deadline::too_early(by, limit, names_none ? collective::Deadline::most_stages : 1))
            return;
        // Several ranks may all wait for one of them, which only another one can name.
        if (who.ranks.size() > 1 && collective::Deadline::too_early(by, limit, 2)) return;
        // A rank that has not started this one may be waiting in an earlier one.
        if (!ask(who, open->number(), limit)) return;
        // The rank that stopped did not start this one.
        if (who.ranks.empty() && unheard != nullptr) who = late(*(open = unheard));
        world_.fail(collective::timed_out(collective::name_of(open->call(), open->number()), who,
                                          self_.own_world_rank(), limit));
    }

    /// Tells the ranks that ask which rank this one waits for. Called while it waits.
    [[gnu::cold]] void answer(const Late& who) noexcept {
        const bool knows = who.certain && !who.ranks.empty() && who.ranks.front() != self_.own_world_rank();
        world_.answer(knows ? who.ranks.front() : -1);
    }

    /// Asks the first of these ranks which rank it waits for, then that one, and so on: the last one is to blame.
    /// `number`: the collective that the ranks hold up. Returns false while the last one may still answer or, if it
    /// does not know, report.
    [[gnu::cold]] bool ask(Late& who, std::uint64_t number, std::chrono::nanoseconds limit) {
        if (who.ranks.empty()) return true;
        const bool not_started = who.did == Late::Did::not_start;
        const int first = who.ranks.front();
        const bool is_another = std::exchange(asked_number_, number + 1) != number + 1;
        if (is_another) excuses_ = 0;
        if (is_another || asked_.empty() || asked_.front() != first) {
            asked_.clear();
            ask(first, limit);
        }
        const int last = asked_.back();
        const std::optional<int> late = world_.answer_of(last);
        if (late == MessageWorld::nobody && ++excuses_ < collective::Deadline::most_limits)
            return asked_.clear(), false;                        // ask again after another limit
        bool in_turn = late && *late == self_.own_world_rank();  // they wait for one another, so some calls differ
        for (const int rank : asked_) in_turn |= late && rank == *late;
        if (late && *late >= 0 && !in_turn) return ask(*late, limit), false;
        const auto too_early = [&](int stages) {
            return collective::Deadline::too_early(Clock::now() - asked_at_, limit, stages);
        };
        const bool followed = asked_.size() > 1;
        if (not_started) {
            if (in_turn) return true;
            if (too_early(late ? 4 : followed ? 2 : 1)) return false;
            if (late || !followed) return true;  // a waiting rank is not to blame
            bool missing = false;
            for (const int rank : who.ranks) missing |= rank == last;
            who = {.ranks = {last}, .did = missing ? Late::Did::not_start : Late::Did::not_answer};
            return true;
        }
        // A rank that waits may wait for several, and reports them all.
        if (followed) who = {.ranks = {last}};
        else if (late) who.did = Late::Did::wait_itself;
        else if (who.did == Late::Did::wait_itself) who.did = Late::Did::not_answer;
        return !too_early(late || followed ? 4 : 1);
    }

private:
    void ask(int rank, std::chrono::nanoseconds limit) {
        asked_.push_back(rank);
        asked_at_ = Clock::now();
        world_.ask(rank, limit);
    }
    int size() const noexcept { return self_.size(); }
    int world_rank(int rank) const noexcept { return self_.world_rank(rank); }

    /// Has its process been gone for a while? The delay is for its last messages, which may still be on their way, and
    /// may say that the rank has left.
    bool is_dead(int rank) noexcept {
        Clock::time_point& since = gone_since_[rank];
        if (world_.alive(world_rank(rank))) since = {};
        else if (since == Clock::time_point{}) since = Clock::now();
        else return Clock::now() - since > std::chrono::milliseconds(20);
        return false;
    }

    MessageWorld& world_;
    const collective::Member& self_;
    const int communicator_;
    const Rounds& rounds_;
    List<Clock::time_point> gone_since_;  ///< by rank
    std::uint64_t asked_number_ = 0;      ///< 1 + the number of the collective that the questions are about
    List<int> asked_;                     ///< the ranks that were asked; each waits for the next
    int excuses_ = 0;                     ///< how often data moved at a rank that was asked
    Clock::time_point asked_at_{};        ///< time of the last question
};

}  // namespace gradsync::inline v0_2::message_passing
