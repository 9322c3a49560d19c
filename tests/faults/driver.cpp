// SPDX-License-Identifier: BSL-1.0
// Runs trainings whose ranks fail, and looks at what the other ranks say. See usage().
#include <arpa/inet.h>
#include <fnmatch.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cctype>
#include <iterator>
#include <map>
#include <memory>
#include <utility>

#include <gradsync/bootstrap/file_rendezvous.hpp>

#include "program.hpp"

namespace faults {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

void usage() {
    std::puts(
        "usage: faults [--runs N | --rounds N] [--seed S] [--only PATTERN] [--jobs J] [--limit SECONDS] [--keep FOLDER]\n"
        "              [--mpirun PROGRAM] [--cluster SCRIPT] [--forgive N] [--verbose]\n"
        "       faults --left-out\n"
        "\n"
        "Runs N trainings of 2 to 5 ranks, J at a time, in each of which something goes wrong: seed S says what, on whom and when, and so do\n"
        "S + 1, ... A run is bad if a rank that lives does not end within the limit and 20 s (a hang), succeeds with other bits than the\n"
        "oracle (a wrong number), or blames a rank, or none, that has no fault (a wrong culprit). \"Text only\": the error's text names the\n"
        "right rank, but not its context. Ends with 1 if there are any; with --forgive N, only for hangs, wrong numbers and\n"
        "more than N wrong culprits and texts only.\n"
        "\n"
        "  --rounds N      so many runs that each fault meets each backend N times; 1 by default\n"
        "  --only PATTERN  only plans whose description contains it, such as kill/tcp-messages or 'kill/*, 4 ranks'\n"
        "  --limit         of each wait; 3 s by default\n"
        "  --keep FOLDER   what the ranks of bad runs have written, by seed\n"
        "  --mpirun        Open MPI's mpirun; without it, nothing runs over MPI\n"
        "  --cluster       scripts/emulated-cluster; without it, no links are cut\n"
        "  --left-out      the combinations that are left out, and why");
}

struct Options {
    std::uint64_t runs = pairs().size(), seed = 0;
    std::string only = "*", mpirun = {}, cluster = {};
    std::size_t jobs = 4;
    double limit = 3;
    fs::path keep = {};
    std::uint64_t forgive = 0;
    bool verbose = false;
};

fs::path beside_this_program(const char* name) { return fs::read_symlink("/proc/self/exe").parent_path() / name; }

/// A port that nobody listens at, outside the range from which the kernel gives ports to callers.
std::uint16_t free_port() {
    static std::uint32_t next = static_cast<std::uint32_t>(::getpid()) * 97;
    for (;;) {
        const auto port = static_cast<std::uint16_t>(10000 + next++ % 20000);
        const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
        sockaddr_in name{};
        name.sin_family = AF_INET;
        name.sin_port = htons(port);
        name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const bool free = ::bind(socket, reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0;
        ::close(socket);
        if (free) return port;
    }
}

int run_tcp_rank(const Orders& orders, int rank, const std::string& address, std::uint16_t port) {
    return run_rank(orders, rank, [&]() -> std::optional<std::uint64_t> {
        const Plan& plan = orders.plan;
        Injector inject(orders, rank);
        if (!inject.at(Stage::before)) return {};
        std::optional<gs::TcpBackend> comm;
        const auto connect = [&](auto&& rendezvous) {
            const bool goes_on = inject.at(Stage::during);
            if (goes_on)
                comm.emplace(
                    rendezvous,
                    gs::TcpOptions{.timeout = orders.timeout(), .shared_memory = !plan.messages, .domain = plan.divided ? rank / 2 : -1});
            return goes_on;
        };
        const gs::Job job{
            .rank = rank, .size = plan.size, .address = address, .port = port, .token = "the faults of seed " + std::to_string(plan.seed)};
        if (plan.by_file ? !connect(gs::FileRendezvous(orders.folder / "meeting", rank, plan.size, {.timeout = orders.timeout()}))
                         : !connect(gs::TcpRendezvous(job, {.timeout = orders.timeout()})))
            return {};
        return train_to_the_end(*comm, inject, orders);
    });
}

int run_thread_ranks(const Orders& orders) {
    gs::run_threads(orders.plan.size,
                    [&](gs::ThreadBackend comm) {
                        run_rank(orders, comm.rank(), [&] {
                            Injector inject(orders, comm.rank());
                            return train_to_the_end(comm, inject, orders);
                        });
                    },
                    {.timeout = orders.timeout()});
    return 0;
}

/// Does a text name this rank: "rank 2", "ranks 0, 2 and 3"?
bool names_rank(const std::string& text, int rank) {
    for (std::size_t at = text.find("rank"); at != std::string::npos; at = text.find("rank", at + 1)) {
        const char* word = text.c_str() + at + 4;
        if (*word == 's') ++word;
        while (*word == ' ') {
            char* end = nullptr;
            const long number = std::strtol(word, &end, 10);
            if (end == word) break;
            if (number == rank) return true;
            word = end;
            if (*word == ',') ++word;
            if (std::strncmp(word, " and ", 5) == 0) word += 4;
        }
    }
    return false;
}

enum class Kind { hang, wrong_number, wrong_culprit, text_only, count_of };
constexpr const char* kind_names[] = {"hang", "wrong number", "wrong culprit", "text only"};

struct Finding {
    Kind kind;
    std::string text;
};

/// What this rank's report says of the library. `report`: as `faults::run_rank` writes it.
std::optional<Finding> judge(const Plan& plan, int rank, const std::string& report) {
    const std::string who = "rank " + std::to_string(rank) + ": ";
    if (report.find("WRONG NUMBER") != std::string::npos && !plan.is_faulty(rank)) return Finding{Kind::wrong_number, who + report};
    if (report.rfind("ok ", 0) == 0) {
        if (std::stoull(report.substr(3)) == expected_digest(plan.size)) return {};
        return Finding{Kind::wrong_number, who + "succeeded with other weights"};
    }
    const bool all_succeed = plan.fault == Fault::pause || plan.fault == Fault::fork_exits || plan.fault == Fault::none;
    if (plan.is_faulty(rank) && !all_succeed) return {};
    int code = 0, peer = -1;
    if (std::sscanf(report.c_str(), "error %d %d", &code, &peer) != 2) return Finding{Kind::wrong_culprit, who + "says " + report};
    const std::string text = report.substr(report.find('\n') + 1);
    const std::string said =
        who + "blames " + (peer < 0 ? "nobody" : "rank " + std::to_string(peer)) + " (code " + std::to_string(code) + "): " + text;
    if (all_succeed) return Finding{Kind::wrong_culprit, said};
    const bool names = std::any_of(plan.faulty.begin(), plan.faulty.end(), [&](int r) { return names_rank(text, r); });
    // Where two ranks make different calls, no one can tell which of them is mistaken: both are named.
    const bool differs = plan.fault >= Fault::count && plan.fault <= Fault::never;
    if (plan.is_faulty(peer) || (differs && peer >= 0 && names)) return {};
    return Finding{peer < 0 && names ? Kind::text_only : Kind::wrong_culprit, said};
}

/// The processes of one plan.
class Run {
public:
    Run(const Options& options, const Plan& plan, const fs::path& folder) : orders_{plan, options.limit, folder}, begin_(Clock::now()) {
        fs::create_directories(folder);
        const std::string seed = std::to_string(plan.seed), limit = std::to_string(options.limit), size = std::to_string(plan.size);
        if (plan.on_hosts()) {
            ::mkfifo((folder / "links").c_str(), 0600);
            std::string per_host = "1";
            if (plan.divided) per_host = plan.size == 3 ? "2,1" : plan.size == 4 ? "2,2" : "2,2,1";
            const std::string hosts = std::to_string(plan.divided ? (plan.size + 1) / 2 : plan.size);
            launch({options.cluster, hosts, "1gbit", "--ranks-per-host", per_host, "--no-mpi", "--control", folder / "links", "--",
                    beside_this_program("faults"), "--rank", seed, limit, folder});
        } else if (plan.backend == Backend::mpi) {
            launch({options.mpirun, "--enable-recovery", "--oversubscribe", "-n", size, beside_this_program("faults_mpi"), seed, limit,
                    folder});
        } else if (plan.backend == Backend::threads) {
            start([&] { return run_thread_ranks(orders_); });
        } else {
            const std::uint16_t port = free_port();
            for (int rank = 0; rank < plan.size; ++rank) start([&] { return run_tcp_rank(orders_, rank, "127.0.0.1", port); });
        }
    }
    Run(const Run&) = delete;
    ~Run() {
        ::kill(-group_, SIGKILL);
        std::ifstream processes(orders_.folder / "processes");
        for (std::string process; processes >> process;) {
            std::ifstream line("/proc/" + process + "/cmdline");  // another process may have the number by now
            if (std::string(std::istreambuf_iterator<char>(line), {}).find(orders_.folder) != std::string::npos)
                ::kill(std::stoi(process), SIGKILL);
        }
        for (const pid_t child : children_) ::waitpid(child, nullptr, 0);
    }

    const Plan& plan() const { return orders_.plan; }
    const fs::path& folder() const { return orders_.folder; }

    /// True when all ranks that can end have ended, or it is too late.
    bool is_over() {
        if (Clock::now() > begin_ + std::chrono::duration<double>(orders_.limit + orders_.pause() + (plan().on_hosts() ? 25 : 20)))
            return true;
        for (std::size_t i = 0; i < children_.size(); ++i) {
            siginfo_t end{};  // the process stays, as a zombie, so that its number and its group's are not given to others
            if (has_ended_[i] || ::waitid(P_PID, static_cast<id_t>(children_[i]), &end, WEXITED | WNOHANG | WNOWAIT) != 0) continue;
            has_ended_[i] = end.si_pid == children_[i];
            if (has_ended_[i] && end.si_code != CLD_EXITED) signals_[i] = end.si_status;
        }
        if (std::find(has_ended_.begin(), has_ended_.end(), false) == has_ended_.end()) return true;
        for (int rank = 0; rank < plan().size; ++rank)
            if (must_end(rank) && (launched_ ? !has_reported(rank) : !has_ended_[child_of(rank)])) return false;
        return true;
    }

    /// Open MPI's mpirun has been seen to start none of its processes: then there is nothing to judge.
    bool started_nothing() const { return plan().backend == Backend::mpi && !fs::exists(orders_.folder / "processes"); }

    std::vector<Finding> findings() const {
        std::vector<Finding> all;
        for (int rank = 0; rank < plan().size; ++rank) {
            if (has_reported(rank)) {
                std::ifstream file(report_of(rank));
                const std::string text(std::istreambuf_iterator<char>(file), {});
                if (const auto finding = judge(plan(), rank, text)) all.push_back(*finding);
            }
            if (!must_end(rank)) continue;
            const std::string who = "rank " + std::to_string(rank) + ": ";
            const std::size_t child = child_of(rank);
            if (signals_[child] != 0 && !launched_) all.push_back({Kind::hang, who + "ended by signal " + std::to_string(signals_[child])});
            else if (!has_reported(rank))
                all.push_back({Kind::hang, who + (has_ended_[child] ? "ended without a report" : "gave no report in time")});
            else if (!launched_ && !has_ended_[child]) all.push_back({Kind::hang, who + "reported, but did not end"});
        }
        return all;
    }

private:
    template <class F>
    void start(F&& f) {
        std::fflush(nullptr);
        const pid_t child = ::fork();
        if (child == 0) {
            ::setpgid(0, group_);
            ::prctl(PR_SET_PDEATHSIG, SIGKILL);
            const int output = ::open((orders_.folder / "output").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
            ::dup2(output, 1);
            ::dup2(output, 2);
            int code = 1;
            try {
                code = f();
            } catch (const std::exception& error) {
                std::fprintf(stderr, "%s\n", error.what());
            }
            std::exit(code);
        }
        if (children_.empty()) group_ = child;
        ::setpgid(child, group_);
        children_.push_back(child);
        has_ended_.push_back(false);
        signals_.push_back(0);
    }
    void launch(std::vector<std::string> command) {
        launched_ = true;
        start([&] {
            for (const auto& [name, value] : std::map<std::string, std::string>{{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                                                                {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                                                                {"OMPI_MCA_hwloc_base_binding_policy", "none"},
                                                                                {"OMPI_MCA_mpi_yield_when_idle", "1"},
                                                                                {"OMPI_MCA_orte_tmpdir_base", orders_.folder},
                                                                                {"OMPI_MCA_btl_vader_backing_directory", orders_.folder}})
                ::setenv(name.c_str(), value.c_str(), 1);
            std::vector<char*> words;
            for (std::string& word : command) words.push_back(word.data());
            words.push_back(nullptr);
            ::execvp(words[0], words.data());
            std::fprintf(stderr, "cannot start %s: %s\n", words[0], std::strerror(errno));
            return 1;
        });
    }

    std::size_t child_of(int rank) const { return launched_ || plan().backend == Backend::threads ? 0 : static_cast<std::size_t>(rank); }
    bool must_end(int rank) const {
        const Fault kind = plan().kind_of(rank);
        return kind != Fault::exit && kind != Fault::kill && kind != Fault::stop && kind != Fault::fork_outlives;
    }
    fs::path report_of(int rank) const { return orders_.folder / ("rank" + std::to_string(rank)); }
    bool has_reported(int rank) const { return fs::exists(report_of(rank)); }

    Orders orders_;
    Clock::time_point begin_;
    pid_t group_ = 0;
    bool launched_ = false;  ///< by one program, which starts the ranks
    std::vector<pid_t> children_;
    std::vector<bool> has_ended_;
    std::vector<int> signals_;  ///< that ended them
};

struct Cell {
    std::uint64_t runs = 0, bad = 0;
};

void print_table(const std::map<std::pair<int, int>, Cell>& cells) {
    std::printf("\n%-16s", "runs (bad)");
    for (const char* const name : backend_names) std::printf("%18s", name);
    for (int f = 1; f < static_cast<int>(Fault::count_of); ++f) {
        std::printf("\n%-16s", fault_names[f]);
        for (int b = 0; b < static_cast<int>(Backend::count_of); ++b) {
            const auto cell = cells.find({f, b});
            std::string text = "-";
            if (cell != cells.end()) {
                text = std::to_string(cell->second.runs);
                if (cell->second.bad != 0) text += " (" + std::to_string(cell->second.bad) + ")";
            }
            std::printf("%18s", text.c_str());
        }
    }
    std::printf("\n\n");
}

/// Clears a tool that does not work here, and says what is left out.
void check_tool(std::string& tool, const std::string& test, const char* otherwise) {
    if (tool.empty() || std::system((tool + test).c_str()) == 0) return;
    std::printf("faults: %s does not work here: %s\n", tool.c_str(), otherwise);
    tool.clear();
}

/// Copies what the ranks have written, but neither checkpoints nor MPI's shared memory.
void keep(const fs::path& where, const fs::path& folder, const Plan& plan) {
    std::error_code ignored;
    fs::create_directories(where, ignored);
    for (const auto& file : fs::directory_iterator(folder))
        if (const std::string name = file.path().filename(); name == "output" || name.rfind("rank", 0) == 0)
            fs::copy(file, where, fs::copy_options::overwrite_existing, ignored);
    std::ofstream(where / "plan") << plan.describe() << "\n";
}

volatile std::sig_atomic_t interrupted = 0;

int run_all(Options options) {
    std::signal(SIGPIPE, SIG_IGN);
    for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, [](int) { interrupted = 1; });
    check_tool(options.mpirun, " --version 2>&1 | grep -q '(Open MPI) [34][.]'",
               "nothing runs over MPI (it has to be that of Open MPI 3 or 4)");
    check_tool(options.cluster, " 1 1gbit --no-mpi -- true", "no links are cut");
    const fs::path home = fs::temp_directory_path() / ("gradsync-faults-" + std::to_string(::getpid()));
    std::map<std::pair<int, int>, Cell> cells;
    std::uint64_t counts_of[static_cast<int>(Kind::count_of)] = {}, started = 0, seed = options.seed, tried = 0, launched_again = 0;
    std::vector<std::unique_ptr<Run>> running;
    const auto next = [&]() -> std::optional<Plan> {
        for (; tried < 1'000'000; ++tried) {
            const Plan plan = plan_of(seed++);
            if ((plan.backend == Backend::mpi && options.mpirun.empty()) || (plan.on_hosts() && options.cluster.empty())) continue;
            if (::fnmatch(options.only.c_str(), plan.describe().c_str(), 0) == 0) return plan;
        }
        return {};
    };
    while (started < options.runs || !running.empty()) {
        while (started < options.runs && running.size() < options.jobs) {
            const auto plan = next();
            if (!plan) {
                std::fprintf(stderr, "faults: no more plan matches '%s'\n", options.only.c_str());
                return 2;
            }
            ++started;
            running.push_back(std::make_unique<Run>(options, *plan, home / std::to_string(plan->seed)));
        }
        if (interrupted != 0) return 130;  // the destructors end the processes
        for (auto& run : running) {
            if (!run->is_over()) continue;
            const Plan plan = run->plan();
            const fs::path folder = run->folder();
            std::error_code ignored;
            if (run->started_nothing() && ++launched_again < 10) {
                run.reset();
                fs::remove_all(folder, ignored);
                run = std::make_unique<Run>(options, plan, folder);
                continue;
            }
            const auto findings = run->findings();
            run.reset();
            Cell& cell = cells[{static_cast<int>(plan.fault), static_cast<int>(plan.backend)}];
            ++cell.runs;
            cell.bad += !findings.empty();
            if (!findings.empty() || options.verbose) std::printf("%s\n", plan.describe().c_str());
            bool counted[static_cast<int>(Kind::count_of)] = {};  // a run counts once for each kind
            for (const Finding& finding : findings) {
                std::printf("    %s, %s\n", kind_names[static_cast<int>(finding.kind)], finding.text.c_str());
                if (!std::exchange(counted[static_cast<int>(finding.kind)], true)) ++counts_of[static_cast<int>(finding.kind)];
            }
            std::fflush(stdout);
            if (!findings.empty() && !options.keep.empty()) keep(options.keep / std::to_string(plan.seed), folder, plan);
            fs::remove_all(folder, ignored);
        }
        std::erase(running, nullptr);
        ::usleep(2000);
    }
    std::error_code ignored;
    fs::remove_all(home, ignored);
    print_table(cells);
    std::printf("seeds %llu to %llu\n", static_cast<unsigned long long>(options.seed), static_cast<unsigned long long>(seed - 1));
    std::printf("%llu runs, %llu hangs, %llu wrong numbers, %llu wrong culprits, %llu text only\n",
                static_cast<unsigned long long>(started), static_cast<unsigned long long>(counts_of[0]),
                static_cast<unsigned long long>(counts_of[1]), static_cast<unsigned long long>(counts_of[2]),
                static_cast<unsigned long long>(counts_of[3]));
    return counts_of[0] + counts_of[1] != 0 || counts_of[2] + counts_of[3] > options.forgive;
}

void print_left_out() {
    for (int f = 1; f < static_cast<int>(Fault::count_of); ++f)
        for (int b = 0; b < static_cast<int>(Backend::count_of); ++b)
            for (int s = 0; s < static_cast<int>(Stage::count_of); ++s)
                if (const char* const why = left_out(static_cast<Fault>(f), static_cast<Backend>(b), static_cast<Stage>(s)))
                    std::printf("%s/%s/%s: %s\n", fault_names[f], backend_names[b], stage_names[s], why);
}

}  // namespace
}  // namespace faults

int main(int count, char** arguments) {
    using namespace faults;
    const std::vector<std::string> words(arguments + 1, arguments + count);
    if (words.size() == 4 && words[0] == "--rank") {  // of a host
        const Orders orders{plan_of(std::stoull(words[1])), std::stod(words[2]), words[3]};
        const gs::Job job = gs::Job::from_environment();
        return run_tcp_rank(orders, job.rank, job.address, job.port);
    }
    Options options;
    for (std::size_t i = 0; i < words.size(); ++i) {
        const auto value = [&] {
            if (i + 1 < words.size()) return words[++i];
            std::fprintf(stderr, "faults: %s needs a value; see --help\n", words[i].c_str());
            std::exit(2);
        };
        const auto number = [&] {
            const std::string text = value();
            if (!text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c); }))
                return std::stoull(text);
            std::fprintf(stderr, "faults: '%s' is no number; see --help\n", text.c_str());
            std::exit(2);
        };
        if (words[i] == "--help") return usage(), 0;
        else if (words[i] == "--left-out") return print_left_out(), 0;
        else if (words[i] == "--runs") options.runs = number();
        else if (words[i] == "--rounds") options.runs = number() * pairs().size();
        else if (words[i] == "--seed") options.seed = number();
        else if (words[i] == "--jobs") options.jobs = std::max<std::size_t>(1, number());
        else if (words[i] == "--limit") options.limit = static_cast<double>(number());
        else if (words[i] == "--only") options.only = "*" + value() + "*";
        else if (words[i] == "--keep") options.keep = value();
        else if (words[i] == "--mpirun") options.mpirun = value();
        else if (words[i] == "--cluster") options.cluster = fs::absolute(value());
        else if (words[i] == "--forgive") options.forgive = number();
        else if (words[i] == "--verbose") options.verbose = true;
        else {
            std::fprintf(stderr, "faults: unknown option %s; see --help\n", words[i].c_str());
            return 2;
        }
    }
    return run_all(options);
}
