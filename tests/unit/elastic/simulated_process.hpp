// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "simulation.hpp"

/// @file
/// A process of a simulated job: what Membership and ElasticJob do, step by step, with the library's own decisions. A process may be
/// stopped or killed wherever it waits.

namespace gradsync_test::simulated {

class Simulation final : public World {
public:
    explicit Simulation(std::uint64_t seed, Bug mistake = Bug::none, Script* script = nullptr) : World(seed, mistake, script) {}

private:
    Task live(Process& p) override {
        while (co_await meet(p)) {
            Comm& c = comm(p.generation);
            bool agreed = false;
            if (co_await restore(p, c)) agreed = co_await train(p, c);
            leave_comm(p, !agreed);
            const std::uint64_t culprit = std::exchange(p.missed, 0);
            if (std::exchange(p.has_failed, false)) {
                if (co_await abandon(p)) continue;
                co_return 0;
            }
            if (!agreed) co_await fail(p, c.number, culprit);
            else p.machine.leave(c.number, true);
            if (p.leaves && agreed && co_await leave_job(p)) break;
        }
        if (p.leaves && p.self.id != 0) {
            co_await create(p, Name::gone, p.self.id, 0, nobody);
            co_await sleep(p, 0, 2 * limit);  // it lives on for a while
        }
        co_return 0;
    }

    // GCC 12 cannot keep such temporaries across a wait.
    inline static const Word nothing = {};
    inline static const List<Member> nobody = {};

    // ---- The store, as Membership uses it. ----

    /// Returns the number of the record that has won. The answer may be lost, and then the process asks again.
    Task create(Process& p, Name name, std::uint64_t key, std::uint64_t value, const List<Member>& members) {
        for (;;) {
            co_await sleep(p, ms / 5, 2 * ms);
            while (!reaches_store(p)) co_await sleep(p, 10 * ms, 20 * ms);
            const std::uint64_t found = put(p, name, key, value, members).value;
            observe(p, found);
            co_await sleep(p, ms / 5, 2 * ms);
            if (!chance(50)) co_return found;
        }
    }
    void refresh(Process& p) {
        while (const Record* r = read(p, Name::generation, p.machine.newest().number + 1)) p.machine.see(r->members);
        for (const Record& r : store()) {
            if (r.name == Name::join && !p.machine.knows(r.key) && sees(p, r)) {
                p.machine.see(r.members[0]);
                if (bug == Bug::silent_joiner) p.machine.see_ready(r.key);
            }
            if (r.name == Name::here && job.changes && sees(p, r)) p.machine.see_ready(r.key);
            if (r.name == Name::gone && job.changes && sees(p, r)) p.machine.see_gone(r.key);
            if (r.name == Name::leave && job.changes && sees(p, r)) p.machine.see_leaving(r.key);
            if (r.name == Name::end && sees(p, r)) p.machine.see_end();
        }
        observe_all(p);
    }
    auto deaths() {
        return [this](const Member& one) { return is_dead(one); };
    }
    int rank_in_newest(const Process& p) const { return p.machine.newest().rank_of(p.self.id); }

    /// ElasticJob::leave: returns whether the process leaves. The last member gives its state to one that waits, or ends the job.
    Task leave_job(Process& p) {
        refresh(p);
        if (!p.machine.may_leave(deaths())) co_return 0;
        check_leaves(p);
        if (p.machine.view(deaths()).is_deserted()) co_await create(p, Name::end, 0, 2, nobody);
        co_return 1;
    }

    /// Who leaves as agreed does not take the only state along if it knows of another process that could have it.
    void check_leaves(const Process& p) {
        if (rank_in_newest(p) < 0 || was_disturbed() || job.lag != 0) return;
        std::vector<int> others;
        for (const int one : all_processes()) {
            const Process& other = process(one);
            if (other.generation != 0) return;  // it is about to have the same state
            // A member that has not said so yet stays for another generation.
            const bool is_leaving = other.leaves && (!is_in_last_generation(other) || find(Name::leave, other.self.id) != nullptr);
            if (one != p.index && !other.dead && !is_leaving && other.self.id != 0 && p.machine.knows(other.self.id)) others.push_back(one);
        }
        if (others.empty() || newest_state(others) != 0) return;
        if (newest_state({p.index}) != 0) violate("5: a process leaves with the only state, and another one could have it");
    }

    /// ElasticJob::abandon: an error of its own has ended this process's part. Returns whether it joins again.
    Task abandon(Process& p) {
        co_await create(p, Name::gone, p.self.id, 0, nobody);
        p.is_left_behind |= p.machine.newest().members.size() > 1;
        p.self.id = 0;
        p.machine.join(p.self);
        co_await sleep(p, 0, coin() ? 10 * ms : limit);
        p.born = now;
        co_return below(4) != 0;
    }

    // ---- Membership::meet ----

    /// Returns whether the process is in a generation; otherwise it ends.
    Task meet(Process& p) {
        Time deadline = now + limit;
        int failures = 0;
        List<Member> members = p.machine.newest().members;
        std::size_t here = 0;
        for (;;) {
            co_await sleep(p, ms / 5, ms);
            refresh(p);
            const std::size_t before = std::exchange(here, count_here(p));
            if (here != before && !job.changes) deadline = now + limit;
            if (p.machine.newest().members != members) {
                members = p.machine.newest().members;
                deadline = now + limit;
                failures = 0;
            }
            if (p.leaves && rank_in_newest(p) < 0) co_return 0;
            if (p.machine.must_join()) {
                p.is_left_behind |= p.self.id != 0;
                p.self.id = static_cast<std::uint64_t>(p.index + 1) * 1000 + ++p.joins;
                p.self.place = p.slot;
                p.machine.join(p.self);
                p.settled.clear();
                const List<Member> self{p.self};
                co_await create(p, Name::join, p.self.id, 0, self);
                continue;
            }
            const bool late = now >= deadline;
            const Decision next = decide_next(p, late);
            if (next.step == Step::leave) co_return 0;
            if (next.step == Step::propose) {
                check_proposal(p, next.members, late);
                say(p, "proposes ", next.members.size(), " members as generation ", p.machine.newest().number + 1);
                const std::uint32_t number = p.machine.newest().number + 1;
                reach(p, Moment::propose);
                co_await create(p, Name::generation, number, number, next.members);
                if (bug == Bug::stale_proposal) p.machine.see(next.members);
            } else if (next.step == Step::meet) {
                if (co_await meet_newest(p)) co_return 1;
                if (++failures == 3) co_return check_gives_up(p);
                deadline = now + limit;
            } else if (late && !p.machine.view(deaths()).is_spare()) {
                co_return check_gives_up(p);
            } else {
                if (rank_in_newest(p) < 0) {
                    if (read(p, Name::call, p.self.id) && !find(Name::here, p.self.id)) {
                        co_await create(p, Name::here, p.self.id, 0, nobody);
                        continue;
                    }
                } else {
                    if (p.machine.left() < p.machine.newest().number) p.machine.leave(p.machine.newest().number);
                    call_those_that_wait(p);
                }
                co_await change(p, late ? now + limit : deadline);
            }
        }
    }
    /// Membership::count_here
    std::size_t count_here(Process& p) {
        const View known = p.machine.view(deaths());
        return known.newest.members.size() + known.waiting.size();
    }
    /// Nobody gives up if enough others have been there for a while, and nothing has kept them from each other.
    std::uint64_t check_gives_up(const Process& p) {
        std::size_t here = 0;
        for (const int one : all_processes())
            here += !process(one).dead && !process(one).leaves && process(one).self.id != 0 && now - process(one).born > limit / 2;
        const bool is_needed =
            job.changes || p.machine.newest().number == 0 || rank_in_newest(p) >= 0 || has_dead_member(p.machine.newest().members);
        if (here >= job.least && is_needed && !was_disturbed()) violate("8: a process gives up, and enough others are there");
        say(p, "gives up");
        return 0;
    }
    Decision decide_next(Process& p, bool late) {
        Decision next = decide(p.machine.view(deaths(), late));
        if (bug == Bug::hasty_minority && next.step == Step::wait && !p.machine.newest().members.empty()) {
            Decision hasty = decide(p.machine.view(deaths(), true));
            if (hasty.step == Step::propose && !contains_all(hasty.members, p.machine.newest().members)) next = std::move(hasty);
        }
        return next;
    }
    static bool contains_all(const List<Member>& all, const List<Member>& some) {
        std::size_t found = 0;
        for (const Member& one : some)
            for (const Member& other : all) found += one == other;
        return found == some.size();
    }
    void call_those_that_wait(Process& p) {
        if (!job.changes || !reaches_store(p)) return;
        for (const Member& one : p.machine.waiting())
            if (!find(Name::call, one.id)) put(p, Name::call, one.id);
    }
    /// Members do not count on processes that have not answered, and a minority of those that live waits. Those that had the state count;
    /// others break a tie.
    void check_proposal(Process& p, const List<Member>& proposed, bool late) {
        const Generation& newest = p.machine.newest();
        if (newest.number == 0 || rank_in_newest(p) < 0) return;
        std::size_t had_state = 0, live = 0, stay = 0;
        bool has_first = false;
        const View known = p.machine.view(deaths());
        const List<Member> here = (known.agreed ? known.staying() : known.newest).members;
        for (const Member& one : here) {
            const bool stays = contains_all(proposed, {one}), had = contains_all(p.settled, {one});
            if (stays && live == 0) has_first = true;
            live += had ? 1000 : 1;
            if (stays) stay += had ? 1000 : 1;
            had_state += had;
        }
        const bool is_small = job.changes && newest.number > 1 && had_state == 0
                                  ? stay < live
                                  : live != 0 && (2 * stay < live || (2 * stay == live && !has_first));
        const bool has_waited = late && now - p.failed_at >= limit;
        if (is_small && !has_waited) violate("10: a minority has not waited");
        if (job.changes)
            for (const Member& one : proposed)
                if (newest.rank_of(one.id) < 0 && !find(Name::here, one.id)) violate("9: members count on a process that has not answered");
    }

    Task meet_newest(Process& p) {
        const Generation& newest = p.machine.newest();
        if (newest.members != members_of(newest.number))
            violate("1: two processes see different members in generation " + std::to_string(newest.number));
        Comm& c = comm(newest.number);
        if (c.processes.empty()) {
            c.number = newest.number;
            c.members = newest.members;
            for (const Member& one : c.members) c.processes.push_back(process_of(one.id).index);
        }
        p.generation = c.number;
        p.missed = 0;
        if (co_await exchange(p, c, Topic::meeting, 0, nothing)) {
            say(p, "has met generation ", c.number, " of ", c.members.size());
            co_return 1;
        }
        say(p, "has not met generation ", c.number);
        leave_comm(p, true);
        const std::uint64_t absent = std::exchange(p.missed, 0);
        co_await leave_generation(p, c.number, absent);
        co_return 0;
    }
    Task leave_generation(Process& p, std::uint32_t generation, std::uint64_t culprit) {
        p.machine.leave(generation);
        p.failed_at = now;
        if (culprit != 0 && culprit != p.self.id) co_await create(p, Name::out, culprit, 0, nobody);
        co_return 0;
    }
    /// Membership::goes_on
    Task fail(Process& p, std::uint32_t generation, std::uint64_t culprit) {
        refresh(p);
        co_await leave_generation(p, generation, culprit);
        co_return 0;
    }

    // ---- Collectives ----

    /// `among`: the ranks that take part, a bit each.
    void contribute(Process& p, Comm& c, Topic topic, std::uint64_t step, const Word& word, std::uint32_t among = ~0u) {
        Call& call = c.calls[{topic, step}];
        if (call.words.empty()) call.words = List<Word>(c.processes.size());
        call.among = among & c.all();
        const int rank = rank_of(p, c);
        if (rank < 0) return violate("2: a process takes part in a generation without it");
        if (p.machine.newest().number != c.number && rank_in_newest(p) < 0) violate("7: a process has read a newer generation");
        if (topic == Topic::sum && c.agreed_at != 0 && step >= c.agreed_at) violate("2: a member goes on where another has left as agreed");
        call.words[static_cast<std::size_t>(rank)] = word;
        call.here |= 1u << rank;
        nudge_all();
    }
    static int rank_of(const Process& p, const Comm& c) {
        for (std::size_t r = 0; r < c.members.size(); ++r)
            if (c.members[r] == p.self) return static_cast<int>(r);
        return -1;
    }
    Task exchange(Process& p, Comm& c, Topic topic, std::uint64_t step, const Word& word) {
        contribute(p, c, topic, step, word);
        return arrive(p, c, topic, step);
    }
    /// Waits for what all members have contributed. Returns 0 after an error; `p.missed` is who did not come in time.
    Task arrive(Process& p, Comm& c, Topic topic, std::uint64_t step) {
        const Time start = now;
        Call& call = c.calls[{topic, step}];
        const int rank = rank_of(p, c);
        for (;;) {
            complete(c, call, topic);
            const bool has_arrived = call.complete && now >= call.arrival[rank];
            bool failed = has_arrived ? c.broken != 0 && coin() : !call.complete && c.gone != 0;
            if (topic == Topic::meeting && !call.complete) failed = is_over(p, c, call);
            if (failed || has_arrived) {
                observe(p, failed);
                co_return !failed;
            }
            // Who has reached the hub waits a little longer for what the hub says.
            const bool waits_for_hub = topic == Topic::meeting && rank != 0 && !lacks(p, c, call, 0);
            const Time deadline = start + (waits_for_hub ? limit * 5 / 4 : limit);
            if (now >= deadline) {
                p.missed = missing(p, c, call, topic);
                observe(p, p.missed);
                co_return 0;
            }
            co_await change(p, call.complete && call.arrival[rank] < deadline ? call.arrival[rank] : deadline);
        }
    }
    /// Can a meeting not succeed any more? The hub says whom it has missed to all that it reaches.
    bool is_over(Process& p, const Comm& c, const Call& call) {
        if (read(p, Name::generation, c.number + 1) || has_dead_member(c.members)) return true;
        if (rank_of(p, c) == 0 || (c.gone & 1) == 0 || lacks(p, c, call, 0)) return false;
        for (const std::uint64_t one : c.missed) p.machine.miss(one);
        return true;
    }
    bool lacks(const Process& p, const Comm& c, const Call& call, std::size_t r) {
        if ((call.among >> r & 1) == 0) return false;
        return (call.here >> r & 1) == 0 || !are_connected(p, process(c.processes[r]));
    }
    bool has_dead_member(const List<Member>& members) {
        for (const Member& one : members)
            if (is_dead(one)) return true;
        return false;
    }
    /// Everything has been sent when all have contributed and all links work.
    void complete(Comm& c, Call& call, Topic topic) {
        if (call.complete || call.here != (call.among & c.all())) return;
        for (std::size_t a = 0; a < c.processes.size(); ++a)
            for (std::size_t b = 0; b < c.processes.size(); ++b)
                if ((call.here >> a & call.here >> b & 1) != 0 && !are_connected(process(c.processes[a]), process(c.processes[b]))) return;
        call.complete = true;
        for (Time& one : call.arrival) one = now + between(0, 3 * ms);
        if (topic == Topic::barrier && c.gone == 0) {
            if (c.begins_anew && result.commits != 0) violate("4: a job begins anew, and its steps are lost");
            for (const int m : c.processes)
                if (process(m).holdings.place_of(wanted(c, call.words[0].number)) < 0)
                    violate(gradsync::detail::text("5: member ", m, " lacks the base ", call.words[0].number, " of generation ", c.number,
                                                   " gone ", c.gone));
        }
        if (topic == Topic::rows && c.gone == 0) c.newest = newest_state(c.processes);
        if (topic == Topic::sum)
            for (const Word& word : call.words)
                if (word.number != call.words[0].number || word.content != right_state(word.number))
                    violate("3: members sum what they have computed from different states");
        nudge_all();
    }
    /// Returns for whom a member has waited in vain. In a meeting the others look for the hub, and the hub for all: of two that cannot reach
    /// each other, it misses the later one.
    std::uint64_t missing(Process& p, Comm& c, const Call& call, Topic topic) {
        List<std::uint64_t> missed;
        const bool is_hub = rank_of(p, c) == 0;
        if (topic == Topic::meeting && !is_hub) missed.push_back(c.members[0].id);
        for (std::size_t r = 0; r < c.processes.size() && missed.size() == 0; ++r)
            if (lacks(p, c, call, r)) missed.push_back(c.members[r].id);
        for (std::size_t r = 1; r < c.processes.size() && topic == Topic::meeting && is_hub; ++r)
            for (std::size_t other = 1; other < r && missed.size() == 0; ++other)
                if (lacks(process(c.processes[other]), c, call, r)) missed.push_back(c.members[r].id);
        if (topic == Topic::meeting) {
            for (const std::uint64_t one : missed) p.machine.miss(one);
            if (is_hub) c.missed = missed;
        }
        return missed.empty() ? 0 : missed[0];
    }

    // ---- ElasticJob::restore ----

    Task restore(Process& p, Comm& c) {
        if (std::exchange(p.is_left_behind, false) && job.changes) forget(p);
        const Word offer{.row = p.holdings.row()};
        if (!co_await exchange(p, c, Topic::rows, 0, offer)) co_return 0;
        List<Row> rows;
        for (const Word& word : c.calls[{Topic::rows, 0}].words) rows.push_back(word.row);
        for (const Row& row : rows) know(p, row.top);
        const Plan plan = agree(rows);
        check_plan(c, plan);
        say(p, "goes on from ", plan.base.number, " with ", describe(p), ", lost: ", plan.lost);
        std::uint64_t base = plan.base.number;
        if (base == 0) {
            base = co_await begin(p, c);
            if (base == 0) co_return 0;
        }
        Task gets = job.is_sharded ? restore_parts(p, c, plan, base) : heal(p, c, plan, base);
        if (!co_await gets) co_return 0;
        const std::uint64_t goes_on = co_await go_on_from(p, c, base);
        co_return goes_on;
    }
    /// LiveState::heal
    Task heal(Process& p, Comm& c, const Plan& plan, std::uint64_t base) {
        const Holding own = wanted(c, base);
        const bool sends = plan.owners.empty() ? rank_of(p, c) == 0 : static_cast<int>(plan.owners[0]) == rank_of(p, c);
        const Word state = sends ? Word{.number = base, .content = p.place(p.holdings.place_of(own)).content, .flag = true} : nothing;
        contribute(p, c, Topic::state, 0, state);
        if (p.holdings.place_of(own) < 0) {
            if (!co_await arrive(p, c, Topic::state, 0)) co_return 0;
            int place = p.holdings.place_for(plan_from(plan, own), static_cast<std::uint32_t>(rank_of(p, c)));
            if (bug == Bug::healing_in_place) place = Row::memory;
            if (place < 0) {
                violate("5: there is no place for a copy");
                co_return 0;
            }
            reach(p, Moment::heal);
            co_await write(p, place, own, received(c));
        }
        const Word same{.number = base};
        if (!co_await exchange(p, c, Topic::barrier, 0, same)) co_return 0;
        c.all_have_base = true;
        reach(p, Moment::heal);
        if (p.holdings.place_of(own) != Row::memory) co_await write(p, Row::memory, own, p.place(p.holdings.place_of(own)).content);
        p.holdings.go_on_from(Row::memory);
        co_return 1;
    }
    /// ElasticJob::restore with shards: KeptParts::restore, and keep_for
    Task restore_parts(Process& p, Comm& c, const Plan& plan, std::uint64_t base) {
        Word state;  // what this member sends to the others
        for (std::uint32_t i = 0; i < plan.owners.size(); ++i)
            if (static_cast<int>(plan.owners[i]) == rank_of(p, c)) {
                const std::uint64_t content = p.place(p.holdings.place_of(plan.base, i)).content;
                state = {.number = base, .content = state.flag && state.content != content ? garbage : content, .flag = true};
            }
        if (!co_await exchange(p, c, Topic::state, 0, state)) co_return 0;
        p.memory = {wanted(c, base), plan.owners.empty() ? right_state(base) : received(c)};
        reach(p, Moment::heal);
        const List<std::uint64_t> goes(c.processes.size());
        const int place = p.holdings.place_for(plan_from(plan, wanted(c, base)), static_cast<std::uint32_t>(rank_of(p, c)));
        if (!co_await keep(p, c, 0, bug == Bug::healing_in_place ? p.holdings.place_of(plan.base) : place, goes)) co_return 0;
        const Word same{.number = base};
        if (!co_await exchange(p, c, Topic::barrier, 0, same)) co_return 0;
        c.all_have_base = true;
        p.holdings.go_on_from(p.newest);
        co_return 1;
    }
    static Plan plan_from(const Plan& plan, const Holding& loaded) {
        return plan.base.number != 0 ? plan : Plan{.base = loaded, .owners = List<std::uint32_t>(loaded.parts, 0)};
    }
    /// LiveState::forget
    void forget(Process& p) {
        for (int i = 0; i < Row::most; ++i) p.holdings.tear(i), p.place(i) = {};
    }
    Holding wanted(const Comm& c, std::uint64_t number) const {
        if (!job.is_sharded) return {.number = number};
        const auto size = static_cast<std::uint32_t>(c.processes.size());
        return {.number = number, .division = 1 + size * 2 + (job.divides_anew ? c.number % 2 : 0), .parts = size, .part = {Holding::none}};
    }
    static std::string describe(Process& p) {
        std::string text;
        for (int i = 0; i < Row::most; ++i) {
            const Holding& one = p.place(i).label;
            text += gradsync::detail::text("[", one.number, ":");
            for (const std::uint32_t part : one.part)
                if (part != Holding::none) text += gradsync::detail::text(" ", part);
            text += gradsync::detail::text("/", one.parts, " ", one.division, "]");
        }
        return text;
    }
    static std::uint64_t received(Comm& c) {
        std::uint64_t content = 0;
        for (const Word& word : c.calls[{Topic::state, 0}].words)
            if (word.flag) content = content == 0 || content == word.content ? word.content : garbage;
        return content;
    }
    void know(Process& p, std::uint64_t top) {
        p.holdings.know(top);
        p.shared->top = gradsync::detail::larger(p.shared->top, top);
    }
    /// All members come to the same plan, and it is the newest state that they really have.
    void check_plan(Comm& c, const Plan& plan) {
        if (!c.plan) {
            c.plan = plan;
            if (c.newest != no_state && c.newest != plan.base.number)
                violate("5: the members do not go on from the newest state that they have");
            result.losses += plan.lost;
            const bool may_lose = was_disturbed() || job.lag != 0 || result.failures != 0 || result.kills > 1;
            if (!may_lose && plan.base.number != 0 && plan.lost > (result.kills == 0 ? 0 : job.keep_every))
                violate("5: steps are lost that were kept");
        }
        if (!c.plan->base.is_of(plan.base) || !(c.plan->owners == plan.owners) || c.plan->lost != plan.lost)
            violate("3: the members have different plans");
    }

    /// Nobody has a state: rank 0 begins anew, loads a checkpoint, or ends the job. Returns the number of the state.
    Task begin(Process& p, Comm& c) {
        Word word;
        if (rank_of(p, c) == 0) {
            const std::uint64_t has_begun = co_await find_begun(p, c);
            if (has_begun == 0) word = {.number = 1, .content = right_state(1), .flag = true};
            else if (const Record* newest = newest_checkpoint(p)) word = {.number = newest->value, .content = right_state(newest->value)};
            else {
                check_loss();
                co_await create(p, Name::end, 0, 1, nobody);
            }
            c.loaded = word.number;
            if (!job.is_sharded && word.number != 0) {
                const Holding loaded = wanted(c, word.number);
                const int place = p.holdings.place_for(plan_from({}, loaded), 0);
                if (place < 0) violate("5: there is no place for a copy");
                else co_await write(p, place, loaded, word.content);
            }
        }
        if (!co_await exchange(p, c, Topic::begin, 0, word)) co_return 0;
        c.begins_anew = c.calls[{Topic::begin, 0}].words[0].flag;
        c.loads = !c.begins_anew;
        co_return c.calls[{Topic::begin, 0}].words[0].number;
    }
    /// Has the job begun in an earlier generation? A read could be late, so rank 0 says no in the name of each generation, unless that has
    /// said yes.
    Task find_begun(Process& p, Comm& c) {
        for (std::uint32_t g = 1; g < c.number; ++g) {
            const std::uint64_t answer = co_await create(p, Name::begun, g, 2, nobody);
            if (answer == 1) co_return 1;
        }
        co_return 0;
    }
    const Record* newest_checkpoint(const Process& p) {
        const Record* newest = nullptr;
        std::uint64_t complete = 0;
        for (const Record& r : store()) {
            if (r.name != Name::manifest) continue;
            if (sees(p, r) && (!newest || r.value > newest->value)) newest = &r;
        }
        for (const auto& [number, at] : checkpoints_)
            if (at + job.lag < now) complete = number;
        if (complete != 0 && (!newest || newest->value < complete)) violate("4: an older checkpoint is loaded");
        return newest;
    }
    /// A process that leaves takes its state along. One that waits may have inherited a state, but members ask only each other.
    void check_loss() {
        result.lost = true;
        std::vector<int> stay;
        for (const int one : all_processes()) {
            const Process& p = process(one);
            const bool waits = rank_in_newest(p) < 0 && !p.machine.must_join();
            if (!p.leaves && !p.is_left_behind && !waits) stay.push_back(one);
        }
        if (!job.is_sharded && !was_disturbed() && newest_state(stay) != 0) violate("5: the job ends, and a process has its state");
    }

    /// All have the base.
    Task go_on_from(Process& p, Comm& c, std::uint64_t base) {
        for (int i = 0; i < Row::most; ++i)
            if (p.holdings.row().holdings[i].number == 0) p.place(i).label = {};
        p.shared->top = base;
        if (p.had > base && !c.loads && p.had - base > c.plan->lost) violate("4: a member goes on from an older state, and nobody says so");
        p.had = base;
        p.machine.settle();
        p.settled = c.members;
        std::uint64_t begun = 1;
        reach(p, Moment::begin);
        if (rank_of(p, c) == 0 && bug != Bug::late_begun) begun = co_await create(p, Name::begun, c.number, 1, nobody);
        co_return begun == 1;
    }

    /// Writes a state, or a part of one. It is torn until the end.
    Task write(Process& p, int place, Holding label, std::uint64_t content) {
        tear(p, place, false);
        co_await sleep(p, ms / 10, 3 * ms);
        fill(p, place, label, content);
        co_return 0;
    }
    void tear(Process& p, int place, bool is_update) {
        const Holding here = p.place(place).label;
        const std::uint64_t before = is_update || here.number == 0 ? 0 : newest_state(comm(p.generation).processes);
        if ((place != Row::memory || p.has_parts) && p.shared->owner != p.index) violate("6: memory has two writers");
        if (!(is_update && bug == Bug::torn_offer)) p.holdings.tear(place), p.place(place).label = {};
        p.place(place).content = garbage;
        const Comm& c = comm(p.generation);
        if (!is_in_last_generation(p)) return;  // the others have gone on without it, and what it has does not count any more
        if (is_update || here.number == 0 || here.number == c.loaded) return;
        if (!p.has_parts) {
            if (c.all_have_base || (here.number == c.plan->base.number && static_cast<int>(c.plan->owners[0]) != rank_of(p, c))) return;
            std::uint64_t newest = 0;
            for (int i = 0; i < Row::most; ++i) newest = gradsync::detail::larger(newest, p.place(i).label.number);
            if (newest < here.number) violate("5: a process overwrites its newest state");
        }
        if (newest_state(comm(p.generation).processes) < before) violate("5: the newest state is overwritten");
    }
    void fill(Process& p, int place, const Holding& label, std::uint64_t content) {
        if ((place != Row::memory || p.has_parts) && p.shared->owner != p.index) violate("6: memory has two writers");
        p.place(place) = {label, content};
        p.holdings.fill(place, label);
        know(p, label.number);
        p.had = gradsync::detail::larger(p.had, label.number);
    }

    // ---- The user's loop ----

    /// Returns whether the members have agreed to leave the generation; otherwise there was an error, or the job has ended.
    Task train(Process& p, Comm& c) {
        const int rank = rank_of(p, c);
        std::optional<std::uint64_t> vote;
        for (;;) {
            const std::uint64_t number = p.memory.label.number;
            if (rank == 0) watch(p);
            if (p.machine.newest().number != c.number) co_return 0;
            if (vote) {
                if (!co_await arrive(p, c, Topic::vote, *vote)) co_return 0;
                if (says_change(c, *vote)) {
                    const bool agreed = leave_as_agreed(p, c, number);
                    if (job.is_sharded && !co_await keep_for_change(p, c, number)) co_return 0;
                    if (!co_await exchange(p, c, Topic::kept, 0, nothing)) co_return 0;
                    co_return agreed;
                }
            }
            if (number == job.last) break;
            if (p.leaves && !find(Name::leave, p.self.id)) co_await create(p, Name::leave, p.self.id, 0, nobody);
            contribute(p, c, Topic::vote, number, Word{.flag = p.leaves || (rank == 0 && p.machine.wants_change(deaths()))});
            vote = number;
            if (bug == Bug::early_vote && c.calls[{Topic::vote, number}].here == c.all() && says_change(c, number))
                co_return leave_as_agreed(p, c, number);
            co_await sleep(p, ms, 10 * ms);
            const Word summand{.number = number, .content = p.memory.content};
            if (!co_await exchange(p, c, Topic::sum, number, summand)) co_return 0;
            if (!co_await update(p, c, number)) co_return 0;
            if (rank == 0 && bug == Bug::late_begun) co_await create(p, Name::begun, c.number, 1, nobody);
            if (job.is_sharded && number + 1 - p.kept >= job.keep_every) {
                const List<std::uint64_t> goes(c.processes.size());
                if (!co_await keep(p, c, 0, p.holdings.place_for_next(), goes)) co_return 0;
            }
            const bool is_time = job.checkpoint_every != 0 && (number == 1 || (number + 1) % job.checkpoint_every == 0);
            if (rank == 0 && is_time) co_await save(p);
        }
        const std::uint64_t ended = co_await finish(p, c);
        co_return ended;
    }
    /// Rank 0's watcher of the store.
    void watch(Process& p) {
        refresh(p);
        call_those_that_wait(p);
    }
    static bool says_change(Comm& c, std::uint64_t step) {
        for (const Word& word : c.calls[{Topic::vote, step}].words)
            if (word.flag) return true;
        return false;
    }
    bool leave_as_agreed(Process&, Comm& c, std::uint64_t number) {
        if (c.agreed_at != 0 && c.agreed_at != number) violate("2: members leave a generation at different steps");
        c.agreed_at = number;
        return true;
    }
    Task update(Process& p, Comm& c, std::uint64_t number) {
        const Holding label = wanted(c, number + 1);
        const std::uint64_t content = after_step(c.calls[{Topic::sum, number}].words[0].content, number);
        reach(p, Moment::update);
        if (!p.has_parts) tear(p, Row::memory, true);
        if (bug == Bug::early_commit) {
            if (!p.has_parts) p.holdings.fill(Row::memory, label);
            p.memory.label = label;
        }
        co_await sleep(p, ms / 5, 2 * ms);
        if (chance(static_cast<std::uint64_t>(job.fails_updates))) {  // the user's function has thrown
            p.has_failed = job.changes && coin();
            ++result.failures;
            co_return 0;
        }
        if (p.has_parts) {
            p.memory = {label, content};
            know(p, number + 1);
            p.had = gradsync::detail::larger(p.had, number + 1);
        } else {
            fill(p, Row::memory, label, content);
        }
        if (content != right_state(number + 1)) violate("3: two commits of a step differ");
        ++result.commits;
        stepped_at = now;
        say(p, "has ", describe(p));
        co_return 1;
    }
    /// KeptParts::keep: keeps this member's part of the state in memory, and those of its mates. `turn`: of this state.
    Task keep(Process& p, Comm& c, std::uint64_t turn, int place, const List<std::uint64_t>& goes) {
        reach(p, Moment::keep);
        if (place < 0 && bug == Bug::two_places) place = 1;
        if (place < 0 && bug == Bug::healing_in_place) place = 0;
        if (place < 0) {
            violate("5: there is no place for a part");
            co_return 0;
        }
        List<std::uint64_t> hosts;
        for (const Member& one : c.members) hosts.push_back(job.one_host ? 0 : static_cast<std::uint64_t>(one.place) / 2);
        const List<std::uint32_t> mates = mates_of(static_cast<std::uint32_t>(rank_of(p, c)), hosts, goes);
        std::uint32_t among = 0;
        for (const std::uint32_t one : mates) among |= 1u << one;
        const std::uint64_t number = p.memory.label.number;
        tear(p, place, false);
        const std::uint64_t name = (number * 8 + mates[0]) * 2 + turn;
        const Word own{.number = number, .content = p.memory.content};
        contribute(p, c, Topic::mates, name, own, among);
        if (!co_await arrive(p, c, Topic::mates, name)) co_return 0;
        Holding label = wanted(c, number);
        for (std::size_t m = 0; m < Holding::most; ++m) label.part[m] = m < mates.size() ? mates[m] : Holding::none;
        std::uint64_t content = p.memory.content;
        for (const std::uint32_t one : mates)
            if (c.calls[{Topic::mates, name}].words[one].content != content) content = garbage;
        co_await sleep(p, ms / 10, 3 * ms);
        fill(p, place, label, content);
        p.newest = place;
        p.kept = number;
        co_return 1;
    }
    /// ElasticJob::keep_for_change
    Task keep_for_change(Process& p, Comm& c, std::uint64_t number) {
        const Word own{.flag = find(Name::leave, p.self.id) != nullptr};
        if (!co_await exchange(p, c, Topic::leaving, 0, own)) co_return 0;
        const auto& words = c.calls[{Topic::leaving, 0}].words;
        for (std::size_t r = 0; r < words.size(); ++r)
            if (words[r].flag) p.machine.see_leaving(c.members[r].id);
        const Generation stays = p.machine.view(deaths()).staying();
        List<std::uint64_t> goes;
        bool any = false;
        for (std::size_t r = 0; r < words.size(); ++r) {
            goes.push_back(words[r].flag && stays.rank_of(c.members[r].id) < 0);
            any = any || goes[r] != 0;
        }
        if (!any && p.kept == number) co_return 1;
        const std::uint64_t has_kept = co_await keep(p, c, 1, p.holdings.place_for_next(), goes);
        co_return has_kept;
    }
    Task save(Process& p) {
        const std::uint64_t number = p.memory.label.number;
        reach(p, Moment::save);
        co_await create(p, Name::manifest, bug == Bug::replaced_manifest ? 0 : number, number, nobody);
        if (auto [at, is_new] = checkpoints_.emplace(number, now); !is_new) at->second = at->second < now ? at->second : now;
        co_return 0;
    }
    Task finish(Process& p, Comm& c) {
        const std::uint64_t came = co_await exchange(p, c, Topic::last, 0, nothing);
        if (came == 0) co_return 0;
        if (p.memory.content != right_state(job.last)) violate("3: the job ends with another state");
        result.ended_well = true;
        co_await create(p, Name::end, 0, 0, nobody);
        co_return 0;
    }

    std::map<std::uint64_t, Time> checkpoints_;  ///< when each was complete
};

}  // namespace gradsync_test::simulated
