// SPDX-License-Identifier: BSL-1.0
#include "start.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cstdlib>
#include <list>
#include <map>

#include "generations.hpp"

namespace gradsync_run {

namespace {

constexpr std::size_t longest_quote = 160;  // characters of an error
constexpr const char* loopback = "127.0.0.1";

/// A port that nobody uses now. Rank 0 listens there.
std::uint16_t free_port() {
    const Descriptor socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    sockaddr_in name{};
    name.sin_family = AF_INET;
    ::inet_pton(AF_INET, loopback, &name.sin_addr);
    socklen_t length = sizeof name;
    if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0 ||
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&name), &length) != 0)
        fail("cannot find a free port");
    return ntohs(name.sin_port);
}

/// The cores of rank r of n: its part of those that this process may use, or none if there are fewer than ranks.
std::optional<cpu_set_t> cores_of(int r, int n) {
    cpu_set_t all;
    if (::sched_getaffinity(0, sizeof all, &all) != 0 || CPU_COUNT(&all) < n) return {};
    std::vector<int> numbers;
    for (int core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &all)) numbers.push_back(core);
    const auto first = [&](int rank) { return numbers.size() * static_cast<std::size_t>(rank) / static_cast<std::size_t>(n); };
    cpu_set_t own;
    CPU_ZERO(&own);
    for (std::size_t i = first(r); i < first(r + 1); ++i) CPU_SET(numbers[i], &own);
    return own;
}

/// Each rank takes a few descriptors. Returns the limit before.
rlimit raise_limit_of_descriptors() {
    rlimit before{};
    ::getrlimit(RLIMIT_NOFILE, &before);
    const rlimit most{before.rlim_max, before.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &most);
    return before;
}

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// "rank 1", "ranks 0, 2"
std::string name_ranks(const std::vector<int>& ranks) {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (std::size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
    return text;
}

std::string rounded(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, seconds < 10 ? "%.1f" : "%.0f", seconds);
    return text;
}

class Start {
public:
    Start(const Options& options, unsigned number, const Events& events) : options_{options}, number_{number}, events_{events} {
        if (options.bind_cores && !cores_of(0, options.ranks + options.spares))
            throw std::runtime_error("--bind: there are fewer cores than ranks; leave it out");
        if (!options.state.empty()) files_.emplace(options.state);
        if (!events.stores.empty()) generations_.emplace(events.stores + "/" + std::to_string(number), load_state());
        if (is_on_hosts() && !join_job()) return;
        if (events.hosts != nullptr) try {
                meeting_ = events.hosts->meet(number, {own_address(options), meeting_.port, meeting_.token}, [&] { look_outside(); });
            } catch (const Failure& failure) {
                elsewhere_ = failure;  // there is nothing to start
                return;
            }
        begin_ = Clock::now();
        ranks_.resize(static_cast<std::size_t>(options.ranks + options.spares));
        for (int r = 0; r < processes(); ++r) start_rank(r);
    }
    /// Nothing that ranks have started outlives them.
    ~Start() { kill_descendants(); }

    Outcome run() {
        while (!all_ended()) {
            wait_for_events();
            reap();
            look_at_generations();
            look_at_hosts();
            if (files_ && Clock::now() >= next_save_at_) save_beside();
            for (int r = 0; r < processes(); ++r)
                if (const auto at = rank(r).starts_again; at && Clock::now() >= *at) {
                    if (generations_->ended()) start_no_more();
                    else start_rank_again(r);
                }
            if (next_signal_at_ && Clock::now() >= *next_signal_at_) press_on();
        }
        while (saver_ >= 0 && !asked_again_) {  // it may be about to write what batch systems leave no time for later
            wait_for_events();
            reap();
        }
        kill_descendants();  // they may keep the streams open
        if (is_elastic()) look_at_store();
        await_other_hosts();
        save_state();
        const auto is_open = [](const Stream* stream) { return stream->is_open(); };
        while ((std::ranges::any_of(streams(), is_open) || out_.has_something() || err_.has_something()) && !asked_again_)
            wait_for_events();
        return outcome();
    }

private:
    /// Ranks of this host, and those that wait to become one.
    int processes() const { return static_cast<int>(ranks_.size()); }
    bool is_elastic() const { return options_.min_ranks != 0; }
    bool is_on_hosts() const { return options_.is_elastic_on_hosts(); }
    /// Among the ranks of all hosts.
    int number_of(int r) const { return options_.number_of(r); }
    int number_of(const Rank& rank) const { return number_of(static_cast<int>(&rank - ranks_.data())); }
    std::string name_of(const Rank& rank) const { return "rank " + std::to_string(number_of(rank)); }

    Rank& rank(int r) { return ranks_[static_cast<std::size_t>(r)]; }

    std::map<std::string, std::string> environment_of(int r) const {
        std::map<std::string, std::string> all{{"RANK", std::to_string(number_of(r))},
                                               {"LOCAL_RANK", std::to_string(r)},
                                               {"WORLD_SIZE", std::to_string(options_.all_processes())},
                                               {"LOCAL_WORLD_SIZE", std::to_string(processes())},
                                               {"MASTER_ADDR", meeting_.address},
                                               {"MASTER_PORT", std::to_string(meeting_.port)},
                                               {"GRADSYNC_JOB_TOKEN", meeting_.token},
                                               {"GRADSYNC_RESTART", std::to_string(number_ + restarts_)}};
        if (generations_) all["GRADSYNC_STORE"] = generations_->address();
        if (is_elastic()) all["GRADSYNC_RANKS"] = std::to_string(options_.min_ranks) + ":" + std::to_string(options_.all_ranks());
        return all;
    }

    /// If the system cannot start the program now, as while it is built anew, the rank has failed once more, and the others go on.
    void start_rank_again(int r) {
        rank(r).starts_again.reset();
        try {
            start_rank(r);
        } catch (const std::exception& error) {
            say(error.what());
            constexpr int cannot_run = 127;  // as a shell says it
            note_end(rank(r), cannot_run << 8);
        }
    }

    void start_rank(int r) {
        Rank& rank = this->rank(r);
        if (rank.begin != Clock::time_point{}) {  // in place of another one, which may have left processes of its own
            for (const pid_t process : descendants())
                if (is_of(rank, process)) ::kill(process, SIGKILL);
            if (!next_signal_at_ && !is_on_hosts() && (lost_since_ || !is_elastic())) next_signal_at_ = Clock::now() + grace();
            next_signal_ = SIGTERM;
        }
        old_streams_.remove_if([](const Stream& stream) { return !stream.is_open(); });
        for (Stream& stream : rank.streams) old_streams_.push_back(std::move(stream));
        std::erase(pressed_, number_of(r));
        rank = {.begin = Clock::now(), .is_new = true, .looked_at_next = Clock::now() + grace()};
        auto [out, out_end] = make_pipe();
        auto [err, err_end] = make_pipe();
        auto [problem, problem_end] = make_pipe();  // closes at exec, or says why there was none
        Descriptor out_log = log_of(r, "out"), err_log = log_of(r, "err");
        for (const Descriptor* end : {&out, &err}) ::fcntl(end->get(), F_SETFL, O_NONBLOCK);
        const pid_t parent = ::getpid();
        const pid_t process = ::fork();
        if (process < 0) fail("cannot start rank " + std::to_string(number_of(r)));
        if (process == 0) {
            die_with(parent);
            sigset_t none;
            ::sigemptyset(&none);
            ::sigprocmask(SIG_SETMASK, &none, nullptr);
            // A shell lets its background jobs ignore interrupts; what the launcher gets, ranks are to get, too.
            for (const int signal : {SIGPIPE, SIGINT, SIGQUIT}) ::signal(signal, SIG_DFL);
            ::setrlimit(RLIMIT_NOFILE, &descriptors_);
            ::dup2(out_end.get(), STDOUT_FILENO);
            ::dup2(err_end.get(), STDERR_FILENO);
            if (r != 0)
                if (const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC); nothing >= 0) ::dup2(nothing, STDIN_FILENO);
            for (const char* const name : {"GRADSYNC_STORE", "GRADSYNC_RANKS"}) ::unsetenv(name);  // of a launcher around this one
            for (const auto& [name, value] : environment_of(r)) ::setenv(name.c_str(), value.c_str(), 1);
            if (options_.bind_cores)
                if (const auto cores = cores_of(r, processes())) ::sched_setaffinity(0, sizeof *cores, &*cores);
            std::vector<char*> arguments;
            for (const std::string& argument : options_.command) arguments.push_back(const_cast<char*>(argument.c_str()));
            arguments.push_back(nullptr);
            ::execvp(arguments[0], arguments.data());
            const int error = errno;
            (void)!::write(problem_end.get(), &error, sizeof error);
            ::_exit(127);
        }
        problem_end = Descriptor{};
        if (int error = 0; ::read(problem.get(), &error, sizeof error) == sizeof error) {
            ::waitpid(process, nullptr, 0);  // it never became a rank
            errno = error;
            fail("cannot start " + options_.command.front());
        }
        rank.process = process;
        rank.handle = Descriptor{static_cast<int>(::syscall(SYS_pidfd_open, rank.process, 0))};
        epoll_event event{.events = EPOLLIN, .data = {.u32 = static_cast<std::uint32_t>(r)}};
        if (rank.handle) ::epoll_ctl(ends_.get(), EPOLL_CTL_ADD, rank.handle.get(), &event);
        const std::string prefix = options_.prefix ? "[" + std::to_string(number_of(r)) + "] " : "";
        rank.streams.emplace_back(std::move(out), out_, prefix, std::move(out_log));
        rank.streams.emplace_back(std::move(err), err_, prefix, std::move(err_log));
    }

    /// Does this process, a descendant, belong to the rank?
    bool is_of(const Rank& rank, pid_t process) const {
        return process == rank.process ||
               has_variables(process, {"RANK=" + std::to_string(number_of(rank)), "GRADSYNC_JOB_TOKEN=" + meeting_.token});
    }

    Descriptor log_of(int r, const char* stream) const {
        if (options_.log_dir.empty()) return {};
        const auto folder = options_.log_dir / ("start-" + std::to_string(number_ + restarts_));
        std::error_code error;
        std::filesystem::create_directories(folder, error);
        const auto name = folder / ("rank-" + std::to_string(number_of(r)) + "." + stream);
        Descriptor file{::open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)};
        if (!file) fail("cannot write " + name.string());
        return file;
    }

    bool all_ended() const {
        return std::ranges::all_of(ranks_, [](const Rank& rank) { return rank.end && !rank.starts_again; });
    }

    std::vector<Stream*> streams() {
        std::vector<Stream*> all;
        for (Rank& rank : ranks_)
            for (Stream& stream : rank.streams) all.push_back(&stream);
        for (Stream& stream : old_streams_) all.push_back(&stream);
        return all;
    }

    void wait_for_events() {
        std::vector<pollfd> waiting{{events_.signals, POLLIN, 0}, {events_.lifeline, POLLIN, 0}};
        for (const Sink* sink : {&out_, &err_})
            if (sink->has_something()) waiting.push_back({sink->descriptor(), POLLOUT, 0});
        const std::size_t first_stream = waiting.size();
        std::vector<Stream*> open = streams();
        std::erase_if(open, [](const Stream* stream) { return !stream->may_read(); });
        for (const Stream* stream : open) waiting.push_back({stream->descriptor(), POLLIN, 0});
        if (generations_) waiting.push_back({generations_->descriptor(), POLLIN, 0});
        int milliseconds = generations_ && generations_->descriptor() < 0 ? static_cast<int>(Generations::interval.count()) : -1;
        const auto wake_at = [&](const std::optional<Clock::time_point>& at) {
            if (!at || all_ended()) return;
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(*at - Clock::now()).count();
            const int wait = static_cast<int>(std::clamp<long long>(left, 0, 60'000));
            milliseconds = milliseconds < 0 ? wait : std::min(milliseconds, wait);
        };
        wake_at(next_signal_at_);
        if (files_) wake_at(next_save_at_);
        if (events_.hosts != nullptr) milliseconds = milliseconds < 0 ? 200 : std::min(milliseconds, 200);
        for (const Rank& rank : ranks_) {
            wake_at(rank.starts_again);
            if (is_elastic() && !has_joined(rank)) wake_at(rank.looked_at_next);
        }
        ::poll(waiting.data(), waiting.size(), milliseconds);
        if (waiting[1].revents != 0) {  // the launcher was killed: so is the job
            kill_descendants();
            std::error_code error;
            if (!events_.stores.empty() && options_.store.empty()) std::filesystem::remove_all(events_.stores, error);
            ::_exit(128 + SIGKILL);
        }
        signalfd_siginfo signal{};
        while (waiting[0].revents != 0 && ::read(events_.signals, &signal, sizeof signal) == sizeof signal)
            take_signal(static_cast<int>(signal.ssi_signo));
        for (std::size_t i = 0; i < open.size(); ++i)
            if (waiting[first_stream + i].revents != 0) open[i]->read();
        out_.write();
        err_.write();
    }

    void take_signal(int signal) {
        if (signal == SIGCHLD) return;
        // Ctrl-Z stops nobody in a session without a terminal.
        for (const Rank& rank : ranks_)
            if (!rank.end) ::kill(rank.process, signal == SIGTSTP ? SIGSTOP : signal);
        if (signal != SIGINT && signal != SIGTERM && signal != SIGHUP && signal != SIGQUIT) return;
        // The same request may come by several ways: from a terminal, a shell and the launcher.
        const auto now = Clock::now();
        const bool again = asked_ && now - *asked_ > std::chrono::seconds(1);
        if (asked_ && !again) return;
        start_no_more();
        if (!is_on_hosts()) tell_ranks("a signal has ended it");  // else the others go on
        if (files_ && !asked_) save_beside();                     // batch systems do not wait long
        // After SIGTERM programs may have something to save. An interrupt is typed by somebody who waits, a second one by somebody who has
        // waited enough.
        if (!asked_) {
            asked_ = now, asked_by_ = signal;
            if (events_.hosts != nullptr) attempt([&] { (void)tell_of_request(); });
        }
        asked_again_ = again;
        next_signal_ = again || signal == SIGTERM ? SIGKILL : SIGTERM;
        next_signal_at_ = now + (again ? std::chrono::milliseconds(0) : signal == SIGTERM ? grace() : std::chrono::seconds(5));
    }

    /// Tells the other hosts. Returns the first failure that anybody has told.
    Failure tell_of_request() {
        return events_.hosts->tell(
            number_, {options_.host_index, 128 + asked_by_, true, std::string("the job was asked to end by ") + ::strsignal(asked_by_)});
    }

    /// Records which ranks have ended. epoll reports handles in the order in which they became readable, however late this process looks.
    /// waitpid reports processes in any order.
    void reap() {
        int status = 0;
        std::vector<epoll_event> ended(ranks_.size());
        const int count = ::epoll_wait(ends_.get(), ended.data(), static_cast<int>(ended.size()), 0);
        for (int k = 0; k < count; ++k) {
            Rank& rank = ranks_[ended[static_cast<std::size_t>(k)].data.u32];
            if (!rank.end && ::waitpid(rank.process, &status, WNOHANG) == rank.process) note_end(rank, status);
        }
        // Orphans; and ranks, on systems without such handles. A rank that has ended since then waits for the next look.
        siginfo_t next{};
        while (::waitid(P_ALL, 0, &next, WEXITED | WNOHANG | WNOWAIT) == 0 && next.si_pid != 0) {
            const auto rank = std::ranges::find(ranks_, next.si_pid, &Rank::process);
            if (rank != ranks_.end() && rank->handle) break;
            if (::waitpid(next.si_pid, &status, WNOHANG) != next.si_pid) break;
            if (rank != ranks_.end() && !rank->end) note_end(*rank, status);
            if (next.si_pid == saver_) {
                saver_ = -1;
                if (exit_status(status) == 0) attempt([&] { saved_ = std::max(saved_, files_->newest()); });
            }
            next = {};
        }
    }
    void note_end(Rank& rank, int status) {
        rank.end = status;
        rank.handle = Descriptor{};
        if (exit_status(status) == 0) return;
        if (generations_) look_at_store();  // once: what follows must agree
        if (is_on_hosts()) note_gone(rank);
        if (is_needed_no_more(rank)) return;
        rank.failed_after = seconds_since(rank.begin);
        // The others end with their own errors, or meet again, meanwhile.
        if (!next_signal_at_ && !is_on_hosts() && is_missed(rank)) next_signal_at_ = Clock::now() + grace();
        if (first_failed_ || start_again(rank)) return;
        first_failed_ = static_cast<int>(&rank - ranks_.data());
        if (events_.hosts == nullptr || elsewhere_ || asked_) return;
        for (Stream& stream : rank.streams) stream.read();
        attempt([&] { elsewhere_ = events_.hosts->tell(number_, {options_.host_index, exit_status(status), false, failure_of(rank)}); });
        if (elsewhere_ && elsewhere_->host == options_.host_index) elsewhere_.reset();
    }

    /// The job has succeeded when it has on all hosts.
    void await_other_hosts() {
        if (events_.hosts == nullptr || first_failed_ || elsewhere_ || asked_) return;
        attempt([&] { events_.hosts->finish(number_); });
        const auto until = Clock::now() + std::chrono::milliseconds(static_cast<long long>(options_.wait * 1000));
        while (!asked_ && !events_.hosts->have_all_finished(number_) && !(elsewhere_ = events_.hosts->failure(number_))) {
            if (Clock::now() > until)
                return say("the ranks of this host have succeeded; not all other hosts have told of theirs within the " +
                           rounded(options_.wait) + " s of --wait");
            wait_for_events();
        }
    }

    void look_at_hosts() {
        if (events_.hosts == nullptr || first_failed_ || elsewhere_) return;
        elsewhere_ = events_.hosts->failure(number_);
        if (!elsewhere_) return;
        start_no_more();
        if (!next_signal_at_) next_signal_at_ = Clock::now() + grace();
    }

    /// Starts a rank again, if the others of this job can go on. Returns false if they cannot. Failures until the ranks have met again are one
    /// restart, except those of ranks that are new.
    bool start_again(Rank& rank) {
        if (!generations_ || asked_) return false;
        const bool may_have_met = is_elastic() || generations_->newest() != 0 || store_away_since_;
        if (!may_have_met || generations_->ended()) return false;
        // A program that fails by itself may never succeed; one that has waited in vain did nothing wrong.
        const bool has_waited = rank.member != 0 && (!generations_->has(rank.member) || generations_->is_back(rank.member));
        if (has_waited && !is_elastic()) end_stopped(true);
        const bool is_innocent = has_waited && !is_elastic() && !rank.is_ended && last_ended_ && rank.begin < last_ended_->second;
        const bool counts = (!lost_since_ || rank.is_new) && !is_innocent;
        if (counts && !has_waited && !was_ended_from_outside(*rank.end)) failed_soon_ = *rank.failed_after < soon ? failed_soon_ + 1 : 0;
        std::string refusal;
        if ((counts || is_refused_) && number_ + restarts_ == options_.restarts)
            refusal = options_.restarts == 0 ? "a rank has failed" : "no restart is left of " + std::to_string(options_.restarts);
        if (failed_soon_ == most_soon)
            refusal = hopeless_ = "ranks have failed " + std::to_string(most_soon) + " times in a row within " +
                                  std::to_string(static_cast<int>(soon)) + " s of their start";
        if (!lost_since_ && is_missed(rank)) lost_since_ = generations_->newest();
        if (!refusal.empty() && is_elastic() && are_enough()) {
            hopeless_.clear();
            is_refused_ = true;
            say_failure(rank);
            say(refusal + ", so the others go on without it");
            return true;
        }
        if (!refusal.empty()) {
            if (is_on_hosts()) say("no rank of this host is left; the job goes on if the other hosts have enough");
            else tell_ranks(refusal);
            start_no_more();
            return false;
        }
        restarts_ += counts;
        const double pause = failed_soon_ < 2 ? 0 : pause_after(failed_soon_ - 1);
        rank.starts_again = Clock::now() + std::chrono::milliseconds(static_cast<long long>(pause * 1000));
        if (is_innocent) say_failure(rank, " has waited in vain for " + last_ended_->first + ": it ");
        else say_failure(rank);
        say((counts ? "starts it again, " + std::to_string(number_ + restarts_) + " of at most " + std::to_string(options_.restarts)
                    : std::string("starts it again, too")) +
            (pause > 0 ? ", in " + rounded(pause) + " s" : ""));
        return true;
    }
    void say_failure(Rank& rank, const std::string& what = " failed: it ") {
        for (Stream& stream : rank.streams) stream.read();
        say(name_of(rank) + what + describe_end(*rank.end) + " after " + rounded(*rank.failed_after) + " s" + said_by(rank));
    }
    /// Are there as many ranks as the job needs, or will there be?
    bool are_enough() const {
        const auto here = std::ranges::count_if(ranks_, [](const Rank& rank) { return !rank.end || rank.starts_again; });
        return here >= (is_on_hosts() ? 1 : options_.min_ranks);
    }
    /// Do others notice its end? Not if they have not counted on it yet.
    bool is_missed(const Rank& rank) const { return !is_elastic() || generations_->has(rank.member); }
    /// Has it joined a job whose ranks have not needed it yet?
    bool waits(const Rank& rank) const { return is_elastic() && rank.member != 0 && !rank.was_listed; }
    /// Have the others ended the job well, without this rank?
    bool is_needed_no_more(const Rank& rank) const { return is_elastic() && generations_->ended_well() && !generations_->has(rank.member); }
    void start_no_more() {
        for (Rank& rank : ranks_) {
            if (rank.starts_again && !first_failed_ && !is_needed_no_more(rank)) first_failed_ = static_cast<int>(&rank - ranks_.data());
            rank.starts_again.reset();
        }
    }
    void say(const std::string& text) { err_.add("gradsync_run: " + text + "\n"); }

    /// Calls `f`, which uses the store or the folder of --state. If it throws, says why; the ranks go on.
    template <class F>
    void attempt(F&& f) {
        try {
            f();
        } catch (const std::exception& error) {
            say(error.what());
        }
    }

    /// Ranks that wait for others learn why they wait no longer.
    void tell_ranks(const std::string& reason) {
        attempt([&] {
            if (generations_) generations_->end(reason);
        });
    }

    /// Takes part in a job of several hosts. Returns false if it has ended.
    bool join_job() {
        generations_.emplace(options_.store);
        meeting_.address = own_address(options_);
        generations_->refresh(true);
        // Processes of this host that have joined before have ended, with an earlier launcher or with the host.
        for (const auto& member : generations_->take_joined())
            if (options_.process_of(member.place) && !is_alive_here(member)) generations_->note_gone(member.id);
        if (generations_->ended_well())
            say("the job in " + options_.store + " has ended well already; give another job a store of its own");
        return !generations_->ended();
    }
    bool is_alive_here(const gradsync::elastic::Member& member) const {
        return member.process.system == own_.system && member.process.alive(own_);
    }
    /// Tells the members on other hosts at once, which cannot see that the process of this rank has ended.
    void note_gone(const Rank& rank) {
        learn_members();
        if (rank.member != 0 && !generations_->ended()) note_gone(rank.member);
    }
    void note_gone(std::uint64_t member) {
        attempt([&] { generations_->note_gone(member); });  // if it fails, they wait for their time limit
    }

    void look_at_store(bool at_once = true) {
        try {
            if (!generations_->refresh(at_once) || !std::exchange(store_away_since_, std::nullopt)) return;
            say("the store answers again");
            if (next_signal_at_ && !asked_) next_signal_at_ = Clock::now() + grace();
            for (Rank& rank : ranks_)
                if (rank.left_out) rank.left_out = Clock::now();
        } catch (const std::exception& error) {
            if (store_away_since_) return;
            store_away_since_ = Clock::now();
            say(error.what());
        }
    }
    void learn_members() {
        for (const gradsync::elastic::Member& member : generations_->take_joined()) {
            // Somebody may have started another one by hand, with the same number.
            const auto r = options_.process_of(member.place);
            if (!r || member.process.system != own_.system) continue;
            if (is_on_hosts() && !is_alive_here(member)) note_gone(member.id);
            const pid_t process = member.process.process();
            if (process != rank(*r).process && !has_variables(process, {"GRADSYNC_JOB_TOKEN=" + meeting_.token})) continue;
            Rank& joined = rank(*r);
            joined.member = member.id;
            joined.was_listed = false;
            joined.left_out.reset();
            longest_start_ = std::max(longest_start_, Clock::now() - joined.begin);
        }
    }
    /// Have the others waited for it in vain? On several hosts a broken link may be to blame, and it may join them again.
    bool is_silent(const Rank& rank) const {
        if (rank.end || store_away_since_ || !generations_->is_silent(rank.member)) return false;
        return !is_on_hosts() || (rank.left_out && Clock::now() >= *rank.left_out + grace());
    }
    static bool has_joined(const Rank& rank) { return rank.end || rank.member != 0; }
    /// Nobody misses a process that is stopped before it joins: its launcher ends it, if it is still stopped at the next look, or
    /// `at_once`, when somebody has waited in vain.
    void end_stopped(bool at_once) {
        for (Rank& rank : ranks_) {
            if (has_joined(rank) || rank.is_ended || (!at_once && Clock::now() < rank.looked_at_next)) continue;
            rank.looked_at_next = Clock::now() + grace();
            const bool is_stopped = std::ranges::any_of(descendants('T'), [&](pid_t process) { return is_of(rank, process); });
            if (!(std::exchange(rank.was_stopped, is_stopped) || at_once) || !is_stopped) continue;
            end_rank(rank, "was stopped before it joined the others");
        }
    }
    void end_rank(Rank& rank, const std::string& why) {
        if (std::exchange(rank.is_ended, true)) return;
        say(name_of(rank) + " " + why + ", and is ended");
        ::kill(rank.process, SIGKILL);
        last_ended_ = {name_of(rank), Clock::now()};
    }
    void look_at_generations() {
        if (!generations_) return;
        look_at_store(false);
        learn_members();
        for (Rank& rank : ranks_)
            if (rank.was_listed && !rank.left_out && !generations_->has(rank.member)) rank.left_out = Clock::now();
        for (Rank& rank : ranks_)
            if (is_silent(rank)) end_rank(rank, "did not answer the others in time");
        if (is_elastic()) end_stopped(false);
        // When a rank leaves a job that has ended, the others have only to leave.
        const auto has_ended = [](const Rank& rank) { return rank.end.has_value(); };
        if (generations_->ended() && !next_signal_at_ && std::ranges::any_of(ranks_, has_ended)) next_signal_at_ = Clock::now() + grace();
        for (Rank& rank : ranks_)
            if (generations_->has(rank.member)) {
                rank.was_listed = true;
                if (is_elastic()) rank.is_new = false;
            }
        const auto has_met = [&](const Rank& rank) {
            return rank.end ? is_elastic() : generations_->has(rank.member) || waits(rank) || (is_elastic() && is_on_its_way(rank));
        };
        if (!std::ranges::all_of(ranks_, has_met)) return;
        if (!is_elastic())
            for (Rank& rank : ranks_) rank.is_new = false;
        if (!lost_since_ || generations_->newest() == *lost_since_ || asked_ || first_failed_) return;
        lost_since_.reset();
        last_ended_.reset();
        is_refused_ = false;
        next_signal_at_.reset();
        next_signal_ = SIGTERM;
        pressed_.clear();
    }

    /// A rank that is on its way to the others, or waits for them, is not one that does not end: it has a limit of its own.
    bool meets_others(const Rank& rank) const {
        if (!lost_since_ || asked_ || first_failed_) return false;
        if (generations_->newest() > *lost_since_ && generations_->has(rank.member)) return true;
        if (!rank.is_new) return waits(rank) || (generations_->newest() == *lost_since_ && generations_->is_back(rank.member));
        return is_on_its_way(rank);
    }
    bool is_on_its_way(const Rank& rank) const {
        const Clock::duration usual = std::max<Clock::duration>(grace(), 3 * longest_start_);
        return rank.is_new && (rank.member != 0 || Clock::now() < rank.begin + usual);
    }

    /// Returns the state of an earlier run from --state, or nothing.
    std::optional<SavedState> load_state() {
        if (!files_) return std::nullopt;
        const auto state = files_->load([&](const std::string& what) { say(what); });
        if (state && state->ranks.size() != static_cast<std::size_t>(options_.ranks))
            throw std::runtime_error("--state: " + options_.state.string() + " has the state of " + std::to_string(state->ranks.size()) +
                                     " ranks; start as many, or name another folder");
        if (!state) return state;
        saved_ = state->number;
        say("goes on after step " + std::to_string(saved_ - 1) + ", from " + options_.state.string());
        return state;
    }

    /// Writes the newest state in a process of its own: what the launcher has to do meanwhile, it does.
    void save_beside() {
        next_save_at_ = Clock::now() + std::chrono::milliseconds(static_cast<long long>(options_.state_every * 1000));
        if (saver_ >= 0 || !generations_) return;
        const pid_t parent = ::getpid();
        saver_ = ::fork();
        if (saver_ != 0) return;
        die_with(parent);
        err_ = Sink{STDERR_FILENO};  // what is queued is the parent's to write
        save_state();
        err_.write();
        ::_exit(has_state_ ? 0 : 1);
    }
    /// Writes the newest state that all ranks have kept.
    void save_state() {
        if (!files_ || !generations_) return;
        has_state_ = false;
        try {
            const auto memory = generations_->memory(ranks_.size());
            if (const auto state = StateFiles::copy(memory, saved_)) {
                files_->save(*state);
                saved_ = state->number;
            }
            has_state_ = saved_ != 0;
        } catch (const std::exception& error) {
            say("the state was not written: " + std::string(error.what()));
        }
    }
    /// Before there are ranks: throws a Failure if a signal asks for the end, here or on another host. Ends this process if the launcher is
    /// gone. If a rank of another host has failed already, ranks are started here, too: those that wait for them say then who failed.
    void look_outside() {
        pollfd lifeline{events_.lifeline, POLLIN, 0};
        if (::poll(&lifeline, 1, 0) > 0) ::_exit(128 + SIGKILL);
        signalfd_siginfo signal{};
        while (::read(events_.signals, &signal, sizeof signal) == sizeof signal)
            for (const int ends : {SIGINT, SIGTERM, SIGHUP, SIGQUIT})
                if (static_cast<int>(signal.ssi_signo) == ends) {
                    asked_ = Clock::now(), asked_by_ = ends;
                    throw tell_of_request();
                }
        if (const auto failure = events_.hosts->failure(number_); failure && failure->asked) throw *failure;
    }

    /// The ranks that are left do not end by themselves.
    void press_on() {
        // They wait for the store, for ten minutes at most, and the launcher cannot see whether they meet.
        const bool is_store_away = store_away_since_ && Clock::now() - *store_away_since_ < std::chrono::minutes(10);
        if (is_store_away && !asked_ && !first_failed_ && !elsewhere_ && !generations_->ended()) {
            next_signal_at_ = Clock::now() + grace();
            return;
        }
        for (std::size_t r = 0; r < ranks_.size(); ++r)
            if (!ranks_[r].end && !meets_others(ranks_[r])) {
                const int number = number_of(ranks_[r]);
                const bool is_asked = !was_pressed(number) && (next_signal_ == SIGTERM || asked_by_ == 0);
                ::kill(ranks_[r].process, is_asked ? SIGTERM : SIGKILL);
                if (is_asked) ::kill(ranks_[r].process, SIGCONT);
                if (!was_pressed(number)) pressed_.push_back(number);
            }
        next_signal_ = SIGKILL;
        next_signal_at_ = Clock::now() + std::chrono::seconds(5);
    }

    Outcome outcome() const {
        Outcome result{.asked = asked_by_,
                       .hopeless = hopeless_,
                       .is_over = generations_ && generations_->ended(),
                       .has_state = has_state_,
                       .restarts = restarts_,
                       .seconds = seconds_since(begin_)};
        if (!first_failed_ && !elsewhere_ && !asked_ && is_elastic() && generations_->ended() && !generations_->ended_well()) {
            result.account.push_back("the job was ended before its end: " + generations_->end_reason());
            result.status = 1;
        }
        if (!first_failed_ && !elsewhere_) return result;
        if (elsewhere_ && elsewhere_->asked) result.asked = elsewhere_->status - 128;
        const Rank* const first = first_failed_ ? &ranks_[static_cast<std::size_t>(*first_failed_)] : nullptr;
        result.status = elsewhere_ ? elsewhere_->status : exit_status(*first->end);
        if (asked_ && (first == nullptr || *asked_ < first->begin + std::chrono::duration<double>(*first->failed_after)))
            return result;  // it did what it was asked
        result.account.push_back(elsewhere_ ? "on host " + std::to_string(elsewhere_->host) + ", " + elsewhere_->account
                                            : failure_of(*first));
        // The others by how they ended, with the words of one: all have printed theirs.
        std::map<std::string, std::vector<int>> others;
        for (std::size_t r = 0; r < ranks_.size(); ++r) {
            const int number = number_of(ranks_[r]);
            if (!ranks_[r].failed_after || (&ranks_[r] == first && !elsewhere_) || was_pressed(number)) continue;
            others[describe_end(*ranks_[r].end)].push_back(number);
        }
        for (const auto& [what, ranks] : others) {
            const std::string said = said_by(ranks_[static_cast<std::size_t>(options_.process_of(ranks.front()).value())]);
            result.account.push_back(name_ranks(ranks) + " " + what + said);
        }
        if (!pressed_.empty())
            result.account.push_back(name_ranks(pressed_) + " did not end within " + rounded(options_.grace) + " s of that, and " +
                                     (pressed_.size() == 1 ? "was" : "were") + " ended");
        return result;
    }

    std::string failure_of(const Rank& rank) const {
        return name_of(rank) + (restarts_ == 0 ? " failed first: it " : " failed: it ") + describe_end(*rank.end) + " after " +
               rounded(*rank.failed_after) + " s" + said_by(rank);
    }

    /// The last line of an error, which says most: ": gradsync: ..."
    static std::string said_by(const Rank& rank) {
        if (rank.end && was_ended_from_outside(*rank.end)) return {};  // what it said before is not why
        if (rank.streams.empty()) return {};                           // it could not be started
        const auto& lines = rank.streams[1].last_lines();
        for (auto line = lines.rbegin(); line != lines.rend(); ++line)
            if (line->find_first_not_of(" \t\r") != std::string::npos)
                return ": " + line->substr(0, longest_quote) + (line->size() > longest_quote ? "..." : "");
        return {};
    }

    bool was_pressed(int rank) const { return std::ranges::find(pressed_, rank) != pressed_.end(); }
    std::chrono::milliseconds grace() const { return std::chrono::milliseconds(static_cast<long long>(options_.grace * 1000)); }

    const rlimit descriptors_ = raise_limit_of_descriptors();
    const gradsync::collective::ProcessIdentity own_ = gradsync::collective::ProcessIdentity::own();
    const Options& options_;
    unsigned number_, restarts_ = 0, failed_soon_ = 0;
    const Events& events_;
    Meeting meeting_{loopback, free_port(), gradsync::net::Nonce::random().text()};
    std::optional<Failure> elsewhere_;  // a failure on another host, before any here
    Clock::time_point begin_ = Clock::now();
    Clock::duration longest_start_ = {};  // of ranks, until they wait for the others
    std::optional<StateFiles> files_;
    std::uint64_t saved_ = 0;                  // number of the newest state in them that this process has written or read
    std::optional<Generations> generations_;   // if ranks may be started again
    std::optional<std::uint32_t> lost_since_;  // the generation that has lost a rank, until all have met again
    std::optional<std::pair<std::string, Clock::time_point>>
        last_ended_;           // a rank that the others have waited for in vain, since they last met
    bool is_refused_ = false;  // a rank that was lost since then is not started again
    std::vector<Rank> ranks_;
    Clock::time_point next_save_at_ = Clock::now() + std::chrono::milliseconds(static_cast<long long>(options_.state_every * 1000));
    pid_t saver_ = -1;
    bool has_state_ = false;                             // the newest one is in the files
    std::optional<Clock::time_point> store_away_since_;  // which was said
    std::list<Stream> old_streams_;                      // of ranks that were started again
    const Descriptor ends_{::epoll_create1(EPOLL_CLOEXEC)};
    std::optional<int> first_failed_;
    std::optional<Clock::time_point> asked_;  // when a signal first asked for the end
    int asked_by_ = 0;                        // that signal
    bool asked_again_ = false;
    std::string hopeless_;
    Sink out_{STDOUT_FILENO}, err_{STDERR_FILENO};
    int next_signal_ = SIGTERM;  // for ranks that are left at `next_signal_at_`
    std::optional<Clock::time_point> next_signal_at_;
    std::vector<int> pressed_;
};

}  // namespace

Outcome run_once(const Options& options, unsigned number, const Events& events) { return Start{options, number, events}.run(); }

}  // namespace gradsync_run
