// SPDX-License-Identifier: BSL-1.0
// gradsync_run: starts a program on several ranks of this machine, and starts it again when a rank is lost. See --help.
//
// Two processes: the launcher passes signals on to a supervisor in a session of its own, whose children the ranks are. If one of the two is
// killed, the other one ends everything.

#include <poll.h>
#include <sys/signalfd.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "../numbers.hpp"
#include "generations.hpp"
#include "start.hpp"

namespace gradsync_run {

namespace {

/// Those that end a job, and those that programs give a meaning of their own. Without SIGHUP under nohup.
sigset_t passed_on() {
    sigset_t signals;
    ::sigemptyset(&signals);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD, SIGTSTP, SIGCONT, SIGWINCH}) {
        struct sigaction before {};
        ::sigaction(signal, nullptr, &before);
        if (signal != SIGHUP || before.sa_handler != SIG_IGN) ::sigaddset(&signals, signal);
    }
    return signals;
}

void say(const std::string& text) { write_all(STDERR_FILENO, "gradsync_run: " + text + "\n"); }
void say(const std::vector<std::string>& lines) {
    for (const std::string& line : lines) say(line);
}

/// Sleeps, unless a signal asks for the end or the launcher goes. Returns whether it slept.
bool rest(double seconds, const Events& events) {
    const auto until = Clock::now() + std::chrono::milliseconds(static_cast<long long>(seconds * 1000));
    for (auto now = Clock::now(); now < until; now = Clock::now()) {
        pollfd waiting[] = {{events.signals, POLLIN, 0}, {events.lifeline, POLLIN, 0}};
        ::poll(waiting, 2, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(until - now).count()));
        if (waiting[1].revents != 0) return false;
        signalfd_siginfo signal{};
        if (waiting[0].revents != 0 && ::read(events.signals, &signal, sizeof signal) == sizeof signal)
            for (const int ends : {SIGINT, SIGTERM, SIGHUP, SIGQUIT})
                if (static_cast<int>(signal.ssi_signo) == ends) return false;
    }
    return true;
}

/// Starts the job until it succeeds, or may not start again. Returns the exit status.
int supervise(const Options& options, const Events& events) {
    unsigned failed_soon = 0;
    for (unsigned number = 0;; ++number) {
        const Outcome outcome = run_once(options, number, events);
        number += outcome.restarts;
        say(outcome.account);
        const std::string starts =
            number == 0 ? "" : " It was started again " + std::to_string(number) + (number == 1 ? " time." : " times.");
        if (outcome.status == 0 || outcome.asked != 0) {
            if (outcome.asked != 0 && outcome.has_state) {
                say("the job was asked to end; the next start goes on from " + options.state.string());
                return outcome.asked == SIGTERM && outcome.account.empty() ? 0 : outcome.status;
            }
            if (!starts.empty()) say(outcome.status == 0 ? "the job succeeded." + starts : "the job was asked to end." + starts);
            return outcome.status;
        }
        if (outcome.is_over && outcome.hopeless.empty()) {
            if (number < options.restarts) say("the ranks had ended the job, so it is not started again." + starts);
            else if (options.restarts != 0) say("no restart is left of " + std::to_string(options.restarts) + ".");
            return outcome.status;
        }
        failed_soon = outcome.seconds < soon ? failed_soon + 1 : 0;
        if (number == options.restarts) {
            if (options.restarts != 0) say("no restart is left of " + std::to_string(options.restarts) + ".");
            return outcome.status;
        }
        const std::string often =
            std::to_string(most_soon) + " times in a row within " + std::to_string(static_cast<int>(soon)) + " s of its start";
        const std::string hopeless = failed_soon == most_soon ? "the job has failed " + often : outcome.hopeless;
        if (!hopeless.empty()) {
            say(hopeless + "; the job is not started again: mend what the errors above say");
            return outcome.status;
        }
        const double pause = failed_soon == 0 ? 0 : pause_after(failed_soon);
        say("starts again, " + std::to_string(number + 1) + " of at most " + std::to_string(options.restarts) +
            (pause > 0 ? ", in " + gradsync_examples::as_text(pause) + " s" : ""));
        if (!rest(pause, events)) {
            if (events.hosts != nullptr)
                events.hosts->tell(number + 1, {options.host_index, 128 + SIGTERM, true, "the job was asked to end"});
            return outcome.status;
        }
    }
}

/// The supervisor's process.
[[noreturn]] void be_supervisor(const Options& options, Descriptor lifeline, const std::optional<StoreFolder>& stores) {
    ::setsid();  // what is sent to the launcher's group, or typed on its terminal, comes through the launcher only
    adopt_orphans();
    const sigset_t signals = passed_on();
    const Descriptor signal_queue{::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK)};
    int status = 1;
    try {
        if (!signal_queue) fail("cannot listen to signals");
        std::optional<Hosts> hosts;
        if (options.hosts > 1 && !options.is_elastic_on_hosts()) hosts.emplace(options);
        else if (options.hosts == 1 && !options.store.empty()) (void)open_store(options);
        const std::string place = options.hosts > 1 ? "" : stores ? stores->path() : options.store;
        status = supervise(options, {signal_queue.get(), lifeline.get(), hosts ? &*hosts : nullptr, place});
    } catch (const std::exception& error) {
        say(error.what());
        status = 127;
    }
    if (!kill_descendants()) say("some processes of the job do not end");
    if (stores) stores->remove();
    ::_exit(status);
}

/// Passes signals on until the supervisor has ended. Returns the exit status.
int wait_for(pid_t supervisor, const sigset_t& signals) {
    for (;;) {
        int signal = 0;
        ::sigwait(&signals, &signal);
        if (signal != SIGCHLD) {
            ::kill(supervisor, signal);
            if (signal == SIGTSTP) ::raise(SIGSTOP);
            continue;
        }
        int status = 0;
        if (::waitpid(supervisor, &status, WNOHANG) != supervisor) continue;
        if (!WIFSIGNALED(status)) return WEXITSTATUS(status);
        say("the supervisor " + describe_end(status) + "; ending the job");
        kill_descendants();
        return exit_status(status);
    }
}

/// Standard descriptors that are closed would be taken by pipes. Rank 0 has no claim on the input of a terminal that another job has.
void prepare_descriptors() {
    for (int number = 0; number < 3; ++number)
        if (::fcntl(number, F_GETFD) < 0) (void)!::open("/dev/null", number == 0 ? O_RDONLY : O_WRONLY);
    if (::isatty(STDIN_FILENO) != 0 && ::tcgetpgrp(STDIN_FILENO) != ::getpgrp())
        if (const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC); nothing >= 0) ::dup2(nothing, STDIN_FILENO);
}

/// Under srun each host knows its number.
void read_slurm(Options& o, bool is_told) {
    const char *const hosts = std::getenv("SLURM_NNODES"), *const index = std::getenv("SLURM_NODEID");
    if (o.store.empty() || o.hosts != 1 || is_told || hosts == nullptr || index == nullptr || std::getenv("SLURM_STEP_ID") == nullptr)
        return;
    o.hosts = std::atoi(hosts);
    o.host_index = std::atoi(index);
}

Options parse(int argc, char** argv) {
    Options o;
    CLI::App app{
        "Starts a program on several ranks of this machine, or of several, which meet over TCP (TcpBackend::from_environment):\n"
        "\n"
        "  gradsync_run -n 4 -- ./train\n"
        "  gradsync_run -n 4 --restarts 3 -- gradsync_train --backend tcp --checkpoint run1 --checkpoint-every 100 --resume\n"
        "  gradsync_run -n 4 --hosts 2 --host-index 0 --store /shared/run1 -- ./train      # and on the other host, 1\n"
        "\n"
        "Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, a fresh GRADSYNC_JOB_TOKEN, and\n"
        "GRADSYNC_RESTART, the number of restarts before. Rank 0 reads standard input. If a rank fails, the others get time to end with\n"
        "their own errors, or to meet that rank again (gradsync::Membership); then they are ended. The exit status is that of the rank\n"
        "that failed first, or 128 + the number of the signal that ended it.\n"};
    app.name("gradsync_run")->option_defaults()->always_capture_default();
    app.get_formatter()->column_width(28);
    app.add_option("-n,--ranks", o.ranks_on, "number of ranks on each host; or one number for each: 1,1,2,2")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(gradsync_examples::within(1, 1024));
    app.add_option("--hosts", o.hosts, "hosts that run this launcher; SLURM_NNODES with --store under srun")
        ->check(gradsync_examples::within(1, 100'000));
    auto* const index = app.add_option("--host-index", o.host_index, "which of them this is, from 0; SLURM_NODEID")
                            ->check(gradsync_examples::within(0, 99'999));
    app.add_option("--store", o.store,
                   "where ranks and hosts meet, for this job alone: a folder that exists and all hosts see, or etcd://host:2379,.../prefix")
        ->default_str("");
    app.add_option("--address", o.address, "at which the others reach this host; by default its first network's")->default_str("");
    app.add_option("--wait", o.wait, "seconds to wait for other hosts, at each start")->check(gradsync_examples::within(1.0, 86'400.0));
    app.add_option("--restarts", o.restarts, "how often to start ranks again after a failure")
        ->check(gradsync_examples::within(0u, 1'000'000u));
    app.add_option("--min-ranks", o.min_ranks,
                   "go on without lost ranks while there are so many (gradsync::ElasticJob), and with more when they come back")
        ->check(gradsync_examples::within(1, 1024))
        ->default_str("");
    app.add_option("--spares", o.spares, "more processes on each host, which wait to take the place of lost ranks (gradsync::ElasticJob)")
        ->check(gradsync_examples::within(0, 1024));
    app.add_option("--state", o.state,
                   "a folder: what ranks keep in memory (KeptState) is also written there, and a later start goes on from it")
        ->default_str("");
    app.add_option("--state-every", o.state_every, "seconds between these writes; and at the end")
        ->check(gradsync_examples::within(0.1, 1e6));
    app.add_option("--grace", o.grace, "seconds that other ranks get to end by themselves")
        ->check(gradsync_examples::within(0.0, 86'400.0));
    app.add_flag("--bind", o.bind_cores, "give each rank cores of its own");
    app.add_option("--log-dir", o.log_dir, "keep what each rank prints, in start-K/rank-R.out and .err")->default_str("");
    app.add_flag("!--no-prefix", o.prefix, "print lines without the rank before them");
    app.prefix_command();  // what follows the program belongs to it
    try {
        app.parse(argc, argv);
        o.command = app.remaining();
        read_slurm(o, index->count() != 0);
        if (o.hosts > 1 && o.store.empty()) throw CLI::ValidationError("--hosts needs --store: a folder that all hosts see, or etcd");
        if (o.hosts > 1 && !o.state.empty()) throw CLI::ValidationError("--state works on one host only");
        if (o.spares != 0 && o.min_ranks == 0) o.min_ranks = 1;
        if (o.min_ranks != 0 && !o.state.empty())
            throw CLI::ValidationError("--state is for a fixed number of ranks (KeptState); write checkpoints instead");
        if (o.host_index >= o.hosts)
            throw CLI::ValidationError("--host-index: there are " + std::to_string(o.hosts) + " hosts, so say 0 to " +
                                       std::to_string(o.hosts - 1));
        if (o.ranks_on.size() == 1) o.ranks_on.resize(static_cast<std::size_t>(o.hosts), o.ranks_on[0]);
        if (o.ranks_on.size() != static_cast<std::size_t>(o.hosts))
            throw CLI::ValidationError("-n: there are " + std::to_string(o.hosts) + " hosts, so give one number, or one for each");
        o.ranks = o.ranks_on[static_cast<std::size_t>(o.host_index)];
        if (o.min_ranks > o.all_ranks())
            throw CLI::ValidationError("--min-ranks: there are " + std::to_string(o.all_ranks()) + " ranks only");
        const bool dashes = !o.command.empty() && o.command.front() == "--";
        if (dashes) o.command.erase(o.command.begin());
        if (!dashes && !o.command.empty() && o.command.front().starts_with('-'))
            throw CLI::ValidationError("there is no option " + o.command.front() + "; see --help");
        if (o.command.empty()) throw CLI::ValidationError("name a program: gradsync_run -n 4 -- ./train");
    } catch (const CLI::CallForHelp&) {
        std::cout << app.help();
        std::exit(0);
    } catch (const CLI::Error& error) {
        say(std::string(error.what()));
        std::exit(2);
    }
    return o;
}

}  // namespace

}  // namespace gradsync_run

int main(int argc, char** argv) {
    using namespace gradsync_run;
    prepare_descriptors();
    ::signal(SIGCHLD, SIG_DFL);  // else the system would tell of no child's end
    const Options options = parse(argc, argv);
    ::signal(SIGPIPE, SIG_IGN);
    const sigset_t signals = passed_on();
    ::sigprocmask(SIG_BLOCK, &signals, nullptr);
    adopt_orphans();  // those of a supervisor that was killed
    try {
        std::optional<StoreFolder> stores;
        if ((options.restarts != 0 || options.min_ranks != 0 || !options.state.empty()) && options.hosts == 1 && options.store.empty())
            stores.emplace();
        auto [lifeline, held] = make_pipe();
        const pid_t supervisor = ::fork();
        if (supervisor < 0) fail("cannot start");
        if (supervisor == 0) {
            held = Descriptor{};
            be_supervisor(options, std::move(lifeline), stores);
        }
        lifeline = Descriptor{};
        return wait_for(supervisor, signals);
    } catch (const std::exception& error) {
        say(error.what());
        return 127;
    }
}
