// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <gradsync/elastic/agreement.hpp>
#include <gradsync/elastic/machine.hpp>

#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

/// @file
/// The world of simulated elastic jobs: a clock, a store, links, launchers and faults, all drawn from a seed. The processes in it
/// (simulated_process.hpp) decide with the library's own code. Each rule that they must keep is checked whenever it could break.

namespace gradsync_test::simulated {

using gradsync::List;
using namespace gradsync::elastic;

/// Mistakes that a simulation must find.
enum class Bug {
    none,
    names_collected,    ///< the store removes old generations
    healing_in_place,   ///< a state is received over the receiver's only one
    unreaped_writer,    ///< memory is handed on while its former owner still writes
    stale_proposal,     ///< a process takes its own proposal as agreed, whoever has won
    early_commit,       ///< a step counts before the weights are changed
    torn_offer,         ///< a state is offered while a step changes it
    two_places,         ///< no third place for the parts of a sharded state
    early_vote,         ///< a vote is read in its own step, where it has come already
    silent_joiner,      ///< members count on a process that has not answered
    hasty_minority,     ///< the smaller part of the members does not wait
    late_begun,         ///< `begun` comes after the first step
    replaced_manifest,  ///< checkpoints have one name, and the last writer wins
};

using Time = std::int64_t;  ///< in microseconds
inline constexpr Time ms = 1000, limit = 1000 * ms, never = INT64_MAX;

inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
    std::uint64_t state = a ^ (b * 0x9e3779b97f4a7c15u);
    return gradsync::detail::split_mix(state);
}
/// The state that a step makes of another. A training's state is a hash of all its steps.
inline std::uint64_t after_step(std::uint64_t state, std::uint64_t number) { return mix(state, number); }
inline std::uint64_t right_state(std::uint64_t number) {
    std::uint64_t state = 1;
    for (std::uint64_t i = 1; i < number; ++i) state = after_step(state, i);
    return state;
}
inline constexpr std::uint64_t garbage = 0xbad, no_state = ~std::uint64_t{0};

/// What a process does, from one wait to the next. GCC 12 misplaces the promise of a coroutine without local variables that waits in a
/// condition first, and resumes it at a wrong address: give such a function a variable.
class [[nodiscard]] Task {
public:
    struct promise_type {
        std::uint64_t value = 0;
        std::coroutine_handle<> then = std::noop_coroutine();
        struct Final {
            bool await_ready() noexcept { return false; }
            std::coroutine_handle<> await_suspend(std::coroutine_handle<promise_type> own) noexcept { return own.promise().then; }
            void await_resume() noexcept {}
        };
        Task get_return_object() { return Task(std::coroutine_handle<promise_type>::from_promise(*this)); }
        std::suspend_always initial_suspend() noexcept { return {}; }
        Final final_suspend() noexcept { return {}; }
        void return_value(std::uint64_t result) { value = result; }
        void unhandled_exception() { std::terminate(); }
    };
    Task() = default;
    Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
    Task& operator=(Task&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~Task() {
        if (handle_) handle_.destroy();
    }
    bool await_ready() noexcept { return false; }
    std::coroutine_handle<> await_suspend(std::coroutine_handle<> caller) noexcept {
        handle_.promise().then = caller;
        return handle_;
    }
    std::uint64_t await_resume() noexcept { return handle_.promise().value; }
    std::coroutine_handle<> handle() const noexcept { return handle_; }

private:
    explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
    std::coroutine_handle<promise_type> handle_;
};

/// Memory for a state, or for parts of one. The label says what it is when it is whole.
struct Place {
    Holding label = {};
    std::uint64_t content = garbage;
};
/// Memory that a launcher holds, and hands on to the next process of the same place.
struct SharedMemory {
    Place copies[Row::most] = {};  ///< [0] is used for parts only
    std::uint64_t top = 0;
    int owner = -1;
};

/// What a process is about to do when a fault hurts most.
enum class Moment { propose, heal, begin, update, keep, save, count };

struct Process {
    Process(const Machine& decides, const Holdings& has) : machine(decides), holdings(has) {}

    int index = 0, slot = 0;
    Machine machine;
    Holdings holdings;
    Member self = {};
    Place memory = {};
    bool has_parts = false;  ///< of a sharded state: what the training computes in does not outlive the generation
    std::shared_ptr<SharedMemory> shared = {};
    Task task = {};
    std::coroutine_handle<> at = {};  ///< where it waits
    std::uint64_t ticket = 0;         ///< of this wait
    bool for_change = false;          ///< it also waits for a change
    bool nudged = false;
    bool dead = false, stopped = false, overdue = false;
    std::uint64_t stops = 0;      ///< how often it has been stopped
    std::uint32_t waits_for = 0;  ///< stopped until others have come to `stopped_at` this often without it; 0: for a time
    Moment stopped_at = {};
    bool is_last = false;          ///< all are killed soon after it has gone on
    bool leaves = false;           ///< it wants to leave the job
    bool has_failed = false;       ///< by an error of its own
    bool is_left_behind = false;   ///< others may have gone on without it: what it has does not count any more
    std::uint64_t joins = 0;       ///< how often it has joined
    std::uint32_t generation = 0;  ///< in which it is; 0: none
    std::uint64_t kept = 0;        ///< the last state of which it has kept its part
    int newest = 0;                ///< in this place
    std::uint64_t had = 0;         ///< the newest state that it has had since the members last went on from one
    std::uint64_t missed = 0;      ///< the member for which it has waited in vain
    Time born = 0;
    Time failed_at = 0;         ///< when it left the last generation
    List<Member> settled;       ///< with whom it last had the state, since it has joined
    std::uint64_t history = 0;  ///< a hash of all that it has seen

    Place& place(int i) { return i == Row::memory && !has_parts ? memory : shared->copies[i]; }
};

/// What a member tells the others in a collective.
struct Word {
    Row row = {};
    std::uint64_t number = 0, content = 0;
    bool flag = false;
};
enum class Topic { meeting, rows, begin, state, mates, barrier, sum, vote, leaving, kept, last };
struct Call {
    List<Word> words = {};
    std::uint32_t among = ~0u;  ///< whose words it needs: a bit a rank
    std::uint32_t here = 0;     ///< a bit a rank
    bool complete = false;
    Time arrival[8] = {};
};
/// The members of a generation and what they send each other.
struct Comm {
    std::uint32_t number = 0;
    List<Member> members = {};
    std::vector<int> processes = {};  ///< by rank
    std::uint32_t gone = 0, broken = 0;
    std::map<std::pair<Topic, std::uint64_t>, Call> calls = {};
    std::optional<Plan> plan = {};
    std::uint64_t newest = no_state;  ///< the newest state that the members have, when all have told what they have
    bool all_have_base = false, loads = false, begins_anew = false;
    std::uint64_t loaded = 0;         ///< the state that rank 0 has from elsewhere
    List<std::uint64_t> missed = {};  ///< those that the hub has missed
    std::uint64_t agreed_at = 0;      ///< the step at which the members leave
    std::uint32_t all() const { return (1u << processes.size()) - 1; }
};

enum class Name { join, call, here, generation, out, leave, gone, begun, manifest, end };
struct Record {
    Name name;
    std::uint64_t key = 0, value = 0;
    List<Member> members = {};
    Time at = 0;
    bool removed = false;
};

/// The job, as drawn.
struct Settings {
    std::size_t ranks = 3, least = 1;
    bool changes = true;  ///< the number of ranks may
    int spares = 0;
    std::uint64_t last = 6;
    bool is_sharded = false;
    bool divides_anew = false;  ///< each generation divides the state in its own way
    bool one_host = true;       ///< links are never cut, and launchers end members that do not answer
    bool inherits = false, restarts = true;
    std::uint64_t keep_every = 1, checkpoint_every = 0;
    Time lag = 0;           ///< of reads, at most
    int fails_updates = 0;  ///< of 1,000
};

struct Result {
    std::string violation = {};
    bool ended_well = false, lost = false;
    std::uint64_t kills = 0, stops = 0, cuts = 0, failures = 0, generations = 0, commits = 0, losses = 0;
    Time calm = 0;  ///< how long the job has gone on after the last fault
};

/// A path of an exhaustive search. The first events and the last ones come in the order of their causes; between them there are choices:
/// first those to take again, then the first of each.
struct Script {
    std::uint64_t from = 0, depth = 12;  ///< events before the first choice, and with choices
    int kills = 1;
    bool is_sharded = false;
    std::unordered_map<std::uint64_t, std::uint64_t>* seen = nullptr;  ///< states, and after how many events
    std::vector<int> choices = {}, widths = {};
    std::size_t at = 0;
    bool was_seen = false;  ///< the path has come to a state from which all paths have been taken
};

/// A fault that waits for such a moment.
struct Ambush {
    Moment moment = Moment::heal;
    std::uint64_t after = 0;  ///< as many of them pass
    bool sprung = false;
};

enum class What { timer, nudge, kill, start, mend, resume, reach_store, kill_all };
struct Event {
    Time at;
    std::uint64_t sequence;
    What what;
    int a = 0, b = 0;
    std::uint64_t ticket = 0;
    bool deadline = false;
    bool operator<(const Event& other) const { return at != other.at ? at > other.at : sequence > other.sequence; }
};

class World {
public:
    World(std::uint64_t seed, Bug mistake, Script* script) : bug(mistake), script_(script), random_(mix(seed, 4711)) {
        if (script_) job = {.ranks = 3, .least = 2, .last = 3, .is_sharded = script_->is_sharded};
        else draw();
    }
    virtual ~World() = default;

    Result run() {
        for (int i = 0; i < static_cast<int>(job.ranks) + job.spares; ++i) start(i);
        while (result.violation.empty() && step()) {
        }
        if (script_ && script_->was_seen) return result;
        if (result.violation.empty() && !find(Name::end, 0)) violate("8: the job has not ended");
        result.generations = generations_.size();
        if (is_calm()) result.calm = now - calm_at_;
        return result;
    }

    const Bug bug;
    std::ostream* log = nullptr;  ///< what processes do, a line each
    Settings job;
    Result result;
    Time now = 0;

protected:
    Time stepped_at = 0;  ///< when a process has last done a step

    virtual Task live(Process& p) = 0;

    // Chance. An exhaustive search takes both sides of a coin, and leaves out what is unlikely.
    std::uint64_t below(std::uint64_t n) { return gradsync::detail::split_mix(random_) % n; }
    bool chance(std::uint64_t permille) { return !script_ && below(1000) < permille; }
    bool coin() { return script_ ? choose(2) == 1 : below(2) == 1; }
    Time between(Time low, Time high) { return script_ ? 0 : low + static_cast<Time>(below(static_cast<std::uint64_t>(high - low + 1))); }

    void violate(const std::string& what) {
        if (result.violation.empty()) result.violation = what + ", at " + std::to_string(now / ms) + " ms";
    }

    template <class... Parts>
    void say(const Process& p, const Parts&... parts) {
        if (log) ((*log << now / ms << " ms: process " << p.index << " at " << p.slot << ": ") << ... << parts) << '\n';
    }

    // Waiting.
    struct Wait {
        World& world;
        Process& p;
        Time until;
        bool for_change;
        bool await_ready() noexcept { return false; }
        void await_suspend(std::coroutine_handle<> at) {
            p.at = at;
            p.for_change = for_change;
            world.push({until, 0, What::timer, p.index, 0, ++p.ticket, for_change});
        }
        void await_resume() noexcept {}
    };
    Wait sleep(Process& p, Time low, Time high) { return {*this, p, now + between(low, high), false}; }
    /// Until something has changed, but not for longer.
    Wait change(Process& p, Time until) { return {*this, p, until, true}; }
    static void observe(Process& p, std::uint64_t what) { p.history = mix(p.history, what + 1); }
    /// All that a process can learn of at once.
    void observe_all(Process& p) {
        observe(p, store_hash_);
        for (const auto& one : processes_) observe(p, one->dead);
    }

    // Processes.
    Process& process_of(std::uint64_t member) { return *processes_[member / 1000 - 1]; }
    Process& process(int index) { return *processes_[static_cast<std::size_t>(index)]; }
    bool is_dead(const Member& one) { return process_of(one.id).dead; }
    bool are_connected(const Process& a, const Process& b) const { return !cut_[a.slot][b.slot] && !cut_[b.slot][a.slot]; }
    Comm& comm(std::uint32_t number) { return comms_[number]; }
    void leave_comm(Process& p, bool broken) {
        if (p.generation == 0) return;
        Comm& c = comms_[p.generation];
        for (std::size_t r = 0; r < c.processes.size(); ++r)
            if (c.members[r] == p.self) {
                c.gone |= 1u << r;
                if (broken) c.broken |= 1u << r;
            }
        p.generation = 0;
        nudge_all();
    }
    void nudge_all() {
        for (const auto& p : processes_)
            if (p->at != nullptr && p->for_change && !p->nudged) {
                p->nudged = true;
                push({now + between(0, 2 * ms), 0, What::nudge, p->index});
            }
    }

    // The store. `create` is atomic; reads may be late.
    const Record* find(Name name, std::uint64_t key) const {
        for (const Record& r : store_)
            if (r.name == name && r.key == key && !r.removed) return &r;
        return nullptr;
    }
    bool sees(const Process& p, const Record& r) const {
        if (r.removed || r.at >= store_away_[p.slot]) return false;
        return job.lag == 0 || now >= r.at + job.lag || now >= r.at + lag_of(p, r);
    }
    const Record* read(const Process& p, Name name, std::uint64_t key) const {
        const Record* found = find(name, key);
        return found && sees(p, *found) ? found : nullptr;
    }
    const std::deque<Record>& store() const { return store_; }
    bool reaches_store(const Process& p) const { return store_away_[p.slot] == never; }
    const Record& put(Process& p, Name name, std::uint64_t key, std::uint64_t value = 0, List<Member> members = {}) {
        if (const Record* found = find(name, key)) {
            if (bug == Bug::replaced_manifest && name == Name::manifest) const_cast<Record*>(found)->value = value;
            return *found;
        }
        check_publishes(p, name);
        store_.push_back({name, key, value, std::move(members), now});
        const Record& made = store_.back();
        store_hash_ = mix(mix(store_hash_, static_cast<std::uint64_t>(name)), mix(key, value));
        if (name == Name::generation) {
            if (!generations_.emplace(key, made.members).second) violate("1: two records of generation " + std::to_string(key));
            for (Record& r : store_)
                if (bug == Bug::names_collected && r.name == name && r.key < key) r.removed = true;
        }
        if (name == Name::out && job.one_host && process_of(key).joins == key % 1000) end_process(process_of(key));
        nudge_all();
        if (job.lag != 0)
            for (const auto& one : processes_)
                if (!one->dead) push({now + lag_of(*one, made), 0, What::nudge, one->index});
        return made;
    }
    const List<Member>& members_of(std::uint64_t generation) { return generations_[generation]; }
    bool is_in_last_generation(const Process& p) const {
        for (const Member& one : generations_.rbegin()->second)
            if (one == p.self) return true;
        return false;
    }

    // Rules.
    /// Who has read a newer generation without itself publishes nothing for an older one.
    void check_publishes(Process& p, Name name) {
        const bool is_result = name == Name::begun || name == Name::manifest;
        if (is_result && p.machine.newest().rank_of(p.self.id) < 0)
            violate("7: a process publishes what it does outside of its generation");
    }
    /// The newest state of which the live members have all parts.
    std::uint64_t newest_state(const std::vector<int>& members) {
        std::uint64_t newest = 0;
        std::map<std::tuple<std::uint64_t, std::uint64_t, std::uint32_t>, std::set<std::uint32_t>> parts;
        for (const int m : members)
            for (int i = 0; i < Row::most && !process(m).dead; ++i) {
                const Holding& one = process(m).place(i).label;
                if (one.number <= newest) continue;
                auto& found = parts[{one.number, one.division, one.parts}];
                for (const std::uint32_t part : one.part)
                    if (part != Holding::none) found.insert(part);
                if (found.size() == one.parts) newest = one.number;
            }
        return newest;
    }
    std::vector<int> all_processes() const {
        std::vector<int> all;
        for (const auto& p : processes_) all.push_back(p->index);
        return all;
    }
    bool was_disturbed() const { return result.stops + result.cuts != 0; }

    // Faults that wait for their moment.
    void reach(Process& p, Moment moment) {
        for (const auto& one : processes_)
            if (one->stopped && one->waits_for != 0 && one->stopped_at == moment &&
                p.machine.newest().number > one->machine.newest().number && --one->waits_for == 0)
                push({now + between(0, 5 * ms), 0, What::resume, one->index, 0, one->stops});
        for (Ambush& one : ambushes_)
            if (!is_calm() && !one.sprung && one.moment == moment && one.after-- == 0) one.sprung = true, --left_, spring(p, moment);
    }

private:
    void draw() {
        job.ranks = 2 + below(1 + below(1 + below(6)));
        job.least = below(4) == 0 ? job.ranks : 1 + below(1 + below(job.ranks));
        job.changes = job.least < job.ranks || below(2) == 0;
        job.spares = static_cast<int>(below(4));
        job.last = 4 + below(80);
        job.is_sharded = below(5) < 3;
        job.divides_anew = job.is_sharded && coin();
        job.one_host = below(3) == 0;
        job.inherits = below(3) != 0;
        job.restarts = job.least == job.ranks || below(8) != 0;
        job.keep_every = 1 + below(4);
        job.checkpoint_every = below(16) == 0 ? 0 : below(8) != 0 ? job.keep_every : 1 + below(4);
        job.lag = coin() ? 0 : 30 * ms;
        job.fails_updates = below(3) == 0 ? 20 : 0;
        std::uint64_t at = below(400);
        const std::uint64_t pace = std::uint64_t{25} << below(4);
        for (std::uint64_t n = below(30); n > 0; --n, at += below(pace)) faults_.push_back(at);
        // Half of the jobs have one sore point.
        const std::uint64_t moments = static_cast<std::uint64_t>(Moment::count), sore = below(2 * moments);
        for (std::uint64_t n = below(12); n > 0; --n)
            ++left_,
                ambushes_.push_back({static_cast<Moment>(sore < moments ? sore : below(moments)), below(std::uint64_t{1} << below(6))});
    }

    bool is_calm() const { return calm_at_ != never; }
    Time lag_of(const Process& p, const Record& r) const {
        const std::uint64_t drawn =
            mix(mix(static_cast<std::uint64_t>(p.index), r.key), mix(random_seed_, static_cast<std::uint64_t>(r.name)));
        return drawn % 4 != 0 ? 0 : static_cast<Time>(drawn >> 8) % job.lag;
    }
    void push(Event event) {
        event.sequence = sequence_++;
        if (script_) pending_.push_back(event);
        else events_.push(event);
    }

    bool step() {
        if (script_) return scripted_step();
        if (!is_calm() && next_fault_ == faults_.size() && lasting_ == 0 && (left_ == 0 || steps_ >= last_ambush_)) calm();
        if (events_.empty()) {
            if (is_calm()) return false;
            next_fault_ = faults_.size(), left_ = 0;
            if (lasting_ != 0) violate("the simulation has lost a fault");
            return true;
        }
        const Event event = events_.top();
        events_.pop();
        now = event.at;
        while (next_fault_ < faults_.size() && steps_ >= faults_[next_fault_]) ++next_fault_, strike();
        if (handle(event)) ++steps_;
        // A process behind a link that stays cut costs the others a time limit each time it joins, but they do steps in between.
        if (is_calm() && (now > calm_at_ + 200 * limit || now > gradsync::detail::larger(calm_at_, stepped_at) + 20 * limit))
            violate("8: the job does not go on");
        return true;
    }
    /// Returns whether a process has run.
    bool handle(const Event& event) {
        Process* const p = event.what <= What::kill || event.what == What::resume ? &process(event.a) : nullptr;
        switch (event.what) {
            case What::timer:
                if (event.ticket == p->ticket) observe(*p, event.deadline);
                return event.ticket == p->ticket && resume(*p);
            case What::nudge: return p->for_change && resume(*p);
            case What::kill: kill(*p); break;
            case What::start:
                if (!find(Name::end, 0) && alive() < job.ranks + static_cast<std::size_t>(job.spares) && may_start(event.a)) start(event.a);
                break;
            case What::mend: cut_[event.a][event.b] = false, --lasting_, nudge_all(); break;
            case What::reach_store: store_away_[event.a] = never, --lasting_, nudge_all(); break;
            case What::resume:
                if (!p->stopped || event.ticket != p->stops) break;
                p->stopped = false, --lasting_;
                if (std::exchange(p->is_last, false)) kill_all(10 * ms);
                if (p->overdue) resume(*p);
                break;
            case What::kill_all:
                --lasting_;
                for (std::size_t i = 0; i < processes_.size(); ++i)
                    if (!process(static_cast<int>(i)).dead) ++result.kills, kill(process(static_cast<int>(i)));
                break;
        }
        return false;
    }
    bool resume(Process& p) {
        if (!p.at || p.dead) return false;
        if (p.stopped) return !(p.overdue = true);
        p.nudged = p.overdue = p.for_change = false;
        ++p.ticket;
        std::exchange(p.at, {}).resume();
        if (p.task.handle().done()) kill(p);
        return true;
    }

    // Launchers.
    std::size_t alive() const {
        std::size_t count = 0;
        for (const auto& p : processes_) count += !p->dead;
        return count;
    }
    bool may_start(int slot) const {
        for (const auto& p : processes_)
            if (p->slot == slot && !p->dead && bug != Bug::unreaped_writer) return false;
        return true;
    }
    void start(int slot) {
        auto made = std::make_unique<Process>(Machine(job.ranks, job.least, job.changes), Holdings(places()));
        Process& p = *made;
        p.index = static_cast<int>(processes_.size());
        p.slot = slot;
        p.born = now;
        p.has_parts = job.is_sharded;
        for (const auto& one : processes_)
            if (one->slot == slot && job.inherits) p.shared = one->shared;
        if (!p.shared) p.shared = std::make_shared<SharedMemory>();
        p.shared->owner = p.index;
        for (int i = p.has_parts ? 0 : 1; i < Row::most; ++i)
            if (p.shared->copies[i].label.number != 0) p.holdings.fill(i, p.shared->copies[i].label);
        p.holdings.know(p.shared->top);
        p.had = p.shared->top;
        processes_.push_back(std::move(made));
        p.task = live(p);
        p.at = p.task.handle();
        push({now, 0, What::timer, p.index, 0, p.ticket});
    }
    int places() const { return job.is_sharded && bug != Bug::two_places ? Row::most : 2; }
    void kill(Process& p) {
        if (p.dead) return;
        say(p, "ends");
        p.dead = true;
        p.at = {};
        p.task = {};
        leave_comm(p, true);
        nudge_all();
        if (job.restarts || is_calm()) push({now + between(20 * ms, 100 * ms), 0, What::start, p.slot});
    }
    /// The launcher of a process that has not answered ends it, and waits until it has ended.
    void end_process(Process& p) {
        if (p.dead) return;
        const bool early = bug == Bug::unreaped_writer;
        if (early) push({now + between(ms, 50 * ms), 0, What::start, p.slot});
        push({now + between(20 * ms, early ? 2000 * ms : 80 * ms), 0, What::kill, p.index});
    }

    // Faults.
    Process* victim() {
        if (alive() == 0) return nullptr;
        Process* found;
        do found = processes_[below(processes_.size())].get();
        while (found->dead);
        return found;
    }
    void strike() {
        Process *one = victim(), *other = victim();
        if (!one) return;
        const Time lasts = chance(600) ? between(5 * ms, 200 * ms) : between(800 * ms, 2500 * ms);
        const std::uint64_t kind = below(100);
        if (kind < 40) ++result.kills, kill(*one);
        else if (kind < 50) result.kills += 2, kill(*one), kill(*other);
        else if (kind < 75) stop(*one, Moment::update, lasts);
        else if (kind < 80) {
            if (!reaches_store(*one)) return;
            say(*one, "loses the store for ", lasts / ms), store_away_[one->slot] = now, ++lasting_, ++result.cuts;
            push({now + lasts, 0, What::reach_store, one->slot});
        } else if (kind < 85) say(*one, "wants to leave"), one->leaves = job.changes;
        else if (kind < 90) start_another();
        else if (!job.one_host && one->slot != other->slot) {
            ++result.cuts;
            say(*one, "is cut off from ", other->slot, " for ", lasts / ms);
            cut(one->slot, other->slot, lasts);
            if (coin()) cut(other->slot, one->slot, lasts);
        }
    }
    /// Stops a process for a while, or until others have gone on without it.
    void stop(Process& p, Moment at, Time lasts) {
        if (p.stopped || p.dead) return;
        p.stopped_at = at;
        p.waits_for = below(4) != 0 ? static_cast<std::uint32_t>(1 + below(3) / 2) : 0;
        if (p.waits_for != 0) lasts = 3 * limit;
        say(p, "is stopped for ", lasts / ms), p.stopped = true, ++lasting_, ++result.stops;
        push({now + lasts, 0, What::resume, p.index, 0, ++p.stops});
    }
    /// Stops or ends the process that has come to a moment, or another one; and perhaps all of them soon after.
    void spring(Process& p, Moment moment) {
        Process& one = below(4) == 0 ? *victim() : p;
        if (one.stopped) return;
        if (below(3) != 0) stop(one, moment, between(5 * ms, 1500 * ms)), one.is_last = coin();
        else {
            ++result.kills, push({now + between(0, 3 * ms), 0, What::kill, one.index});
            if (below(8) == 0) kill_all(200 * ms);
        }
    }
    void kill_all(Time within) { ++lasting_, push({now + between(0, within), 0, What::kill_all}); }
    void cut(int from, int to, Time lasts) {
        if (cut_[from][to]) return;
        cut_[from][to] = true, ++lasting_;
        push({now + lasts, 0, What::mend, from, to});
    }
    void start_another() {
        int slot = 0;
        for (const auto& p : processes_) slot = p->slot >= slot ? p->slot + 1 : slot;
        if (slot < slots) start(slot);
    }
    /// There are no more faults, and launchers start what the job needs.
    void calm() {
        calm_at_ = now;
        if (log) *log << now / ms << " ms: no more faults\n";
        job.fails_updates = 0;
        if (!job.one_host && job.changes && job.least < job.ranks && job.ranks > 2 && below(3) == 0) {  // a link that is never mended
            const int from = static_cast<int>(below(job.ranks)), to = static_cast<int>(below(job.ranks));
            if (from != to) cut_[from][to] = true, ++result.cuts;
            if (log) *log << "the link from " << from << " to " << to << " stays cut\n";
        }
        for (int slot = 0; slot < static_cast<int>(job.ranks); ++slot) {
            bool has_one = false;
            for (const auto& p : processes_) has_one |= p->slot == slot && !p->dead;
            if (!has_one) push({now + 100 * ms, 0, What::start, slot});
        }
    }

    // An exhaustive search: any process that can run may run next, or die. Time passes when none can.
    bool has_choice() const { return steps_ >= script_->from && steps_ < script_->from + script_->depth; }
    int choose(int n) {
        if (n < 2 || !has_choice()) return 0;
        if (script_->at == script_->choices.size()) script_->choices.push_back(0);
        script_->widths.push_back(n);
        return script_->choices[script_->at++];
    }
    bool scripted_step() {
        std::erase_if(pending_, [&](const Event& e) {
            if (e.what == What::start) return false;
            const Process& p = process(e.a);
            return p.dead || (e.what == What::timer ? e.ticket != p.ticket : !p.for_change);
        });
        std::vector<int> next;
        for (const Event& e : pending_)
            if (!e.deadline) next.push_back(static_cast<int>(&e - pending_.data()));
        if (next.empty())
            for (const Event& e : pending_)
                if (next.empty() || e.at < pending_[static_cast<std::size_t>(next[0])].at) next = {static_cast<int>(&e - pending_.data())};
        if (next.empty()) return false;
        if (has_choice() && script_->at >= script_->choices.size()) {
            const auto [state, is_new] = script_->seen->emplace(hash(), steps_);
            script_->was_seen = !is_new && state->second <= steps_;
            if (script_->was_seen) return false;
            state->second = steps_;
        }
        const int can_run = static_cast<int>(next.size());
        if (script_->kills > 0)
            for (const auto& p : processes_)
                if (!p->dead) next.push_back(p->index);
        const int choice = choose(has_choice() ? static_cast<int>(next.size()) : 1);
        ++steps_;
        if (choice >= can_run) {
            --script_->kills, ++result.kills;
            kill(process(next[static_cast<std::size_t>(choice)]));
            return true;
        }
        const Event event = pending_[static_cast<std::size_t>(next[static_cast<std::size_t>(choice)])];
        pending_.erase(pending_.begin() + next[static_cast<std::size_t>(choice)]);
        now = now > event.at ? now : event.at;
        (void)handle(event);
        return true;
    }
    /// Of all that decides what comes next: what processes have seen says where they are.
    std::uint64_t hash() const {
        std::uint64_t all = mix(store_hash_, static_cast<std::uint64_t>(now)), waiting = 0;
        for (const auto& p : processes_)
            all = mix(all, mix(p->history, p->dead + 2u * p->for_change + 4u * p->nudged + 8u * (p->at != nullptr)));
        for (const auto& [number, c] : comms_) {
            all = mix(all, mix(c.gone, c.broken));
            for (const auto& [name, call] : c.calls) all = mix(all, call.here + 64u * call.complete);
        }
        for (const Event& e : pending_)
            waiting += mix(mix(static_cast<std::uint64_t>(e.at), static_cast<std::uint64_t>(e.a)), static_cast<std::uint64_t>(e.what));
        return mix(mix(all, waiting), static_cast<std::uint64_t>(script_->kills));
    }

    static constexpr int slots = 16;
    static constexpr std::uint64_t last_ambush_ = 2000;  ///< ambushes come before the processes have done as many steps
    Script* script_;
    std::uint64_t random_, random_seed_ = random_;
    std::priority_queue<Event> events_;
    std::vector<Event> pending_;  ///< of an exhaustive search
    std::uint64_t sequence_ = 0, steps_ = 0, store_hash_ = 0;
    std::vector<std::unique_ptr<Process>> processes_;
    std::deque<Record> store_;
    std::map<std::uint64_t, List<Member>> generations_;  ///< as they were created, whatever the store has forgotten
    std::map<std::uint32_t, Comm> comms_;
    bool cut_[slots][slots] = {};
    Time store_away_[slots] = {never, never, never, never, never, never, never, never,
                               never, never, never, never, never, never, never, never};
    std::vector<std::uint64_t> faults_;  ///< after how many steps of processes
    std::vector<Ambush> ambushes_;
    std::size_t left_ = 0;  ///< of them
    std::size_t next_fault_ = 0;
    int lasting_ = 0;
    Time calm_at_ = never;
};

}  // namespace gradsync_test::simulated
